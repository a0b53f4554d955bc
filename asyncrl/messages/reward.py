"""Requests of rollouters to the reward pool."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from asyncrl.messages import ROLLOUTER, Count, FinishReason, Message, Request, Uid

TIMED_OUT_COMPONENT = "timed_out"
"""The one component of a reward that the function did not give: that of reward.on_timeout."""
PENALTY_COMPONENT = "overlong_penalty"
"""Component that ``reward.truncated = "penalty"`` has added to a reward, 0 or less."""


class Completion(Struct, gc=False, frozen=True, kw_only=True):
    """A trajectory as a reward function sees it."""

    text: str
    finish_reason: FinishReason
    tokens: Count
    """Number of tokens that the policy sampled."""
    messages: list[dict[str, Any]] = []
    """The conversation of an episode, from its first message to the answer given last, as in OpenAI's chat completions;
    empty where a prompt has one response."""
    branches: list[list[dict[str, Any]]] = []
    """The conversation's other ends, each from its first message."""


class Scores(Message, frozen=True, kw_only=True):
    """One reward a completion, in order. ``components`` may be empty."""

    rewards: list[float]
    components: list[dict[str, float]]
    run_s: float
    """Time spent in the function."""


class Score(Request, frozen=True, kw_only=True):
    """Rollouter to reward pool: score one completion, or a whole group for a group reward."""

    reply = Scores
    senders = ROLLOUTER
    uid: Uid
    prompt: str
    row: dict[str, Any]
    completions: Annotated[list[Completion], Meta(min_length=1)]
    has_worked: bool = False
    """Whether the sender has had rewards of this function before, so that a pool that was started again knows."""
