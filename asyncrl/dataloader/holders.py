"""The prompts that are out, the rollouters that hold them by numbered leases, and suspect prompts. Pure.

A prompt is *out* from its lease until it is returned or its outcome is reported. A prompt without a holder is with the
learner, or its holder has died or left. Invariants: a prompt is leased at most once at a time. The numbers of new
leases grow within an incarnation of a rollouter. No new lease has a number that a lost dataloader may have used.

A suspect is a prompt whose rollouter died while the rollouter generated the prompt (messages/groups.py). After
ALONE_FROM deaths a suspect is leased only to a rollouter that holds nothing, and runs there alone. A busy rollouter
always holds something. So while a prompt waits to run alone, one rollouter is kept free for it. This rollouter gets no
lease until it has delivered everything. Then it gets the prompt.

Each restore rebuilds all of this from the learner's ledger and buffer, and from the answers of the rollouters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt
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
    """Holder of the prompt; None when the learner has the prompt, or the holder has died or left."""
    number: int = 0
    """Number of the lease at its rollouter, from 1; negative if the rollouter reported the lease after a restore."""
    param_version: int = -1
    """The newest published version at the time of the lease."""
    attempt: int = 0
    """Number of deaths counted against the prompt at the time of the lease."""
    alone: bool = False
    """Whether the rollouter runs no other prompt with it."""
    suspect: bool = False
    """Whether the holder died while it generated the prompt, and that death is not counted yet."""


@dataclass(frozen=True, slots=True)
class CallNumbers:
    """The numbers of one rollouter incarnation's requests for leases, counted by the rollouter from 1."""

    incarnation: int
    newest: int = 0
    """Number of the latest request that has arrived."""
    answered: int = 0
    """Number of the latest request that got a lease."""


@dataclass(slots=True)
class Holder:
    """A rollouter, as of its last request."""

    incarnation: int
    seen: int
    """The highest lease number that the rollouter has received."""
    last_number: int
    """The highest lease number that may have been given to it."""
    served_version: int
    holding: frozenset[str] = frozenset()
    """Uids that the rollouter held at its last request; every other received lease was delivered."""
    leases: dict[int, PromptLease] = field(default_factory=dict)
    """Leases by number, ascending; until the outcome is reported or the prompt is returned."""

    def running(self, ask: Ask) -> list[PromptLease]:
        """The leases that the rollouter has not delivered: it holds them, or may never have received them."""
        return [lease for lease in self.leases.values() if lease.number > ask.seen or lease.prompt.uid in ask.holding]


class Holders:
    """All rollouters, and all prompts that are out."""

    def __init__(self) -> None:
        self._rollouters: dict[str, Holder] = {}
        self._leaving: set[str] = set()
        """Rollouters that request no more leases; they stay holders until they are removed."""
        self._out: dict[str, PromptLease] = {}
        """Prompts that are out by uid, the oldest first."""
        self._calls: dict[str, CallNumbers] = {}
        """Request numbers by rollouter."""
        self.outstanding = 0
        """Number of training prompts that are out."""

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
        """Number of living rollouters that may request more leases."""
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
        """The rollouter that sent ``ask``; None if it is unknown, leaves, was restarted or has sent a later request."""
        holder = self._rollouters.get(ask.rollouter)
        # The answer to an outdated request would repeat leases that the rollouter has received since.
        if holder is None or (holder.incarnation, holder.seen) != (ask.incarnation, ask.seen):
            return None
        if ask.rollouter in self._leaving or ask.number < self._calls_of(ask).newest:
            return None
        return holder

    def is_answered(self, ask: Ask) -> bool:
        """Whether a copy of this request, or a later request, got a lease before. False for a request numbered 0.

        The rollouter may have received that lease, so ``ask.holding`` may be incomplete. Otherwise ``holding`` names
        everything that the rollouter can hold, since it receives leases only as the answer to its latest request.
        """
        return 0 < ask.number <= self._calls_of(ask).answered

    def note_answer(self, ask: Ask) -> None:
        """Record that a request got a lease."""
        self._calls[ask.rollouter] = replace(self._calls_of(ask), answered=ask.number)

    def recall_calls(self, before: Holders) -> None:
        """Copy the request numbers from ``before``, whose requests may still be parked, or arrive again.

        If a rollouter does not answer the restore, its lease numbers are unknown. A copy of an answered request would
        then get a number that the rollouter has seen, and the prompt would be lost.
        """
        self._calls = dict(before._calls)

    def _calls_of(self, ask: Ask) -> CallNumbers:
        found = self._calls.get(ask.rollouter)
        return found if found is not None and found.incarnation == ask.incarnation else CallNumbers(ask.incarnation)

    def update(self, ask: Ask) -> None:
        """Record what a request says of its rollouter; a request older than the last recorded one changes nothing.

        ``remove`` must have removed an older incarnation before.
        """
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
        """Give ``lease`` the rollouter's next number, and record the rollouter as its holder."""
        lease.number = self._rollouters[rollouter].last_number + 1
        self.hold(lease, rollouter)
        return lease

    def hold(self, lease: PromptLease, rollouter: str | None = None) -> None:
        """Record that a prompt is out: held by ``rollouter``, or with the learner without one."""
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
        """Make the next lease number of a rollouter larger than ``number``."""
        holder = self._rollouters[rollouter]
        holder.last_number = max(holder.last_number, number)

    def release(self, uid: str) -> PromptLease:
        """Remove a prompt from those that are out, and return its lease."""
        lease = self._out.pop(uid)
        if lease.rollouter is not None:
            del self._rollouters[lease.rollouter].leases[lease.number]
        self.outstanding -= isinstance(lease.prompt, TrainingPrompt)
        return lease

    def remove(self, rollouter: str) -> list[PromptLease]:
        """Remove a dead rollouter, and return its leases without a holder; the prompts stay out.

        Marks as suspect each prompt that the rollouter may have been generating. A rollouter confirms a lease only with
        its next request, and a busy one requests nothing until it has finished something. So an unconfirmed lease
        counts as received, unless the prompt was to run alone. To run alone by mistake only costs time, but a
        quarantine by mistake costs the prompt.
        """
        holder = self._rollouters.pop(rollouter)
        self._leaving.discard(rollouter)
        for number, lease in holder.leases.items():
            lease.rollouter = None
            lease.suspect = lease.prompt.uid in holder.holding if number <= holder.seen else not lease.alone
        return list(holder.leases.values())

    def leaves(self, rollouter: str) -> None:
        """Record that a rollouter requests no more leases. It stays a holder, but no longer counts in ``asking``."""
        self._leaving.add(rollouter)

    def keep(self, rollouter: str, uids: Collection[str]) -> list[PromptLease]:
        """Record that a leaving rollouter holds at most ``uids``. Returns its other leases without a holder."""
        leases = self._rollouters[rollouter].leases
        lost = [lease for lease in leases.values() if lease.prompt.uid not in uids]
        for lease in lost:
            del leases[lease.number]
            lease.rollouter = None
        return lost


