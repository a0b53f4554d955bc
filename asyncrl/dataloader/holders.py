"""The prompts that are out, the rollouters that hold them by numbered leases, and suspect prompts. Pure.

Invariants: a prompt is leased at most once at a time; numbers grow within an incarnation of a rollouter, and are never
those of a lease that it may have received from a lost dataloader. A prompt without a holder is with the learner, or its
holder has died; it stays outstanding until it is released.

A suspect (messages/groups.py) is leased only to a rollouter that holds nothing, and runs there alone. A
busy rollouter never holds nothing, so while a prompt waits to run alone one rollouter is set aside: it gets no lease
until it has delivered everything, then it gets the prompt.

This is the dataloader's view and is derived: each restore rebuilds it from the learner's ledger and
buffer and from the answers of the rollouters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.gate import TrainingPrompt
from asyncrl.messages.groups import after_death, runs_alone, verdict

Prompt = TrainingPrompt | EvalPrompt


@dataclass(frozen=True, slots=True)
class Ask:
    """A rollouter's request for groups; the fields are those of RequestLeases."""

    rollouter: str
    incarnation: int
    seen: int
    free_groups: int
    served_version: int
    holding: frozenset[str] = frozenset()
    number: int = 0


@dataclass(slots=True)
class PromptLease:
    """A prompt that is out: leased to a rollouter, or with the learner."""

    prompt: Prompt
    rollouter: str | None = None
    """Holder of the prompt; None when the learner has it, or the holder has died."""
    number: int = 0
    param_version: int = -1
    """The newest published version at the lease."""
    attempt: int = 0
    """Deaths of the prompt at the lease."""
    alone: bool = False
    """Whether it runs alone."""
    suspect: bool = False
    """Whether its holder died while it generated the prompt."""


@dataclass(frozen=True, slots=True)
class CallNumbers:
    """The numbers of an incarnation's requests for leases."""

    incarnation: int
    newest: int = 0
    """The latest call that has arrived."""
    answered: int = 0
    """The latest call that got a lease."""


@dataclass(slots=True)
class Holder:
    """A rollouter, as of its last call."""

    incarnation: int
    seen: int
    last_number: int
    served_version: int
    holding: frozenset[str] = frozenset()
    leases: dict[int, PromptLease] = field(default_factory=dict)
    """Leases by number, ascending; until the outcome is reported or the prompt is returned."""

    def running(self, ask: Ask) -> list[PromptLease]:
        """Leases that it generates, or may never have received."""
        return [lease for lease in self.leases.values() if lease.number > ask.seen or lease.prompt.uid in ask.holding]


