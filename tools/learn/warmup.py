"""The warm-up: supervised training on a teacher's conversations, until the model has their form.

Only what the assistant says, with its end token, is learned: what the chat template puts before it is context.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools.learn.recipe import Message, Recipe, Row

IGNORED = -100
"""The label of a token that is not learned."""
BETAS = (0.9, 0.99)
SHOWN_EVERY = 50


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rows: Sequence[Row]) -> float:
    """Train ``model`` in place on demonstrations of ``rows``; returns the last loss."""
    settings, demonstrate = recipe.settings, recipe.demonstrate
    assert demonstrate is not None
    teacher = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=0.0)
    start, last = time.monotonic(), 0.0
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / settings.rise)
        shown = [demonstrate(row, teacher) for row in teacher.choices(rows, k=settings.batch)]
        ids, labels = _batch(tokenizer, shown, recipe)
        # Padding is on the right, behind everything that is learned: causal attention needs no mask.
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = loss.item()
        if step % SHOWN_EVERY == 0:
            print(f"  warm-up step {step}: loss {last:.3f} ({time.monotonic() - start:.0f} s)", flush=True)
    return last


def labelled(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], recipe: Recipe
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and labels: IGNORED for tokens that are not the assistant's."""

    def rendered(count: int, *, answer: bool) -> list[int]:
        options: dict[str, Any] = {"tools": list(recipe.tools) or None, "add_generation_prompt": answer}
        ids: Any = tokenizer.apply_chat_template(list(messages[:count]), tokenize=True, return_dict=False, **options)
        return list(ids)

    ids = rendered(len(messages), answer=False)
    labels = [IGNORED] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(rendered(at, answer=True)), len(rendered(at + 1, answer=False))
            labels[start:end] = ids[start:end]
    return ids, labels


def _batch(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [batch, length]."""
    rows = [labelled(tokenizer, messages, recipe) for messages in conversations]
    longest = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
    )
