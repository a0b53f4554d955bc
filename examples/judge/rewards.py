"""Scores of a program, beside those of the judge."""


def short(*, completion: str) -> float:
    """1 for up to 60 words, falling to 0 at 120."""
    return min(1.0, max(0.0, 2.0 - len(completion.split()) / 60))
