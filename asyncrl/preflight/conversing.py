"""The conversations of ``sft.data``: read and encoded as rank 0 of the learner does, as far as the time goes."""

from __future__ import annotations

import time

from asyncrl.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.preflight.findings import Finding, fail, ok, warn
from asyncrl.preflight.model import window_of
from asyncrl.sft.conversations import load_conversations
from asyncrl.tokenizer import Tokenizer

CONVERSATIONS = "sft.data"


def check_conversations(config: Config, tokenizer: Tokenizer, seconds: float) -> list[Finding]:
    """Read and encode the conversations of sft.data as the learner does, for about so long."""
    window, longest = window_of(config), config.sft.max_tokens
    if window is not None and longest is not None and longest > window:
        told = f"is {longest}, and the model has max_position_embeddings = {window}"
        return [fail("data", told, f"lower it to {window}", key="sft.max_tokens")]
    end = time.monotonic() + seconds
    is_cut = False

    def goes_on() -> bool:
        nonlocal is_cut
        is_cut = time.monotonic() >= end
        return not is_cut

    try:
        found = load_conversations(config, tokenizer, goes_on=goes_on)
    except DataError as error:
        fix = error.fix or f"correct {CONVERSATIONS}, or put the file there on this host"
        return [fail("data", error.told, fix, key=CONVERSATIONS)]
    except ConfigError as error:
        fix = "take a model whose chat template can be used, or rows of prompt and completion"
        return [fail("data", "; ".join(error.problems), fix, key=CONVERSATIONS)]
    lengths = [len(each.ids) for row in found.rows for each in row.sequences]
    told = f"{_counted(len(found.rows))} can be trained; the longest sequence has {max(lengths)} tokens"
    if is_cut:
        told += f"; read up to {found.rows[-1].place} in {seconds:.2g} s, and the run reads the rest"
    if found.skipped:
        told += f"; {_counted(found.skipped)} left out, the first: {found.first_skipped}"
        return [warn("data", told, "mend these rows", key=CONVERSATIONS)]
    return [ok("data", told, key=CONVERSATIONS)]


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"
