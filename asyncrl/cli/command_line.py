"""Parsers, flags, dotted flags of the configuration, and output of all commands. Standard library only.

Characters that the output lacks are replaced, it is flushed, and complaints never fail. A reader of the output that has
read enough, as ``head`` does, ends a command with exit code 141. A full disk or a closed output ends it with code 1 and
an error. Text that was given to ``PRINTER`` never changes the exit code. A terminal that takes nothing delays the end
by LAST_S at most.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from asyncrl.core.other_names import Meaning, describe_meaning, meaning_of
from asyncrl.core.printable import printable
from asyncrl.core.streams import PRINTER, replace_unknown, send_nowhere


class Parser(argparse.ArgumentParser):
    """A parser whose help stands as it is written; its complaints repeat typed text, so they are made printable."""

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
        """Whether dotted flags are keys of the configuration."""
        # Python colours them from 3.14 on, in codes that would be shown as text.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Print usage and message, with the keys of the configuration for the flags that it names; end with code 2."""
        if self.takes_keys and message.startswith("unrecognized arguments: "):
            message += "".join(f"; {advice}" for advice in map(_key_for, message.split()) if advice)
            message += "; flags of the configuration are dotted keys, as --learner.lr"
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        shown = printable(message, keep="\n")
        if file is sys.stdout:
            # argparse lets no failure be known, and this is what was asked for.
            sys.stdout.write(shown)
        else:
            super()._print_message(shown, file)

    def add_host_arguments(self, what: str) -> None:
        """Add --hosts and the flags that belong to it; ``what`` is done with the hosts."""
        self.add_argument("--hosts", metavar="FILE", help=f"{what} the hosts of this hostfile, by ssh")
        names: dict[str, Any] = {"metavar": "NAME,...", "type": split_names, "default": []}
        self.add_argument("--include", **names, help="of the hosts only these")
        self.add_argument("--exclude", **names, help="of the hosts all but these")
        self.add_argument("--ssh-args", metavar="ARGS", default="", help="further arguments of ssh, as in -F FILE")


def _key_for(word: str) -> str:
    """The keys for a flag without dots, as --learning-rate; empty for any other word."""
    flag = word.partition("=")[0]
    meaning = meaning_of(flag.removeprefix("--")) if flag.startswith("--") else None
    if meaning is None:
        return ""
    if meaning.keys:
        meaning = Meaning(tuple(f"--{key}" for key in meaning.keys), meaning.note)
    return f"{flag}: {describe_meaning(meaning, '')}"


def split_ssh_args(text: str) -> tuple[str, ...]:
    """The words of --ssh-args. Raises UsageError."""
    from asyncrl.core.errors import UsageError

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--ssh-args {text}: {error}") from None


def split_flags(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Dotted flags, ``--a.b VALUE`` or ``--a.b=VALUE``, and the other arguments.

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
    """The names in a list with commas, spaces, or both between them."""
    return text.replace(",", " ").split()


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Reads a number of seconds between these."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be {least:g} to {most:g} seconds")
        return value

    return read


# --- output ---


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
