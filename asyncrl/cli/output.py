"""The end of a command: its output is flushed where a failure can still be told, and its complaints never fail.

A reader of the output that has read enough, as ``head`` does, ends a command with exit code 141; a full disk, or an
output that is closed, with code 1 and a word of it. Standard library only.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from asyncrl.text.printable import say
from asyncrl.text.streams import send_nowhere


def flushed(program: str, command: Callable[[], int]) -> int:
    """Call the rest of ``program`` and flush what it has printed; the exit code."""
    if sys.stdout is None:
        return complain(program, "what is printed cannot be written: standard output is closed", 1)
    try:
        try:
            return command()
        finally:
            # Also where argparse ends the program after --help or --version.
            sys.stdout.flush()
    except BrokenPipeError:
        send_nowhere(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        send_nowhere(sys.stdout)
        return complain(program, f"what is printed cannot be written: {error.strerror or error}", 1)


def complain(program: str, problem: str, exit_code: int) -> int:
    """Say on standard error, unless it is closed, why a command ends; returns ``exit_code``."""
    if sys.stderr is None:
        return exit_code
    try:
        say(f"{program}: {problem}", sys.stderr)
        sys.stderr.flush()
    except OSError:
        # A terminal that was closed.
        send_nowhere(sys.stderr)
    return exit_code
