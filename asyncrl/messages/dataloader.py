"""Messages of the learner to the dataloader: outcomes, the supply of prompts, and what follows a restart."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncrl.messages import DATALOADER, LEARNER, Count, Message, Request, Uid
from asyncrl.messages.ledger import LedgerState


class Outcome(Struct, gc=False, frozen=True, array_like=True):
    """The outcome of a group. Only ``trained`` counts towards the gate's T."""

    uid: Uid
    kind: Literal["trained", "filtered", "quarantined", "left_out", "evaluated"]


class OutcomesSeen(Message, frozen=True, kw_only=True):
    """The highest number seen without a gap, and the limit now in force."""

    number: Count
    limit: float
    """Working limit eta_t, in versions."""


class Outcomes(Request, frozen=True, kw_only=True):
    """Learner to dataloader: numbered, acknowledged, repeated until acknowledged."""

    reply = OutcomesSeen
    senders = LEARNER
    number: Annotated[int, Meta(ge=1)]
    """Counts from 1 without gaps; a number already seen is acknowledged and ignored."""
    version: int
    """The newest published version."""
    trained_at_version: Count
    """T(version): groups trained when it was published."""
    outcomes: list[Outcome] = []
    buffered_groups: Count = 0
    """Groups in the learner's buffer when its last step began, beyond that step's own."""
    waited: bool = False
    """Whether the learner has waited for groups since the last report."""
    step_began: bool = False
    """Whether buffered_groups and waited speak of a step that has begun since the last report."""
    finished: bool = False
    """The last step is trained: nothing more is to be leased for training."""


class Rejected(Struct, gc=False, frozen=True, array_like=True):
    """A prompt that the dataloader will not lease (again)."""

    uid: Uid
    reason: str
    kind: Literal["quarantined", "left_out"] = "quarantined"
    """The outcome that the learner records for it."""


class Supply(Message, frozen=True, kw_only=True):
    """The state of the supply of prompts."""

    number: int
    exhausted: bool
    """Nothing is left to lease for training."""
    outstanding: Count
    """Groups leased for training and not yet reported or returned."""
    rejected: list[Rejected] = []
    """Prompts over max_prompt_tokens and prompts of too many deaths, until the learner reports their outcome."""
    attempts: dict[Uid, Count] = {}
    """LedgerState.attempts, as the dataloader knows it."""
    evals: dict[str, int] = {}
    """eval/NAME@ROUND: number of its prompts, for every round opened so far and not yet closed."""


class WatchSupply(Request, frozen=True, kw_only=True):
    """Learner to dataloader, parked until the supply's state is newer than ``seen``."""

    reply = Supply
    senders = LEARNER
    idle = True
    seen: int = -1


class PromptSample(Message, frozen=True, kw_only=True):
    """The prompts asked for; fewer if fewer may be leased."""

    prompts: list[np.ndarray]
    """int32 [P] each, P > 0."""


class SamplePrompts(Request, frozen=True, kw_only=True):
    """Learner to dataloader: a few training prompts, the same each time."""

    reply = PromptSample
    senders = LEARNER
    count: Annotated[int, Meta(ge=1, le=256)]


class EvalRound(Struct, gc=False, frozen=True, kw_only=True):
    """An open round of evaluation, as the learner knows it."""

    name: str
    """NAME@ROUND."""
    held: list[Uid] = []
    """Its groups that the learner has."""


class Resumed(Message, frozen=True, kw_only=True):
    """The gate is open."""

    fingerprint: str
    seed: int
    limit: float
    """Working limit eta_t, in versions."""
    first_epoch: Count = 0
    """LedgerState.first_epoch from here on: the ledger takes it over."""
    prompts: Count = 0
    """Number of the prompts."""


class Restored(Request, frozen=True, kw_only=True):
    """Learner to dataloader: this is where the run stands; every other belief is void.

    Sent at the start of a learner, and to a dataloader that has started again (which asks for it with the error
    ``restore_needed``). The gate is shut until it is answered: the rollouters have then said which leases they hold.
    Error ``changed`` when the prompts, or the seed of their order, are not those of the ledger and the user has not
    allowed that.
    """

    reply = Resumed
    senders = LEARNER
    version: Count
    """Newest published version, of the weights as they are now. Nothing is leased to an engine that serves less."""
    trained_at_version: Count
    """T(version)."""
    groups_left: Count
    """Groups to be trained until the end of the run, claims included."""
    outcomes_number: Count
    """The next report of outcomes has the number after this one; what came before is in the ledger."""
    ledger: LedgerState
    claims: list[Uid] = []
    """Groups in training and in the buffer."""
    fingerprint: str = ""
    """Fingerprint of the prompts that the ledger speaks of; empty at the start of a run."""
    seed: int = -1
    """Seed of their order; -1 at the start of a run."""
    prompts: Count = 0
    """Number of the prompts; 0 where that is not known."""
    rounds_closed: list[str] = []
    """Rounds of evaluation that are over, as NAME@ROUND."""
    rounds_open: list[EvalRound] = []
    finished: bool = False
    """The last step is trained."""


class LeasesHeld(Message, frozen=True, kw_only=True):
    """All leases that the learner has not acknowledged, those of finished groups included."""

    seen: Count
    """The highest number of a lease that was received."""
    served_version: int
    attempts: dict[Uid, Count]
    """Lease.attempt of each lease that is held, with the deaths since then."""
    leaving: bool = False
    """The rollouter takes no lease above ``seen``."""


class OpenLeases(Request, frozen=True, kw_only=True):
    """Dataloader to rollouter: which leases do you hold?

    Before it answers, the rollouter takes ``learner`` for the living incarnation of learner/0: an acknowledgement of
    an older one releases nothing any more, and what was delivered to an older one is delivered again.
    """

    reply = LeasesHeld
    senders = DATALOADER
    learner: Count
