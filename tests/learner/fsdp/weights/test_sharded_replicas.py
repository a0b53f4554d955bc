"""Several copies of the model among the ranks, and rows that ranks share: the same gradient, publication and checkpoint
as one rank has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.learner_cases import make_config, read_checkpoint, same, save_small_model, train
from model_matrix import make_family, save_family
from segment_reading import weights_of

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError

ALONE, WHOLE, CUT = (1, 1, 1), (2, 2, 1), (4, 2, 1)
SPLIT, ACROSS = (2, 1, 2), (4, 2, 4)
"""(ranks, replicas, context_parallel): two whole copies; two copies of two shards each; rows shared by the ranks of one
copy, and of two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One row that no two ranks can share.
    return save_small_model(tmp_path_factory.mktemp("model"), intermediate_size=1, num_attention_heads=4)


def _train(backend: Any, config: Any, target: Path, other: Path | None = None) -> dict[str, Any]:
    """A step, whose gradient is a share of the first moment in the checkpoint; then ``other`` is read and written."""
    before = weights_of(backend.publish(1).result(60))
    metrics = train(backend, config, 3)
    backend.save(target).result(60)
    found = {"before": before, "metrics": metrics, "weights": weights_of(backend.publish(1).result(60))}
    if other is not None:
        backend.load(other)
        backend.save(target.with_name("again")).result(60)
        found["again"] = weights_of(backend.publish(1).result(60))
    return found


def _compare(run_well: Any, first: Any, second: Any, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """Train in both layouts, and read the checkpoint of the first in the second: nothing differs.

    Returns what the first one ``_train``-ed, and both checkpoints.
    """
    wrote = run_well(first, _train, folder / "first")
    read = run_well(second, _train, folder / "second", folder / "first")
    numbers, expected = read_checkpoint(folder / "first"), read_checkpoint(folder / "second")
    assert same(wrote["before"], read["before"])
    for name in ("loss/policy", "policy/grad_norm"):
        assert wrote["metrics"][name] == pytest.approx(read["metrics"][name], rel=1e-5), name
    assert same(read["again"], wrote["weights"])
    assert same(read_checkpoint(folder / "again"), numbers)
    return wrote, numbers, expected


@pytest.mark.parametrize(
    ("meshes", "optimizer"),
    [
        ((WHOLE, ALONE), "adamw"),
        ((WHOLE, ALONE), "muon"),
        ((SPLIT, ALONE), "adamw"),
        ((ALONE, SPLIT), "muon"),
        pytest.param((CUT, ALONE), "adamw", marks=pytest.mark.slow),
        pytest.param((ALONE, CUT), "adamw", marks=pytest.mark.slow),
        pytest.param((CUT, ALONE), "muon", marks=pytest.mark.slow),
        pytest.param((ACROSS, SPLIT), "adamw", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_publish_and_save_like_one_rank_and_read_other_layouts(
    meshes, optimizer, folder, run_well, tmp_path
) -> None:
    first, second = (
        make_config(folder, ranks=n, replicas=copies, context_parallel=shared, optimizer=optimizer, max_grad_norm=1e9)
        for n, copies, shared in meshes
    )
    wrote, numbers, expected = _compare(run_well, first, second, tmp_path)
    assert numbers.keys() == expected.keys()
    moments = [name for name in expected if name.startswith(("exp_avg/", "momentum_buffer/"))]
    assert any(name.startswith("momentum_buffer/") for name in moments) == (optimizer == "muon")
    assert len(moments) == len(wrote["weights"])
    for name in moments:
        assert np.linalg.norm(numbers[name] - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name
    for name, weight in wrote["weights"].items():
        assert np.array_equal(numbers[f"weights/model.{name}"], weight), name


@pytest.mark.parametrize("meshes", [(SPLIT, ALONE), pytest.param((CUT, SPLIT), marks=pytest.mark.slow)])
def test_experts_train_publish_and_save_on_any_ranks(meshes, run_well, tmp_path) -> None:
    """Three experts, which ranks share unequally."""
    folder = save_family(tmp_path / "model", make_family("Qwen3Moe", tied=False, num_experts=3))
    first, second = (
        make_config(folder, ranks=n, replicas=copies, context_parallel=shared, routes="ignore")
        for n, copies, shared in meshes
    )
    _, numbers, expected = _compare(run_well, first, second, tmp_path)
    moments = [name for name in expected if name.startswith("exp_avg/")]
    assert any(".experts." in name for name in moments)
    for name in moments:
        assert np.linalg.norm(numbers[name] - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    tree = make_config(Path("/model"), ranks=4).model_dump(mode="json")
    tree["learner"]["replicas"] = 3
    with pytest.raises(ConfigError, match=r"learner\.replicas: is 3, which does not divide learner\.ranks = 4"):
        validate_config(tree)
