"""A run started through asyncrl-launch and followed from outside: its metrics, its processes, its end.

``close`` leaves no process of the run. Below are the configurations of the runs that tools start.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from asyncrl.config.keys import default_words
from asyncrl.core.errors import PREEMPTED_EXIT_CODE
from tools.asset_cache import Assets
from tools.waiting import wait_until

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
END_S = 120.0
"""Longest time from a signal to the end of the launcher."""
REAPED_S = 10.0
"""Longest time that other processes outlive a launcher that has waited for them."""


class RunEnded(Exception):
    """A run ended too early. The message is the end of its output."""


class LiveRun:
    """The run. ``tree`` is its configuration; ``folder`` holds all of its files.

    ``processes`` returns all live processes of the run, if the caller knows them for sure. ``command`` turns a command
    into one that runs at the place of the run. ``arguments`` are added to those of the launcher, ``env`` to its
    environment.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        folder: Path,
        *,
        processes: Callable[[], list[psutil.Process]] | None = None,
        command: Callable[[Sequence[str]], list[str]] = list,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "live"
        self._output = folder / "output.txt"
        self._processes, self._command, self._arguments = processes, command, arguments
        self._env = {**os.environ, **(env or {})}
        self._metrics, self._lines = Tail(self.run_dir, "metrics.jsonl"), list[dict[str, Any]]()
        self._seen: dict[int, psutil.Process] = {}
        tree = with_keys(tree, {"run.name": "live", "run.dir": str(folder / "runs")})
        (folder / "config.toml").write_text(to_toml(tree))
        self.launcher = self._launch()
        """The process of asyncrl-launch."""

    def _launch(self, *further: str) -> subprocess.Popen[bytes]:
        launch = [sys.executable, "-m", "asyncrl.cli.launch", str(self.folder / "config.toml")]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self._command([*launch, *self._arguments, *further]),
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def resume(self) -> None:
        assert self.launcher.poll() is not None
        self.launcher = self._launch("--resume", "auto")

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher; None while the launcher lives."""
        return self.launcher.poll()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    # --- metrics ---

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far."""
        self._lines += self._metrics.read()
        return [line for line in self._lines if line["kind"] == kind]

    @property
    def step(self) -> int:
        lines = self.lines("train")
        return lines[-1]["step"] if lines else 0

    def served(self) -> dict[str, int]:
        """The newest version that each replica has committed."""
        return {line["replica"]: line["weights/version"] for line in self.lines("update")}

    def log(self, actor: str) -> list[dict[str, Any]]:
        return LogTail(self, actor).read()

    # --- processes ---

    def processes(self) -> list[psutil.Process]:
        """Return all live processes that it started. They stay known after the end of their parents."""
        if self._processes is not None:
            return self._processes()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if lives(process)]

    def pid(self, actor: str) -> int | None:
        for process in self.processes():
            if title(process).startswith(f"asyncrl {actor} "):
                return process.pid
        return None

    def titled(self, words: str) -> list[int]:
        """Return the numbers of all processes whose title contains ``words``."""
        return [process.pid for process in self.processes() if words in title(process)]

    def engine_cores(self, actor: str) -> list[int]:
        pid = self.pid(actor)
        return [] if pid is None else engine_cores(pid)

    # --- waiting ---

    def until(self, condition: Callable[[], T | None], what: str, timeout: float) -> T:
        """Wait for a true value of ``condition`` and return it. Raises RunEnded or TimeoutError."""

        def found() -> T | None:
            if not (value := condition()) and self.launcher.poll() is not None:
                raise RunEnded(f"while waiting for {what}: " + self.output[-2000:])
            return value

        return wait_until(found, lambda: f"{what}; served {self.served()}, step {self.step}", timeout)

    def wait(self, timeout: float) -> int:
        """Wait until it ends by itself, and return its exit code."""
        return self.launcher.wait(timeout)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it as preempted, by a signal. The launcher ends after all others. Raises RunEnded or TimeoutError."""
        self.launcher.send_signal(number)
        if (code := self._wait_for_exit(f"signal {number}")) != PREEMPTED_EXIT_CODE:
            raise RunEnded(f"exit code {code} after signal {number}: {self.output[-2000:]}")
        self._until_gone(REAPED_S)

    def left(self) -> list[str]:
        """Return the titles of live processes that it started."""
        return [title(process) for process in self.processes()]

    def close(self) -> None:
        """End every process that is left."""
        if self.launcher.poll() is None:
            with contextlib.suppress(TimeoutError, RunEnded):
                self.stop()
        if self.launcher.poll() is None:
            # Its guard ends the rest.
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()
            with contextlib.suppress(TimeoutError):
                self._until_gone(END_S)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_everything(self) -> None:
        """Kill all processes at one moment (SIGKILL). Return when no process is left."""
        known: set[int] = set()
        while True:
            found = self.processes()
            if not found and self.launcher.poll() is not None:
                raise RunEnded(f"before it could be killed: {self.output[-2000:]}")
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    # Freeze all first, so that no process sees another one die.
                    process.suspend() if process.pid not in known else process.kill()
            if found and {process.pid for process in found} <= known:
                break
            known |= {process.pid for process in found}
        self._wait_for_exit("SIGKILL")
        # Guards end what was started in between.
        self._until_gone(END_S)

    def _wait_for_exit(self, cause: str) -> int:
        try:
            return self.launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            problem = f"waited {END_S:g} s for the end of the launcher after {cause}: {self.output[-2000:]}"
            raise TimeoutError(problem) from None

    def _until_gone(self, within_s: float) -> None:
        wait_until(lambda: not self.left(), lambda: f"the end of {self.left()}", within_s)


class UpdatePhases:
    """The phase of the weight update of each replica, and the newest version, as the parameter server last saw them."""

    def __init__(self, run: LiveRun) -> None:
        self._news = LogTail(run, "parameter_server/0")
        self._last: dict[str, str] = {}
        self._newest = -1

    @property
    def newest(self) -> int:
        """The newest published version; -1 before the first one."""
        self._look()
        return self._newest

    def of(self, victim: str) -> str:
        """Return the phase of the victim, or of the replica that changed last."""
        self._look()
        return self._last.get(victim, self._last.get("", "none"))

    def _look(self) -> None:
        for line in self._news.read():
            if line.get("event") == "phase":
                self._last[line["replica"]] = self._last[""] = line["phase"]
            elif line.get("event") == "published":
                self._newest = max(self._newest, line["version"])


class Tail:
    """New lines of JSON of the files in ``folder`` that match ``pattern``."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._at: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call."""
        found = []
        for path in self._folder.glob(self._pattern):
            with path.open("rb") as file:
                file.seek(self._at.get(path, 0))
                while (line := file.readline()).endswith(b"\n"):
                    self._at[path] = self._at.get(path, 0) + len(line)
                    # A full disk leaves half a line.
                    with contextlib.suppress(ValueError):
                        found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]


