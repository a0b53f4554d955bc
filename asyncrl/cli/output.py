"""The output of a command: characters that it lacks are replaced, it is flushed, and complaints never fail.

A reader of the output that has read enough, as ``head`` does, ends a command with exit code 141. A full disk or a
closed output ends it with code 1 and an error. Text that was given to ``PRINTER`` never changes the exit code. A
terminal that takes nothing delays the end by LAST_S at most. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from asyncrl.core.printable import printable
from asyncrl.core.streams import PRINTER, replace_unknown, send_nowhere


class _CannotPrint(Exception):
    """The output takes no more."""


def flushed(program: str, command: Callable[[], int]) -> int:
    """Call the rest of ``program`` and flush what it has printed; the exit code."""
    if sys.stderr is None:
        # Closed by the caller: errors are lost, and nothing else changes.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return complain(program, "what is printed cannot be written: standard output is closed", 1)
    replace_unknown(sys.stdout, sys.stderr)
    try:
        try:
            return command()
        finally:
            PRINTER.finish()
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
    PRINTER.print_to(sys.stderr, printable(f"{program}: {problem}\n", keep="\n"))
    PRINTER.finish()
    return exit_code
