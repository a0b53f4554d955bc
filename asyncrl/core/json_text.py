"""Reads JSON from unknown sources: every fault is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON, too many digits and too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises OSError, and ValueError, which names the file."""
    try:
        found = from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found
