"""A set of prompts ready to be granted: rows with their tokens.

Invariant: ids, text and row of an index never change. Fails with DataError, naming file and line, on a prompt that
cannot be tokenized, and when not one is within max_prompt_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from asyncrl.config.training import DataConfig
from asyncrl.dataloader.rows import Dataset, unpack
from asyncrl.errors import DataError
from asyncrl.tokenizer import Tokenizer


class PromptSet:
    """The prompts of one dataset, by index.

    Built in batches of some rows by ``tokenize``, which blocks and belongs on a thread; complete when it says so.
    """

    def __init__(self, dataset: Dataset, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.fingerprint = dataset.fingerprint
        self.skipped = dataset.skipped
        self.oversize: set[int] = set()
        """Indices of prompts over max_prompt_tokens."""
        self._longest = (0, "")
        """Tokens and place of the longest prompt."""
        self._size = len(dataset.rows)
        self._rows = dataset.rows
        """Emptied once all are tokenized."""
        self._packed: list[bytes] = []
        self._config = config
        self._tokenizer = tokenizer
        self._source: Iterator[int] = iter(range(len(dataset.rows)))
        self._ids: list[np.ndarray] = []
        self._texts: list[str] = []

    def __len__(self) -> int:
        return self._size

    def tokenize(self, count: int) -> bool:
        """Tokenize the next ``count`` prompts; True once all are. Raises DataError."""
        config = self._config
        for index in islice(self._source, count):
            row = self._rows[index]
            try:
                ids, text = self._tokenizer.encode_prompt(row.prompt, config.template, config.system)
            except ValueError as error:
                raise DataError(str(error), path=row.path, line=row.line) from None
            if not ids:
                raise DataError("the prompt has no tokens", path=row.path, line=row.line)
            self._longest = max(self._longest, (len(ids), f"{row.path}:{row.line}"), key=lambda found: found[0])
            if len(ids) > config.max_prompt_tokens:
                self.oversize.add(index)
                ids, text = [], ""
            self._ids.append(np.array(ids, np.int32))
            self._texts.append(text)
            self._packed.append(row.packed)
        if len(self._ids) < self._size:
            return False
        if len(self.oversize) == self._size:
            raise DataError(
                f"every prompt is over max_prompt_tokens = {config.max_prompt_tokens}; the longest has "
                f"{self._longest[0]} tokens",
                path=self._rows[0].path,
            )
        self._rows = []
        return True

    def told_of_oversize(self, key: str) -> str:
        """For the user: how many prompts are left out, and the longest; empty where none is. ``key``: the data's."""
        if not self.oversize:
            return ""
        tokens, place = self._longest
        return (
            f"{key}: {len(self.oversize)} of {len(self)} prompts have more than {key}.max_prompt_tokens = "
            f"{self._config.max_prompt_tokens} tokens and are left out; the longest has {tokens} ({place}). Raise "
            f"{key}.max_prompt_tokens, or shorten them"
        )

    @property
    def admissible(self) -> tuple[int, ...]:
        """Indices of the prompts that may be granted."""
        return tuple(index for index in range(len(self)) if index not in self.oversize)

    def prompt(self, index: int) -> tuple[np.ndarray, str, dict[str, Any]]:
        """(ids int32 [P], text, row) of a prompt that may be granted."""
        assert index not in self.oversize
        return self._ids[index], self._texts[index], unpack(self._packed[index])
