"""Tokens and strings that end a response, in addition to the model's own end-of-sequence token.

A special token never appears in the text of a response. If a string of ``rollout.stop`` is a special token, its id is a
stop token, as those of ``rollout.stop_token_ids`` are. Engines treat such an id as the end-of-sequence token: it is
sampled, trained and left out of the text. All other strings are searched in the text (rollouter/serving/generation.py).

Fails with ConfigError, naming the key, for an id that the model does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.rollout import RolloutConfig
from asyncrl.core.errors import ConfigError
from asyncrl.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop tokens and stop strings of a response."""

    token_ids: tuple[int, ...] = ()
    """Ids of the tokens, ascending."""
    strings: tuple[str, ...] = ()
    """Strings that are looked for in the text."""


def resolve_stops(rollout: RolloutConfig, tokenizer: Tokenizer) -> Stops:
    """Convert ``rollout.stop`` and ``rollout.stop_token_ids`` to ids and strings. Raises ConfigError."""
    size = tokenizer.vocabulary
    unknown = [id for id in rollout.stop_token_ids if id >= size]
    if unknown:
        listed = ", ".join(map(str, unknown))
        raise ConfigError([f"rollout.stop_token_ids: {listed}: no token of the model, whose ids are 0 to {size - 1}"])
    return with_strings(Stops(token_ids=tuple(rollout.stop_token_ids)), rollout.stop, tokenizer)


def with_strings(stops: Stops, strings: Sequence[str], tokenizer: Tokenizer) -> Stops:
    """Return ``stops`` with more ``strings``; a string that is a special token is added as its id."""
    special = tokenizer.special_ids
    ids = {*stops.token_ids, *(special[text] for text in strings if text in special)}
    return Stops(tuple(sorted(ids)), (*stops.strings, *(text for text in strings if text not in special)))
