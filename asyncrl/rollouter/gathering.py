"""Gathers groups of trajectories in a user's script: runs the members of each group and yields the finished group.

``gather_groups`` yields each group as soon as it is finished, without a barrier over all of them.

Invariant: an error is never a trajectory and never a group. The lost trajectories are counted; more than
``max_failures`` end the gathering with TooManyFailures. Cancellation passes through. When ``gather_groups`` ends, every
given coroutine, task and future has ended, or was closed or cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from asyncrl.core.errors import TooManyFailures

T = TypeVar("T")

MIN_SURVIVORS = 2
"""Fewest trajectories of a group, because its baseline needs so many."""


@dataclass(slots=True)
class TrajectoryGroup(Generic[T]):
    """The finished trajectories of one group, in the order of its members."""

    trajectories: list[T]
    failures: list[Exception] = field(default_factory=list)
    """Errors of the members that failed."""
    index: int = 0
    """Index of the group among the given groups."""

    def __iter__(self) -> Iterator[T]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


Member: TypeAlias = T | Awaitable[T]
GivenGroup: TypeAlias = Iterable[Member[T]] | Awaitable[Iterable[Member[T]]]
Kept: TypeAlias = TrajectoryGroup[T] | list[TrajectoryGroup[T]] | None


async def gather_groups(
    groups: Iterable[GivenGroup[T]],
    *,
    after_each: Callable[[TrajectoryGroup[T]], Awaitable[Kept[T]] | Kept[T]] | None = None,
    max_failures: int | float = 0,
) -> AsyncIterator[TrajectoryGroup[T]]:
    """Run all groups at once and yield each as soon as it is finished.

    A group is an iterable of trajectories or of awaitables that give them, or an awaitable that gives such an iterable.
    ``after_each`` is called with each group as soon as it is complete, while others still run. It returns the group to
    keep it, None to drop it, or a list of groups to split it; it may be async. A failed member is left out of its
    group. A group is lost if a member failed and fewer than two are left (or none, if it had one). It is also lost if
    ``after_each`` raises.

    ``max_failures`` is the number of trajectories that may be lost in this way; above 0 and below 1 it is their share
    of all trajectories. A group that is still awaited counts as one trajectory, and ``math.inf`` allows any number.
    More lost trajectories raise TooManyFailures. Cancellation is not counted: it ends the gathering. To leave early,
    use ``contextlib.aclosing``, or drop the iterator.
    """
    is_fraction = 1 < max_failures < math.inf and max_failures != int(max_failures)
    if math.isnan(max_failures) or max_failures < 0 or is_fraction:
        raise ValueError(f"max_failures is a count, or a share below 1; got {max_failures}")
    gathering = _Gathering(list(groups), after_each, max_failures)
    try:
        while gathering.running:
            for group in await gathering.next_finished():
                yield group
    finally:
        await gathering.end()


class _Gathering(Generic[T]):
    """The groups of one call, each in a task of its own."""

    def __init__(
        self,
        groups: list[GivenGroup[T]],
        after_each: Callable[[TrajectoryGroup[T]], Awaitable[Kept[T]] | Kept[T]] | None,
        max_failures: float,
    ) -> None:
        self._given = [group if inspect.isawaitable(group) else list(group) for group in groups]
        """The groups; an awaited group is replaced by the list of its members once it has arrived."""
        self._after_each = after_each
        self._max_failures = max_failures
        self._sizes = [1 if inspect.isawaitable(group) else len(group) for group in self._given]
        """Number of trajectories of each group; 1 while the group is awaited."""
        self._lost = 0
        """Number of lost trajectories."""
        self._errors: list[Exception] = []
        """Errors of members, of awaited groups and of ``after_each``."""
        self._too_many_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once more trajectories are lost than ``max_failures`` allows."""
        self.running = {asyncio.ensure_future(self._run(index)) for index in range(len(self._given))}
        """Tasks of the groups that ``next_finished`` has not returned."""

    async def next_finished(self) -> list[TrajectoryGroup[T]]:
        """Wait until a group's task ends, and return what ``after_each`` made of its group. Raises TooManyFailures."""
        watched: list[asyncio.Future[Any]] = [*self.running, self._too_many_lost]
        ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._too_many_lost.done():
            raise TooManyFailures(self._lost, sum(self._sizes), self._errors) from self._errors[0]
        finished = [task for task in self.running if task in ended]
        self.running.difference_update(finished)
        return [group for task in finished for group in task.result()]

    async def end(self) -> None:
        """Cancel the running tasks and wait for their end; close the coroutines that have not begun."""
        for task in self.running:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)
        for given in self._given:
            for one in given if isinstance(given, list) else [given]:
                _discard(one)

    async def _run(self, index: int) -> list[TrajectoryGroup[T]]:
        """Run the members of one group and ``after_each``; returns the groups to yield, an empty list if it is lost.

        A group that is awaited and fails counts as one lost trajectory, because its size is unknown.
        """
        given = self._given[index]
        if not isinstance(given, list):
            try:
                given = self._given[index] = list(await given)
            except Exception as error:
                self._count_lost(1, error)
                return []
            self._sizes[index] = len(given)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._member(member)) for member in given]
        ended = [task.result() for task in running]
        finished = TrajectoryGroup(
            [trajectory for each in ended for trajectory in each.trajectories],
            [failure for each in ended for failure in each.failures],
            index,
        )
        if finished.failures and len(finished) < min(MIN_SURVIVORS, len(given)):
            # Failed members are counted already.
            self._count_lost(len(finished))
            return []
        return await self._apply_after_each(finished)

    async def _member(self, member: Member[T]) -> TrajectoryGroup[T]:
        """Run one member. Returns a group with its trajectory, or with its error, which is counted at once."""
        if not inspect.isawaitable(member):
            return TrajectoryGroup([member])
        try:
            return TrajectoryGroup([await member])
        except Exception as error:
            self._count_lost(1, error)
            return TrajectoryGroup([], [error])

    async def _apply_after_each(self, group: TrajectoryGroup[T]) -> list[TrajectoryGroup[T]]:
        """Call ``after_each`` and return the groups that it keeps; if it raises, the group is lost."""
        if self._after_each is None:
            return [group]
        # Read now, because ``after_each`` may change the group.
        size = len(group)
        try:
            kept = self._after_each(group)
            if inspect.isawaitable(kept):
                kept = await kept
            groups = [] if kept is None else kept if isinstance(kept, list) else [kept]
            for one in groups:
                if not isinstance(one, TrajectoryGroup):
                    raise TypeError(
                        f"after_each returned {one!r}; a TrajectoryGroup, a list of them or None is expected"
                    )
        except Exception as error:
            self._count_lost(size, error)
            return []
        return groups

    def _count_lost(self, trajectories: int, *errors: Exception) -> None:
        """Count lost trajectories and keep their errors; ends the gathering if too many are lost."""
        self._lost += trajectories
        self._errors += errors
        allowed = self._max_failures
        if self._lost > (allowed * sum(self._sizes) if 0 < allowed < 1 else allowed) and not self._too_many_lost.done():
            self._too_many_lost.set_result(None)


def _discard(given: object) -> None:
    """Cancel a task, or close a coroutine, because a coroutine that was never awaited would log a warning."""
    if inspect.iscoroutine(given):
        given.close()
    elif isinstance(given, asyncio.Future):
        given.cancel()
