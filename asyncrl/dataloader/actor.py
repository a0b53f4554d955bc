"""The dataloader's shell: messages to events, prompts to leases, parked calls woken when something changed.

All decisions are made in ``lease_book`` and the modules under it; ``prompts`` reads and tokenizes before the actor is
ready. Orphans of a dead rollouter are leased again only after the learner has said which it holds.

The gate is shut until the learner says where the run stands (``Restored``); then each rollouter is asked what it holds,
under a deadline, and one that does not answer counts as holding nothing: what it holds all the same is generated twice
and trained once, since the learner takes every group once. Until then calls are parked.
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
        """Leases as they were when the gate was shut last."""
        self._learner = 0
        """Newest incarnation of the learner that has said where the run stands."""
        self._last_word: Restored | None = None
        self._restoring = asyncio.Lock()
        self._preempted = False
        self._opened = ParkingLot()
        self._parked = ParkingLot()
        self._watchers = ParkingLot()
        self._supply_number = numbers_begin_above(context.incarnation)
        """Number of the supply, above every number of an earlier incarnation."""
        self._orphaned = asyncio.Event()
        self._leavers: dict[str, int] = {}
        """Incarnations of rollouters that take no more leases; their parked requests get none."""
        self._known_orphans: set[str] = set()
        self._leased: dict[str, float] = {}
        """Time at which each training prompt that is out was leased by this incarnation; the oldest first."""
        self._counts: Counter[str] = Counter()
        """Counts of the leases before the present ones."""

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
        """Check the chat template for the whole run, in the log and in the run folder. Raises ConfigError."""
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
        while True:
            await self._orphaned.wait()
            # Before the look: an orphan that comes while the learner is asked sets it again.
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
                # The answer may be of a learner that is no more.
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
        """Continue from the learner's state.

        Raises RunChanged, and InvalidRequest for a learner that has a successor.
        """
        self._restorer.check_unchanged(request)
        async with self._restoring:
            # Looked at under the lock: a newer learner may have been served while this call waited.
            if caller.incarnation < self._learner:
                raise InvalidRequest(f"a newer {LEARNER} has said where the run stands")
            if not self._is_known(request, caller):
                self._shut()
                # Before the restore, in which the rollouters hear which learner lives.
                self._learner = caller.incarnation
                self.peer(LEARNER).adopt(caller.incarnation)
                book = await self._restore(request)
                # Only now: a word whose restore has failed is not known, and is taken again.
                self._last_word = request
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
        """Prompts from all over the data."""
        return PromptSample(prompts=self._prompts.sample(request.count))

    def _is_known(self, request: Restored, caller: Caller) -> bool:
        """Whether the run continues from there already, or from a later state of the same learner."""
        if self._book is None or caller.incarnation != self._learner:
            return False
        return request == self._last_word or request.outcomes_number < self._book.number

    def _shut(self) -> None:
        if self._book is not None:
            # After a failed restore there is no book, and the previous one stays that of before it.
            self._previous, self._book = self._book, None
            self._counts.update(self._previous.counts)

    async def _restore(self, request: Restored) -> LeaseBook:
        # A rollouter that is dead and has no successor yet would be waited for in vain.
        dead = {actor.name for actor in self.run_state.dead}
        names = [name for name in self.roster.actors if name.startswith("rollouter/") and name not in dead]
        found = await asyncio.gather(*(self._ask_rollouter(name) for name in names))
        answers = {name: answer for name, answer in zip(names, found, strict=True) if answer is not None}
        previous = self._previous
        book = await asyncio.to_thread(self._restorer.rebuild, request, answers, previous, self._supply_number + 1)
        # Groups that were delivered after the learner spoke and before their rollouter did.
        # The gate admits no more than this, so unknown groups are among the next in the order.
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
        """Deadline of a question (s): both together end before the learner gives up."""
        return self.config.network.call_timeout_s / 3

    def _open(self, book: LeaseBook) -> None:
        # Deaths while the gate was shut: an answer may be of an incarnation that is dead by now.
        for name, incarnation in self.dead.items():
            if name.startswith("rollouter/"):
                book.died(name, incarnation)
        if self._preempted:
            book.stop()
        self._book, self._previous = book, None
        # The others have their outcome in the learner's checkpoint, and no report of it will come.
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
        """The learner is to be asked about the orphans that there are."""
        assert self._book is not None
        orphans = self._book.orphans
        if orphans:
            self._orphaned.set()
        if new := [uid for uid in orphans if uid not in self._known_orphans]:
            self._group_log.write(ORPHANED, uids=new, of=rollouter)
        self._known_orphans = set(orphans)

    @handler
    async def request_leases(self, request: RequestLeases, caller: Caller) -> NewLeases:
        """Lease the prompts that may be leased; parked until there are some, answered before half of the deadline."""
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
        if self._asks_no_more(ask):
            return NewLeases()
        book = self._book
        if book is None:
            return None
        if not book.knows(ask.rollouter):
            # It has asked before the gate was opened.
            self._meet(ask)
        leases = book.take(ask)
        if leases or book.supply_number != self._supply_number:
            # A prompt may be rejected in its turn, and nothing be leased.
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
        """Take groups back, for another rollouter. Parked while the gate is shut."""
        if request.leaving:
            # At once, also while the gate is shut: calls of it that are parked are to be leased nothing.
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
        """Take in the outcomes of groups. Raises RestoreNeeded, and ProtocolError for one that cannot be."""
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
        """The ages (s) of those of these prompts that are out no more; those of the others are kept."""
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
        """Have every parked call for leases ask again."""
        self._parked.wake()
        self._count()

    def _count(self) -> None:
        """Show the state, and wake the watchers of the supply if that has changed."""
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
