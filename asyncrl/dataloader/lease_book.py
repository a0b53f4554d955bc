"""The book of leases: which prompt is leased to which rollouter, and what becomes of it. Pure.

Invariants:

- every prompt is leased to at most one rollouter at a time, and to none once its outcome is reported;
- new leases are numbered from 1 for each rollouter incarnation. Each reply repeats a lease until a later request of
  that incarnation has seen the number: a lost reply loses nothing;
- a training prompt is outstanding from its lease until the learner reports its outcome or the prompt is returned;
- a prompt whose holder has died or left is an *orphan*. The prompt stays outstanding until the learner has said whether
  it holds the prompt (``settle``). If the learner does not hold it, the prompt is leased again;
- a request gets new leases once, and only while it is the latest request of its rollouter. So its ``holding`` names
  everything that the rollouter can hold, even if the request, or a copy of it, arrives late;
- a prompt with ALONE_FROM deaths (``holders``) is leased only to a rollouter that holds nothing, and runs there alone.

``restoring`` rebuilds the book from the order, the ledger, the learner's claims and the leases that rollouters hold. So
an outcome may be reported for a prompt without a known holder.

Fails with ProtocolError on an impossible outcome; then nothing has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from asyncrl.core.errors import ProtocolError
from asyncrl.dataloader.evals import EvalPrompt, EvalRounds
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.holders import Ask, Holders, Prompt, PromptLease, SuspectPrompts
from asyncrl.dataloader.prompt_queue import PromptQueue, TrainingPrompt
from asyncrl.messages.dataloader import DataloaderStatus, LeasesHeld, Outcome, Outcomes, Rejected
from asyncrl.messages.groups import runs_alone
from asyncrl.messages.ledger import position_of


class LeaseBook:
    """A run's leases. ``number`` is the number of the learner's last report, ``status_number`` the number of the last
    DataloaderStatus.

    Callers read ``gate`` and ``ledger``, and change neither.
    """

    def __init__(
        self,
        queue: PromptQueue,
        gate: Gate,
        evals: EvalRounds,
        *,
        max_attempts: int,
        number: int = 0,
        status_number: int = 0,
    ) -> None:
        self.gate, self.ledger = gate, queue.ledger
        self._queue, self._evals = queue, evals
        self._holders = Holders()
        self._suspects = SuspectPrompts(queue.ledger.attempts, max_attempts)
        self._orphans: dict[str, None] = {}
        """Uids of the orphans, the oldest death first."""
        self._eval_turn = False
        """Whether evaluation is next where training and evaluation both have prompts to lease."""
        self._stopped = False
        for uid in [uid for uid in self.ledger.attempts if not self._is_open(uid)]:
            # Its prompt has an outcome, or is never leased again.
            self._suspects.forget(uid)
        self.number = number
        """Number of the newest report of the learner that was applied; there is no gap before it."""
        self.status_number = status_number
        """Number of the present ``status``; it grows with each change that the learner must receive."""
        self._status_key: tuple[object, ...] = ()
        """The parts of the status whose change gives the status a new number."""
        self.counts: Counter[str] = Counter()
        """Counts of this book, by the rest of their metric's name after ``tickets/``: granted, orphaned and so on."""
        self._note_status()

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
        """Whether the run needs no further group: training is finished and no round of evaluation is open."""
        return self.gate.finished and not self._evals.sizes

    @property
    def orphans(self) -> list[str]:
        """Uids of the prompts that the learner is to be asked about, the oldest death first."""
        return list(self._orphans)

    @property
    def status(self) -> DataloaderStatus:
        """The status for the learner: outstanding groups, rejected prompts, deaths, evaluation rounds.

        A new number wakes the learner. While prompts are left to lease, a change of ``outstanding`` alone keeps the
        number.
        """
        of_evals = [Rejected(uid, reason) for uid, reason in self._evals.rejected.items()]
        return DataloaderStatus(
            number=self.status_number,
            exhausted=self._exhausted,
            outstanding=self.outstanding,
            rejected=[*self._queue.rejected.values(), *of_evals],
            attempts=dict(self.ledger.attempts),
            grown=list(self.ledger.grown),
            evals=self._evals.sizes,
        )

    # --- rollouters ---

    def meet(self, ask: Ask) -> None:
        """Record a rollouter's request. Prompts that an older incarnation of the rollouter held become orphans."""
        holder = self._holders.get(ask.rollouter)
        if holder is not None and ask.incarnation > holder.incarnation:
            self.died(ask.rollouter, holder.incarnation)
        self._holders.update(ask)
        self.gate.forget_below(self._holders.oldest_served)

    def knows(self, rollouter: str) -> bool:
        """Whether a rollouter has been met and is not known to be dead."""
        return self._holders.get(rollouter) is not None

    def take(self, ask: Ask) -> list[PromptLease]:
        """Lease as much as may be leased now, at most ``ask.free_groups`` in all.

        The result begins with earlier leases that the rollouter has not confirmed, since their reply may be lost.

        May be called again with the same ``ask`` until it returns a lease. Returns nothing to a rollouter that leaves,
        or whose later request has arrived.
        """
        holder = self._holders.current(ask)
        if holder is None or self._stopped:
            return []
        running = holder.running(ask)
        lone = any(lease.alone for lease in running)
        if lone and ask.holding:
            # The rollouter holds the lone prompt already. Or a late copy of an earlier request got the lone prompt, and
            # the rollouter holds others: then the lease is repeated once it holds nothing.
            return []
        # Unconfirmed leases come first. They bypass the gate, which counts them already.
        found = [lease for lease in running if lease.number > ask.seen][: ask.free_groups]
        self.counts["granted_again"] += len(found)
        if not lone and not self._holders.is_answered(ask):
            self._lease_new(ask, running, found)
        if found:
            self._holders.note_answer(ask)
        self._note_status()
        return found

    def _lease_new(self, ask: Ask, running: list[PromptLease], found: list[PromptLease]) -> None:
        """Append new leases to ``found``, up to ``ask.free_groups`` in all; stops after a prompt that runs alone.

        ``running`` are the leases that the rollouter has not delivered yet.
        """
        generating = sum(isinstance(lease.prompt, TrainingPrompt) for lease in running)
        # A rollouter that did not answer a restore may hold groups that have no lease in this book.
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
        """Take back the prompts that a rollouter returns; uids that it does not hold are ignored."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation != incarnation:
            return
        for uid in uids:
            if uid in self._holders and self._holders[uid].rollouter == rollouter:
                self._take_back(uid)
                self.counts["returned"] += 1
        self._note_status()

    def died(self, rollouter: str, incarnation: int) -> None:
        """Remove a dead rollouter: the prompts that it held become orphans. Ignored if a later incarnation is known."""
        for held in self._remove(rollouter, incarnation):
            self._orphan(held)

    def left(self, rollouter: str, incarnation: int, holding: Collection[str] = ()) -> None:
        """Record that a rollouter leaves and holds only the uids ``holding``.

        Its other prompts become orphans, since the learner may have received them. None of them becomes suspect, since
        no rollouter has died.
        """
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return
        found = self._holders.keep(rollouter, holding)
        # A leaving rollouter stays a holder while it holds prompts, so that its death makes them orphans.
        if not holding:
            found += self._remove(rollouter, incarnation)
        else:
            self._holders.leaves(rollouter)
            if self._suspects.set_aside == rollouter:
                # A leaving rollouter gets no lease, so the suspect must wait for another one.
                self._suspects.set_aside = None
        for held in found:
            held.suspect = False
            self._orphan(held)
        self._note_status()

    def settle(self, asked: Iterable[str], held: Collection[str]) -> None:
        """Apply the learner's answer about the orphans ``asked``: it holds ``held``; lease the others again."""
        kept = set(held)
        for uid in asked:
            # A prompt whose outcome was reported meanwhile is no orphan any more.
            if uid in self._orphans:
                del self._orphans[uid]
                if uid in kept:
                    # The group was delivered before its rollouter died, so the prompt did not cause the death.
                    self._holders[uid].suspect = False
                else:
                    self._take_back(uid)
                    self.counts["recovered"] += 1
        self._note_status()

    def stop(self) -> None:
        """Lease nothing more: the run is preempted."""
        self._stopped = True
        self._note_status()

    # --- the state of the run ---

    def claim(self, uid: str) -> None:
        """Record that the learner holds a prompt. Ignored unless the prompt is still to be leased (``_mark_out``)."""
        prompt = self._mark_out(uid)
        if prompt is not None:
            self._holders.hold(PromptLease(prompt))
        self._note_status()

    def adopt(self, rollouter: str, incarnation: int, held: LeasesHeld, previous: LeaseBook | None) -> None:
        """Record the leases that a rollouter says it holds, after a restart or restore.

        Unless the rollouter leaves, it also keeps the leases of ``previous`` that may still be on their way to it.
        Prompts that the learner or another rollouter was recorded with before stay with that holder.
        """
        uids = frozenset(held.attempts)
        self._holders.update(Ask(rollouter, incarnation, held.seen, 0, held.served_version, uids))
        if held.leaving:
            self._holders.leaves(rollouter)
        # A received lease is not repeated, so it needs no valid number: it gets an unused negative one. A prompt may
        # have reached ALONE_FROM deaths by deaths of the rollouter's engine while the rollouter holds other prompts:
        # then it does not run alone.
        # Fields: number, uid, attempt, alone.
        found = [
            (-1 - index, uid, attempt, runs_alone(attempt) and len(uids) == 1)
            for index, (uid, attempt) in enumerate(held.attempts.items())
        ]
        known = None if previous is None else previous._holders.get(rollouter)
        if known is not None and known.incarnation == incarnation and not held.leaving:
            on_their_way = [(number, lease) for number, lease in known.leases.items() if number > held.seen]
            found += [(number, lease.prompt.uid, lease.attempt, lease.alone) for number, lease in on_their_way]
            # Leases up to this number may still be on their way, and no number may be used twice.
            self._holders.skip_to(rollouter, known.last_number)
        for number, uid, attempt, alone in found:
            prompt = self._mark_out(uid)
            if prompt is not None:
                self._suspects.raise_to(uid, attempt)
                version = self.gate.newest_version
                lease = PromptLease(prompt, number=number, param_version=version, attempt=attempt, alone=alone)
                self._holders.hold(lease, rollouter)
        self._note_status()

    def recall_calls(self, previous: LeaseBook) -> None:
        """Copy the numbers of the requests that ``previous`` has received: a request may be parked, or arrive again."""
        self._holders.recall_calls(previous._holders)

    def missing(self, previous: LeaseBook) -> list[str]:
        """Uids of the prompts that were out in ``previous``, are not out here and have no outcome."""
        return [uid for uid in previous._holders.uids if uid not in self._holders and self._is_open(uid)]

    def inherit(self, previous: LeaseBook) -> None:
        """Add the deaths that only ``previous`` knows. Call it after the last ``claim`` and ``adopt``.

        A suspect of ``previous`` that is not out here was not delivered, so the death of its holder counts now.
        """
        for uid, attempt in previous.ledger.attempts.items():
            if self._is_open(uid):
                self._suspects.raise_to(uid, attempt)
        for held in [previous._holders[uid] for uid in self.missing(previous)]:
            if held.suspect:
                self._suspects.died(held.prompt.uid, alone=held.alone)
        self._note_status()

    def grow(self) -> None:
        """Lease the prompts that were read since the start, from the next epoch of their source on."""
        self._queue.grow()
        self._note_status()

    def to_come(self, count: int) -> list[str]:
        """Uids of the next ``count`` training prompts of each source, and of all evaluation prompts that wait."""
        return [prompt.uid for prompt in self._queue.ahead(count)] + self._evals.waiting

    # --- the learner ---

    def report(self, report: Outcomes) -> int:
        """Apply a report of the learner: outcomes, published version, begun step, end of the run.

        Returns the number of the newest applied report, which acknowledges all reports up to it. Ignores a report that
        does not follow the newest applied one, and a second outcome of a prompt from a later report. Raises
        ProtocolError for an impossible outcome, and for two outcomes of one prompt in a report.
        """
        # An older report is applied already. To apply a report behind a gap would acknowledge the missing reports.
        if report.number != self.number + 1:
            return self.number
        uids = [outcome.uid for outcome in report.outcomes]
        wrong = [outcome.uid for outcome in report.outcomes if not self._is_possible(outcome)]
        if wrong or len(set(uids)) < len(uids):
            raise ProtocolError(f"outcomes that cannot be: {wrong or uids}")
        self.number = report.number
        for outcome in (each for each in report.outcomes if self._is_open(each.uid)):
            self._conclude(outcome)
        previous = self.gate.newest_version
        if report.version > previous:
            self.gate.published(report.version, report.trained_at_version)
            self._evals.published(report.version, previous)
        if report.step_began:
            self.gate.limit.step_began(report.buffered_groups, waited=report.waited)
        # After the publication above: the rounds at the end evaluate the last version.
        if report.finished and not self.gate.finished:
            self.gate.finished = True
            self._evals.finish(self.gate.newest_version)
        self._note_status()
        return self.number

    # --- within ---

    def _remove(self, rollouter: str, incarnation: int) -> list[PromptLease]:
        """Remove a rollouter of this incarnation or an older one, and return the leases that it held; else none."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return []
        if self._suspects.set_aside == rollouter:
            self._suspects.set_aside = None
        return self._holders.remove(rollouter)

    def _orphan(self, held: PromptLease) -> None:
        """Make a prompt without a holder an orphan."""
        self._orphans[held.prompt.uid] = None
        self.counts["orphaned"] += 1

    @property
    def _exhausted(self) -> bool:
        return self._stopped or not self.gate.needed(self.outstanding)

    def _next_prompt(self, ask: Ask, generating: int, *, empty: bool) -> Prompt | None:
        """Take the prompt to be leased next to the rollouter of ``ask``; None if the rollouter gets no lease now.

        While a suspect waits to run alone, an ``empty`` rollouter, which holds nothing, gets that suspect. A rollouter
        that holds prompts is set aside for the suspect and gets no lease. If another rollouter is set aside already, or
        no suspect waits, the rollouter gets the next prompt in turn.
        """
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
                # No waiting suspect may run here now.
                suspects.set_aside = None
            prompt = self._next_in_turn(ask, generating)
            if prompt is None or not suspects.must_run_alone(prompt.uid):
                return prompt
            # After a restore the queue may hold a suspect: ``_put_back`` lets it wait to run alone, or rejects it.
            self._put_back(prompt)

    def _may_run(self, prompt: Prompt, served_version: int) -> bool:
        """Whether a waiting suspect may run now on a rollouter that serves this version."""
        if isinstance(prompt, EvalPrompt):
            return prompt.version <= served_version
        return not self._evals.starting and self.gate.has_place(served_version, self.outstanding)

    def _next_in_turn(self, ask: Ask, generating: int) -> Prompt | None:
        """Take the next prompt of the queue or of an evaluation round; both alternate while both may be leased.

        None if neither may be leased.
        """
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

    def _mark_out(self, uid: str) -> Prompt | None:
        """Mark a prompt that has a holder as out, and return it.

        None if there is no such prompt, or if it is out, returned, rejected or concluded already.
        """
        if "@" in uid:
            return self._evals.hold(uid)
        return self._queue.hold(*position_of(uid))

    def _is_possible(self, outcome: Outcome) -> bool:
        """Whether an outcome is possible: its prompt exists and allows the kind. It may have been reported before."""
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
        """Apply the outcome of a prompt that had none: release its lease, forget its deaths, record the outcome."""
        uid = outcome.uid
        if uid in self._holders:
            self._holders.release(uid)
            self._orphans.pop(uid, None)
        self._suspects.forget(uid)
        # The uid alone decides. The kind is checked for the type checker: ``finish`` takes no "evaluated".
        if outcome.kind == "evaluated" or "@" in uid:
            self._evals.finish_prompt(uid)
        else:
            self._queue.finish(outcome.kind, *position_of(uid), outcome.rewards)
        self.counts[outcome.kind] += 1
        self.gate.trained += outcome.kind == "trained"

    def _take_back(self, uid: str) -> None:
        """Release a prompt that is out, count its holder's death if it is suspect, and put it back to be leased."""
        held = self._holders.release(uid)
        if held.suspect:
            self._suspects.died(uid, alone=held.alone)
        self._put_back(held.prompt)

    def _put_back(self, prompt: Prompt) -> None:
        """Send a prompt that came back to its next place.

        It is rejected after too many deaths of its own, waits to run alone after ALONE_FROM deaths, and else returns to
        its queue.
        """
        reason = self._suspects.verdict(prompt.uid)
        # A prompt of earlier data is in no order here and can never be leased again, so the queue drops it.
        if isinstance(prompt, TrainingPrompt) and prompt.epoch < self.ledger.first_epoch:
            self._queue.give_back(prompt)
        elif reason is not None:
            self.counts["rejected"] += 1
            if isinstance(prompt, EvalPrompt):
                self._evals.reject(prompt, reason)
            else:
                self._queue.reject(prompt, reason)
        elif self._suspects.must_run_alone(prompt.uid):
            self._suspects.add(prompt)
        elif isinstance(prompt, EvalPrompt):
            self._evals.give_back(prompt)
        else:
            self._queue.give_back(prompt)

    def _note_status(self) -> None:
        """Give the status a new number if it has changed; called at the end of each method that may change it."""
        exhausted = self._exhausted
        key = (
            exhausted,
            self.outstanding if exhausted else None,
            # Rejections count up; the length falls once the learner has reported one.
            self._queue.rejections,
            len(self._queue.rejected),
            self._evals.changes,
            self._suspects.changes,
            tuple(self.ledger.grown),
        )
        if key != self._status_key:
            self._status_key = key
            self.status_number += 1
