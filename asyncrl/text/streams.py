"""Output that nobody reads any more. Standard library only."""

from __future__ import annotations

import os
from typing import TextIO


def send_nowhere(stream: TextIO) -> None:
    """Let all that is written to ``stream`` be lost, what it still holds too.

    A terminal that was closed, or a reader that has ended, is no reason for a command to end, or to end otherwise: what
    cannot be written would be tried again at the end, and be an error there.
    """
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
