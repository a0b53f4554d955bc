"""The task of an episode: a row of the data, and a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one sample; the same for all samples of a prompt but for ``sample`` and ``attempt``."""

    prompt: str
    """Text of the prompt, through the chat template where data.template says so."""
    messages: list[dict[str, Any]]
    """The prompt as the messages that a conversation about it begins with."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools of the row (data.tools_key), as ``client.chat`` takes them."""
    row: dict[str, Any]
    """The dataset row."""
    seed: int
    """Seed, the same for all samples of a prompt in every attempt: they face the same task."""
    uid: str
    """Uid of the prompt."""
    sample: int
    attempt: int
    """Number of the attempt at this sample, from 0."""
    purpose: str = "train"
    """Purpose: train, or eval/NAME."""

    @property
    def episode_id(self) -> str:
        """Id that is the same in every attempt: side effects of an episode may happen once an attempt."""
        return f"{self.uid}/{self.sample}"

    def fields(self) -> dict[str, Any]:
        """All fields, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
