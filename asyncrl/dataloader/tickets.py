"""Everything between the messages and the gate: who was granted what, and what became of it. Pure.

Invariants:

- every prompt is granted to at most one rollouter at a time, and to nobody once its outcome is reported;
- a grant is numbered by rollouter incarnation from 1, and given again, first of all, until a later call of that
  incarnation says that it has seen it: a lost reply loses nothing;
- a training prompt is outstanding from its grant until the learner reports its outcome or it is returned, whoever
  holds it meanwhile. When its holder has died it is an *orphan*, outstanding all the same, until the learner has
  said whether it holds it (``settle``); only what it does not hold is granted again.

A prompt that is returned keeps its attempt number; one whose holder died after it had seen the grant gets the next.

Fails with ProtocolError on an outcome for something that is not granted, without having changed anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.dataloader.evals import EvalPrompt, EvalRounds
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.prompt_queue import PromptQueue, TrainingPrompt
from asyncrl.errors import ProtocolError
from asyncrl.messages import Outcomes, Rejected, Supply


@dataclass(frozen=True, slots=True)
class Ask:
    """A rollouter's request for groups; the fields are those of Lease."""

    rollouter: str
    incarnation: int
    seen: int
    free_groups: int
    served_version: int
    holding: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Grant:
    """A prompt granted to a rollouter."""

    number: int
    prompt: TrainingPrompt | EvalPrompt
    param_version: int
    """The newest published version at the grant."""


@dataclass(slots=True)
class _Holder:
    incarnation: int
    seen: int
    last_grant: int
    served_version: int
    grants: dict[int, Grant] = field(default_factory=dict)
    """By number, ascending; until the outcome is reported or the prompt is returned."""


@dataclass(slots=True)
class _Granted:
    prompt: TrainingPrompt | EvalPrompt
    rollouter: str | None
    """None when the holder has died."""
    number: int


