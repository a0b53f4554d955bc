"""The warm-up: supervised training on a teacher's conversations, until the model has their form.

Only what the assistant says, with its end token, is learned: what the chat template puts before it is context.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools.learn.recipe import Message, Recipe, Row
from tools.small_model import IGNORED, train

SHOWN_EVERY = 50


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rows: Sequence[Row]) -> float:
    """Train ``model`` in place on demonstrations of ``rows``; returns the last loss."""
    settings, demonstrate = recipe.settings, recipe.demonstrate
    assert demonstrate is not None
    teacher = random.Random(settings.seed)
    shown = ([demonstrate(row, teacher) for row in teacher.choices(rows, k=settings.batch)] for _ in count())
    batches = ([labelled(tokenizer, messages, recipe) for messages in batch] for batch in shown)
    start, last = time.monotonic(), 0.0
    for step, last in enumerate(train(model, settings, islice(batches, settings.steps)), 1):
        if step % SHOWN_EVERY == 0:
            print(f"  warm-up step {step}: loss {last:.3f} ({time.monotonic() - start:.0f} s)", flush=True)
    return last


def labelled(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], recipe: Recipe
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and labels: IGNORED for tokens that are not the assistant's."""

    def rendered(shown: int, *, answer: bool) -> list[int]:
        options: dict[str, Any] = {"tools": list(recipe.tools) or None, "add_generation_prompt": answer}
        ids: Any = tokenizer.apply_chat_template(list(messages[:shown]), tokenize=True, return_dict=False, **options)
        return list(ids)

    ids = rendered(len(messages), answer=False)
    labels = [IGNORED] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(rendered(at, answer=True)), len(rendered(at + 1, answer=False))
            labels[start:end] = ids[start:end]
    return ids, labels
