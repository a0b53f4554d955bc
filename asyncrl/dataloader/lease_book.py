"""The book of leases: which prompt is leased to which rollouter, and what becomes of it. Pure.

A prompt is *out* from its lease until the learner reports its outcome or it is returned. A prompt that is out without a
holder is with the learner, or its holder has died or left: then it is an *orphan*. An orphan stays out until the
learner has said whether it holds the group (``settle``). If the learner does not, the prompt is leased again.

Invariants:

- a prompt is leased to at most one rollouter at a time, and to none once its outcome is reported;
- new leases are numbered from 1 for each rollouter incarnation, and no number is used that a lost dataloader may have
  used. Each reply repeats a lease until a later request of that incarnation has seen the number: a lost reply loses
  nothing;
- a request gets new leases once, and only while it is the latest request of its rollouter. So its ``holding`` names
  everything that the rollouter can hold, even if the request, or a copy of it, arrives late;
- a suspect (suspect_prompts.py) runs alone.

``restoring`` rebuilds the book from the order, the ledger, the learner's claims and the leases that rollouters hold. So
an outcome may be reported for a prompt without a known holder.

Fails with ProtocolError on an impossible outcome; then nothing has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from asyncrl.core.death_counts import DeathCounts, runs_alone
from asyncrl.core.errors import ProtocolError
from asyncrl.dataloader.evals import EvalPrompt, EvalRounds
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.prompt_queue import PromptQueue, TrainingPrompt
from asyncrl.dataloader.suspect_prompts import Prompt, SuspectPrompts
from asyncrl.messages.dataloader import DataloaderStatus, Outcome, Outcomes
from asyncrl.messages.ledger import position_of


@dataclass(frozen=True, slots=True)
class Ask:
    """A rollouter's request for groups; the fields are those of RequestLeases (messages/groups.py)."""

    rollouter: str
    incarnation: int
    seen: int
    free_groups: int
    served_version: int
    holding: frozenset[str] = frozenset()
    number: int = 0


@dataclass(slots=True)
class PromptLease:
    """A prompt that is out."""

    prompt: Prompt
    rollouter: str | None = None
    """Holder of the prompt, if it has one."""
    number: int = 0
    """Number of the lease at its holder; negative if the rollouter reported the lease after a restore."""
    param_version: int = -1
    """The newest published version at the time of the lease."""
    attempt: int = 0
    """Number of deaths counted against the prompt at the time of the lease."""
    alone: bool = False
    """Whether the rollouter runs no other prompt with it."""
    suspect: bool = False
    """Whether the holder died while it generated the prompt, and that death is not counted yet."""


@dataclass(slots=True)
class Holder:
    """A rollouter, as of its last request."""

    incarnation: int
    seen: int = 0
    """The highest lease number that the rollouter has received."""
    last_number: int = 0
    """The highest lease number that may have been given to it."""
    served_version: int = -1
    """Policy version that the rollouter's engine serves; -1 before the first."""
    holding: frozenset[str] = frozenset()
    """Uids that the rollouter held at its last request; every other received lease was delivered."""
    leases: dict[int, PromptLease] = field(default_factory=dict)
    """Leases by number, those above 0 ascending; until the outcome is reported, or the prompt returned or orphaned."""


