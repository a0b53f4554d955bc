"""Sets the wall clocks of new Python processes in a test, one clock for each host.

A sitecustomize.py on the PYTHONPATH replaces ``time.time`` and ``time.time_ns``. A run passes the PYTHONPATH to its
hosts. A live process sees a new setting within LOOK_S.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from asyncrl.core.files import replace_file

LOOK_S = 0.05
SITE = f"""\
import os
import socket
import time

FILE = os.path.join(os.path.dirname(__file__), "ahead-" + socket.gethostname())
real, monotonic = time.time_ns, time.monotonic
looked, ahead = -1.0, 0


def time_ns():
    global looked, ahead
    if monotonic() - looked > {LOOK_S}:
        looked = monotonic()
        try:
            with open(FILE) as file:
                ahead = int(file.read())
        except FileNotFoundError:
            ahead = 0
    return real() + ahead


time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
"""


class WallClocks:
    """The clocks of one test. ``path`` is the PYTHONPATH of what it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "wall_clocks"
        self.folder.mkdir()
        (self.folder / "sitecustomize.py").write_text(SITE)
        self.path = f"{self.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)

    def set(self, ahead_s: float, host: str = "") -> None:
        """Set how far the clock of a host, this one if none is named, is ahead of the right time."""
        replace_file(self.folder / f"ahead-{host or socket.gethostname()}", str(int(ahead_s * 1e9)))
