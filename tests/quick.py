"""Skips the tests that need absent packages, and for ``make quick`` the slow tests.

Tests are not listed or marked. Under ``--quick``, torch and vLLM cannot be imported and no process can be started. A
test or a module that tries is skipped, with the reason.
"""

import asyncio
import contextlib
import gc
import importlib.util
import multiprocessing.process
import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence

import pytest

SLOW = ("torch", "vllm", "transformers")
"""Packages that ``--quick`` runs without."""
STARTS = "it starts a process"
"""Reason of a skip under ``--quick``."""
SKIP = signal.SIGRTMIN
"""Signal that a thread of a test sends to the main thread when it starts a process."""
OPTIONAL = ("vllm",)
"""Packages that the extra ``dev`` lacks."""
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="it starts vLLM, which is not installed here"
)
"""Mark of tests whose processes import vLLM; those that import it themselves are skipped without a mark."""


class Skips:
    """A plugin of pytest that turns a failed import of ``packages`` into a skip."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector):
        # For its own text of a failure, pytest parses each file in the traceback.
        describe = collector.repr_failure
        collector.repr_failure = lambda excinfo: self._absent(excinfo) or describe(excinfo)
        report = yield
        call = getattr(report, "call", None)
        return self._skipped(report, call.excinfo if call else None, collector.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        return self._skipped(report, call.excinfo, item.path)

    def _skipped(self, report, excinfo, path):
        name = self._absent(excinfo) if report.failed and excinfo else None
        if name:
            report.outcome = "skipped"
            report.longrepr = (str(path), 0, f"Skipped: it imports {name}")
        return report

    def _absent(self, excinfo: pytest.ExceptionInfo) -> str | None:
        """The name of the module whose failed import caused the error, if it belongs to ``packages``."""
        error = excinfo.value
        while error is not None:
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in self._packages:
                return error.name
            error = error.__cause__ or error.__context__
        return None


class Quick(Skips):
    """The plugin for ``--quick``."""

    def __init__(self) -> None:
        super().__init__(SLOW)
        self._refused = False
        """Whether the present test has tried to start a process."""
        self._runs = False
        """Whether a test runs now."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let threads of a test skip it."""
        signal.signal(SKIP, self._skip)

    def pytest_collection(self) -> None:
        """Forbid slow modules and processes. Not earlier: pytest and its plugins start processes of their own."""
        # Python starts a process to learn the processor's name, once. OpenAI's client wants it.
        platform.platform()
        for name in SLOW:
            sys.modules[name] = None  # type: ignore[assignment]
        subprocess.Popen.__init__ = self._refuse  # type: ignore[assignment]
        multiprocessing.process.BaseProcess.start = self._refuse  # type: ignore[assignment]
        os.fork = self._refuse  # type: ignore[assignment]
        os.posix_spawn = self._refuse  # type: ignore[assignment]
        report = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is pytest.skip.Exception else report(args)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        self._runs = True
        try:
            return (yield)
        finally:
            self._runs = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self):
        """A test that is cut short leaves sockets and tasks. pytest would blame a later test for them."""
        try:
            return (yield)
        finally:
            if self._refused:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    gc.collect()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        if self._refused:
            item.repr_failure = lambda excinfo: STARTS
        report = yield from super().pytest_runtest_makereport(item, call)
        if self._refused and report.failed:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"Skipped: {STARTS}")
        self._refused &= call.when != "teardown"
        return report

    def _refuse(self, *arguments: object, **named: object) -> None:
        """Skip the test, or the module that is imported.

        In an actor of the test the skip would end that actor alone, so the whole loop is cancelled. In another thread
        it would end that thread alone, so the main thread gets a signal.
        """
        self._refused = True
        with contextlib.suppress(RuntimeError):
            for task in asyncio.all_tasks():
                task.cancel()
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident, SKIP)
        pytest.skip(STARTS, allow_module_level=True)

    def _skip(self, *_: object) -> None:
        if self._runs:
            pytest.skip(STARTS)


def plugin(*, quick: bool) -> Skips:
    """The plugin for a process that runs tests."""
    return Quick() if quick else Skips([name for name in OPTIONAL if importlib.util.find_spec(name) is None])
