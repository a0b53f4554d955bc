"""The end of an actor's log file."""

from __future__ import annotations

from pathlib import Path

LINES = 20
BYTES = 16_384


def last_lines(run_dir: Path, attempt: int, actor: str) -> list[str] | None:
    """The last lines, oldest first; None when there is no such file that can be read, as when it is on another host."""
    path = run_dir / "logs" / f"attempt_{attempt}" / f"{actor.replace('/', '-')}.log"
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - BYTES))
            lines = file.read(BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    # The first of a part of a file may be torn.
    return (lines if size <= BYTES else lines[1:])[-LINES:]
