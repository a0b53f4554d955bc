"""Model folders of a few kilobytes: a byte-level tokenizer, and chat templates like those of well-known families."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from asyncrl.config.load import validate_config
from asyncrl.text.chat.renderer import TemplateRenderer, make_renderer
from asyncrl.text.tokenizer import tokenizer_of

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start|>", "<|header|>", "<|eot|>", "<|eom|>"),
    *("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]"),
)
THINK = ("<think>", "</think>")
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen and Llama 3 split text: newlines go with the punctuation before them, and stay together."""
CORPUS = (
    "assistant user system tool Hello world. What is the weather? assistant:\nuser:\n",
    '<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call> answer.\n\n' + "end.\n\n" * 20,
)

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- ('' if loop.first and not message.content else '\\n') + '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A newline after the end of each message, as the engine never samples it. Shows no tools."""

TOOLS_FIRST = (
    """{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}""" + CHATML
)

TOOLS_LAST = CHATML.replace(
    "{%- if add_generation_prompt %}",
    """{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- if add_generation_prompt %}""",
)
"""Tools come after all messages, so each new message moves them."""

PLAIN_CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
{{ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Knows neither tools nor calls."""

QWEN3 = """{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Reasoning is left out of answers before the last question."""

QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    "{{- '<think>\\n' }}",
)
"""The generation prompt opens the reasoning."""

KEEPS_THINKING = QWEN3.replace("loop.index0 > ns.last_query and (loop.last or reasoning)", "reasoning")

LINES = """{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
"""No token ends an answer."""

LLAMA = """{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|start|>system<|header|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' + first + '<|eot|>' }}
{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant<|header|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) }}
{{- '}<|eot|>' }}
{%- elif message.role == 'tool' %}{{ '<|start|>ipython<|header|>\\n\\n' + (message.content | tojson) + '<|eot|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|header|>\\n\\n' + message.content | trim + '<|eot|>' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|header|>\\n\\n' }}{% endif %}"""
"""The date in the system prompt, one call at a time, no seam."""

MISTRAL = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- set ns = namespace(users=0) %}
{%- for message in turns %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.users % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.users = ns.users + 1 %}{% endif %}{% endfor %}
{%- set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools and message == last %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{{- '[INST]' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[CALLS]' }}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- call.function.name + (call.function.arguments | tojson) }}{% endfor %}{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- '[RESULTS]' + message.tool_call_id + message.content + '[/RESULTS]' }}
{%- else %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}"""
"""Tools before the last question, the system prompt in it, ids of calls of nine characters, no generation prompt."""


@functools.cache
def _backend(splits: str, special: tuple[str, ...]) -> str:
    backend = Tokenizer(models.BPE())
    if splits == "words":
        split = pre_tokenizers.Split(Regex(WORDS), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    # Like tokenizers that prepend a first token themselves, in addition to the template's own.
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(backend.to_str())


def id_of(token: str) -> int:
    return (*SPECIAL, *THINK).index(token)


def write_chat_model(
    folder: Path,
    template: Any,
    *,
    eos: str = "<|im_end|>",
    more_ends: tuple[str, ...] = (),
    more_special: tuple[str, ...] = (),
    splits: str = "words",
    think_tokens: bool = True,
) -> Path:
    """A folder with a tokenizer that ends answers at ``eos`` and ``more_ends``, and a chat template, or none.

    ``splits``: text is split as by Qwen, ``words``, or as by GPT-2. A template that thinks has tokens for it, unless
    ``think_tokens`` is false.
    """
    folder.mkdir(exist_ok=True)
    special = (*SPECIAL, *(THINK if think_tokens and THINK[0] in str(template) else ()), *more_special)
    (folder / "tokenizer.json").write_text(_backend(splits, special))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [id_of(end) for end in (eos, *more_ends)]}))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": eos}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path | None, *, engine: str = "sim", **chat: Any):
    """A simulated run with this model, or a run on vLLM."""
    return validate_config(
        {
            "model": {"path": str(folder)} if folder is not None else {},
            "data": {"source": "synthetic"},
            "rollout": {"engine": engine},
            "learner": {"backend": "sim"} if engine == "sim" else {},
            "chat": {"date": "2026-11-23"} | chat,
        }
    )


def renderer_of(folder: Path | None, **chat: Any) -> TemplateRenderer:
    config = config_of(folder, **chat)
    renderer = make_renderer(config, tokenizer_of(config))
    assert isinstance(renderer, TemplateRenderer)
    return renderer


FAMILIES: dict[str, tuple[str, str]] = {
    "chatml": (CHATML, "<|im_end|>"),
    "tools first": (TOOLS_FIRST, "<|im_end|>"),
    "tools last": (TOOLS_LAST, "<|im_end|>"),
    "plain chatml": (PLAIN_CHATML, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "qwen3 thinking": (QWEN3_THINKING, "<|im_end|>"),
    "keeps thinking": (KEEPS_THINKING, "<|im_end|>"),
    "lines": (LINES, "</s>"),
    "llama": (LLAMA, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
}
"""Template and the token that ends an answer."""
