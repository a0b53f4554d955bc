"""The dataloader's shell: messages to events, prompts to leases, parked calls woken when something changed.

``lease_book`` and the modules under it make all decisions; ``prompts`` reads and tokenizes, all prompts before the
actor is ready and appended rows later.
An *orphan* is a prompt whose rollouter has died or left. Orphans are leased again only after the learner has said which
of them it holds.

The gate (``gate``) is shut until the learner says where the run stands (``Restored``). The dataloader then asks each
rollouter which leases it holds. A rollouter that does not answer in time counts as holding nothing. If it does hold
groups, these groups are generated twice and trained once, since the learner takes every group once. A call that cannot
be answered yet is parked: it waits here and is tried again after each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asyncrl.core.errors import ConfigError, InvalidRequest, RestoreNeeded, WireError
from asyncrl.dataloader.curriculum import find_curriculum
from asyncrl.dataloader.evals import EvalPrompt, EvalSet
from asyncrl.dataloader.lease_book import Ask, LeaseBook
from asyncrl.dataloader.prompts import RunPrompts
from asyncrl.dataloader.restoring import Restorer, RollouterAnswer, inherit, missing
from asyncrl.messages import Done
from asyncrl.messages.dataloader import (
    DataloaderStatus,
    LeasesHeld,
    OpenLeases,
    Outcomes,
    OutcomesSeen,
    PromptSample,
    Restored,
    Resumed,
    SamplePrompts,
    WatchDataloader,
)
from asyncrl.messages.groups import Held, Holds, NewLeases, RequestLeases, ReturnLeases, sealed
from asyncrl.observe.group_log import LEASED, ORPHANED, RETURNED, SETTLED, GroupLog
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.calls.retry import AWAY_S, log_away
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.parking_lot import ParkingLot
from asyncrl.text.chat.probe import FILE as CHAT_FILE
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of

LEARNER = "learner/0"
FOLLOW_S = 1.0
"""Interval (s) at which files that grow are read."""


class Dataloader(Actor):
    """The actor that leases prompts; the rules are in the module's docstring."""

    role = "dataloader"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._group_log = GroupLog(self.name)
        self._prompts = RunPrompts(self.config)
        self._restorer: Restorer
        self._book: LeaseBook | None = None
        """Leases of the run; None while the gate is shut."""
        self._previous: LeaseBook | None = None
        """The last book before the gate was shut; None while the gate is open, and before the first book."""
        self._learner = 0
        """Newest incarnation of the learner that has sent ``Restored``; 0 before the first."""
        self._last_restored: Restored | None = None
        """The last ``Restored`` from which a book was rebuilt."""
        self._restoring = asyncio.Lock()
        """Held while a ``Restored`` is served, so that one restore runs at a time."""
        self._preempted = False
        self._parked_returns = ParkingLot()
        """ReturnLeases calls, which wait for the gate to open."""
        self._parked_requests = ParkingLot()
        """RequestLeases calls, which wait for a lease."""
        self._parked_watches = ParkingLot()
        """WatchDataloader calls of the learner, which wait for a new ``DataloaderStatus``."""
        self._status_number = numbers_begin_above(context.incarnation)
        """Number of the newest ``DataloaderStatus``; it starts above every number of an earlier incarnation."""
        self._orphaned = asyncio.Event()
        """Set when there may be orphans to settle."""
        self._leaving: dict[str, int] = {}
        """Rollouters that leave, by name, with their incarnation; their parked requests get no lease."""
        self._known_orphans: set[str] = set()
        """Orphans that are in the group log already."""
        self._leased_at: dict[str, float] = {}
        """Time of the lease of each outstanding training prompt, if this incarnation leased it; the oldest first."""

    # --- life ---

    async def setup(self) -> None:
        """Read and tokenize all prompts. Raises DataError or ConfigError."""
        config = self.config
        tokenizer = await asyncio.to_thread(tokenizer_of, config)
        if config.episode.kind != "single":
            await asyncio.to_thread(self._check_chat, tokenizer)
        await self._prompts.read(tokenizer, self.services)
        self.counters["prompts/read"] = self._prompts.count
        self._restorer = Restorer(
            config,
            [each.source for each in self._prompts.training],
            [EvalSet(name, prompts.admissible, config.eval[name]) for name, prompts in self._prompts.evals.items()],
            find_curriculum(config),
        )

    def _check_chat(self, tokenizer: Tokenizer) -> None:
        """Check the chat template once for the whole run, and write the report to the log and the run folder.

        Raises ConfigError.
        """
        report = make_renderer(self.config, tokenizer).report
        for line in report.lines():
            self.log.info("chat template", found=line)
        (self.context.run_dir / CHAT_FILE).write_bytes(report.to_json())

    async def run(self) -> None:
        """Serve; ask the learner about orphans whenever there are any, and follow files that grow."""
        works = [self.tasks.create_task(self._settle_orphans())]
        if self._prompts.grow:
            works.append(self.tasks.create_task(self._follow()))
        await self.drained()
        for work in works:
            work.cancel()

    def preempted(self) -> None:
        """Lease nothing more."""
        self._preempted = True
        if self._book is not None:
            self._book.stop()
            self._retry_parked()

    async def _follow(self) -> None:
        """Read the rows that are appended to files, until cancelled. Raises DataError."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            if await self._prompts.read_appended():
                self.log.info("rows were appended", prompts=self._prompts.count)
                self.counters["prompts/read"] = self._prompts.count
            # Not only then: the gate may have been shut when the rows were read.
            if self._book is not None:
                self._book.grow()
                self._count()

    async def _settle_orphans(self) -> None:
        """Ask the learner, whenever there are orphans, which of them it holds; the book leases the others again.

        Runs until cancelled. Repeats the question while the learner does not answer, and if the book was rebuilt before
        the answer.
        """
        while True:
            await self._orphaned.wait()
            # Cleared before the orphans are read: an orphan that comes during the call sets it again.
            self._orphaned.clear()
            book = self._book
            if book is None or not book.orphans:
                continue
            orphans = book.orphans
            try:
                held: Held = await self.peer(LEARNER).call(Holds(uids=orphans))
            except WireError as error:
                log_away(self.log, "learner", error)
                self._orphaned.set()
                await asyncio.sleep(AWAY_S)
                continue
            if book is not self._book:
                # The book was rebuilt meanwhile, so the answer may come from a learner that has been replaced.
                self._orphaned.set()
                continue
            book.settle(orphans, held.uids)
            self._drop_lease_times(book, orphans)
            for uids, by_learner in ((held.uids, True), (sorted(set(orphans).difference(held.uids)), False)):
                if uids:
                    self._group_log.write(SETTLED, uids=uids, held=by_learner)
            self.log.info("orphans settled", orphans=len(orphans), held=len(held.uids))
            self._retry_parked()

    # --- the state of the run ---

    @handler
    async def restored(self, request: Restored, caller: Caller) -> Resumed:
        """Shut the gate, rebuild the leases from the learner's state, open the gate. A repeated call changes nothing.

        Raises RunChanged, and InvalidRequest for an unreadable ledger or a learner that has a successor.
        """
        self._restorer.check_unchanged(request)
        async with self._restoring:
            # Checked under the lock: a newer learner may have been served while this call waited.
            if caller.incarnation < self._learner:
                raise InvalidRequest(f"a newer {LEARNER} has said where the run stands")
            if not self._is_applied(request, caller):
                if self._book is not None:
                    # After a failed restore there is no book, and ``_previous`` stays as it is.
                    self._previous, self._book = self._book, None
                # Before the restore, which names this learner to the rollouters.
                self._learner = caller.incarnation
                self.peer(LEARNER).adopt(caller.incarnation)
                book = await self._restore(request)
                # Only after the restore: if it fails, the learner repeats the request and it is restored again.
                self._last_restored = request
                self._open(book)
            assert self._book is not None
            return self._restorer.resumed(self._book)

    @handler
    def sample_prompts(self, request: SamplePrompts, caller: Caller) -> PromptSample:
        """A sample of training prompts, spread evenly over the data."""
        return PromptSample(prompts=self._prompts.sample(request.count))

    def _is_applied(self, request: Restored, caller: Caller) -> bool:
        """Whether the book already continues from ``request``, or from a later state of the same learner.

        A repeated call may be older than the book: then the book has applied later reports of the learner.
        """
        if self._book is None or caller.incarnation != self._learner:
            return False
        return request == self._last_restored or request.outcomes_number < self._book.number

    async def _restore(self, request: Restored) -> LeaseBook:
        """Rebuild the book: ask the rollouters what they hold, then the learner which prompts without a holder it has.

        A missing answer does not fail the restore: it counts as "nothing held".
        """
        # A dead rollouter without a successor does not answer, so it is not asked.
        dead = {actor.name for actor in self.run_state.dead}
        names = [name for name in self.roster.actors if name.startswith("rollouter/") and name not in dead]
        replies = await asyncio.gather(*(self._ask_rollouter(name) for name in names))
        answers = {name: answer for name, answer in zip(names, replies, strict=True) if answer is not None}
        previous = self._previous
        book = await asyncio.to_thread(self._restorer.rebuild, request, answers, previous, self._status_number + 1)
        # A group may be delivered after the learner sent its state and before its rollouter answered: then neither
        # names the group, and the learner is asked again. The gate never admits more groups than its capacity, so such
        # groups are among the next ones in the order.
        unclear = await asyncio.to_thread(book.to_come, self.config.gate_capacity)
        if previous is not None:
            unclear = list(dict.fromkeys([*missing(book, previous), *unclear]))
        held = await self._ask_learner(unclear)
        for uid in held:
            book.hold(uid)
        if previous is not None:
            inherit(book, previous)
        self.log.info(
            "restored",
            version=request.version,
            learner=self._learner,
            claims=len(request.claims),
            rollouters={name: len(answer.held.attempts) for name, answer in answers.items()},
            silent=[name for name in names if name not in answers],
            held=len(held),
            outstanding=book.outstanding,
        )
        return book

    async def _ask_rollouter(self, name: str) -> RollouterAnswer | None:
        """Ask a rollouter which leases it holds; None if the call fails."""
        peer = self.peer(name)
        call = peer.call(OpenLeases(learner=self._learner), timeout=self._question_timeout_s)
        try:
            held: LeasesHeld = await call
        except WireError as error:
            # No warning at the start of a run: rollouters that have not started yet do not answer.
            log = self.log.warning if peer.known else self.log.info
            log("rollouter counts as holding nothing", rollouter=name, error=str(error))
            return None
        return RollouterAnswer(call.answered_by, held)

    async def _ask_learner(self, uids: list[str]) -> list[str]:
        """Ask the learner which of the prompts ``uids`` it holds; an empty list if the call fails."""
        if not uids:
            return []
        try:
            held: Held = await self.peer(LEARNER).call(Holds(uids=uids), timeout=self._question_timeout_s)
        except WireError as error:
            self.log.warning("what the learner holds may be generated again", error=str(error))
            return []
        return held.uids

    @property
    def _question_timeout_s(self) -> float:
        """Timeout (s) of each of the two questions of a restore: both end before the learner's call does."""
        return self.config.network.call_timeout_s / 3

    def _open(self, book: LeaseBook) -> None:
        """Open the gate with a rebuilt book, and try all parked calls again."""
        # A rollouter may have died since it answered.
        for name, incarnation in self.dead.items():
            if name.startswith("rollouter/"):
                book.died(name, incarnation)
        if self._preempted:
            book.stop()
        self._book, self._previous = book, None
        # Drops the others: their outcome is in the learner's checkpoint already, or they will be leased again.
        self._leased_at = {uid: at for uid, at in self._leased_at.items() if uid in book.out}
        self.param_version = book.gate.newest_version
        self._note_orphans("")
        self.progress()
        self._parked_returns.wake()
        self._retry_parked()

    def _require_book(self, caller: Caller) -> LeaseBook:
        """Return the book. Raises RestoreNeeded if the gate is shut, or was opened for another learner."""
        if self._book is None or caller.incarnation != self._learner:
            raise RestoreNeeded
        return self._book

    # --- rollouters ---

    def peer_died(self, name: str, incarnation: int) -> None:
        """Prompts that a dead rollouter held become orphans."""
        if not name.startswith("rollouter/"):
            return
        if self._book is not None:
            self._book.died(name, incarnation)
            self._note_orphans(name)
            self._parked_requests.wake()

    def _note_orphans(self, rollouter: str) -> None:
        """Log new orphans as those of ``rollouter`` ("" after a restore); wake ``_settle_orphans`` if any are left."""
        assert self._book is not None
        orphans = self._book.orphans
        if orphans:
            self._orphaned.set()
        if new := [uid for uid in orphans if uid not in self._known_orphans]:
            self._group_log.write(ORPHANED, uids=new, of=rollouter)
        self._known_orphans = set(orphans)

    @handler
    async def request_leases(self, request: RequestLeases, caller: Caller) -> NewLeases:
        """Lease prompts to the calling rollouter.

        The call is parked until something can be leased. The reply is empty if that takes about half of the call's
        time, and at once if the rollouter leaves or the book is closed.
        """
        ask = Ask(
            caller.name,
            caller.incarnation,
            request.seen,
            request.free_groups,
            request.served_version,
            frozenset(request.holding),
            request.number,
        )
        if not self._is_leaving(ask):
            self._note_request(ask)
        return await self._parked_requests.until(lambda: self._answer(ask), caller.park_s) or NewLeases()

    def _note_request(self, ask: Ask) -> None:
        """Record a request in the book, if the gate is open. The request may show that an older incarnation is dead."""
        if self._book is not None:
            self._book.meet(ask)
            if self._book.orphans:
                self._note_orphans(ask.rollouter)

    def _answer(self, ask: Ask) -> NewLeases | None:
        """Lease what the book admits, and return the reply; None while the request has to stay parked.

        The reply is empty for a rollouter that leaves, and ``closed`` once the run needs no further group.
        """
        if self._is_leaving(ask):
            return NewLeases()
        book = self._book
        if book is None:
            return None
        if ask.rollouter not in book.rollouters:
            # The call came before the gate was opened, or the book was rebuilt since.
            self._note_request(ask)
        try:
            leases = book.take(ask)
        except ConfigError as error:
            # A user's curriculum has failed: in a handler the error would reach the rollouter alone.
            self.tasks.create_task(_fail(error))
            return None
        if leases or book.status_number != self._status_number:
            # ``take`` may have rejected a prompt without leasing anything.
            self._count()
        if leases:
            self.progress()
            for lease in leases:
                if not isinstance(lease.prompt, EvalPrompt):
                    # A lease that is given again keeps its age.
                    self._leased_at.setdefault(lease.prompt.uid, self.clock.now())
            self._group_log.write(
                LEASED,
                to=ask.rollouter,
                served=ask.served_version,
                uids=[lease.prompt.uid for lease in leases],
                leases=[[lease.number, lease.param_version, lease.attempt, lease.alone] for lease in leases],
            )
            if leases[-1].alone:
                # A rollouter that was set aside for this prompt may get leases again.
                self._parked_requests.wake()
            key, messages = self.context.credentials.seal_key, map(self._prompts.lease, leases)
            return NewLeases(leases=[sealed(key, each, ask.rollouter, ask.incarnation) for each in messages])
        return NewLeases(closed=True) if book.closed else None

    def _is_leaving(self, ask: Ask) -> bool:
        """Whether the incarnation that asks, or a later one of the rollouter, has said that it leaves."""
        return ask.incarnation <= self._leaving.get(ask.rollouter, 0)

    @handler
    async def return_leases(self, request: ReturnLeases, caller: Caller) -> Done:
        """Take back the leases that a rollouter returns, and note if it leaves. Parked while the gate is shut.

        Raises RestoreNeeded if the gate stays shut.
        """
        if request.leaving:
            # At once, even while the gate is shut: the rollouter's parked calls must get no lease.
            self._leaving[caller.name] = caller.incarnation
            self._parked_requests.wake()
        book = await self._parked_returns.until(lambda: self._book, caller.park_s)
        if book is None:
            raise RestoreNeeded
        book.give_back(caller.name, caller.incarnation, request.uids)
        self._drop_lease_times(book, request.uids)
        self._group_log.write(RETURNED, uids=request.uids, by=caller.name)
        if request.leaving:
            book.left(caller.name, caller.incarnation, request.holding)
            if book.orphans:
                self._orphaned.set()
        self._retry_parked()
        return Done()

    # --- the learner ---

    @handler
    def outcomes(self, request: Outcomes, caller: Caller) -> OutcomesSeen:
        """Record outcomes that the learner reports. Raises RestoreNeeded, and ProtocolError for an impossible one."""
        book = self._require_book(caller)
        number = book.report(request)
        for age in self._drop_lease_times(book, [outcome.uid for outcome in request.outcomes]):
            self.histograms.observe("tickets/age_s", age)
        self.param_version = book.gate.newest_version
        self.progress()
        self._retry_parked()
        return OutcomesSeen(number=number, limit=book.gate.limit.versions)

    @handler
    async def watch_dataloader(self, request: WatchDataloader, caller: Caller) -> DataloaderStatus:
        """The status. The call is parked until the status is newer than ``request.seen``, at most ``caller.park_s``.

        Raises RestoreNeeded.
        """

        def news() -> DataloaderStatus | None:
            book = self._require_book(caller)
            return book.status if book.status_number > request.seen else None

        return await self._parked_watches.until(news, caller.park_s) or self._require_book(caller).status

    # --- within ---

    def _drop_lease_times(self, book: LeaseBook, uids: Iterable[str]) -> list[float]:
        """Drop the lease times of the prompts among ``uids`` that are no longer out; returns their ages (s).

        A prompt that an earlier incarnation leased has no lease time, and gives no age.
        """
        ended = [uid for uid in uids if uid not in book.out]
        leased = [self._leased_at.pop(uid) for uid in ended if uid in self._leased_at]
        return [self.clock.now() - at for at in leased]

    def metrics(self) -> dict[str, float]:
        # The heartbeat's thread calls this while the event loop changes the dict, so ``list`` copies it in one step.
        oldest = next(iter(list(self._leased_at.values())[:1]), None)
        return super().metrics() | {
            "tickets/oldest_s": self.clock.now() - oldest if oldest is not None else 0.0,
            "tickets/parked": len(self._parked_requests),
        }

    def _retry_parked(self) -> None:
        """Try every parked call for leases again, and update the counters."""
        self._parked_requests.wake()
        self._count()

    def _count(self) -> None:
        """Copy the book's counts to the metrics, and wake ``watch_dataloader`` if the status has changed."""
        book = self._book
        if book is None:
            return
        for name, count in book.counts.items():
            self.counters[f"tickets/{name}"] = count
        self.counters["tickets/outstanding"] = book.outstanding
        gate = book.gate
        self.counters["tickets/gate"] = gate.room(gate.newest_version, 0)
        self.counters["staleness/limit"] = gate.limit.versions
        if book.status_number != self._status_number:
            self._status_number = book.status_number
            self._parked_watches.wake()


async def _fail(error: Exception) -> None:
    """Raise ``error``; run as a task of the actor, this ends the actor."""
    raise error
