"""Adapters (LoRA) of each family in vLLM: its log-probs are those of the model with the adapters added to its weights,
where layers are packed and where they are not, and again after an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from model_matrix import make_family, save_family
from test_served_models import SERVED, compare, make_jobs, serve, wrong
from tiny_adapters import ALPHA, RANK, make_adapter, with_adapter
from tiny_models import Publisher


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("families", [SERVED[first::2] for first in range(2)], ids=lambda named: named[0][0])
def test_adapters_of_every_family_are_served(families: Sequence[tuple[str, bool]], tmp_path: Path) -> None:
    folders, manifests, models = [], [], {}
    with closing(Publisher()) as publisher:
        for family, tied in families:
            name, base = f"{family} {'tied' if tied else 'untied'}", make_family(family, tied=tied)
            folders.append(save_family(tmp_path / name, base))
            adapters = [make_adapter(base, seed) for seed in (1, 2)]
            models[name] = [
                save_family(tmp_path / f"{name} {version}", with_adapter(base, adapter).float())
                for version, adapter in enumerate(adapters)
            ]
            published = [publisher.publish(version, adapter) for version, adapter in enumerate(adapters)]
            manifests.append([msgspec.json.encode(manifest).decode() for manifest in published])
        jobs = make_jobs(folders, manifests, lora={"rank": RANK, "alpha": ALPHA})
        assert not wrong(compare(models, jobs, serve(jobs, tmp_path)))
