"""Supervised training on conversations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, OptionalPath, Positive, Section


class SftConfig(Section):
    """Supervised training on conversations: steps before the first version, and a term of each later step's loss."""

    data: OptionalPath = None
    """JSON lines, a file or a glob: rows of {"messages": [...]}, with "tools" if the chat template has them, or of
    {"prompt": ..., "completion": ...}, tokenized as data.template says. Assistant messages are trained, except those
    with "weight": 0."""
    warm_steps: NonNegative = 0
    """Supervised steps before version 0 is published."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the supervised term in each step of reinforcement learning; 0 trains warm steps alone."""
    batch: Positive = 32
    """Conversations of a supervised step or term."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of the warm steps, which have their own optimizer; by default learner.lr."""
    rise_steps: NonNegative = 0
    """Warm steps of linear warm-up; then the rate falls linearly to 0."""
    max_tokens: Positive | None = None
    """Longest sequence of a conversation; by default the longest that the run samples."""
    on_long: Literal["error", "cut"] = "error"
    """A longer sequence refuses the start with file and line, or is cut to max_tokens without its end token."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used refuses the start with file and line, or is counted and skipped."""

    @property
    def is_on(self) -> bool:
        """Whether anything is trained by it."""
        return self.warm_steps > 0 or self.weight > 0
