"""The snapshots of a run that lives, and after them one of its end.

Invariant: the last snapshot of a run that has ended is one of its end. A run that was killed as a whole gives none
itself: then the snapshot that was recorded or seen last is made into one, as at the end of a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from asyncrl.monitor.client import Away, Target, watch
from asyncrl.monitor.top.replay import ending
from asyncrl.snapshot import OVER, Snapshot


async def follow(target: Target) -> AsyncIterator[Snapshot | Away]:
    """Snapshots of ``watch``, and then one of the end. Raises UsageError as ``watch`` does."""
    last: Snapshot | None = None
    async for seen in watch(target):
        yield seen
        if isinstance(seen, Snapshot):
            last = seen
    if target.run_dir is not None and (last is None or last.run.phase not in OVER):
        end = await asyncio.to_thread(ending, target.run_dir, last)
        if end is not None:
            yield end
