"""Ranks for a module's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from learner_cases import RankPool, run_alone


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def run(request) -> Callable[..., tuple[Any, list[Any]]]:
    """Runs a case on as many ranks as its config says."""

    def play(config, main, *arguments):
        if config.learner.ranks == 1:
            return run_alone(config, main, *arguments), []
        return request.getfixturevalue("pair").run(config, main, *arguments)

    return play
