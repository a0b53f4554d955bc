"""Tokens that a model's chat template makes of conversations, for people. Starts nothing and needs no torch."""

from __future__ import annotations

from asyncrl.chat.messages import Message
from asyncrl.chat.probe import TOOLS
from asyncrl.chat.renderer import Renderer, make_renderer
from asyncrl.config import Config
from asyncrl.errors import ChatRefused
from asyncrl.stops import resolve_stops
from asyncrl.tokenizer import Tokenizer, tokenizer_of

EXAMPLE: list[Message] = [
    {"role": "user", "content": "How old is the oldest tree?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0_0",
                "type": "function",
                "function": {"name": TOOLS[0]["function"]["name"], "arguments": {"word": "oldest tree"}},
            }
        ],
    },
    {"role": "tool", "content": "4,857 years", "tool_call_id": "call_0_0"},
]


def examine_chat(config: Config) -> tuple[Renderer, Tokenizer]:
    """The checked renderer of a configuration. Raises ConfigError."""
    tokenizer = tokenizer_of(config)
    stops = resolve_stops(config.rollout, tokenizer)
    return make_renderer(config, tokenizer, stop_ids=stops.token_ids), tokenizer


def describe_chat(renderer: Renderer, tokenizer: Tokenizer) -> list[str]:
    """The verdicts on all kinds of turns, the parsers, and a conversation as the model sees it."""
    try:
        ids = renderer.render(EXAMPLE, TOOLS, {})
        shown = tokenizer.decode(ids, keep_special=True).splitlines()
        title = f"a call of a tool and its result are {len(ids)} tokens:"
    except ChatRefused as error:
        title, shown = f"a call of a tool and its result cannot be shown: {error}", []
    return [*renderer.report.lines(), "", title, *(f"  | {line}" for line in shown)]
