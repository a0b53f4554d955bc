"""A run started through asyncrl-launch and followed from outside: its metrics, its processes, its end.

Used by tools that break a run (chaos/) and that check it afterwards (soak.py). ``close`` leaves no process of
the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from asyncrl.config.keys import default_words
from asyncrl.core.errors import PREEMPTED_EXIT_CODE
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
        tree: dict[str, Any],
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
        self._read = 0
        self._lines: list[dict[str, Any]] = []
        self._seen: dict[int, psutil.Process] = {}
        tree = {**tree, "run": {**tree.get("run", {}), "name": "live", "dir": str(folder / "runs")}}
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
        """Start it again after its end."""
        assert self.launcher.poll() is not None
        self.launcher = self._launch("--resume", "auto")

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher; None while the launcher lives."""
        return self.launcher.poll()

    @property
    def output(self) -> str:
        """Output so far."""
        return self._output.read_text(errors="replace")

    # --- metrics ---

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                while (line := file.readline()).endswith(b"\n"):
                    self._read += len(line)
                    # A full disk leaves half a line.
                    with contextlib.suppress(ValueError):
                        self._lines.append(json.loads(line))
        return [line for line in self._lines if line["kind"] == kind]

    @property
    def step(self) -> int:
        """Steps trained."""
        lines = self.lines("train")
        return lines[-1]["step"] if lines else 0

    def served(self) -> dict[str, int]:
        """The newest version that each replica has committed."""
        return {line["replica"]: line["weights/version"] for line in self.lines("update")}

    def log(self, actor: str) -> list[dict[str, Any]]:
        """Return the log of an actor."""
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
        """Return the process number of an actor."""
        for process in self.processes():
            if title(process).startswith(f"asyncrl {actor} "):
                return process.pid
        return None

    def titled(self, words: str) -> list[int]:
        """Return the numbers of all processes whose title contains ``words``."""
        return [process.pid for process in self.processes() if words in title(process)]

    def engine_cores(self, actor: str) -> list[int]:
        """Processes of a rollouter's engine."""
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
            told = f"waited {END_S:g} s for the end of the launcher after {cause}: {self.output[-2000:]}"
            raise TimeoutError(told) from None

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


class LogTail:
    """New lines of the log of an actor."""

    def __init__(self, run: LiveRun, actor: str) -> None:
        self._run, self._name = run, f"{actor.replace('/', '-')}.log"
        self._at: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call."""
        found = []
        for path in self._run.run_dir.glob(f"logs/*/{self._name}"):
            with path.open("rb") as file:
                file.seek(self._at.get(path, 0))
                while (line := file.readline()).endswith(b"\n"):
                    self._at[path] = self._at.get(path, 0) + len(line)
                    with contextlib.suppress(ValueError):
                        found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]


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


def to_toml(tree: dict[str, Any], prefix: str = "") -> str:
    """TOML of a tree of numbers, text, truth values, lists and tables."""
    values = "".join(f"{key} = {default_words(value)}\n" for key, value in tree.items() if not isinstance(value, dict))
    text = (f"[{prefix}]\n" if prefix and values else "") + values
    for key, value in tree.items():
        if isinstance(value, dict):
            text += to_toml(value, f"{prefix}.{key}" if prefix else key)
    return text