class LogTail(Tail):
    """New lines of the log of an actor."""

    def __init__(self, run: LiveRun, actor: str) -> None:
        super().__init__(run.run_dir, f"logs/*/{actor.replace('/', '-')}.log")


def engine_cores(pid: int) -> list[int]:
    """Return the processes of engines below a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if "EngineCore" in title(child)]
    return []


def title(process: psutil.Process) -> str:
    """Return the title (command line) of a process; empty after its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def lives(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def pid_lives(pid: int) -> bool:
    """Whether a process with this number exists that is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return lives(psutil.Process(pid))
    return False


def to_toml(tree: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {default_words(table)}\n" for name, table in tree.items())


def with_keys(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with these dotted keys."""
    found = copy.deepcopy(dict(tree))
    for key, value in keys.items():
        *tables, last = key.split(".")
        place = found
        for name in tables:
            place = place.setdefault(name, {})
        place[last] = value
    return found


SIMULATED: dict[str, Any] = {
    "data.source": "synthetic",
    "rollout.engine": "sim",
    "rollout.gpus_per_replica": 0,
    "reward.function": "constant",
    "reward.workers": 1,
    "learner.backend": "sim",
    "learner.dynamic_sampling": False,
    "checkpoint.export_at_end": False,
    "log.level": "warning",
}
"""Keys of a run whose engines and learner are timing models."""


def simulated(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a simulated run with these dotted keys."""
    return with_keys({}, {**SIMULATED, **keys})


def quickstart(assets: Assets, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the quickstart with its model and data and these dotted keys."""
    tree = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
    return with_keys(tree, {**assets.keys("heldout", "heldout_greedy"), **keys})


def run_to_end(
    tree: Mapping[str, Any], folder: Path, timeout: float, meanwhile: Callable[[LiveRun], None] = lambda run: None
) -> LiveRun:
    """Run to the end in ``folder``. Raises RunEnded if the run fails, and subprocess.TimeoutExpired."""
    folder.mkdir(parents=True, exist_ok=True)
    run = LiveRun(tree, folder)
    try:
        meanwhile(run)
        code = run.wait(timeout)
    finally:
        run.close()
    if code:
        raise RunEnded(f"exit code {code}: {run.output[-2000:]}")
    return run
