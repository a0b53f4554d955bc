"""Tasks of reasoning-gym with several tries: env = "asyncrl.episodes.adapters.reasoning_gym:ReasoningGym".

With data.source = "reasoning_gym" the row is the task. Otherwise episode.options names it: ``task`` (chain_sum) and
``task_options``; the seed then chooses the item. The policy has ``tries`` answers, and the last one counts. ``tag``
encloses an answer. Source: reasoning-gym 0.1.25.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

from asyncrl.episodes.playing.client import Task

OF_AN_ITEM = ("task", "seed", "size", "index")
"""Columns that every row of data.source = "reasoning_gym" has."""


class ReasoningGym:
    """One item."""

    def __init__(
        self,
        task: str | None = None,
        task_options: Mapping[str, Any] | None = None,
        tries: int = 1,
        tag: str = "answer",
    ) -> None:
        if tries < 1:
            raise ValueError(f"tries must be at least 1, got {tries}")
        self._task, self._options, self._tries, self._tag = task, dict(task_options or {}), tries, tag
        self._scorer: Any = None
        self._item: Any = None

    def reset(self, task: Task) -> str:
        """Make the item that the row, or the seed, names; returns its question."""
        row = task.row
        name, options, seed, size, index = self._task, self._options, task.seed % 2**31, 1, 0
        # A row of another source may have columns of the same names, of other meanings.
        if all(key in row for key in OF_AN_ITEM):
            name, seed, size, index = (row[key] for key in OF_AN_ITEM)
            options = row.get("options", self._options)
        if name is None:
            raise ValueError('the row has no task: set data.source = "reasoning_gym", or episode.options.task')
        self._scorer = create_dataset(name, **{**options, "size": size, "seed": seed})
        self._item = self._scorer[index]
        return f"{self._item['question']}\nGive the answer in <{self._tag}>...</{self._tag}>."

    def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Score an answer. The episode ends with that score if it is full, or if no try is left."""
        self._tries -= 1
        answer = extract_answer(message["content"], tag_name=self._tag)
        score = float(self._scorer.score_answer(answer, self._item))
        if score < 1.0 and self._tries:
            return f"That is not right. You have {self._tries} more tries.", None, False
        return "", score, True