class Tickets:
    """See the module."""

    def __init__(self, queue: PromptQueue, gate: Gate, evals: EvalRounds) -> None:
        self._queue = queue
        self._gate = gate
        self._evals = evals
        self._holders: dict[str, _Holder] = {}
        self._granted: dict[str, _Granted] = {}
        self._orphans: dict[str, None] = {}
        """Granted prompts whose holder has died and of which the learner has not said whether it holds them."""
        self._outstanding = 0
        self._eval_turn = False
        self._number = 0
        """The last report of the learner without a gap before it."""
        self.supply_number = 0
        """Number of the present ``supply``."""
        self._supply_key: tuple[object, ...] = ()
        self.counts: Counter[str] = Counter()
        self._note_supply()

    # --- what the shell asks ---

    @property
    def outstanding(self) -> int:
        """Training groups granted and neither reported nor returned."""
        return self._outstanding

    @property
    def limit(self) -> float:
        """The working limit, in versions."""
        return self._gate.limit.versions

    @property
    def newest_version(self) -> int:
        """The newest version that the learner has reported."""
        return self._gate.newest_version

    @property
    def closed(self) -> bool:
        """Whether nothing will ever be granted again."""
        return self._gate.finished and not self._evals.sizes

    @property
    def orphans(self) -> list[str]:
        """Uids of the prompts that the learner is to be asked about, oldest death first."""
        return list(self._orphans)

    @property
    def supply(self) -> Supply:
        """What there is still to come. ``outstanding`` moves its number only when nothing is left to grant."""
        return Supply(
            number=self.supply_number,
            exhausted=not self._gate.needed(self._outstanding),
            outstanding=self._outstanding,
            rejected=[Rejected(uid, "over data.max_prompt_tokens") for uid in self._queue.too_long],
            evals=self._evals.sizes,
        )

    # --- rollouters ---

    def meet(self, ask: Ask) -> None:
        """Take note of a rollouter's call. What an older incarnation of it held becomes orphans."""
        holder = self._holders.get(ask.rollouter)
        if holder is None or ask.incarnation > holder.incarnation:
            if holder is not None:
                self.died(ask.rollouter, holder.incarnation)
            self._holders[ask.rollouter] = _Holder(ask.incarnation, ask.seen, ask.seen, ask.served_version)
        elif ask.incarnation == holder.incarnation and ask.seen >= holder.seen:
            holder.seen = ask.seen
            holder.served_version = ask.served_version
        self._gate.forget_below(min(other.served_version for other in self._holders.values()))

    def lease(self, ask: Ask) -> list[Grant]:
        """Grant as much as may be granted now; may be asked again with the same ``ask`` until it gives something.

        Nothing is granted to a call that a later one of the same rollouter has overtaken.
        """
        holder = self._holders.get(ask.rollouter)
        if holder is None or (holder.incarnation, holder.seen) != (ask.incarnation, ask.seen):
            return []
        found = [grant for number, grant in holder.grants.items() if number > ask.seen][: ask.free_groups]
        self.counts["granted_again"] += len(found)
        generating = sum(
            isinstance(grant.prompt, TrainingPrompt)
            for number, grant in holder.grants.items()
            if number > ask.seen or grant.prompt.uid in ask.holding
        )
        while len(found) < ask.free_groups:
            prompt = self._next_prompt(ask.served_version, generating)
            if prompt is None:
                break
            holder.last_grant += 1
            grant = Grant(holder.last_grant, prompt, self._gate.newest_version)
            holder.grants[grant.number] = grant
            self._granted[prompt.uid] = _Granted(prompt, ask.rollouter, grant.number)
            if isinstance(prompt, TrainingPrompt):
                self._outstanding += 1
                generating += 1
            self.counts["granted"] += 1
            found.append(grant)
        self._note_supply()
        return found

    def give_back(self, rollouter: str, incarnation: int, uids: Iterable[str]) -> None:
        """A rollouter returns prompts; those that it does not hold are ignored."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation != incarnation:
            return
        for uid in uids:
            granted = self._granted.get(uid)
            if granted is not None and granted.rollouter == rollouter:
                self._take_back(uid)
                self.counts["returned"] += 1
        self._note_supply()

    def died(self, rollouter: str, incarnation: int) -> None:
        """An incarnation of a rollouter is dead: what it held becomes orphans."""
        holder = self._holders.get(rollouter)
        if holder is None or holder.incarnation != incarnation:
            return
        del self._holders[rollouter]
        for number, grant in holder.grants.items():
            orphan = self._granted[grant.prompt.uid]
            orphan.rollouter = None
            if number <= holder.seen:
                orphan.prompt = replace(orphan.prompt, attempt=orphan.prompt.attempt + 1)
            self._orphans[grant.prompt.uid] = None
            self.counts["orphaned"] += 1

    def settle(self, asked: Collection[str], held: Collection[str]) -> None:
        """The learner has said which of the orphans it was asked about it holds; the others are granted again."""
        kept = set(held)
        for uid in asked:
            if uid in self._orphans:
                del self._orphans[uid]
                if uid not in kept:
                    self._take_back(uid)
        self._note_supply()

    # --- the learner ---

    def report(self, report: Outcomes) -> int:
        """Apply a report of the learner. Returns the highest number seen without a gap.

        Raises ProtocolError for an outcome of a prompt that is not granted, returned or too long.
        """
        if report.number != self._number + 1:
            return self._number
        uids = [outcome.uid for outcome in report.outcomes]
        unknown = [uid for uid in uids if not self._is_open(uid)]
        if unknown or len(set(uids)) < len(uids):
            raise ProtocolError(f"outcomes of prompts that are not open: {unknown or uids}")
        self._number = report.number
        for outcome in report.outcomes:
            self._conclude(outcome.uid)
            self.counts[outcome.kind] += 1
            if outcome.kind == "trained":
                self._gate.trained += 1
        previous = self._gate.newest_version
        if report.version > previous:
            self._gate.published(report.version, report.trained_at_version)
            self._evals.published(report.version, previous)
        if report.step_began:
            self._gate.limit.step_began(report.buffered_groups, waited=report.waited)
        if report.finished and not self._gate.finished:
            self._gate.finish()
            self._evals.finish(self._gate.newest_version)
        self._note_supply()
        return self._number

    # --- within ---

    def _next_prompt(self, served_version: int, generating: int) -> TrainingPrompt | EvalPrompt | None:
        """Training and evaluation take turns where both may be granted."""
        may_train = not self._evals.starting and self._gate.admits(
            served_version,
            outstanding=self._outstanding,
            generating=generating,
            rollouters=len(self._holders),
        )
        if self._evals.is_waiting(served_version) and (self._eval_turn or not may_train):
            self._eval_turn = False
            return self._evals.take(served_version)
        if may_train:
            self._eval_turn = True
            return self._queue.take()
        return None

    def _is_open(self, uid: str) -> bool:
        return uid in self._granted or uid in self._queue or uid in self._evals

    def _conclude(self, uid: str) -> None:
        if uid in self._granted:
            self._release(uid)
            self._orphans.pop(uid, None)
        elif uid in self._queue:
            self._queue.finish(uid)
        if uid in self._evals:
            self._evals.finish_prompt(uid)

    def _release(self, uid: str) -> TrainingPrompt | EvalPrompt:
        """A prompt is not granted any more."""
        granted = self._granted.pop(uid)
        if granted.rollouter is not None:
            del self._holders[granted.rollouter].grants[granted.number]
        if isinstance(granted.prompt, TrainingPrompt):
            self._outstanding -= 1
        return granted.prompt

    def _take_back(self, uid: str) -> None:
        """A granted prompt is to be granted again."""
        prompt = self._release(uid)
        if isinstance(prompt, TrainingPrompt):
            self._queue.give_back(prompt)
        else:
            self._evals.give_back(prompt)

    def _note_supply(self) -> None:
        exhausted = not self._gate.needed(self._outstanding)
        key = (
            exhausted,
            self._outstanding if exhausted else None,
            self._queue.passed_too_long,
            len(self._queue.too_long),
            self._evals.changes,
        )
        if key != self._supply_key:
            self._supply_key = key
            self.supply_number += 1
