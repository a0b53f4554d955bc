"""A small chat model and its tokenizer: one token a character, one for each mark of its chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tools.learn.recipe import Settings

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ("<tool_call>", "</tool_call>")
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""Printable ASCII, so that any template's words have tokens."""
INITIAL_STD = 0.05
"""Standard deviation of the initial weights: with transformers' 0.02 a model this narrow is slow to start learning."""
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
    vocabulary = {END: 0} | {token: at for at, token in enumerate((*ROLES, *CALL, *CHARACTERS), start=1)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (END, *ROLES)])
    # Text that a parser reads, so no special tokens.
    backend.add_tokens([AddedToken(token, normalized=False) for token in CALL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(settings: Settings, vocabulary: int) -> Qwen2ForCausalLM:
    """A Qwen2 with seeded initial weights, float32. Its embeddings are not tied, which vLLM on CPU needs."""
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=settings.width,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=settings.positions,
            initializer_range=INITIAL_STD,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            dtype="float32",
        )
    )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write both in the layout of a Hugging Face model folder."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
