"""The values of a prompt group: its lease, its trajectories and its outcome."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, field

from asyncrl.messages import Count, FinishReason, Uid

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
    """Deaths of engines and rollouters that its prompt was in, counted by messages/suspects.py."""
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
    """Seal that shows the learner which rollouter it was leased to (seals.py); empty without a key."""


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


class ConcludedEpochs(Struct, gc=False, frozen=True, kw_only=True):
    """Consecutive epochs in which the same prompts have an outcome."""

    first: Count
    epochs: Count
    """Number of the epochs; more than one only where ``bits`` has at most one byte."""
    below: Count
    """Multiple of 8: all prompts with a smaller index have an outcome."""
    bits: bytes
    """Bits of prompts; bit k of byte j is the index below + 8 * j + k. The first byte is not 255, the last not 0."""


class LedgerState(Struct, gc=False, frozen=True, kw_only=True):
    """The learner's word on the outcome of every prompt; see ledger.py."""

    attempts: dict[Uid, Count] = {}
    """Lease.attempt of prompts without an outcome; absent where it is 0."""
    first_epoch: Count = 0
    """The prompts of earlier epochs were others: nothing is leased from them any more."""
    concluded: list[ConcludedEpochs] = []
    """Outcomes by epochs, ascending; an epoch in which no prompt has an outcome is in none."""
    counts: dict[Literal["trained", "filtered", "quarantined", "left_out"], Count] = {}
    """Prompts with an outcome, by outcome, over all epochs."""


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
