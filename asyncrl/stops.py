"""Which tokens and strings end a response, beside the model's own end-of-sequence token.

A special token never shows in the text of a response, so a string of ``rollout.stop`` that is one is looked for by its
id, as those of ``rollout.stop_token_ids`` are: engines end at them as at the end-of-sequence token, which is sampled,
trained and left out of the text. Every other string is looked for in the text (rollouter/response.py).

Fails with ConfigError, naming the key, for an id that the model does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stops:
    """The ends of a response, beside its longest length."""

    token_ids: tuple[int, ...] = ()
    """Ascending."""
    strings: tuple[str, ...] = ()
    """Looked for in the text."""


def resolve_stops(rollout: RolloutConfig, tokenizer: Tokenizer) -> Stops:
    """``rollout.stop`` and ``rollout.stop_token_ids`` in the terms of a tokenizer. Raises ConfigError."""
    size = tokenizer.vocabulary
    strangers = [id for id in rollout.stop_token_ids if id >= size]
    if strangers:
        listed = ", ".join(map(str, strangers))
        raise ConfigError([f"rollout.stop_token_ids: {listed}: no token of the model, whose ids are 0 to {size - 1}"])
    special = tokenizer.special_ids
    ids = {*rollout.stop_token_ids, *(special[text] for text in rollout.stop if text in special)}
    return Stops(tuple(sorted(ids)), tuple(text for text in rollout.stop if text not in special))
