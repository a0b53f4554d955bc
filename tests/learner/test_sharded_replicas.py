"""Several copies of the model among the ranks: the same gradient, publication and checkpoint as one rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_config, random_groups, save_small_model
from segment_reading import read_manifest
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from asyncrl.config.load import validate_config
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithm.batch import build_step

ALONE, WHOLE, CUT = (1, 1), (2, 2), (4, 2)
"""(ranks, replicas): two whole copies; two copies of two shards each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One row that no two ranks can share.
    return save_small_model(tmp_path_factory.mktemp("model"), intermediate_size=1)


def _weights(backend: Any) -> dict[str, np.ndarray]:
    with backend.publish(1).result(60) as publication:
        return {
            spec.name: torch.frombuffer(bytearray(view), dtype=torch.float32).view(spec.shape).numpy()
            for spec, view in read_manifest(publication.manifest)
        }


def _train(backend: Any, config: Any, target: Path) -> dict[str, Any]:
    """A step, whose gradient is a share of the first moment in the checkpoint."""
    before = _weights(backend)
    plan = build_step(
        random_groups(3, 4), version=0, config=config, world_size=config.learner.ranks, packed=backend.packed
    )
    metrics = backend.train(plan)
    backend.save(target).result(60)
    return {"before": before, "metrics": metrics, "weights": _weights(backend)}


def _load(backend: Any, config: Any, source: Path, target: Path) -> dict[str, np.ndarray]:
    backend.load(source)
    backend.save(target).result(60)
    return _weights(backend)


def _numbers(target: Path) -> dict[str, np.ndarray]:
    """What DCP's own tool makes of a checkpoint."""
    whole = target.with_suffix(".pt")
    dcp_to_torch_save(target, whole)
    return {name: tensor.numpy() for name, tensor in torch.load(whole, weights_only=True).items()}


def _same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("mesh", [WHOLE, pytest.param(CUT, marks=pytest.mark.slow)])
def test_replicas_train_publish_and_save_as_one_rank_does(
    mesh: tuple[int, int], folder: Path, run_well, tmp_path
) -> None:
    def run(mesh: tuple[int, int], main: Any, *arguments: Any) -> Any:
        ranks, replicas = mesh
        return run_well(make_config(folder, ranks=ranks, replicas=replicas, max_grad_norm=1e9), main, *arguments)

    alone, found = run(ALONE, _train, tmp_path / "alone"), run(mesh, _train, tmp_path / "cut")
    expected, numbers = _numbers(tmp_path / "alone"), _numbers(tmp_path / "cut")
    assert _same(found["before"], alone["before"])
    for name in ("loss/policy", "policy/grad_norm"):
        assert found["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5), name
    assert numbers.keys() == expected.keys()
    moments = [name for name in expected if name.startswith("exp_avg/")]
    assert moments
    for name in moments:
        assert np.linalg.norm(numbers[name] - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name
    for name, weight in found["weights"].items():
        assert np.array_equal(numbers[f"weights/model.{name}"], weight), name
    # One mesh reads what the other has written.
    for source, reader in (("cut", ALONE), ("alone", mesh)):
        again = tmp_path / f"{source}-again"
        weights = run(reader, _load, tmp_path / source, again)
        assert _same(weights, (found if source == "cut" else alone)["weights"])
        assert _same(_numbers(again), _numbers(tmp_path / source))


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    tree = make_config(Path("/model"), ranks=4).model_dump(mode="json")
    tree["learner"]["replicas"] = 3
    with pytest.raises(ConfigError, match=r"learner\.replicas: is 3, which does not divide learner\.ranks = 4"):
        validate_config(tree)
