"""The lease of a prompt group, as a rollouter requests and returns it, and the group that comes of it.

**Seals** show the learner, without a question, which rollouter a lease was given to. The dataloader seals each lease
for one incarnation of one rollouter, under a key that it shares with the learner for the whole run. Invariant: a lease
fits only that rollouter, with the uid, number and purpose that were sealed. Either side may start again, and earlier
seals still fit.

**Suspects** are prompts that were in the death of a process (a rollouter, an engine, a worker of an episode host), and
most of them are innocent. After ALONE_FROM deaths a prompt runs alone, so only a later death is its own. A prompt with
``rollout.max_attempts`` deaths of its own is quarantined. One number says all of this: ``Lease.attempt``, the deaths of
a prompt. Deaths in company count up to ALONE_FROM and no further, so the rest of the number are its own. The number
travels with the lease, from holder to holder, and the learner's ledger keeps it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from asyncrl.messages import ROLLOUTER, Count, Done, FinishReason, Message, Request, Uid

ALONE_FROM = 2
"""Deaths from which on a prompt runs alone."""
TokenRole = Literal["sampled", "context", "repeated"]
"""Maker of a token: the policy, and it is trained here; anybody else; or the policy, but it is trained in an earlier
sequence of the trajectory, or never (an auxiliary call)."""


class VersionSpan(Struct, gc=False, frozen=True, array_like=True):
    """Tokens [start, end) were sampled under ``version``; ``mixed_kv`` over an older KV cache.

    The version of tokens that are not sampled is -1.
    """

    version: int
    start: int
    end: int
    mixed_kv: bool = False
    role: TokenRole = "sampled"


class Turn(Struct, gc=False, frozen=True, array_like=True):
    """One answer of the policy: tokens [start, end) of its sequence, all of them sampled."""

    start: int
    end: int
    past_reward: float = 0.0
    """Turn rewards of the trajectory that this answer cannot have brought about: all but its own and those of the turns
    that come after it on a path of the conversation."""


class Sequence(Struct, gc=False, kw_only=True):
    """A path through a conversation, as the policy saw it: T tokens after the prompt, S of them sampled."""

    prompt_ids: np.ndarray | None = None
    """int32 [P], P > 0, the tokens before the first sampled one; None: the prompt of the lease."""
    tokens: np.ndarray
    """int32 [T]; the first is sampled, or repeated."""
    logprobs: np.ndarray
    """float32 [S], nats: of the policy that sampled each token of role ``sampled``, in their order."""
    spans: list[VersionSpan]
    """Contiguous, covering [0, T)."""
    turns: list[Turn] = []
    """The answers in it, ascending; empty: all of it is one."""


class Lease(Struct, gc=False, frozen=True, kw_only=True):
    """The lease of one prompt group. It ends by delivery, return, or its holder's death."""

    uid: Uid
    """EPOCH-INDEX of a training prompt; NAME@ROUND-INDEX of an eval prompt."""
    number: Count = field(name="grant")
    """Number of the lease, counted per rollouter incarnation from 1. Checkpoints hold it as ``grant``."""
    purpose: str
    """train, or eval/NAME."""
    epoch: Count
    index: Count
    param_version: int
    """The newest version published at the lease."""
    attempt: Count = 0
    """Deaths of engines and rollouters that its prompt was in, see ``after_death``."""
    prompt_ids: np.ndarray
    """int32 [P]."""
    prompt: str
    """The prompt as text."""
    row: dict[str, Any]
    """The dataset row, as the reward function sees it."""
    samples: Annotated[int, Meta(ge=1)]
    temperature: float
    max_tokens: Annotated[int, Meta(ge=1)]
    seal: str = ""
    """Seal that shows the learner which rollouter it was leased to (``fits``); empty without a key."""


class NewLeases(Message, frozen=True, kw_only=True):
    """New leases; empty if there was none in time, ``closed`` if there will never be one again."""

    leases: list[Lease] = []
    closed: bool = False


