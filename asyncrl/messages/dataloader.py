"""Messages between the learner and the dataloader, and those for a dataloader's recovery.

Rollouters do not get their prompts by these messages: they send RequestLeases and get NewLeases, both in
messages/groups.py. SamplePrompts is a request of the learner. The gate is the dataloader's rule on when the next group
may be leased (dataloader/gate.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncrl.messages import DATALOADER, LEARNER, Count, Message, Request, Uid
from asyncrl.messages.ledger import Growth, Kind, LedgerState


class Outcome(Struct, gc=False, frozen=True, array_like=True):
    """The outcome of a group. Only kind ``trained`` counts towards T, the gate's number of trained groups."""

    uid: Uid
    kind: Kind | Literal["evaluated"]
    mean: float | None = None
    """Mean reward of the group, for a curriculum; None without one, or without rewards."""
    spread: float = 0.0
    """Its largest minus its smallest reward."""

    @property
    def rewards(self) -> tuple[float, float] | None:
        """Mean and spread, if they are known."""
        return None if self.mean is None else (self.mean, self.spread)


class OutcomesSeen(Message, frozen=True, kw_only=True):
    """``number`` is the highest Outcomes.number that was seen without a gap; ``limit`` is valid from now on."""

    number: Count
    limit: float
    """Working limit eta_t, in versions."""


class Outcomes(Request, frozen=True, kw_only=True):
    """Learner to dataloader: a report of outcomes. It is numbered, and repeated until it is acknowledged."""

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
    """Whether a step has begun since the last report, so that ``buffered_groups`` and ``waited`` are news."""
    finished: bool = False
    """Whether the last step is trained, so that nothing more may be leased for training."""


class Rejected(Struct, gc=False, frozen=True, array_like=True):
    """A prompt that the dataloader will not lease (again)."""

    uid: Uid
    reason: str
    kind: Literal["quarantined", "left_out", "rested"] = "quarantined"
    """The outcome that the learner records for it."""


class DataloaderStatus(Message, frozen=True, kw_only=True):
    """The prompts to come, the rejected ones and the open evaluation rounds; numbered."""

    number: int
    exhausted: bool
    """Whether nothing more is leased for training: no further group is needed, or the run is preempted."""
    outstanding: Count
    """Groups leased for training and not yet reported or returned."""
    rejected: list[Rejected] = []
    """Prompts that are too long, that the curriculum rests, or that have too many deaths. Each is listed until the
    learner reports its outcome."""
    attempts: dict[Uid, Count] = {}
    """LedgerState.attempts, as the dataloader knows it."""
    grown: list[Growth] = []
    """LedgerState.grown, as the dataloader knows it."""
    evals: dict[str, int] = {}
    """Number of prompts of each open round of evaluation, by eval/NAME@ROUND."""


class WatchDataloader(Request, frozen=True, kw_only=True):
    """Learner to dataloader, parked until the dataloader's status is newer than ``seen``."""

    reply = DataloaderStatus
    senders = LEARNER
    idle = True
    seen: int = -1


class PromptSample(Message, frozen=True, kw_only=True):
    """The requested prompts; fewer if fewer may be leased."""

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
    """Uids of its groups that the learner has."""


class Resumed(Message, frozen=True, kw_only=True):
    """The dataloader has taken over the learner's state, and the gate is open."""

    fingerprint: str
    seed: int
    limit: float
    """Working limit eta_t, in versions."""
    first_epoch: Count = 0
    """New value of LedgerState.first_epoch, which the learner's ledger takes over."""
    prompts: Count = 0
    """Number of the prompts."""


class Restored(Request, frozen=True, kw_only=True):
    """Learner to dataloader: the state of the run, which replaces everything that the dataloader assumed.

    Sent at the start of a learner, and to a restarted dataloader (which requests it by the error ``restore_needed``).
    Nothing is leased before the answer. Until then the dataloader asks the rollouters which leases they hold. Error
    ``changed`` if the prompts, or the seed of their order, differ from those of the ledger and the user has not allowed
    that.
    """

    reply = Resumed
    senders = LEARNER
    version: Count
    """Newest published version, that of the present weights. An engine with an older one gets no lease for training."""
    trained_at_version: Count
    """T(version)."""
    groups_left: Count
    """Number of groups still to be trained in this run, including ``claims``."""
    outcomes_number: Count
    """Number of the last report of outcomes; all outcomes up to it are in the ledger."""
    ledger: LedgerState
    claims: list[Uid] = []
    """Uids of the groups that the learner is training or has in its buffer."""
    fingerprint: str = ""
    """Fingerprint of the prompts whose outcomes the ledger has; empty at the start of a run."""
    seed: int = -1
    """Seed of their order; -1 at the start of a run."""
    prompts: Count = 0
    """Number of these prompts; 0 if unknown."""
    rounds_closed: list[str] = []
    """Rounds of evaluation that are over, as NAME@ROUND."""
    rounds_open: list[EvalRound] = []
    finished: bool = False
    """Whether the last step is trained."""


class LeasesHeld(Message, frozen=True, kw_only=True):
    """The rollouter's leases that the learner has not acknowledged, including those of finished groups."""

    seen: Count
    """The highest number of a lease that was received."""
    served_version: int
    attempts: dict[Uid, Count]
    """Deaths of the prompt of each lease that is held, by uid: Lease.attempt and the deaths since then."""
    leaving: bool = False
    """Whether the rollouter leaves, or the run is preempted: it takes no lease above ``seen``."""


class OpenLeases(Request, frozen=True, kw_only=True):
    """Dataloader to rollouter: list the leases that it holds.

    ``learner`` is the living incarnation of learner/0, which the rollouter uses from then on. Acknowledgements of an
    older incarnation release nothing any more, and groups delivered to an older one are delivered again.
    """

    reply = LeasesHeld
    senders = DATALOADER
    learner: Count
