"""asyncrl-top on a hidden terminal: when it draws, and the cost of drawing."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.core.errors import ActorFailed
from tools.bench.scale_terminal import Terminal


@dataclass(frozen=True, slots=True)
class Drawing:
    """The figures of drawing, from one picture on."""

    cores: float
    """Processors that it took."""
    seconds_share: float
    """Share of all seconds in which it drew."""
    longest_s: float
    """Longest time without drawing."""
    measured_s: float


def drawing(drawn: Sequence[float], now: float, cpu_s: float) -> Drawing | None:
    """Figures of what was drawn at these times up to ``now``; None without a picture that is a second old."""
    if not drawn or (whole := int(now - drawn[0])) < 1:
        return None
    seconds = {int(at - drawn[0]) for at in drawn} & set(range(whole))
    longest = max(later - earlier for earlier, later in zip(drawn, [*drawn[1:], now], strict=True))
    return Drawing(cpu_s / (now - drawn[0]), len(seconds) / whole, longest, now - drawn[0])


class Top:
    """asyncrl-top on the run in this folder."""

    def __init__(self, run_dir: Path) -> None:
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli.top", str(run_dir)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "180", "LINES": "50"},
            process_group=0,
        )
        os.close(theirs)
        self._terminal = Terminal(ours)
        self._drawn: list[float] = []
        """Times at which it drew, by time.monotonic."""
        self._start_cpu_s = 0.0

    def drawing(self) -> Drawing | None:
        """Figures from the last picture before the first call on; None before, and in the second after that. Raises
        ActorFailed.
        """
        if (exit_code := self._process.poll()) is not None:
            raise ActorFailed("asyncrl-top", f"has ended, exit code {exit_code}")
        drawn, now, cpu_s = self._terminal.read(), time.monotonic(), self._cpu_s()
        if drawn and not self._drawn:
            self._start_cpu_s, drawn = cpu_s, drawn[-1:]
        self._drawn += drawn
        return drawing(self._drawn, now, cpu_s - self._start_cpu_s)

    def close(self) -> None:
        """End asyncrl-top."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._terminal.close()

    def _cpu_s(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return self._start_cpu_s
