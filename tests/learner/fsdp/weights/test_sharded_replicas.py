"""Several copies of the model among the ranks: the same gradient, publication and checkpoint as one rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.learner_cases import make_config, read_checkpoint, same, save_small_model, train
from segment_reading import weights_of

from asyncrl.config.load import validate_config
from asyncrl.errors import ConfigError

ALONE, WHOLE, CUT = (1, 1), (2, 2), (4, 2)
"""(ranks, replicas): two whole copies; two copies of two shards each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One row that no two ranks can share.
    return save_small_model(tmp_path_factory.mktemp("model"), intermediate_size=1)


def _train(backend: Any, config: Any, target: Path) -> dict[str, Any]:
    """A step, whose gradient is a share of the first moment in the checkpoint."""
    before = weights_of(backend.publish(1).result(60))
    metrics = train(backend, config, 3)
    backend.save(target).result(60)
    return {"before": before, "metrics": metrics, "weights": weights_of(backend.publish(1).result(60))}


def _load(backend: Any, config: Any, source: Path, target: Path) -> dict[str, np.ndarray]:
    backend.load(source)
    backend.save(target).result(60)
    return weights_of(backend.publish(1).result(60))


@pytest.mark.parametrize("mesh", [WHOLE, pytest.param(CUT, marks=pytest.mark.slow)])
def test_replicas_train_publish_and_save_as_one_rank_does(
    mesh: tuple[int, int], folder: Path, run_well, tmp_path
) -> None:
    def run(mesh: tuple[int, int], main: Any, *arguments: Any) -> Any:
        ranks, replicas = mesh
        return run_well(make_config(folder, ranks=ranks, replicas=replicas, max_grad_norm=1e9), main, *arguments)

    alone, found = run(ALONE, _train, tmp_path / "alone"), run(mesh, _train, tmp_path / "cut")
    expected, numbers = read_checkpoint(tmp_path / "alone"), read_checkpoint(tmp_path / "cut")
    assert same(found["before"], alone["before"])
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
        assert same(weights, (found if source == "cut" else alone)["weights"])
        assert same(read_checkpoint(again), read_checkpoint(tmp_path / source))


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    tree = make_config(Path("/model"), ranks=4).model_dump(mode="json")
    tree["learner"]["replicas"] = 3
    with pytest.raises(ConfigError, match=r"learner\.replicas: is 3, which does not divide learner\.ranks = 4"):
        validate_config(tree)
