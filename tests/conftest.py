"""Settings of all tests and of the processes that they start.

An emitted metric that is not in the catalogue is an error. Tests open more files and sockets than many shells allow,
so the limit is raised. Their processes use one BLAS thread each: numpy's threads would spin at every start, and no
test here multiplies with them. pydantic looks for no plugins, or each process would read the metadata of all packages.

When several workers share the tests, the longest tests start first. In the runs on the real vLLM, updates must meet
trajectories that still run, which happens less often on a busy machine. One of these runs starts first, together with
tests that mostly wait, and the others start last.

``--quick`` runs the tests that need no torch, no vLLM and no other process (``quick.py``).
"""

import asyncio
import gc
import inspect
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import quick
import structlog
from draws import TIMES, load_profile
from hypothesis import is_hypothesis_test

from asyncrl.observe import logging

os.environ["ASYNCRL_STRICT_METRICS"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

_MOST_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_DESCRIPTORS, _MOST_DESCRIPTORS))

# A shell lets its background processes ignore SIGINT. Tests and their children inherit that, so it is undone here.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
LONGEST_FOLDERS = ("e2e", "system", "launcher", "rollouter", "wire", "learner", "reward", "weights", "top", "sinks")
FIRST = "test_learner_updates"
LAST = "test_soak"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the tests that need no torch, vLLM or other process")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    load_profile(quick=config.option.quick)
    if hasattr(config, "workerinput") or not config.option.numprocesses:
        config.pluginmanager.register(quick.plugin(quick=config.option.quick))
        # Until ``pytest_collection_finish``. Imports leave little garbage.
        gc.disable()
    if TIMES and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str | None:
    return (
        f"property tests draw {TIMES} times as much: --hypothesis-seed={config.option.hypothesis_seed}"
        if TIMES
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
    if hasattr(config, "workerinput"):
        order = {name: at for at, name in enumerate(LONGEST_FOLDERS)}
        folders = [item.path.relative_to(TESTS).parts[:-1] for item in items]
        places = [min((order[name] for name in names if name in order), default=len(order)) for names in folders]
        by_folder = list(zip(places, items, strict=True))
        by_folder.sort(key=lambda each: (each[1].path.stem == LAST, each[1].path.stem != FIRST, each[0]))
        items[:] = [item for _, item in by_folder]


def pytest_collection_finish() -> None:
    """Hide modules and tests from the garbage collector: to go through them all takes up to half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At the interpreter's exit some modules report objects that were not collected."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests to their end: with ``RUN`` of their module if it has one, for example under uvloop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = getattr(pyfuncitem.module, "RUN", asyncio.run)
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that sets up or captures logs leaves no trace for the next one."""
    monkeypatch.setattr(logging, "_level", None)
    monkeypatch.setattr(logging, "_listener", None)
    yield
    structlog.reset_defaults()


def _restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    now = os.environ.pop("PYTEST_CURRENT_TEST")
    os.environ.clear()
    os.environ.update(before, PYTEST_CURRENT_TEST=now)


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Variables that a test sets in this process end with it: a learner's rank sets one for gloo."""
    yield from _restore_environment()


@pytest.fixture(autouse=True, scope="module")
def environment_of_module() -> Iterator[None]:
    """Variables that a module's fixtures set in this process end with the module."""
    yield from _restore_environment()


@pytest.fixture
def no_memory_left():
    """The test closes all sealed memory that it opens."""
    from published_weights import comes_to, open_memory

    before = open_memory()
    yield
    assert comes_to(before)


@pytest.fixture
def utc(monkeypatch):
    """Times of day are in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def forbid(monkeypatch):
    """``forbid(folder)``: listing it fails, like another user's folder; for root too, who otherwise may list all."""

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
