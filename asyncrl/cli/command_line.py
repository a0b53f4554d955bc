"""Argument parsers, dotted flags of the configuration (--learner.lr), and output of all commands.

Standard library only. ``flushed`` runs a command. It replaces characters that the output cannot encode, and flushes the
output at the end. If the reader of the output closes it, as ``head`` does, the command ends with exit code 141. A full
disk or a closed output ends it with code 1 and an error. Text given to ``PRINTER``, such as the errors of ``complain``,
never changes the exit code. A terminal that blocks delays the end by LAST_S (core/streams.py) at most.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl.core.formatting import printable, say
from asyncrl.core.other_names import Meaning, describe_meaning, meaning_of
from asyncrl.core.streams import PRINTER, replace_unknown, send_nowhere
from asyncrl.launcher.common.signals import heeded

if TYPE_CHECKING:
    from asyncrl.core.errors import AsyncRLError


class Parser(argparse.ArgumentParser):
    """A parser that prints its help unchanged, and makes its errors printable, because they repeat the user's text."""

    def __init__(self, program: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=program,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.takes_keys = False
        """True if the command accepts dotted flags, which set keys of the configuration."""
        # From 3.14 on argparse colours its text. ``printable`` would show the codes as text.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and end with code 2.

        For an unknown flag that another system uses, such as --learning-rate, the message names the key that is meant.
        """
        if self.takes_keys and message.startswith("unrecognized arguments: "):
            message += "".join(f"; {advice}" for advice in map(_key_for, message.split()) if advice)
            message += "; flags of the configuration are dotted keys, as --learner.lr"
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        shown = printable(message, keep="\n")
        if file is sys.stdout:
            # argparse would hide that help or version could not be written.
            sys.stdout.write(shown)
        else:
            super()._print_message(shown, file)

    def add_host_arguments(self, what: str) -> None:
        """Add --hosts and the flags that belong to it. ``what`` is the verb of the help, for example "run on"."""
        self.add_argument("--hosts", metavar="FILE", help=f"{what} the hosts of this hostfile, by ssh")
        names: dict[str, Any] = {"metavar": "NAME,...", "type": split_names, "default": []}
        self.add_argument("--include", **names, help="of the hosts only these")
        self.add_argument("--exclude", **names, help="of the hosts all but these")
        self.add_argument("--ssh-args", metavar="ARGS", default="", help="further arguments of ssh, as in -F FILE")


def _key_for(word: str) -> str:
    """Return advice on the keys that a flag such as --learning-rate means; empty for any other word."""
    flag = word.partition("=")[0]
    meaning = meaning_of(flag.removeprefix("--")) if flag.startswith("--") else None
    if meaning is None:
        return ""
    if meaning.keys:
        meaning = Meaning(tuple(f"--{key}" for key in meaning.keys), meaning.note)
    return f"{flag}: {describe_meaning(meaning, '')}"


def split_ssh_args(text: str) -> tuple[str, ...]:
    """Split the value of --ssh-args into words as a shell does. Raises UsageError."""
    from asyncrl.core.errors import UsageError

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--ssh-args {text}: {error}") from None


def split_flags(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split off the dotted flags, ``--a.b VALUE`` or ``--a.b=VALUE``; return their values by key, and the rest.

    The last value of a repeated key counts. Ends the program on wrong usage.
    """
    parser.takes_keys = True
    overrides: dict[str, str] = {}
    rest: list[str] = []
    queue = list(argv)
    while queue:
        argument = queue.pop(0)
        flag, is_joined, value = argument.partition("=")
        if not flag.startswith("--") or "." not in flag:
            rest.append(argument)
            continue
        if not all(flag.removeprefix("--").split(".")):
            parser.error(f"{flag}: not a key of the configuration")
        if not is_joined:
            if not queue or queue[0].startswith("--"):
                parser.error(f"{flag}: a value is missing")
            value = queue.pop(0)
        overrides[flag.removeprefix("--")] = value
    return overrides, rest


def split_names(text: str) -> list[str]:
    """Split a list of names at commas and spaces."""
    return text.replace(",", " ").split()


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Return a function that argparse calls to read a number of seconds from ``least`` to ``most``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            # Below every ``least``, so the text is refused.
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be {least:g} to {most:g} seconds")
        return value

    return read


# --- output ---


class _CannotPrint(Exception):
    """Standard output could not be written."""


def flushed(program: str, command: Callable[[], int]) -> int:
    """Run ``command``, flush its output, and return the exit code: the command's, or that of a failed output."""
    if sys.stderr is None:
        # The caller has closed standard error: errors are lost, and nothing else changes.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return complain(program, "what is printed cannot be written: standard output is closed", 1)
    replace_unknown(sys.stdout, sys.stderr)
    try:
        try:
            return command()
        finally:
            PRINTER.finish()
            # Also when argparse raises SystemExit after --help or --version.
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
    """Print on standard error why a command ends, and return ``exit_code``. Never fails."""
    PRINTER.print_to(sys.stderr, printable(f"{program}: {problem}\n", keep="\n"))
    PRINTER.finish()
    return exit_code


def complain_of(program: str, error: AsyncRLError) -> int:
    """Print on standard error the error with which a command ends. Returns the exit code."""
    *problems, last = describe_error(error)
    for problem in problems:
        say(problem, sys.stderr)
    return complain(program, last, error.exit_code)


def describe_error(error: AsyncRLError) -> list[str]:
    """Return the lines that the user gets for an error: one, or each problem of a ConfigError and a summary."""
    from asyncrl.core.errors import ConfigError

    if not isinstance(error, ConfigError):
        return [str(error)]
    # With ``found`` a check raised the error: each key is valid by itself, so no advice to read about the keys.
    keys = "" if error.found else "; --help-config explains every key"
    if len(error.problems) == 1:
        return [f"{error.problems[0]}{keys}"]
    count = f"{len(error.problems)} problems" + ("" if error.found else " in the configuration")
    return [*(f"  {problem}" for problem in error.problems), f"{count}: correct what is listed above{keys}"]


# --- signals ---


class _Interrupted(KeyboardInterrupt):
    """A signal that the command does not handle itself. As a KeyboardInterrupt it passes through event loops."""

    def __init__(self, number: int) -> None:
        self.number = number


def interruptible(program: str, command: Callable[[], int]) -> int:
    """Run ``command`` by ``flushed``. A signal that it does not handle itself raises in it, and ends it in order.

    Returns the exit code: the command's, or 128 + signal.
    """
    raise_at_signals()
    try:
        return flushed(program, command)
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, _Interrupted) else int(signal.SIGINT)
        return complain(program, f"ended by {signal.Signals(number).name}", 128 + number)


def raise_at_signals() -> None:
    """Let the signals that end a run raise in this thread."""
    for stopping in heeded():
        signal.signal(stopping, _raise_interrupted)


def _raise_interrupted(number: int, _frame: FrameType | None) -> None:
    # A closing terminal sends SIGHUP more than once. A second one must not interrupt the cleanup.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise _Interrupted(number)
