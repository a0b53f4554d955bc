"""For all tests, and the processes that they start.

A figure that is not in the catalogue is an error. No example of a property has a deadline: machines are slow at times,
and that is no fault of what is tested. Tests open more files and sockets than many shells allow at first. Their
processes have one thread of BLAS each: numpy's would spin a while at every start, and nothing here multiplies by it.

Where several workers share the tests, those come first that take long. In the runs on the real vLLM updates must meet
trajectories that still run, which they do less where neighbours take the cores: one has those that mostly wait beside
it, the others come last of all.
"""

import asyncio
import inspect
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from asyncrl.telemetry import logging

os.environ["ASYNCRL_STRICT_METRICS"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_MOST_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_DESCRIPTORS, _MOST_DESCRIPTORS))

settings.register_profile("asyncrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asyncrl")

TESTS = Path(__file__).parent
LONGEST_FOLDERS = ("e2e", "system", "launcher", "rollouter", "wire", "learner", "reward", "weights", "top", "sinks")
FIRST = "test_learner_updates"
LAST = "test_soak"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {name: at for at, name in enumerate(LONGEST_FOLDERS)}
        by_folder = [(order.get(item.path.relative_to(TESTS).parts[0], len(order)), item) for item in items]
        by_folder.sort(key=lambda each: (each[1].path.stem == LAST, each[1].path.stem != FIRST, each[0]))
        items[:] = [item for _, item in by_folder]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Coroutines are run to their end: by ``RUN`` of their module where it has one, as under uvloop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = getattr(pyfuncitem.module, "RUN", asyncio.run)
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that sets up logs, or captures them, leaves nothing of it to the next."""
    monkeypatch.setattr(logging, "_level", None)
    monkeypatch.setattr(logging, "_listener", None)
    yield
    structlog.reset_defaults()


@pytest.fixture
def utc(monkeypatch):
    """Times of the day are those of UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def forbid(monkeypatch):
    """``forbid(folder)``: it cannot be listed, as one of somebody else; root, who may all, cannot either."""

    def forbid(folder):
        def refusing(real):
            def list_it(path=".", *words):
                if os.fspath(path) == os.fspath(folder):
                    raise PermissionError(13, "Permission denied", os.fspath(path))
                return real(path, *words)

            return list_it

        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))

    return forbid


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """``family(name)``: the folder of a model with the chat template of this family."""
    from chat_models import FAMILIES, write_chat_model

    made = {}

    def folder(name):
        if name not in made:
            template, eos = FAMILIES[name]
            made[name] = write_chat_model(tmp_path_factory.mktemp("family") / "model", template, eos=eos)
        return made[name]

    return folder
