"""The book of leases: which prompt is leased to which rollouter, and what becomes of it. Pure.

Invariants:

- every prompt is leased to at most one rollouter at a time, and to none once its outcome is reported;
- a lease is numbered by rollouter incarnation from 1, and given again, first of all, until a later call of that
  incarnation says that it has seen it: a lost reply loses nothing;
- a training prompt is outstanding from its lease until the learner reports its outcome or it is returned, with any
  holder meanwhile. When its holder has died it is an *orphan*, outstanding all the same, until the learner has
  said whether it holds it (``settle``); only what it does not hold is leased again;
- a request gets new leases once, and only while it is the latest request of its rollouter. So its ``holding`` names
  everything that the rollouter can hold, even if the request, or a copy of it, arrives late;
- a suspect prompt is leased only to a rollouter that holds nothing, and runs there alone.

All of it follows from the order, the ledger, what the learner claims and what the rollouters hold: ``restoring``
rebuilds it from these. So an outcome may be reported for a prompt without a known holder.

Fails with ProtocolError on an outcome that cannot be, without having changed anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from asyncrl.core.errors import ProtocolError
from asyncrl.dataloader.evals import EvalPrompt, EvalRounds
from asyncrl.dataloader.gate import Gate, PromptQueue, TrainingPrompt
from asyncrl.dataloader.holders import Ask, Holders, Prompt, PromptLease, SuspectPrompts
from asyncrl.messages.dataloader import LeasesHeld, Outcome, Outcomes, Rejected, Supply
from asyncrl.messages.groups import runs_alone
from asyncrl.messages.ledger import position_of


class LeaseBook:
    """A run's leases. ``number`` is that of the learner's last report, ``supply_number`` that of the last supply.

    ``gate`` and ``ledger`` are there to be looked at.
    """

    def __init__(
        self,
        queue: PromptQueue,
        gate: Gate,
        evals: EvalRounds,
        *,
        max_attempts: int,
        number: int = 0,
        supply_number: int = 0,
    ) -> None:
        self.gate, self.ledger = gate, queue.ledger
        self._queue, self._evals = queue, evals
        self._holders = Holders()
        self._suspects = SuspectPrompts(queue.ledger.attempts, max_attempts)
        self._orphans: dict[str, None] = {}
        """Prompts whose holder has died, until the learner says whether it holds them; oldest first."""
        self._eval_turn = False
        self._stopped = False
        self._forget_deaths()
        self.number = number
        """The last report of the learner without a gap before it."""
        self.supply_number = supply_number
        """Number of the present ``supply``."""
        self._supply_key: tuple[object, ...] = ()
        self.counts: Counter[str] = Counter()
        self._note_supply()

    # --- questions of the shell ---

    @property
    def outstanding(self) -> int:
        """Training groups leased and neither reported nor returned."""
        return self._holders.outstanding

    def is_out(self, uid: str) -> bool:
        """Whether a prompt is leased, or with the learner, and neither reported nor returned."""
        return uid in self._holders

    @property
    def closed(self) -> bool:
        """Whether nothing will ever be leased again."""
        return self.gate.finished and not self._evals.sizes

    @property
    def orphans(self) -> list[str]:
        """Uids of the prompts that the learner is to be asked about, the oldest death first."""
        return list(self._orphans)

    @property
    def supply(self) -> Supply:
        """The supply that is still to come. ``outstanding`` moves its number only when nothing is left to lease."""
        of_evals = [Rejected(uid, reason) for uid, reason in self._evals.rejected.items()]
        return Supply(
            number=self.supply_number,
            exhausted=self._exhausted,
            outstanding=self.outstanding,
            rejected=[*self._queue.rejected.values(), *of_evals],
            attempts=dict(self.ledger.attempts),
            evals=self._evals.sizes,
        )

    # --- rollouters ---

    def meet(self, ask: Ask) -> None:
        """Take note of a rollouter's call. Prompts that an older incarnation of it held become orphans."""
        holder = self._holders.get(ask.rollouter)
        if holder is not None and ask.incarnation > holder.incarnation:
            self.died(ask.rollouter, holder.incarnation)
        self._holders.update(ask)
        self.gate.forget_below(self._holders.oldest_served)

    def knows(self, rollouter: str) -> bool:
        """Whether a rollouter has been met and is not known to be dead."""
        return self._holders.get(rollouter) is not None

    def take(self, ask: Ask) -> list[PromptLease]:
        """Lease as much as may be leased now; may be asked again with the same ``ask`` until it gives something.

        Nothing is leased to a rollouter that leaves, nor to a call that a later one of the same has overtaken.
        """
        holder = self._holders.current(ask)
        if holder is None or self._stopped:
            return []
        running = holder.running(ask)
        lone = any(lease.alone for lease in running)
        if lone and ask.holding:
            # A late copy of a call was leased it, whose rollouter has received something since.
            return []
        # First of all, and past the gate, in which these have their places already.
        found = [lease for lease in running if lease.number > ask.seen][: ask.free_groups]
        self.counts["granted_again"] += len(found)
        if not lone and not self._holders.is_answered(ask):
            self._lease_new(ask, running, found)
        if found:
            self._holders.note_answer(ask)
        self._note_supply()
        return found

    def _lease_new(self, ask: Ask, running: list[PromptLease], found: list[PromptLease]) -> None:
        """Add new leases to ``found``, up to the number that was asked for."""
        generating = sum(isinstance(lease.prompt, TrainingPrompt) for lease in running)
        # A rollouter that did not answer a restore may hold groups without a lease here.
        empty = not running and not ask.holding
        while len(found) < ask.free_groups:
            prompt = self._next_prompt(ask, generating, empty=empty and not found)
            if prompt is None:
                break
            attempt = self._suspects.attempt(prompt.uid)
            version, alone = self.gate.newest_version, runs_alone(attempt)
            lease = PromptLease(prompt, param_version=version, attempt=attempt, alone=alone)
            self._holders.lease(ask.rollouter, lease)
            generating += isinstance(prompt, TrainingPrompt)
            self.counts["granted"] += 1
            self.counts["granted_alone"] += lease.alone
            found.append(lease)
            if lease.alone:
                break

    def give_back(self, rollouter: str, incarnation: int, uids: Iterable[str]) -> None:
        """A rollouter returns prompts; those that it does not hold are ignored."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation != incarnation:
            return
        for uid in uids:
            if uid in self._holders and self._holders[uid].rollouter == rollouter:
                self._take_back(uid)
                self.counts["returned"] += 1
        self._note_supply()

    def died(self, rollouter: str, incarnation: int) -> None:
        """An incarnation of a rollouter is dead: the prompts that it held become orphans."""
        for held in self._remove(rollouter, incarnation):
            self._orphan(held)

    def left(self, rollouter: str, incarnation: int, holding: Collection[str] = ()) -> None:
        """A rollouter asks no more and holds only this: what else it has here, the learner may have.

        Nothing of that is suspect of anybody's death.
        """
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return
        found = self._holders.keep(rollouter, holding)
        # One that still holds something stays a holder: its death is to make orphans of that.
        if not holding:
            found += self._remove(rollouter, incarnation)
        else:
            self._holders.leaves(rollouter)
            if self._suspects.set_aside == rollouter:
                # Nothing would be leased to it once it holds nothing.
                self._suspects.set_aside = None
        for held in found:
            held.suspect = False
            self._orphan(held)
        self._note_supply()

    def settle(self, asked: Iterable[str], held: Collection[str]) -> None:
        """The learner has said which of the orphans it was asked about it holds; the others are leased again."""
        kept = set(held)
        for uid in asked:
            # An outcome may have been reported meanwhile.
            if uid in self._orphans:
                del self._orphans[uid]
                if uid in kept:
                    # It was delivered, and did not end its rollouter.
                    self._holders[uid].suspect = False
                else:
                    self._take_back(uid)
                    self.counts["recovered"] += 1
        self._note_supply()

    def stop(self) -> None:
        """Lease nothing more: the run is preempted."""
        self._stopped = True
        self._note_supply()

    # --- the state of the run ---

    def claim(self, uid: str) -> None:
        """The learner has a prompt. Ignored where that is known."""
        prompt = self._hold(uid)
        if prompt is not None:
            self._holders.hold(PromptLease(prompt))
        self._note_supply()

    def adopt(self, rollouter: str, incarnation: int, held: LeasesHeld, previous: LeaseBook | None) -> None:
        """A rollouter has said what it holds; what else ``previous`` leased it, it may still receive unless it leaves.

        Prompts that the learner has, or another rollouter was found with, stay theirs.
        """
        uids = frozenset(held.attempts)
        self._holders.update(Ask(rollouter, incarnation, held.seen, 0, held.served_version, uids))
        if held.leaving:
            self._holders.leaves(rollouter)
        # A lease that was received needs no number. A death of its engine may have made something suspect that has
        # company.
        found = [
            (-1 - at, uid, attempt, runs_alone(attempt) and len(uids) == 1)
            for at, (uid, attempt) in enumerate(held.attempts.items())
        ]
        known = None if previous is None else previous._holders.get(rollouter)
        if known is not None and known.incarnation == incarnation and not held.leaving:
            on_their_way = [(number, lease) for number, lease in known.leases.items() if number > held.seen]
            found += [(number, lease.prompt.uid, lease.attempt, lease.alone) for number, lease in on_their_way]
            # Leases up to this number may still be on their way, and a number is that of one lease.
            self._holders.skip_to(rollouter, known.last_number)
        for number, uid, attempt, alone in found:
            prompt = self._hold(uid)
            if prompt is not None:
                self._suspects.raise_to(uid, attempt)
                version = self.gate.newest_version
                lease = PromptLease(prompt, number=number, param_version=version, attempt=attempt, alone=alone)
                self._holders.hold(lease, rollouter)
        self._note_supply()

    def recall_calls(self, previous: LeaseBook) -> None:
        """Remember which lease calls ``previous`` has heard and answered: they may be parked, or arrive again."""
        self._holders.recall_calls(previous._holders)

    def missing(self, previous: LeaseBook) -> list[str]:
        """Uids of the prompts that ``previous`` had out and that have no holder here."""
        return [uid for uid in previous._holders.uids if uid not in self._holders and self._is_open(uid)]

    def inherit(self, previous: LeaseBook) -> None:
        """Take over the deaths that only ``previous`` knows of, once everything that is out is known."""
        for uid, attempt in previous.ledger.attempts.items():
            if self._is_open(uid):
                self._suspects.raise_to(uid, attempt)
        for uid in self.missing(previous):
            held = previous._holders[uid]
            if held.suspect:
                self._suspects.died(uid, alone=held.alone)
        self._note_supply()

    def to_come(self, count: int) -> list[str]:
        """Uids of the prompts that come next, and of those that eval rounds wait for."""
        return [prompt.uid for prompt in self._queue.ahead(count)] + self._evals.waiting

    # --- the learner ---

    def report(self, report: Outcomes) -> int:
        """Apply a report of the learner. Returns the highest number seen without a gap.

        An outcome of a prompt that has one changes nothing. Raises ProtocolError for an outcome of what is no prompt,
        and for two of the same prompt.
        """
        # An older one is known; the number of one behind a gap would acknowledge reports that have not come.
        if report.number != self.number + 1:
            return self.number
        uids = [outcome.uid for outcome in report.outcomes]
        wrong = [outcome.uid for outcome in report.outcomes if not self._may_be(outcome)]
        if wrong or len(set(uids)) < len(uids):
            raise ProtocolError(f"outcomes that cannot be: {wrong or uids}")
        self.number = report.number
        for outcome in report.outcomes:
            if self._is_open(outcome.uid):
                self._conclude(outcome)
        previous = self.gate.newest_version
        if report.version > previous:
            self.gate.published(report.version, report.trained_at_version)
            self._evals.published(report.version, previous)
        if report.step_began:
            self.gate.limit.step_began(report.buffered_groups, waited=report.waited)
        # Behind the publication above: the rounds at the end are of the last version.
        if report.finished and not self.gate.finished:
            self.gate.finished = True
            self._evals.finish(self.gate.newest_version)
        self._note_supply()
        return self.number

    # --- within ---

    def _remove(self, rollouter: str, incarnation: int) -> list[PromptLease]:
        """Prompts that this incarnation of a rollouter, or an older one, is known to hold, and holds no more."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return []
        if self._suspects.set_aside == rollouter:
            self._suspects.set_aside = None
        return self._holders.remove(rollouter)

    def _orphan(self, held: PromptLease) -> None:
        self._orphans[held.prompt.uid] = None
        self.counts["orphaned"] += 1

    @property
    def _exhausted(self) -> bool:
        return self._stopped or not self.gate.needed(self.outstanding)

    def _next_prompt(self, ask: Ask, generating: int, *, empty: bool) -> Prompt | None:
        """The prompt leased next to a rollouter that holds nothing, if ``empty``; it is out from here on."""
        suspects = self._suspects
        while True:
            alone = suspects.next(lambda prompt: self._may_run(prompt, ask.served_version))
            if alone is not None:
                if empty:
                    suspects.discard(alone.uid)
                    if suspects.set_aside == ask.rollouter:
                        suspects.set_aside = None
                    return alone
                if suspects.set_aside in (None, ask.rollouter):
                    suspects.set_aside = ask.rollouter
                    return None
            elif suspects.set_aside == ask.rollouter:
                # No prompt waits any more that could run here alone.
                suspects.set_aside = None
            prompt = self._next_in_turn(ask, generating)
            if prompt is None or not suspects.is_suspect(prompt.uid):
                return prompt
            # A suspect in its turn, as after a restore: it joins those that wait to run alone, or is rejected.
            self._put_back(prompt)

    def _may_run(self, prompt: Prompt, served_version: int) -> bool:
        if isinstance(prompt, EvalPrompt):
            return prompt.version <= served_version
        return not self._evals.starting and self.gate.has_place(served_version, self.outstanding)

    def _next_in_turn(self, ask: Ask, generating: int) -> Prompt | None:
        """Training and evaluation take turns where both may be leased."""
        served_version = ask.served_version
        may_train = not self._evals.starting and self.gate.admits(
            served_version,
            outstanding=self.outstanding + self._suspects.reserved,
            generating=generating,
            rollouters=self._holders.asking,
        )
        if self._evals.is_waiting(served_version) and (self._eval_turn or not may_train):
            self._eval_turn = False
            return self._evals.take(served_version)
        if may_train:
            self._eval_turn = True
            return self._queue.take()
        return None

    def _hold(self, uid: str) -> Prompt | None:
        """A prompt without a known holder is out from here on; None if there is no such prompt."""
        if "@" in uid:
            return self._evals.hold(uid)
        return self._queue.hold(*position_of(uid))

    def _may_be(self, outcome: Outcome) -> bool:
        """Whether a prompt can have this outcome. It may be known already."""
        if "@" in outcome.uid:
            return outcome.kind in ("evaluated", "quarantined")
        try:
            epoch, index = position_of(outcome.uid)
        except ValueError:
            return False
        return outcome.kind != "evaluated" and self._queue.knows(epoch, index)

    def _is_open(self, uid: str) -> bool:
        """Whether a prompt has no outcome."""
        if "@" in uid:
            return uid in self._evals
        return self.ledger.is_open(*position_of(uid))

    def _conclude(self, outcome: Outcome) -> None:
        uid = outcome.uid
        if uid in self._holders:
            self._holders.release(uid)
            self._orphans.pop(uid, None)
        self._suspects.forget(uid)
        # The uid alone would do; the kind leaves the type checker only those that ``finish`` takes.
        if outcome.kind == "evaluated" or "@" in uid:
            self._evals.finish_prompt(uid)
        else:
            self._queue.finish(outcome.kind, *position_of(uid))
        self.counts[outcome.kind] += 1
        self.gate.trained += outcome.kind == "trained"

    def _take_back(self, uid: str) -> None:
        """A prompt that was out is to be leased again."""
        held = self._holders.release(uid)
        if held.suspect:
            self._suspects.died(uid, alone=held.alone)
        self._put_back(held.prompt)

    def _forget_deaths(self) -> None:
        """Forget the deaths of prompts that have an outcome, or that are never leased again."""
        for uid in list(self.ledger.attempts):
            if not self._is_open(uid):
                self._suspects.forget(uid)

    def _put_back(self, prompt: Prompt) -> None:
        """A prompt that came back is to be leased again, if it may be, and alone if it must be."""
        reason = self._suspects.verdict(prompt.uid)
        # It is of no order here and can never be leased again, so the queue drops it.
        if isinstance(prompt, TrainingPrompt) and prompt.epoch < self.ledger.first_epoch:
            self._queue.give_back(prompt)
        elif reason is not None:
            self.counts["rejected"] += 1
            if isinstance(prompt, EvalPrompt):
                self._evals.reject(prompt, reason)
            else:
                self._queue.reject(prompt, reason)
        elif self._suspects.is_suspect(prompt.uid):
            self._suspects.add(prompt)
        elif isinstance(prompt, EvalPrompt):
            self._evals.give_back(prompt)
        else:
            self._queue.give_back(prompt)

    def _note_supply(self) -> None:
        exhausted = self._exhausted
        key = (
            exhausted,
            self.outstanding if exhausted else None,
            # Rejections count up; the length falls once the learner has reported one.
            self._queue.rejections,
            len(self._queue.rejected),
            self._evals.changes,
            self._suspects.changes,
        )
        if key != self._supply_key:
            self._supply_key = key
            self.supply_number += 1
