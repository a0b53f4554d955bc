"""Reads and checks the conversations of ``sft.data``, encodes them, and assigns them to steps.

Invariant: the conversations of a supervised step are a pure function of (all conversations, run.seed, sft.batch, its
number). So a resumed run continues with the next conversations. Each epoch has every conversation once.

Fails with DataError, which names file and line of the first unusable row, and with ConfigError if the model's chat
template cannot be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.core.errors import DataError
from asyncrl.data.rows import EpochOrder, read_jsonl
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.sft.encoding import BadConversation, Encoded, Encoder, LongConversation
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of

MEND = 'mend it, or leave such rows out with sft.on_bad_row = "skip"'
LONG = 'raise sft.max_tokens if the memory allows it, or set sft.on_long = "cut"'


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A conversation as tokens. ``place`` is the position of its row, FILE:LINE."""

    place: str
    sequences: list[Encoded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """All conversations of a run."""

    rows: list[TokenizedRow]
    fingerprint: str
    """Digest of the tokens and of the positions that are trained, in hexadecimal."""
    seed: int
    batch: int
    """Conversations of each step."""
    skipped: int = 0
    """Rows left out under sft.on_bad_row = "skip"."""
    first_skipped: str = ""
    """Position and problem of the first such row, as FILE:LINE: PROBLEM."""

    def of_step(self, number: int) -> list[TokenizedRow]:
        """Return the conversations of supervised step ``number``, counted from 1; sft.warm_steps come first."""
        order = EpochOrder(self.fingerprint, self.seed, len(self.rows))
        begin = (number - 1) * self.batch
        places = (order.at(position) for position in range(begin, begin + self.batch))
        return [self.rows[index] for _, index in places]

    def epochs(self, number: int) -> float:
        """Return the number of epochs trained after supervised step ``number``, as a fraction."""
        return number * self.batch / len(self.rows)


def make_encoder(config: Config, tokenizer: Tokenizer) -> Encoder:
    """Make the encoder of a run. Raises ConfigError."""
    if tokenizer.template_text(with_tools=False) is None:
        return Encoder(config, tokenizer, None)
    return Encoder(config, tokenizer, make_renderer(config, tokenizer))


def load_conversations(
    config: Config, tokenizer: Tokenizer | None = None, *, goes_on: Callable[[], bool] = lambda: True
) -> Conversations:
    """Read and encode the rows of sft.data, in order, until ``goes_on`` returns False after a usable row.

    An unusable row raises DataError, or is skipped and counted under sft.on_bad_row = "skip". Raises DataError if no
    row is usable; ConfigError if the chat template cannot be used.
    """
    sft = config.sft
    assert sft.data is not None
    tokenizer = tokenizer_of(config) if tokenizer is None else tokenizer
    encode = make_encoder(config, tokenizer)
    digest = hashlib.blake2b(digest_size=16)
    rows: list[TokenizedRow] = []
    skipped, first_skipped = 0, ""
    for raw in read_jsonl(sft.data):
        try:
            if raw.problem:
                raise BadConversation(raw.problem)
            sequences = encode(raw.value)
        except BadConversation as error:
            if sft.on_bad_row == "error":
                fix = LONG if isinstance(error, LongConversation) else MEND
                raise DataError(str(error), path=raw.path, line=raw.line, fix=fix) from None
            skipped += 1
            first_skipped = first_skipped or f"{raw.path}:{raw.line}: {error}"
            continue
        rows.append(TokenizedRow(f"{raw.path}:{raw.line}", sequences))
        for each in sequences:
            # With the lengths, the same tokens divided into other sequences have another digest.
            digest.update(np.array([len(each.ids), len(each.trained)], np.int64).tobytes())
            digest.update(each.ids.tobytes())
            digest.update(each.trained.tobytes())
        if not goes_on():
            break
    if not rows:
        problem = f"none of its {skipped} rows can be used, the first: {first_skipped}" if skipped else "holds no rows"
        raise DataError(problem, path=sft.data, fix="give a file of conversations")
    return Conversations(
        rows=rows,
        fingerprint=digest.hexdigest(),
        seed=config.run.seed,
        batch=sft.batch,
        skipped=skipped,
        first_skipped=first_skipped,
    )
