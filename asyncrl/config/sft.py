"""Supervised training on conversations that somebody else wrote."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, OptionalPath, Positive, Section


class SftConfig(Section):
    """Supervised training on conversations: steps before the first version of the weights, and a term of each later
    step's loss."""

    data: OptionalPath = None
    """JSON lines, a file or a glob: rows of {"messages": [...]}, with "tools" where the chat template has them, or of
    {"prompt": ..., "completion": ...}, which become tokens as data.template says. The assistant's messages are trained,
    with the token that ends each; one with "weight": 0 is context."""
    warm_steps: NonNegative = 0
    """Supervised steps before version 0 is published, so that nothing is ever sampled with the weights before them."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the supervised term of each step of reinforcement learning; 0 is warm steps alone."""
    batch: Positive = 32
    """Conversations of a supervised step, and of the supervised term of a step."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of the warm steps; by default learner.lr. Their optimizer begins and ends with them."""
    rise_steps: NonNegative = 0
    """Warm steps over which the learning rate rises to its peak, before it falls linearly to 0."""
    max_tokens: Positive | None = None
    """Longest sequence of a conversation; by default the longest that the run samples: the largest sum of the longest
    prompt and the longest response, or episode.max_context_tokens."""
    on_long: Literal["error", "cut"] = "error"
    """A longer sequence ends the start with file and line, or loses all past max_tokens, its end token with it."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used ends the start with file and line, or is counted and left out."""

    @property
    def is_on(self) -> bool:
        """Whether anything is trained by it."""
        return self.warm_steps > 0 or self.weight > 0
