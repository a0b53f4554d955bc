"""The leases of a rollouter: requests them, holds them, and ends them by delivery or return.

Invariants: a lease is held until the living learner has acknowledged the group, or the dataloader the lease's return.
Replies of a replaced learner or dataloader do not count. After an acknowledgement by a replaced learner the group is
delivered again; the learner trains each uid once. After a restart the dataloader asks for the leases held here.

Leases are requested whenever there is room for a trajectory. Each new version repeats the request, because the gate of
the dataloader (dataloader/gate.py) depends on the served version. A delivery has no deadline of its own. The controller
replaces a dead learner, and ends one of two actors that do not reach each other for ``supervision.unreachable_s``.
Fails with WireError if the learner refuses a group for good.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Collection

from msgspec.structs import replace

from asyncrl.core.errors import DeadlineExceeded, MessageTooLarge, RemoteError, WireError
from asyncrl.messages.dataloader import LeasesHeld, OpenLeases
from asyncrl.messages.groups import Deliver, Group, Lease, NewLeases, RequestLeases, ReturnLeases
from asyncrl.rollouter.serving.admission import Slots
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rpc.actor import Actor
from asyncrl.rpc.calls.retry import AWAY_S, log_and_pause, log_away, pause

DATALOADER, LEARNER = "dataloader/0", "learner/0"
LEARNER_LOOK_S = 1.0
"""Interval (s) of attempts to connect to the learner at the start."""
GIVE_BACK_S = 5.0
"""Timeout of the call that reports to the dataloader that this rollouter leaves."""


class HeldLeases:
    """Leases of a rollouter. ``places.size`` is the number of trajectories that it may generate at a time."""

    def __init__(self, rollouter: Actor, manager: EngineManager, places: Slots) -> None:
        self._config, self._peer, self._manager, self._places = rollouter.config, rollouter.peer, manager, places
        self._awaits, self._counters, self._clock = rollouter.awaits, rollouter.counters, rollouter.clock
        self._histograms, self._log = rollouter.histograms, rollouter.log
        self.held: dict[str, Lease] = {}
        """The held leases, by uid."""
        self.taken_at: dict[str, float] = {}
        """Times when the held leases were received, by uid; the oldest first."""
        self.ungenerated: Counter[str] = Counter()
        """Number of trajectories of each held lease, by uid, that are not generated yet."""
        self.generating = 0
        """Number of leased trajectories that are not generated yet, including those that wait for a slot."""
        self.closed = False
        """Whether no more leases are requested."""
        self._seen = 0
        """The highest lease number received."""
        self._requests = 0
        """Number of the latest request for leases, counted from 1."""
        self._dataloader = self._learner = 0
        """The newest known incarnations; replies of older ones do not count."""
        self.news = asyncio.Event()
        """Set when statistics should be sent to the learner soon, as after the receipt of a lease."""
        self._room = asyncio.Event()
        """Set when there may be room for another trajectory."""
        self._ask_again = asyncio.Event()
        """Set to replace the pending request for leases by a new one."""
        self._draws = random.Random(f"deliveries to {LEARNER}")
        """Random numbers for the pauses between attempts to deliver."""
        for name in ("adoptions", "delivered_again"):
            self._counters[f"rollout/{name}"] = 0

    # --- requests ---

    async def received(self) -> AsyncGenerator[Lease, None]:
        """Request leases whenever there is room for a trajectory, and yield each new one; ends after ``close``.

        First waits until the learner is connected: a rollouter that is cut off must take no leases. The wait is
        reported to the controller, which ends it within ``supervision.unreachable_s``.
        """
        with self._awaits.on(LEARNER, "HELLO"):
            learner = self._peer(LEARNER)
            while not learner.ready:
                learner.connect()
                await learner.reached(LEARNER_LOOK_S)
        samples = self._config.rollout.samples_per_prompt
        with self._awaits.on(DATALOADER, "RequestLeases", idle=True) as requesting:
            while not self.closed:
                # Number of groups that fit, rounded up, so that waiting samples of the last one keep every slot busy.
                free = -((self.generating - self._places.size) // samples)
                if free < 1:
                    # Nothing is awaited since ``free`` was computed, so no ``set`` is lost.
                    self._room.clear()
                    await self._room.wait()
                    continue
                reply = await self._request(free)
                if reply is None or self.closed:
                    continue
                if reply.leases:
                    requesting.renew()
                for lease in reply.leases:
                    # Before the check below, because the dataloader repeats a lease until ``_seen`` covers its number.
                    self._seen = max(self._seen, lease.number)
                    if lease.uid not in self.held:
                        self._take(lease)
                        yield lease
                # Wait instead of ending: a learner that goes back to a checkpoint opens the gate again, and the commit
                # of its version sets ``_room``.
                if reply.closed and not reply.leases:
                    self._room.clear()
                    await self._room.wait()

    async def _request(self, free: int) -> NewLeases | None:
        """Send one request for ``free`` groups. Returns None if the caller is to send another.

        That is so after a failure and a pause, and if a replaced dataloader has answered. It is also so if
        ``ask_again`` or the end of a delivery cancels the request: the version, room or held leases have changed.
        """
        self._ask_again.clear()
        self._requests += 1
        request = RequestLeases(
            seen=self._seen,
            free_groups=free,
            served_version=self._manager.version,
            holding=list(self.held),
            number=self._requests,
        )
        call = self._peer(DATALOADER).call(request)
        changed = asyncio.ensure_future(self._ask_again.wait())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # Leases in a lost reply are repeated, because ``seen`` does not cover them.
                return None
            reply: NewLeases = call.result()
            # A replaced dataloader's lease does not count: its successor may give the same number to another lease.
            return reply if call.answered_by >= self._dataloader else None
        except (DeadlineExceeded, RemoteError) as error:
            await log_and_pause(self._log, "dataloader", error)
            return None
        finally:
            changed.cancel()
            if not call.done():
                call.cancel()

    def _take(self, lease: Lease) -> None:
        """Hold a new lease."""
        self.held[lease.uid] = lease
        self.taken_at[lease.uid] = self._clock.now()
        self.ungenerated[lease.uid] = lease.samples
        self.generating += lease.samples
        self.news.set()

    def generated(self, lease: Lease) -> None:
        """Note that a trajectory was generated or has failed, which makes room for another."""
        self.generating -= 1
        self.ungenerated[lease.uid] -= 1
        self._room.set()

    def ask_again(self) -> None:
        """Replace the pending request for leases, because the served version or the room has changed."""
        self._ask_again.set()
        self._room.set()

    def close(self) -> None:
        """Request nothing more."""
        self.closed = True
        self.ask_again()

    # --- the end of a lease ---

    async def deliver(self, group: Group) -> Group:
        """Send a group until the living learner has acknowledged it, then end its lease.

        Returns the group as the learner has it: one that is too large for a message is delivered as failed.
        """
        began = self._clock.now()
        try:
            await self._deliver(group)
        except MessageTooLarge as error:
            # Every rollouter would make it too large, so returning the lease would not help.
            group = replace(group, trajectories=[], failure=f"it cannot be brought to the learner: {error}")
            await self._deliver(group)
        self._histograms.observe("rollout/deliver_s", self._clock.now() - began)
        # Nothing is awaited since the acknowledgement, because it counts only until another learner is adopted.
        self._end(group.lease.uid)
        self._ask_again.set()
        return group

    async def _deliver(self, group: Group) -> None:
        with self._awaits.on(LEARNER, "Deliver"):
            failed_tries = 0
            while not await self._try_to_deliver(group, failed_tries):
                failed_tries += 1

    async def _try_to_deliver(self, group: Group, failed_tries: int) -> bool:
        """Send a group once; returns whether the living learner has acknowledged it.

        Pauses after a retryable refusal, the longer the more ``failed_tries`` came before. Raises other refusals.
        """
        uid, config = group.lease.uid, self._config
        # Longer than the silence after which a learner is replaced: a hanging learner may have received the group.
        timeout = config.network.call_timeout_s + config.supervision.silence_s
        call = self._peer(LEARNER).call(Deliver(group=group), timeout)
        try:
            await call
        except DeadlineExceeded as error:
            log_away(self._log, "learner", error, uid=uid)
            return False
        except RemoteError as error:
            if not error.retryable:
                raise
            self._log.info("learner takes no groups yet", uid=uid, error=str(error))
            await asyncio.sleep(pause(AWAY_S, failed_tries, self._draws.random()))
            return False
        # The learner may have been replaced between its reply and this line.
        if call.answered_by >= self._learner:
            return True
        self._counters["rollout/delivered_again"] += 1
        return False

    async def give_back(self, uids: Collection[str], *, holding: Collection[str], leaving: bool) -> bool:
        """Return the leases ``uids`` to the dataloader, and name in ``holding`` the leases still held.

        The returned leases stay held here until ``forget``. Returns whether the dataloader has acknowledged the return.
        """
        request = ReturnLeases(uids=list(uids), leaving=leaving, holding=list(holding))
        try:
            await self._peer(DATALOADER).call(request, timeout=GIVE_BACK_S if leaving else AWAY_S * 2)
        except WireError as error:
            # The dataloader drains after the rollouters. If it is away, the leases end with this incarnation.
            self._log.warning("leases not returned", error=str(error))
            return False
        return True

    def forget(self, uids: Collection[str]) -> None:
        """End leases that the dataloader has taken back."""
        for uid in uids:
            self._end(uid)

    def _end(self, uid: str) -> None:
        """Hold a lease no longer, and forget the engine deaths that count against it."""
        del self.held[uid], self.ungenerated[uid], self.taken_at[uid]
        self._manager.turns.forget(uid)

    def answer(self, request: OpenLeases, dataloader: int) -> LeasesHeld:
        """Adopt the request's learner and the ``dataloader`` incarnation that asks, if newer; returns the held leases.

        From here on replies of older incarnations do not count.
        """
        if request.learner > self._learner:
            self._learner = request.learner
            self._counters["rollout/adoptions"] += 1
            self._log.info("learner adopted", incarnation=request.learner)
            self._peer(LEARNER).adopt(request.learner)
        self._dataloader = max(self._dataloader, dataloader)
        self._peer(DATALOADER).adopt(dataloader)
        return LeasesHeld(
            seen=self._seen,
            served_version=self._manager.version,
            attempts={uid: self._manager.turns.deaths(lease) for uid, lease in self.held.items()},
            leaving=self.closed,
        )
