"""Counts of an episode host, since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EpisodeCounts:
    """Counts by the names of the catalogue."""

    played: int = 0
    """Episodes that ended by themselves or with their worker."""
    failed: int = 0
    """Played episodes that gave no outcome."""
    stopped: int = 0
    """Episodes that the rollouter ended."""
    played_alone: int = 0
    """Episodes begun in a worker by themselves."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls of tools that raised."""
    tool_mistakes: int = 0
    """Calls of tools that there are not, or with wrong arguments."""
    stalled: int = 0
    """Workers whose event loop stood still."""
    out_of_memory: int = 0
    """Workers and programs ended because of episode.max_memory_bytes."""
    workers_killed: int = 0
    """Worker processes ended by the host."""
    workers_died: int = 0
    """Worker processes that ended by themselves."""
    output_dropped_bytes: int = 0
    """Bytes printed beyond episode.max_output_bytes."""
