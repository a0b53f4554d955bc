"""asyncrl-top on a terminal that nobody sees: when it draws there, and what that costs."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.errors import ActorFailed


@dataclass(frozen=True, slots=True)
class Drawing:
    """From its first picture on."""

    cores: float
    """Processors that it took."""
    seconds_share: float
    """Of all seconds, those in which it drew."""
    longest_s: float
    """Without drawing."""
    measured_s: float


def drawing(drawn: Sequence[float], now: float, cpu_s: float) -> Drawing | None:
    """Of what was drawn at these times up to ``now``; None without a picture that is a second old."""
    if not drawn or (whole := int(now - drawn[0])) < 1:
        return None
    seconds = {int(at - drawn[0]) for at in drawn} & set(range(whole))
    longest = max(later - earlier for earlier, later in zip(drawn, [*drawn[1:], now], strict=True))
    return Drawing(cpu_s / (now - drawn[0]), len(seconds) / whole, longest, now - drawn[0])


class Top:
    """asyncrl-top on the run in this folder."""

    def __init__(self, run_dir: Path) -> None:
        self._terminal, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli.top", str(run_dir)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "180", "LINES": "50"},
            # Not a session of its own, for the reason that the run's processes have none.
            process_group=0,
        )
        os.close(theirs)
        self._drawn: list[float] = []
        """When it drew, by time.monotonic."""
        self._start_cpu_s = 0.0
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    def drawing(self) -> Drawing | None:
        """What it did up to now; None before its first picture and in the first second after it. Raises ActorFailed."""
        if (exit_code := self._process.poll()) is not None:
            raise ActorFailed("asyncrl-top", f"has ended, exit code {exit_code}")
        return drawing(list(self._drawn), time.monotonic(), self._cpu_s() - self._start_cpu_s)

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        # Nobody holds the other end of the terminal any more.
        self._reader.join()
        os.close(self._terminal)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._terminal, 1 << 16):
                if not self._drawn:
                    self._start_cpu_s = self._cpu_s()
                self._drawn.append(time.monotonic())

    def _cpu_s(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return self._start_cpu_s