class RequestLeases(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: request leases of prompt groups. Parked until there is one.

    Leases above ``seen`` are sent again first, so a lost reply loses nothing.
    """

    reply = NewLeases
    senders = ROLLOUTER
    idle = True
    seen: Count
    """The highest lease received by this incarnation of the rollouter."""
    free_groups: Annotated[int, Meta(ge=1)]
    """Number of further groups that it can hold, those above ``seen`` included."""
    served_version: int
    """The oldest version that its engines serve; -1 before the first."""
    holding: list[Uid] = []
    """Uids that it holds. Nothing is left of its earlier incarnations."""
    number: Count = 0
    """Number of the call, from 1 in each incarnation of the rollouter; 0 if it has none.

    A request that a later one has overtaken, or that got a lease before, gets no new leases.
    """


class ReturnLeases(Request, frozen=True, kw_only=True):
    """Rollouter to dataloader: these groups were not generated; lease them to another rollouter."""

    reply = Done
    senders = ROLLOUTER
    uids: list[Uid]
    leaving: bool = False
    """It asks for nothing any more and holds nothing but ``holding``; what else it was leased is with the learner, or
    was never received. Said when it begins to leave, and again when it ends.
    """
    holding: list[Uid] = []
    """Uids of the groups that it may still deliver while it leaves."""


class Trajectory(Struct, gc=False, kw_only=True):
    """The product of one episode: the unit of reward, baseline, counting and ledger."""

    sample: Count
    sequences: Annotated[list[Sequence], Meta(min_length=1)]
    """Each sampled token has that role in one of them. Their order follows from what was asked, and not from when."""
    messages: list[dict[str, Any]] = []
    """The main line of the conversation, as in OpenAI's chat completions; empty where a prompt has one response."""
    branches: list[list[dict[str, Any]]] = []
    """The conversation's other ends, each from its first message."""
    finish_reason: FinishReason
    text: str
    """The response; of a conversation the last answer."""
    reward: float | None = None
    components: dict[str, float] = {}
    resumes: Count = 0
    """Times that its generation was aborted and taken up again."""
    attempts: Annotated[int, Meta(ge=1)] = 1
    turns: Count = 0
    """Answers of the policy, also those that are not trained; 0 where a prompt has one response."""
    forks: dict[str, Count] = {}
    """Calls of the policy whose context did not continue an earlier answer, by cause."""
    stage_s: dict[str, float] = {}
    """Seconds of the episode by what it was at: start, queue, engine, paused, tool, user, close."""
    generate_s: float = 0.0
    score_s: float = 0.0


class Group(Struct, gc=False, frozen=True, kw_only=True):
    """A finished prompt group: scored trajectories, or the reason of its failure."""

    lease: Lease = field(name="ticket")
    """Checkpoints hold it as ``ticket``."""
    trajectories: list[Trajectory]
    failure: str | None = None
    """Set when the group is to be quarantined."""
    dropped: Count = 0
    """Trajectories left out under on_failed_trajectory = drop."""
    failed_attempts: Count = 0
    """Attempts at its trajectories that failed, also where a later one went well."""


def sealed(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> Lease:
    """The lease as this rollouter gets it."""
    return msgspec.structs.replace(lease, seal=_seal(key, lease, rollouter, incarnation))


def fits(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> bool:
    """Whether this rollouter got the lease as it stands."""
    return hmac.compare_digest(_seal(key, lease, rollouter, incarnation).encode(), lease.seal.encode())


def _seal(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> str:
    said = [lease.uid, lease.number, lease.purpose, rollouter, incarnation]
    return hmac.new(key, msgspec.msgpack.encode(said), hashlib.sha256).hexdigest()


def after_death(deaths: int, *, alone: bool) -> int:
    """The deaths of a prompt after one more, in company or alone."""
    return deaths + 1 if alone else max(deaths, min(deaths + 1, ALONE_FROM))


def runs_alone(deaths: int) -> bool:
    """Whether nothing may be generated beside the prompt."""
    return deaths >= ALONE_FROM


def verdict(deaths: int, max_attempts: int, reason: str = "") -> str | None:
    """Why the prompt may not run again; None while it may. ``reason`` is that of its last death."""
    own = deaths - ALONE_FROM
    if own < max_attempts:
        return None
    last = f"; the last time: {reason}" if reason else ""
    return (
        f"its engine or rollouter died {own} times while this prompt alone was generated (rollout.max_attempts){last}"
    )
