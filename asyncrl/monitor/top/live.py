"""The snapshots of a run that lives, and after them how it ended.

Invariant: the last snapshot of a run that has ended is one of its end. A run that was killed as a whole gives none
itself: then it is what was recorded last, or seen last, made into that, as at the end of a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from asyncrl.monitor.client import Away, Target, watch
from asyncrl.monitor.top.replay import ending
from asyncrl.snapshot import OVER, Snapshot


async def follow(target: Target) -> AsyncIterator[Snapshot | Away]:
    """``watch``, and the end. Raises UsageError as that."""
    last: Snapshot | None = None
    async for seen in watch(target):
        yield seen
        if isinstance(seen, Snapshot):
            last = seen
    if target.run_dir is not None and (last is None or last.run.phase not in OVER):
        end = await asyncio.to_thread(ending, target.run_dir, last)
        if end is not None:
            yield end
