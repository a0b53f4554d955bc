"""Dotted flags of the commands, which are laid over the configuration. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def split_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Dotted flags, ``--a.b VALUE`` or ``--a.b=VALUE``, and the other arguments.

    Of a repeated key the last counts. Ends the program on wrong usage.
    """
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