class SuspectPrompts:
    """Counts the deaths of prompts, and queues the suspects that wait to run alone.

    ``attempts`` maps a uid to its number of deaths. It is the ledger's own dict, which this class changes.
    """

    def __init__(self, attempts: dict[str, int], max_attempts: int) -> None:
        self._attempts = attempts
        self._max_attempts = max_attempts
        self._waiting: dict[str, Prompt] = {}
        """Prompts that wait to run alone, by uid; the longest wait first."""
        self.reserved = 0
        """Number of training prompts that wait to run alone; the gate counts them as outstanding."""
        self.set_aside: str | None = None
        """The rollouter that gets no lease until it holds nothing; None while no rollouter is set aside."""
        self.changes = 0
        """Number of changes to the death counts so far."""

    def attempt(self, uid: str) -> int:
        """Number of deaths counted against a prompt."""
        return self._attempts.get(uid, 0)

    def raise_to(self, uid: str, attempt: int) -> None:
        """Raise the number of deaths of a prompt to ``attempt``, if it is lower."""
        if attempt > self.attempt(uid):
            self._attempts[uid] = attempt
            self.changes += 1

    def died(self, uid: str, *, alone: bool) -> None:
        """Count the death of a rollouter that generated this prompt, ``alone`` or with others."""
        self.raise_to(uid, after_death(self.attempt(uid), alone=alone))

    def forget(self, uid: str) -> None:
        """Drop the deaths of a prompt that has an outcome."""
        if self._attempts.pop(uid, None) is not None:
            self.changes += 1
        self.discard(uid)

    def must_run_alone(self, uid: str) -> bool:
        """Whether a prompt may not share a rollouter, after ALONE_FROM deaths."""
        return runs_alone(self.attempt(uid))

    def verdict(self, uid: str) -> str | None:
        """Why a prompt is rejected; None while it may run again."""
        return verdict(self.attempt(uid), self._max_attempts)

    # --- waiting to run alone ---

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt that waits to run alone."""
        self._waiting[prompt.uid] = prompt
        self.reserved += isinstance(prompt, TrainingPrompt)

    def discard(self, uid: str) -> None:
        """Remove a prompt from the queue, if it waits there."""
        prompt = self._waiting.pop(uid, None)
        self.reserved -= isinstance(prompt, TrainingPrompt)

    def next(self, may_run: Callable[[Prompt], bool]) -> Prompt | None:
        """The prompt that has waited longest among those for which ``may_run`` is true; None without any."""
        return next((prompt for prompt in self._waiting.values() if may_run(prompt)), None)
