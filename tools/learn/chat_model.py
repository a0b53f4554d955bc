"""A small chat model, its tokenizer and its warm-up: supervised training on a teacher's conversations.

One token a character, one for each mark of the chat template. The warm-up goes on until the model has the form of the
conversations. Only what the assistant says, with its end token, is learned: the rest is context.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools import small_model
from tools.learn.recipe import Message, Recipe, Row
from tools.small_model import IGNORED, train
from tools.small_model import make_model as make_model
from tools.small_model import save as save

SHOWN_EVERY = 50
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ("<tool_call>", "</tool_call>")
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""Printable ASCII, so that any template's words have tokens."""
TEMPLATE = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""An answer and the end token that was sampled with it are followed by the next message and nothing else."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The end token has id 0. A character beyond CHARACTERS is an error."""
    tokenizer = small_model.make_tokenizer(END, CHARACTERS, special=ROLES, words=CALL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


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
