"""The end of a command: its output is flushed where a failure can still be told, and its complaints never fail.

A reader of the output that has read enough, as ``head`` does, ends a command with exit code 141; a full disk, or an
output that is closed, with code 1 and a word of it. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from asyncrl.text.printable import say
from asyncrl.text.streams import send_nowhere


class _CannotPrint(Exception):
    """The output takes no more."""


def flushed(program: str, command: Callable[[], int]) -> int:
    """Call the rest of ``program`` and flush what it has printed; the exit code."""
    if sys.stderr is None:
        # Closed by who started it: all that is said there is lost, and nothing else.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return complain(program, "what is printed cannot be written: standard output is closed", 1)
    try:
        try:
            return command()
        finally:
            # Also where argparse ends the program after --help or --version.
            _flush()
    except BrokenPipeError:
        send_nowhere(sys.stdout)
        return 128 + signal.SIGPIPE
    except _CannotPrint as error:
        send_nowhere(sys.stdout)
        return complain(program, f"what is printed cannot be written: {error}", 1)
    except OSError as error:
        send_nowhere(sys.stdout)
        return complain(program, f"{error.filename or 'the operating system'}: {error.strerror or error}", 1)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _CannotPrint(error.strerror or str(error)) from error


def complain(program: str, problem: str, exit_code: int) -> int:
    """Say on standard error why a command ends; returns ``exit_code``."""
    try:
        say(f"{program}: {problem}", sys.stderr)
        sys.stderr.flush()
    except OSError:
        # A terminal that was closed.
        send_nowhere(sys.stderr)
    return exit_code
