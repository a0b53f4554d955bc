"""A small chat model and its tokenizer: one token a character, one for each mark of its chat template."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tools import small_model
from tools.small_model import make_model, save

__all__ = ["make_model", "make_tokenizer", "save"]

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
