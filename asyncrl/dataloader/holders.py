"""The holders of prompts: leases by rollouter, numbered, and the prompts that are outstanding. Pure.

Invariants: a prompt is leased at most once at a time; numbers grow within an incarnation of a rollouter, and are never
those of a lease that it may have received from a lost dataloader. A prompt without a holder is with the learner, or its
holder has died; it stays outstanding until it is released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt

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


@dataclass(frozen=True, slots=True)
class PromptLease:
    """A prompt leased to a rollouter."""

    number: int
    prompt: Prompt
    param_version: int
    """The newest published version at the lease."""
    attempt: int = 0
    """Deaths that its earlier holders took part in."""
    alone: bool = False
    """Whether nothing else is generated beside it."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The numbers of an incarnation's lease calls."""

    incarnation: int
    newest: int = 0
    """The latest call that has arrived."""
    answered: int = 0
    """The latest call that was leased something."""


@dataclass(slots=True)
class Holder:
    """A rollouter, as of its last call."""

    incarnation: int
    seen: int
    last_lease: int
    served_version: int
    holding: frozenset[str] = frozenset()
    leases: dict[int, PromptLease] = field(default_factory=dict)
    """Leases by number, ascending; until the outcome is reported or the prompt is returned."""

    def running(self, ask: Ask) -> list[PromptLease]:
        """Leases that it generates, or may never have received."""
        return [lease for lease in self.leases.values() if lease.number > ask.seen or lease.prompt.uid in ask.holding]


@dataclass(slots=True)
class HeldPrompt:
    """A prompt that is out."""

    prompt: Prompt
    rollouter: str | None = None
    """Holder of the prompt; None when the learner has it, or the holder has died."""
    number: int = 0
    suspect: bool = False
    """Whether its holder died generating it."""
    alone: bool = False


class Holders:
    """All rollouters, and all prompts that are out."""

    def __init__(self) -> None:
        self._rollouters: dict[str, Holder] = {}
        self._leaving: set[str] = set()
        """Rollouters that ask no more, and live until they are removed."""
        self._held: dict[str, HeldPrompt] = {}
        self._calls: dict[str, Calls] = {}
        """RequestLeases calls by rollouter."""
        self.outstanding = 0
        """Training prompts among those that are out."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._held

    def __getitem__(self, uid: str) -> HeldPrompt:
        return self._held[uid]

    @property
    def uids(self) -> Iterable[str]:
        """Uids of all prompts that are out, in the order of their leases."""
        return self._held.keys()

    @property
    def asking(self) -> int:
        """Number of rollouters that live as far as is known, and may ask for more."""
        return len(self._rollouters) - len(self._leaving)

    @property
    def oldest_served(self) -> int:
        """The oldest version that anybody serves; there must be somebody."""
        return min(holder.served_version for holder in self._rollouters.values())

    def get(self, rollouter: str) -> Holder | None:
        """A rollouter, if it is known."""
        return self._rollouters.get(rollouter)

    def current(self, ask: Ask) -> Holder | None:
        """The rollouter that asks; None if it leaves, or a later call or a newer incarnation of it was heard."""
        holder = self._rollouters.get(ask.rollouter)
        # A call that was overtaken would be leased again what a later one has said that it has seen.
        if holder is None or (holder.incarnation, holder.seen) != (ask.incarnation, ask.seen):
            return None
        if ask.rollouter in self._leaving or ask.number < self._calls_of(ask).newest:
            return None
        return holder

    def is_answered(self, ask: Ask) -> bool:
        """Whether a call was leased something before.

        The caller may have received that, so ``holding`` no longer covers all that the caller holds. A call that was
        neither answered nor overtaken names everything that its rollouter can hold, since a rollouter receives
        leases only as the answer to its latest call.
        """
        return 0 < ask.number <= self._calls_of(ask).answered

    def note_answer(self, ask: Ask) -> None:
        """Record that a call was leased something."""
        self._calls[ask.rollouter] = replace(self._calls_of(ask), answered=ask.number)

    def recall_calls(self, before: Holders) -> None:
        """Take over the numbers of the calls that ``before`` knows: some of these may be parked, or arrive again."""
        self._calls = dict(before._calls)

    def _calls_of(self, ask: Ask) -> Calls:
        found = self._calls.get(ask.rollouter)
        return found if found is not None and found.incarnation == ask.incarnation else Calls(ask.incarnation)

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
            # A lost dataloader may have leased more than is known here.
            self.skip_to(ask.rollouter, ask.seen)

    def remove(self, rollouter: str) -> list[HeldPrompt]:
        """A rollouter is dead: its prompts have no holder. Suspect are those that it generated and may have received.

        That it received a lease is known only when it asks again, which a full one does not before it has finished
        something; so a lease that it may have received counts as received, unless it is one alone: to run alone by
        mistake costs time, to be rejected by mistake the prompt.
        """
        holder = self._rollouters.pop(rollouter)
        self._leaving.discard(rollouter)
        found = []
        for number, lease in holder.leases.items():
            held = self._held[lease.prompt.uid]
            held.rollouter = None
            if number <= holder.seen:
                held.suspect = lease.prompt.uid in holder.holding
            else:
                held.suspect = not lease.alone
            found.append(held)
        return found

    def leaves(self, rollouter: str) -> None:
        """A rollouter asks no more; it is a holder until it is removed, and takes no share of the gate."""
        self._leaving.add(rollouter)

    def keep(self, rollouter: str, uids: Collection[str]) -> list[HeldPrompt]:
        """A rollouter that takes no more holds at most these: all else that it was leased has no holder."""
        leases = self._rollouters[rollouter].leases
        found = []
        for number, lease in list(leases.items()):
            if lease.prompt.uid not in uids:
                del leases[number]
                held = self._held[lease.prompt.uid]
                held.rollouter = None
                found.append(held)
        return found

    def lease(self, ask: Ask, prompt: Prompt, param_version: int, *, attempt: int, alone: bool) -> PromptLease:
        """Lease a prompt that is not out."""
        rollouter = ask.rollouter
        number = self._rollouters[rollouter].last_lease + 1
        lease = PromptLease(number, prompt, param_version, attempt, alone)
        self.restore(rollouter, lease)
        return lease

    def skip_to(self, rollouter: str, number: int) -> None:
        """The next lease of a rollouter has a number above this one."""
        holder = self._rollouters[rollouter]
        holder.last_lease = max(holder.last_lease, number)

    def restore(self, rollouter: str, lease: PromptLease) -> None:
        """A rollouter holds a prompt that is not out, by a lease with this number."""
        self.skip_to(rollouter, lease.number)
        holder = self._rollouters[rollouter]
        assert lease.number not in holder.leases
        holder.leases[lease.number] = lease
        self.hold(lease.prompt, rollouter, lease)

    def hold(self, prompt: Prompt, rollouter: str | None = None, lease: PromptLease | None = None) -> None:
        """A prompt is out from here on, with the learner where no rollouter is named."""
        assert prompt.uid not in self._held, f"{prompt.uid} is leased to two"
        held = self._held[prompt.uid] = HeldPrompt(prompt, rollouter)
        if lease is not None:
            held.number, held.alone = lease.number, lease.alone
        self.outstanding += isinstance(prompt, TrainingPrompt)

    def release(self, uid: str) -> HeldPrompt:
        """A prompt is not out any more."""
        held = self._held.pop(uid)
        if held.rollouter is not None:
            del self._rollouters[held.rollouter].leases[held.number]
        self.outstanding -= isinstance(held.prompt, TrainingPrompt)
        return held
