"""A set of prompts ready to be leased: rows with their tokens.

Invariant: ids, text and row of an index never change. A row whose prompt cannot be tokenized ends the reading with
DataError (file and line). Under on_bad_row = "skip" it is left out, as if it were not there. A prompt over
max_prompt_tokens keeps its index and is left out before a lease, which is no failure. Fails with TooFewUsable when no
prompt is left, or more than max_left_out_fraction is left out; with ConfigError if the model has no chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncrl.config import Config
from asyncrl.config.training import DataConfig
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.dataloader.sources import (
    MEND,
    BadRow,
    DataRow,
    Dataset,
    TooFewUsable,
    fingerprint_of,
    nothing_usable,
    unpack,
)
from asyncrl.text.chat.prompt import PromptEncoder
from asyncrl.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Remark:
    """A fact that the user must know of a set that can be used."""

    kind: Literal["bad_rows", "too_long"]
    told: str
    fix: str


class PromptSet:
    """The prompts of one dataset, by index.

    Built in batches of some rows by ``tokenize``, which blocks and belongs on a thread; complete when it says so.
    ``run`` is the configuration of the run, whose chat and episode settings count; by default they are the defaults.
    """

    def __init__(self, dataset: Dataset, config: DataConfig, tokenizer: Tokenizer, run: Config | None = None) -> None:
        self.fingerprint = dataset.fingerprint
        self.skipped = dataset.skipped
        self.oversize: set[int] = set()
        """Indices of prompts over max_prompt_tokens."""
        self.longest = (0, "")
        """Tokens and place of the longest prompt."""
        self.place = ""
        """FILE:LINE of the last row that was tokenized."""
        self._first_skipped = dataset.first_skipped
        self._rows = dataset.rows
        """Rows to be tokenized; emptied once all are."""
        self._left_out: set[int] = set()
        """Places in ``_rows`` of those that cannot be tokenized."""
        self._next = 0
        self._packed: list[bytes] = []
        self._config = config
        self._encoder = PromptEncoder(tokenizer, config, run)
        self._ids: list[np.ndarray] = []
        self._texts: list[str] = []

    def __len__(self) -> int:
        """Prompts so far; all of them once the set is complete."""
        return len(self._ids)

    def tokenize(self, count: int) -> bool:
        """Tokenize the next ``count`` prompts; True once all are. Raises DataError or ConfigError."""
        config = self._config
        for row in self._rows[self._next : self._next + count]:
            number, self._next = self._next, self._next + 1
            self.place = f"{row.path}:{row.line}"
            try:
                ids, text = self._encode(row)
            except BadRow as problem:
                if config.on_bad_row == "error":
                    raise DataError(str(problem), path=row.path, line=row.line, fix=MEND) from None
                self.skipped += 1
                self._left_out.add(number)
                self._first_skipped = self._first_skipped or f"{self.place}: {problem}"
                continue
            self.longest = max(self.longest, (len(ids), self.place), key=lambda found: found[0])
            if len(ids) > config.max_prompt_tokens:
                # It keeps its index, so that max_prompt_tokens moves no other prompt in the order; it is never asked
                # for its tokens.
                self.oversize.add(len(self))
                ids, text = [], ""
            self._ids.append(np.array(ids, np.int32))
            self._texts.append(text)
            self._packed.append(row.packed)
        if self._next < len(self._rows):
            return False
        self._complete()
        return True

    def _encode(self, row: DataRow) -> tuple[list[int], str]:
        """Token ids and text of a row's prompt. Raises BadRow, and ConfigError for what is no fault of the row."""
        try:
            ids, text = self._encoder(row.prompt, row.tools)
        except ConfigError:
            raise
        except ValueError as error:
            raise BadRow(str(error)) from None
        if not ids:
            raise BadRow("the prompt has no tokens")
        return ids, text

    def _complete(self) -> None:
        path = self._rows[0].path
        if self._left_out:
            self.fingerprint = fingerprint_of(
                row for number, row in enumerate(self._rows) if number not in self._left_out
            )
        if not len(self):
            raise nothing_usable(path, self._first_skipped)
        if len(self.oversize) == len(self):
            raise TooFewUsable(
                f"every prompt is over data.max_prompt_tokens = {self._config.max_prompt_tokens}; the longest has "
                f"{self.longest[0]} tokens",
                path=path,
                fix="raise data.max_prompt_tokens, or shorten the prompts",
            )
        self._check_share(path)
        self._rows = []

    def _check_share(self, path: str) -> None:
        """Raises TooFewUsable where more than max_left_out_fraction is left out."""
        config, rows, left_out = self._config, len(self) + self.skipped, len(self.oversize) + self.skipped
        if left_out <= config.max_left_out_fraction * rows:
            return
        parts, mends = [], []
        if self.oversize:
            tokens, place = self.longest
            over = f"{len(self.oversize):,} have more than data.max_prompt_tokens = {config.max_prompt_tokens} tokens"
            parts.append(f"{over} (the longest has {tokens}: {place})")
            mends.append("raise data.max_prompt_tokens or shorten the prompts")
        if self.skipped:
            parts.append(f"{self.skipped:,} cannot be used (the first: {self._first_skipped})")
            mends.append("mend the rows")
        raise TooFewUsable(
            f"{_share(left_out, rows)} rows are left out, more than data.max_left_out_fraction = "
            f"{config.max_left_out_fraction:g} allows: {'; '.join(parts)}",
            path=path,
            fix=f"{'; '.join(mends)}; or raise data.max_left_out_fraction if the rest is enough",
        )

    def remarks(self, key: str) -> list[Remark]:
        """Remarks on the prompts so far that are left out; ``key`` is the set's in the configuration."""
        found = []
        if self.skipped:
            share = _share(self.skipped, self.skipped + len(self))
            told = f'{share} rows cannot be used and are left out ({key}.on_bad_row = "skip")'
            found.append(Remark("bad_rows", f"{told}; the first: {self._first_skipped}", "mend them, or leave it so"))
        if self.oversize:
            tokens, place = self.longest
            told = (
                f"{_share(len(self.oversize), len(self))} prompts have more than {key}.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens} tokens and are left out; the longest has {tokens} ({place})"
            )
            found.append(Remark("too_long", told, f"raise {key}.max_prompt_tokens, shorten them, or leave it so"))
        return found

    @property
    def admissible(self) -> tuple[int, ...]:
        """Indices of the prompts that may be leased."""
        return tuple(index for index in range(len(self)) if index not in self.oversize)

    def prompt(self, index: int) -> tuple[np.ndarray, str, dict[str, Any]]:
        """(ids int32 [P], text, row) of a prompt that may be leased."""
        assert index not in self.oversize
        return self._ids[index], self._texts[index], unpack(self._packed[index])


def _share(count: int, total: int) -> str:
    """The count with its share of the total, as in "40 of 200 (20 %)"."""
    return f"{count:,} of {total:,} ({100 * count / total:.2g} %)"