class LeaseBook:
    """A run's leases. Callers read its fields; ``restoring`` alone changes some.

    ``number`` is that of the learner's last report, ``status_number`` that of the last DataloaderStatus.
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
        self.suspects = SuspectPrompts(DeathCounts(queue.ledger.attempts, max_attempts=max_attempts))
        self.out: dict[str, PromptLease] = {}
        """Prompts that are out by uid, the oldest first."""
        self.outstanding = 0
        """Number of training prompts that are out."""
        self._orphans: dict[str, None] = {}
        """Uids of the orphans, the oldest death first."""
        self.rollouters: dict[str, Holder] = {}
        """Rollouters that have been met and are not known to be dead."""
        self.leaving: set[str] = set()
        """Rollouters that leave, and so get no more leases."""
        self.newest_call: dict[tuple[str, int], int] = {}
        """Number of the latest request that has arrived, by rollouter and incarnation."""
        self.answered_call: dict[tuple[str, int], int] = {}
        """Number of the latest request that got a lease, by rollouter and incarnation."""
        self._eval_turn = False
        """Whether evaluation is next where training and evaluation both have prompts to lease."""
        self._stopped = False
        """Whether nothing more is leased, because the run is preempted."""
        for uid in [uid for uid in self.ledger.attempts if not self.is_open(uid)]:
            # The prompt of this uid has an outcome, or is never leased again.
            self.suspects.forget(uid)
        self.number = number
        """Number of the newest report of the learner that was applied; there is no gap before it."""
        self._status_number = status_number
        self._status_key: tuple[object, ...] = ()
        """The parts of the status whose change gives the status a new number."""
        self.counts: Counter[str] = Counter()
        """Counts of this book and of those before it, by their metric's name after ``tickets/``."""

    # --- questions ---

    def is_open(self, uid: str) -> bool:
        """Whether a prompt has no outcome."""
        return uid in self._evals if "@" in uid else self.ledger.is_open(*position_of(uid))

    @property
    def closed(self) -> bool:
        """Whether the run needs no further group: training is finished and no round of evaluation is open."""
        return self.gate.finished and not self._evals.sizes

    @property
    def orphans(self) -> list[str]:
        """Uids of the prompts that the learner is to be asked about, the oldest death first."""
        return list(self._orphans)

    @property
    def status_number(self) -> int:
        """Number of the present ``status``, which wakes the learner; it grows when the status has changed.

        While prompts are left to lease, a change of ``outstanding`` alone keeps the number.
        """
        exhausted = self._exhausted
        key = (
            exhausted,
            self.outstanding if exhausted else None,
            # Rejections count up; the length falls once the learner has reported one.
            self._queue.rejections,
            len(self._queue.rejected),
            self._evals.changes,
            self.suspects.deaths.changes,
            tuple(self.ledger.grown),
        )
        if key != self._status_key:
            self._status_key = key
            self._status_number += 1
        return self._status_number

    @property
    def status(self) -> DataloaderStatus:
        """The status for the learner."""
        return DataloaderStatus(
            number=self.status_number,
            exhausted=self._exhausted,
            outstanding=self.outstanding,
            rejected=[*self._queue.rejected.values(), *self._evals.rejected.values()],
            attempts=dict(self.ledger.attempts),
            grown=list(self.ledger.grown),
            evals=self._evals.sizes,
        )

    # --- rollouters ---

    def meet(self, ask: Ask) -> Holder:
        """Record what a request says of its rollouter; one older than the last recorded one changes nothing.

        Prompts that an older incarnation of the rollouter held become orphans.
        """
        self.died(ask.rollouter, ask.incarnation - 1)
        if ask.rollouter not in self.rollouters:
            # Forget the calls of older incarnations.
            for calls in (self.newest_call, self.answered_call):
                for caller in [each for each in calls if each[0] == ask.rollouter and each[1] < ask.incarnation]:
                    del calls[caller]
        holder = self.rollouters.setdefault(ask.rollouter, Holder(ask.incarnation))
        if ask.incarnation == holder.incarnation:
            caller = (ask.rollouter, ask.incarnation)
            self.newest_call[caller] = max(self.newest_call.get(caller, 0), ask.number)
            if ask.seen >= holder.seen:
                holder.seen, holder.served_version, holder.holding = ask.seen, ask.served_version, ask.holding
                # A lost dataloader may have given out higher numbers than are known here.
                holder.last_number = max(holder.last_number, ask.seen)
        self.gate.forget_below(min(holder.served_version for holder in self.rollouters.values()))
        return holder

    def take(self, ask: Ask) -> list[PromptLease]:
        """Lease as much as may be leased now, at most ``ask.free_groups`` in all.

        The result begins with earlier leases that the rollouter has not confirmed, since their reply may be lost.

        May be called again with the same ``ask`` until it returns a lease. Returns nothing after ``stop``, and nothing
        to a rollouter that leaves, or whose later request has arrived.
        """
        holder, caller = self.rollouters.get(ask.rollouter), (ask.rollouter, ask.incarnation)
        # The answer to an outdated request would repeat leases that the rollouter has received since.
        if holder is None or (holder.incarnation, holder.seen) != (ask.incarnation, ask.seen):
            return []
        if self._stopped or ask.rollouter in self.leaving or ask.number < self.newest_call.get(caller, 0):
            return []
        running = [each for each in holder.leases.values() if each.number > ask.seen or each.prompt.uid in ask.holding]
        lone = any(lease.alone for lease in running)
        if lone and ask.holding:
            # The rollouter holds the lone prompt already. Or a late copy of an earlier request got the lone prompt, and
            # the rollouter holds others: then the lease is repeated once it holds nothing.
            return []
        # Unconfirmed leases come first. They bypass the gate, which counts them already.
        found = [lease for lease in running if lease.number > ask.seen][: ask.free_groups]
        self.counts["granted_again"] += len(found)
        # A copy of this request, or a later one, may have got a lease: then ``holding`` may be incomplete. Number 0 is
        # that of an unnumbered request, which counts as unanswered.
        is_answered = 0 < ask.number <= self.answered_call.get(caller, 0)
        if not lone and not is_answered:
            self._lease_new(ask, holder, running, found)
        if found:
            self.answered_call[caller] = ask.number
        return found

    def _lease_new(self, ask: Ask, holder: Holder, running: list[PromptLease], found: list[PromptLease]) -> None:
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
            attempt = self.suspects.deaths.number(prompt.uid)
            version, alone = self.gate.newest_version, runs_alone(attempt)
            lease = PromptLease(prompt, ask.rollouter, holder.last_number + 1, version, attempt, alone)
            self._add(lease)
            generating += isinstance(prompt, TrainingPrompt)
            self.counts["granted"] += 1
            self.counts["granted_alone"] += alone
            found.append(lease)
            if alone:
                break

    def give_back(self, rollouter: str, incarnation: int, uids: Iterable[str]) -> None:
        """Take back the prompts that a rollouter returns; uids that it does not hold are ignored."""
        holder = self.rollouters.get(rollouter)
        if holder is None or holder.incarnation != incarnation:
            return
        for uid in uids:
            if uid in self.out and self.out[uid].rollouter == rollouter:
                self._take_back(uid)
                self.counts["returned"] += 1

    def died(self, rollouter: str, incarnation: int) -> None:
        """Remove a dead rollouter: the prompts that it held become orphans. Ignored if a later incarnation is known.

        Marks as suspect each prompt that the rollouter may have been generating. A rollouter confirms a lease only with
        its next request, and a busy one requests nothing until it has finished something. So an unconfirmed lease
        counts as received, unless the prompt was to run alone. To run alone by mistake only costs time, but a
        quarantine by mistake costs the prompt.
        """
        holder = self.rollouters.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return
        for number, lease in list(holder.leases.items()):
            lease.suspect = lease.prompt.uid in holder.holding if number <= holder.seen else not lease.alone
            self._orphan(holder, lease)
        del self.rollouters[rollouter]
        self.leaving.discard(rollouter)
        self.suspects.release(rollouter)

    def left(self, rollouter: str, incarnation: int, holding: Collection[str] = ()) -> None:
        """Record that a rollouter leaves and holds only the uids ``holding``.

        Its other prompts become orphans, since the learner may have received them. None of them becomes suspect, since
        no rollouter has died.
        """
        holder = self.rollouters.get(rollouter)
        if holder is None or holder.incarnation > incarnation:
            return
        for lease in [each for each in holder.leases.values() if each.prompt.uid not in holding]:
            self._orphan(holder, lease)
        # A leaving rollouter stays a holder while it holds prompts, so that its death makes them orphans. It gets no
        # lease, so a suspect must wait for another rollouter.
        self.leaving.add(rollouter)
        self.suspects.release(rollouter)
        if not holding:
            self.died(rollouter, incarnation)

    def _orphan(self, holder: Holder, lease: PromptLease) -> None:
        """Make a leased prompt an orphan: it stays out, without a holder."""
        del holder.leases[lease.number]
        lease.rollouter = None
        self._orphans[lease.prompt.uid] = None
        self.counts["orphaned"] += 1

    def settle(self, asked: Iterable[str], held: Collection[str]) -> None:
        """Apply the learner's answer about the orphans ``asked``: it holds ``held``; lease the others again."""
        kept = set(held)
        for uid in asked:
            # A prompt whose outcome was reported meanwhile is no orphan any more.
            if uid in self._orphans:
                del self._orphans[uid]
                if uid in kept:
                    # The group was delivered before its rollouter died, so the prompt did not cause the death.
                    self.out[uid].suspect = False
                else:
                    self._take_back(uid)
                    self.counts["recovered"] += 1

    def stop(self) -> None:
        """Lease nothing more: the run is preempted."""
        self._stopped = True

    # --- the state of the run ---

    def hold(
        self, uid: str, rollouter: str | None = None, *, number: int = 0, attempt: int = 0, alone: bool = False
    ) -> None:
        """Record that a prompt is out: with this rollouter, or else with the learner.

        Ignored if there is no such prompt, or if it is out, returned, rejected or concluded already.
        """
        prompt = self._evals.hold(uid) if "@" in uid else self._queue.hold(*position_of(uid))
        if prompt is not None:
            self.suspects.deaths.raise_to(uid, attempt)
            self._add(PromptLease(prompt, rollouter, number, self.gate.newest_version, attempt, alone))

    def grow(self) -> None:
        """Lease the prompts that were read since the start, from the next epoch of their source on."""
        self._queue.grow()

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
        for outcome in (each for each in report.outcomes if self.is_open(each.uid)):
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
        return self.number

    # --- within ---

    @property
    def _exhausted(self) -> bool:
        """Whether no training prompt is left to lease: the run stops, or needs no more than those that are out."""
        return self._stopped or not self.gate.needed(self.outstanding)

    def _add(self, lease: PromptLease) -> None:
        """Record that a prompt is out, with the holder that its lease names."""
        uid = lease.prompt.uid
        assert uid not in self.out, f"{uid} is leased to two"
        self.out[uid] = lease
        self.outstanding += isinstance(lease.prompt, TrainingPrompt)
        if lease.rollouter is not None:
            holder = self.rollouters[lease.rollouter]
            assert lease.number not in holder.leases
            holder.leases[lease.number] = lease
            holder.last_number = max(holder.last_number, lease.number)

    def _release(self, uid: str) -> PromptLease:
        """Remove a prompt from those that are out, and return its lease."""
        lease = self.out.pop(uid)
        if lease.rollouter is not None:
            del self.rollouters[lease.rollouter].leases[lease.number]
        self.outstanding -= isinstance(lease.prompt, TrainingPrompt)
        return lease

    def _next_prompt(self, ask: Ask, generating: int, *, empty: bool) -> Prompt | None:
        """Take the prompt to be leased next to the rollouter of ``ask``; None if the rollouter gets no lease now.

        That is a suspect that waits, or the next prompt in turn. ``empty``: the rollouter holds nothing.
        """
        while True:
            prompt, may_share = self.suspects.take(
                ask.rollouter, lambda prompt: self._may_run(prompt, ask.served_version), empty=empty
            )
            if not may_share:
                return prompt
            prompt = self._next_in_turn(ask, generating)
            if prompt is None or not runs_alone(self.suspects.deaths.number(prompt.uid)):
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
            outstanding=self.outstanding + self.suspects.reserved,
            generating=generating,
            rollouters=len(self.rollouters) - len(self.leaving),
        )
        prompt = self._evals.take(served_version) if self._eval_turn or not may_train else None
        if prompt is None and not may_train:
            return None
        self._eval_turn = prompt is None
        return prompt or self._queue.take()

    def _is_possible(self, outcome: Outcome) -> bool:
        """Whether an outcome is possible: the prompt allows its kind, and exists if it is one of training. It may have
        been reported before."""
        if "@" in outcome.uid:
            return outcome.kind in ("evaluated", "quarantined")
        try:
            epoch, index = position_of(outcome.uid)
        except ValueError:
            return False
        return outcome.kind != "evaluated" and self._queue.knows(epoch, index)

    def _conclude(self, outcome: Outcome) -> None:
        """Apply the outcome of a prompt that had none: release its lease, forget its deaths, record the outcome."""
        uid = outcome.uid
        if uid in self.out:
            self._release(uid)
            self._orphans.pop(uid, None)
        self.suspects.forget(uid)
        # The uid alone decides. The kind is checked for the type checker: ``finish`` takes no "evaluated".
        if outcome.kind == "evaluated" or "@" in uid:
            self._evals.finish_prompt(uid)
        else:
            self._queue.finish(outcome.kind, *position_of(uid), outcome.rewards)
        self.counts[outcome.kind] += 1
        self.gate.trained += outcome.kind == "trained"

    def _take_back(self, uid: str) -> None:
        """Release a prompt that is out, count its holder's death if it is suspect, and put it back to be leased."""
        held = self._release(uid)
        if held.suspect:
            self.suspects.deaths.died(uid, alone=held.alone)
        self._put_back(held.prompt)

    def _put_back(self, prompt: Prompt) -> None:
        """Send a prompt that came back to its next place.

        It is rejected after too many deaths of its own, waits to run alone as a suspect, and else returns to its queue.
        """
        reason = self.suspects.deaths.verdict(prompt.uid)
        # A prompt of earlier data is in no order here and can never be leased again, so the queue drops it.
        if isinstance(prompt, TrainingPrompt) and prompt.epoch < self.ledger.first_epoch:
            self._queue.give_back(prompt)
        elif reason is not None:
            self.counts["rejected"] += 1
            if isinstance(prompt, EvalPrompt):
                self._evals.reject(prompt, reason)
            else:
                self._queue.reject(prompt, reason)
        elif runs_alone(self.suspects.deaths.number(prompt.uid)):
            self.suspects.add(prompt)
        elif isinstance(prompt, EvalPrompt):
            self._evals.give_back(prompt)
        else:
            self._queue.give_back(prompt)
