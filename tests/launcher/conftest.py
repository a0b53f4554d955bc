"""Runs that are launched by tests, and end with them at the latest."""

import functools

import pytest
from launcher.launched import placed_run, sim_run, stub_run


@pytest.fixture
def started():
    runs = []
    yield runs
    for run in runs:
        run.close()


def starts(begin):
    """A fixture with which tests start such runs in their folder."""

    @pytest.fixture
    def start(tmp_path, started):
        @functools.wraps(begin)
        def run(*arguments, **options):
            started.append(begin(tmp_path, *arguments, **options))
            return started[-1]

        return run

    return start


launch, stub, launch_placed = starts(sim_run), starts(stub_run), starts(placed_run)
