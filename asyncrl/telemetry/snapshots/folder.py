"""Entries of a folder: one that may not be read is not taken for an empty one, as a glob would."""

from __future__ import annotations

from pathlib import Path


def entries_of(folder: Path) -> list[Path]:
    """Paths in the folder, in order of name; none where there is no such folder. Raises OSError."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
