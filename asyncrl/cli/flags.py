"""Command lines: parsers, the flags that commands share, dotted flags of the configuration. Standard library only."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from asyncrl.core.other_names import Meaning, describe_meaning, meaning_of
from asyncrl.core.printable import printable


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
