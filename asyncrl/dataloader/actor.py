"""The dataloader's shell: messages to events, prompts to leases, parked calls woken when something changed.

All decisions are made in ``lease_book`` and the modules under it; ``prompts`` reads and tokenizes before the actor is
ready. Orphans of a dead rollouter are leased again only after the learner has said which it holds.

The gate (``gate``) is shut until the learner says where the run stands (``Restored``). The dataloader then asks each
rollouter which leases it holds. A rollouter that does not answer in time counts as holding nothing: groups that it does
hold are generated twice and trained once, since the learner takes every group once. A call that cannot be answered yet
is parked: it waits here and is tried again after each change. An *orphan* is a prompt whose rollouter has died.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from asyncrl.core.errors import InvalidRequest, RestoreNeeded, WireError
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalPrompt, EvalSet
from asyncrl.dataloader.holders import Ask
from asyncrl.dataloader.lease_book import LeaseBook
from asyncrl.dataloader.prompts import RunPrompts
from asyncrl.dataloader.restoring import Restorer, RollouterAnswer
from asyncrl.messages import Done
from asyncrl.messages.dataloader import (
    LeasesHeld,
    OpenLeases,
    Outcomes,
    OutcomesSeen,
    PromptSample,
    Restored,
    Resumed,
    SamplePrompts,
    Supply,
    WatchSupply,
)
from asyncrl.messages.groups import NewLeases, RequestLeases, ReturnLeases, sealed
from asyncrl.messages.learner import Held, Holds
from asyncrl.observe.group_log import LEASED, ORPHANED, RETURNED, SETTLED, GroupLog
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.calls.retry import AWAY_S, log_away
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.parking import ParkingLot
from asyncrl.text.chat.probe import FILE as CHAT_FILE
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of

LEARNER = "learner/0"


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
        """The last book before the gate was shut; None while it is open."""
        self._learner = 0
        """Newest incarnation of the learner that has sent ``Restored``."""
        self._last_restored: Restored | None = None
        """The last ``Restored`` from which a book was rebuilt."""
        self._restoring = asyncio.Lock()
        self._preempted = False
        self._opened = ParkingLot()
        self._parked = ParkingLot()
        self._watchers = ParkingLot()
        self._supply_number = numbers_begin_above(context.incarnation)
        """Number of the newest ``Supply``; it starts above every number of an earlier incarnation."""
        self._orphaned = asyncio.Event()
        self._leavers: dict[str, int] = {}
        """Rollouters that leave, by name, with their incarnation; their parked requests get no lease."""
        self._known_orphans: set[str] = set()
        """Orphans that are in the group log already."""
        self._leased: dict[str, float] = {}
        """Time of the lease of each outstanding training prompt, if this incarnation leased it; the oldest first."""
        self._counts: Counter[str] = Counter()
        """Sums of the counts of earlier books."""

    # --- life ---

    async def setup(self) -> None:
        """Read and tokenize all prompts. Raises DataError or ConfigError."""
        config = self.config
        tokenizer = await asyncio.to_thread(tokenizer_of, config)
        if config.episode.kind != "single":
            await asyncio.to_thread(self._check_chat, tokenizer)
        await self._prompts.read(tokenizer, self.services)
        training = self._prompts.training
        self._restorer = Restorer(
            config,
            EpochOrder(training.fingerprint, config.run.seed, len(training), shuffle=config.data.shuffle),
            training.oversize,
            [EvalSet(name, prompts.admissible, config.eval[name]) for name, prompts in self._prompts.evals.items()],
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
        """Serve; ask the learner about orphans whenever there are any."""
        settling = self.tasks.create_task(self._settle_orphans())
        await self.drained()
        settling.cancel()

    def preempted(self) -> None:
        """Lease nothing more."""
        self._preempted = True
        if self._book is not None:
            self._book.stop()
            self._changed()

    async def _settle_orphans(self) -> None:
        """Ask the learner, whenever there are orphans, which of them it holds; the book leases the others again.

        Runs until cancelled, and repeats the question while the learner does not answer.
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
            self._forget_ages(book, orphans)
            for uids, by_learner in ((held.uids, True), (sorted(set(orphans).difference(held.uids)), False)):
                if uids:
                    self._group_log.write(SETTLED, uids=uids, held=by_learner)
            self.log.info("orphans settled", orphans=len(orphans), held=len(held.uids))
            self._changed()

    # --- the state of the run ---

    @handler
    async def restored(self, request: Restored, caller: Caller) -> Resumed:
        """Shut the gate, rebuild the leases from the learner's state, open the gate. A repeated call changes nothing.

        Raises RunChanged, and InvalidRequest for a learner that has a successor.
        """
        self._restorer.check_unchanged(request)
        async with self._restoring:
            # Checked under the lock: a newer learner may have been served while this call waited.
            if caller.incarnation < self._learner:
                raise InvalidRequest(f"a newer {LEARNER} has said where the run stands")
            if not self._is_known(request, caller):
                self._shut()
                # Before the restore, which names this learner to the rollouters.
                self._learner = caller.incarnation
                self.peer(LEARNER).adopt(caller.incarnation)
                book = await self._restore(request)
                # Only after the restore: if it fails, the learner repeats the request and it is restored again.
                self._last_restored = request
                self._open(book)
            assert self._book is not None
            order = self._restorer.order
            return Resumed(
                fingerprint=order.fingerprint,
                seed=order.seed,
                limit=self._book.gate.limit.versions,
                first_epoch=self._book.ledger.first_epoch,
                prompts=order.size,
            )

    @handler
    def sample_prompts(self, request: SamplePrompts, caller: Caller) -> PromptSample:
        """A sample of training prompts, spread evenly over the data."""
        return PromptSample(prompts=self._prompts.sample(request.count))

    def _is_known(self, request: Restored, caller: Caller) -> bool:
        """Whether the book already continues from ``request``, or from a later state of the same learner."""
        if self._book is None or caller.incarnation != self._learner:
            return False
        return request == self._last_restored or request.outcomes_number < self._book.number

    def _shut(self) -> None:
        if self._book is not None:
            # After a failed restore there is no book, and ``_previous`` stays as it is.
            self._previous, self._book = self._book, None
            self._counts.update(self._previous.counts)

    async def _restore(self, request: Restored) -> LeaseBook:
        """Rebuild the book: ask the rollouters what they hold, then the learner which prompts without a holder it has.

        Neither question can fail the restore; a missing answer counts as "nothing held".
        """
        # A dead rollouter without a successor would not answer.
        dead = {actor.name for actor in self.run_state.dead}
        names = [name for name in self.roster.actors if name.startswith("rollouter/") and name not in dead]
        found = await asyncio.gather(*(self._ask_rollouter(name) for name in names))
        answers = {name: answer for name, answer in zip(names, found, strict=True) if answer is not None}
        previous = self._previous
        book = await asyncio.to_thread(self._restorer.rebuild, request, answers, previous, self._supply_number + 1)
        # A group may be delivered after the learner sent its state and before its rollouter answered: neither names it.
        # The gate never admits more groups than its capacity, so such groups are among the next ones in the order.
        asked = await asyncio.to_thread(book.to_come, self.config.gate_capacity)
        if previous is not None:
            asked = list(dict.fromkeys([*book.missing(previous), *asked]))
        held = await self._ask_learner(asked)
        for uid in held:
            book.claim(uid)
        if previous is not None:
            book.inherit(previous)
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
        peer = self.peer(name)
        call = peer.call(OpenLeases(learner=self._learner), timeout=self._patience_s)
        try:
            held: LeasesHeld = await call
        except WireError as error:
            # Every run begins with rollouters that have yet to start.
            tell = self.log.warning if peer.known else self.log.info
            tell("rollouter counts as holding nothing", rollouter=name, error=str(error))
            return None
        return RollouterAnswer(call.answered_by, held)

    async def _ask_learner(self, uids: list[str]) -> list[str]:
        if not uids:
            return []
        try:
            held: Held = await self.peer(LEARNER).call(Holds(uids=uids), timeout=self._patience_s)
        except WireError as error:
            self.log.warning("what the learner holds may be generated again", error=str(error))
            return []
        return held.uids

    @property
    def _patience_s(self) -> float:
        """Deadline of each of the two questions of a restore (s), so that both end before the learner's call does."""
        return self.config.network.call_timeout_s / 3

    def _open(self, book: LeaseBook) -> None:
        # A rollouter may have died since it answered.
        for name, incarnation in self.dead.items():
            if name.startswith("rollouter/"):
                book.died(name, incarnation)
        if self._preempted:
            book.stop()
        self._book, self._previous = book, None
        # The others have their outcome in the learner's checkpoint already, so no report of them will come.
        self._leased = {uid: at for uid, at in self._leased.items() if book.is_out(uid)}
        self.param_version = book.gate.newest_version
        self._note_orphans("")
        self.progress()
        self._opened.wake()
        self._changed()

    def _for_learner(self, caller: Caller) -> LeaseBook:
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
            self._parked.wake()

    def _note_orphans(self, rollouter: str) -> None:
        """Log new orphans of ``rollouter``, and wake ``_settle_orphans`` if there are any orphans."""
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

        The call is parked until something can be leased, at most until half of its deadline; then the reply is empty.
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
        if not self._asks_no_more(ask):
            self._meet(ask)
        return await self._parked.until(lambda: self._answer(ask), caller.park_s) or NewLeases()

    def _meet(self, ask: Ask) -> None:
        if self._book is not None:
            self._book.meet(ask)
            if self._book.orphans:
                self._note_orphans(ask.rollouter)

    def _answer(self, ask: Ask) -> NewLeases | None:
        """The reply to a request for leases; None while it has to stay parked."""
        if self._asks_no_more(ask):
            return NewLeases()
        book = self._book
        if book is None:
            return None
        if not book.knows(ask.rollouter):
            # The call came before the gate was opened.
            self._meet(ask)
        leases = book.take(ask)
        if leases or book.supply_number != self._supply_number:
            # ``take`` may have rejected a prompt without leasing anything.
            self._count()
        if leases:
            self.progress()
            for lease in leases:
                if not isinstance(lease.prompt, EvalPrompt):
                    # A lease that is given again keeps its age.
                    self._leased.setdefault(lease.prompt.uid, self.clock.now())
            self._group_log.write(
                LEASED,
                to=ask.rollouter,
                served=ask.served_version,
                uids=[lease.prompt.uid for lease in leases],
                leases=[[lease.number, lease.param_version, lease.attempt, lease.alone] for lease in leases],
            )
            if leases[-1].alone:
                # No rollouter needs to be set aside for it any more.
                self._parked.wake()
            key, of = self.context.credentials.seal_key, (ask.rollouter, ask.incarnation)
            return NewLeases(leases=[sealed(key, self._prompts.lease(lease), *of) for lease in leases])
        return NewLeases(closed=True) if book.closed else None

    def _asks_no_more(self, ask: Ask) -> bool:
        return ask.incarnation <= self._leavers.get(ask.rollouter, 0)

    @handler
    async def return_leases(self, request: ReturnLeases, caller: Caller) -> Done:
        """Take back the leases that a rollouter returns, and note if it leaves. Parked while the gate is shut.

        Raises RestoreNeeded if the gate stays shut.
        """
        if request.leaving:
            # At once, even while the gate is shut: the rollouter's parked calls must get no lease.
            self._leavers[caller.name] = caller.incarnation
            self._parked.wake()
        book = await self._opened.until(lambda: self._book, caller.park_s)
        if book is None:
            raise RestoreNeeded
        book.give_back(caller.name, caller.incarnation, request.uids)
        self._forget_ages(book, request.uids)
        self._group_log.write(RETURNED, uids=request.uids, by=caller.name)
        if request.leaving:
            book.left(caller.name, caller.incarnation, request.holding)
            if book.orphans:
                self._orphaned.set()
        self._changed()
        return Done()

    # --- the learner ---

    @handler
    def outcomes(self, request: Outcomes, caller: Caller) -> OutcomesSeen:
        """Record outcomes that the learner reports. Raises RestoreNeeded, and ProtocolError for an impossible one."""
        book = self._for_learner(caller)
        number = book.report(request)
        for age in self._forget_ages(book, [outcome.uid for outcome in request.outcomes]):
            self.histograms.observe("tickets/age_s", age)
        self.param_version = book.gate.newest_version
        self.progress()
        self._changed()
        return OutcomesSeen(number=number, limit=book.gate.limit.versions)

    @handler
    async def watch_supply(self, request: WatchSupply, caller: Caller) -> Supply:
        """The supply; parked until it is newer than what the learner has seen. Raises RestoreNeeded."""

        def news() -> Supply | None:
            book = self._for_learner(caller)
            return book.supply if book.supply_number > request.seen else None

        return await self._watchers.until(news, caller.park_s) or self._for_learner(caller).supply

    # --- within ---

    def _forget_ages(self, book: LeaseBook, uids: Iterable[str]) -> list[float]:
        """Drop the lease times of those ``uids`` that are no longer out; returns the ages of their leases (s)."""
        ended = [uid for uid in uids if not book.is_out(uid)]
        leased = [self._leased.pop(uid) for uid in ended if uid in self._leased]
        return [self.clock.now() - at for at in leased]

    def metrics(self) -> dict[str, float]:
        # Copied in one step: the heartbeat's thread asks while the event loop runs.
        oldest = next(iter(list(self._leased.values())[:1]), None)
        return super().metrics() | {
            "tickets/oldest_s": self.clock.now() - oldest if oldest is not None else 0.0,
            "tickets/parked": len(self._parked),
        }

    def _changed(self) -> None:
        """Try every parked call for leases again, and update the counters."""
        self._parked.wake()
        self._count()

    def _count(self) -> None:
        """Copy the book's counts to the metrics, and wake the learner's ``watch_supply`` if the supply has changed."""
        book = self._book
        if book is None:
            return
        for name in {*self._counts, *book.counts}:
            self.counters[f"tickets/{name}"] = self._counts[name] + book.counts[name]
        self.counters["tickets/outstanding"] = book.outstanding
        gate = book.gate
        self.counters["tickets/gate"] = gate.room(gate.newest_version, 0)
        self.counters["staleness/limit"] = gate.limit.versions
        if book.supply_number != self._supply_number:
            self._supply_number = book.supply_number
            self._watchers.wake()
