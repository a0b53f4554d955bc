"""Shows how often the student is right."""

import re


def reward(*, completion: str, row: dict) -> float:
    """1 if the last number of the response is the answer."""
    numbers = re.findall(r"-?\d[\d,]*", completion)
    return float(bool(numbers) and numbers[-1].replace(",", "") == row["answer"].replace(",", ""))
