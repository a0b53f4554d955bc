"""Ranks for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learner.learner_cases import save_small_model
from learner.rank_pool import Pools, run_alone


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in one kernel, on CPUs."""
    from learner import varlen_kernel

    from asyncrl.learner.fsdp.model import attention

    varlen_kernel.install()
    monkeypatch.setattr(attention, "DEVICE", "cpu")


@pytest.fixture
def run(request) -> Callable[..., tuple[Any, list[Any]]]:
    """Runs a case on as many ranks as its config says."""

    def play(config, main, *arguments):
        if config.learner.ranks == 1:
            return run_alone(config, main, *arguments), []
        return request.getfixturevalue("pools").run(config, main, *arguments)

    return play


@pytest.fixture
def run_well(run) -> Callable[..., Any]:
    """Runs a case as ``run`` does; no other rank may fail."""

    def play(config, main, *arguments):
        found, others = run(config, main, *arguments)
        assert others == [None] * (config.learner.ranks - 1)
        return found

    return play


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of another shape, for a reference or a teacher."""
    return save_small_model(tmp_path_factory.mktemp("other"), seed=5, intermediate_size=128)