class Holders:
    """All rollouters, and all prompts that are out."""

    def __init__(self) -> None:
        self._rollouters: dict[str, Holder] = {}
        self._leaving: set[str] = set()
        """Rollouters that ask no more, and live until they are removed."""
        self._out: dict[str, PromptLease] = {}
        self._calls: dict[str, CallNumbers] = {}
        """Requests by rollouter."""
        self.outstanding = 0
        """Training prompts among those that are out."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._out

    def __getitem__(self, uid: str) -> PromptLease:
        return self._out[uid]

    @property
    def uids(self) -> Iterable[str]:
        """Uids of all prompts that are out, the oldest first."""
        return self._out.keys()

    @property
    def asking(self) -> int:
        """Number of rollouters that are known to live, and may ask for more."""
        return len(self._rollouters) - len(self._leaving)

    @property
    def oldest_served(self) -> int:
        """The oldest version that a rollouter serves; there must be one."""
        return min(holder.served_version for holder in self._rollouters.values())

    def get(self, rollouter: str) -> Holder | None:
        """A rollouter, if it is known."""
        return self._rollouters.get(rollouter)

    # --- requests ---

    def current(self, ask: Ask) -> Holder | None:
        """The rollouter that asks; None if it leaves, or a later call or a newer incarnation of it was heard."""
        holder = self._rollouters.get(ask.rollouter)
        # The answer to an overtaken call would repeat leases that a later call has seen.
        if holder is None or (holder.incarnation, holder.seen) != (ask.incarnation, ask.seen):
            return None
        if ask.rollouter in self._leaving or ask.number < self._calls_of(ask).newest:
            return None
        return holder

    def is_answered(self, ask: Ask) -> bool:
        """Whether a call got a lease before.

        The caller may have received that, so ``holding`` no longer names everything that the caller holds. A call that
        was neither answered nor overtaken names everything that its rollouter can hold, since a rollouter receives
        leases only as the answer to its latest call.
        """
        return 0 < ask.number <= self._calls_of(ask).answered

    def note_answer(self, ask: Ask) -> None:
        """Record that a call got a lease."""
        self._calls[ask.rollouter] = replace(self._calls_of(ask), answered=ask.number)

    def recall_calls(self, before: Holders) -> None:
        """Take over the numbers of the calls that ``before`` knows: some of these may be parked, or arrive again.

        If a rollouter does not answer the restore, its lease numbers are unknown. A copy of an answered call would get
        a number that the rollouter has seen, and the prompt would be lost.
        """
        self._calls = dict(before._calls)

    def _calls_of(self, ask: Ask) -> CallNumbers:
        found = self._calls.get(ask.rollouter)
        return found if found is not None and found.incarnation == ask.incarnation else CallNumbers(ask.incarnation)

    def update(self, ask: Ask) -> None:
        """Take note of a call of a rollouter whose older incarnations have been ``remove``d."""
        holder = self._rollouters.get(ask.rollouter)
        if holder is None or ask.incarnation == holder.incarnation:
            calls = self._calls_of(ask)
            self._calls[ask.rollouter] = replace(calls, newest=max(calls.newest, ask.number))
        if holder is None:
            self._rollouters[ask.rollouter] = Holder(
                ask.incarnation, ask.seen, ask.seen, ask.served_version, ask.holding
            )
        elif ask.incarnation == holder.incarnation and ask.seen >= holder.seen:
            holder.seen = ask.seen
            holder.served_version = ask.served_version
            holder.holding = ask.holding
            # A lost dataloader may have given out higher numbers than are known here.
            self.skip_to(ask.rollouter, ask.seen)

    # --- leases ---

    def lease(self, rollouter: str, lease: PromptLease) -> PromptLease:
        """Give out a lease under the next number."""
        lease.number = self._rollouters[rollouter].last_number + 1
        self.hold(lease, rollouter)
        return lease

    def hold(self, lease: PromptLease, rollouter: str | None = None) -> None:
        """A prompt is out from here on, with the learner where no rollouter is named."""
        uid = lease.prompt.uid
        assert uid not in self._out, f"{uid} is leased to two"
        self._out[uid] = lease
        self.outstanding += isinstance(lease.prompt, TrainingPrompt)
        if rollouter is not None:
            lease.rollouter = rollouter
            self.skip_to(rollouter, lease.number)
            leases = self._rollouters[rollouter].leases
            assert lease.number not in leases
            leases[lease.number] = lease

    def skip_to(self, rollouter: str, number: int) -> None:
        """The next lease of a rollouter has a number above this one."""
        holder = self._rollouters[rollouter]
        holder.last_number = max(holder.last_number, number)

    def release(self, uid: str) -> PromptLease:
        """A prompt is not out any more."""
        lease = self._out.pop(uid)
        if lease.rollouter is not None:
            del self._rollouters[lease.rollouter].leases[lease.number]
        self.outstanding -= isinstance(lease.prompt, TrainingPrompt)
        return lease

    def remove(self, rollouter: str) -> list[PromptLease]:
        """A rollouter is dead: its prompts have no holder. Suspect are those that it generated and may have received.

        A rollouter confirms a lease only when it asks again, and a full one does not ask before it has finished
        something. So a lease that it may have received counts as received, unless the prompt ran alone: running alone
        by mistake costs time, quarantine by mistake costs the prompt.
        """
        holder = self._rollouters.pop(rollouter)
        self._leaving.discard(rollouter)
        for number, lease in holder.leases.items():
            lease.rollouter = None
            lease.suspect = lease.prompt.uid in holder.holding if number <= holder.seen else not lease.alone
        return list(holder.leases.values())

    def leaves(self, rollouter: str) -> None:
        """A rollouter asks no more; it is a holder until it is removed, and takes no share of the gate."""
        self._leaving.add(rollouter)

    def keep(self, rollouter: str, uids: Collection[str]) -> list[PromptLease]:
        """A rollouter that takes no more holds at most these: its other prompts have no holder."""
        leases = self._rollouters[rollouter].leases
        lost = [lease for lease in leases.values() if lease.prompt.uid not in uids]
        for lease in lost:
            del leases[lease.number]
            lease.rollouter = None
        return lost


class SuspectPrompts:
    """``attempts`` are the deaths of each prompt by uid; changed here and where an outcome is recorded."""

    def __init__(self, attempts: dict[str, int], max_attempts: int) -> None:
        self._attempts = attempts
        self._max_attempts = max_attempts
        self._waiting: dict[str, Prompt] = {}
        self.reserved = 0
        """Training prompts that wait to run alone: places that no other prompt may take."""
        self.set_aside: str | None = None
        """The rollouter that gets no lease until it holds nothing."""
        self.changes = 0
        """Deaths counted so far."""

    def attempt(self, uid: str) -> int:
        """Deaths of a prompt."""
        return self._attempts.get(uid, 0)

    def raise_to(self, uid: str, attempt: int) -> None:
        """Count at least this many deaths of a prompt."""
        if attempt > self.attempt(uid):
            self._attempts[uid] = attempt
            self.changes += 1

    def died(self, uid: str, *, alone: bool) -> None:
        """A rollouter died while it generated this prompt."""
        self.raise_to(uid, after_death(self.attempt(uid), alone=alone))

    def forget(self, uid: str) -> None:
        """The prompt has an outcome."""
        if self._attempts.pop(uid, None) is not None:
            self.changes += 1
        self.discard(uid)

    def is_suspect(self, uid: str) -> bool:
        """Whether a prompt may not share a rollouter."""
        return runs_alone(self.attempt(uid))

    def verdict(self, uid: str) -> str | None:
        """Why a prompt is rejected; None while it may run again."""
        return verdict(self.attempt(uid), self._max_attempts)

    # --- waiting to run alone ---

    def add(self, prompt: Prompt) -> None:
        """A prompt waits to run alone."""
        self._waiting[prompt.uid] = prompt
        self.reserved += isinstance(prompt, TrainingPrompt)

    def discard(self, uid: str) -> None:
        """A prompt does not wait any more."""
        prompt = self._waiting.pop(uid, None)
        self.reserved -= isinstance(prompt, TrainingPrompt)

    def next(self, may_run: Callable[[Prompt], bool]) -> Prompt | None:
        """The prompt that has waited longest of those that may run."""
        return next((prompt for prompt in self._waiting.values() if may_run(prompt)), None)
