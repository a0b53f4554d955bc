"""Compares the last number of a response with the row's answer."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def number(text: str) -> float | None:
    """The last number in a text."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward(*, completion: str, row: dict) -> dict:
    """1 for the right number. ``alone``, whether the last line has nothing else, is only a metric."""
    right = number(completion)
    last_line = completion.strip().rpartition("\n")[2]
    return {
        "reward": float(right is not None and right == number(row["answer"])),
        "alone": float(NUMBER.fullmatch(last_line.strip()) is not None),
    }
