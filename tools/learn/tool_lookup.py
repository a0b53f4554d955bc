"""A value that stands behind two keys in a table which only a tool can read.

    user       ab
    assistant  <tool_call>{"name": "look_up", "arguments": {"key": "ab"}}</tool_call>
    tool       xy
    assistant  <tool_call>{"name": "look_up", "arguments": {"key": "xy"}}</tool_call>
    tool       47
    assistant  47

Tables are drawn at random for each row, so nothing can be answered from memory. The teacher of the warm-up makes up an
answer, or looks up something else, one time in three that it ought to look on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

from tools.learn.recipe import Message, Recipe, Row, Settings

LOSES_THREAD = 0.35
"""Chance that the teacher does something else than what leads on."""
NOT_THERE = "none"


class Table:
    """The tools of an episode: ``tools = ["tools.learn.tool_lookup:Table"]``."""

    def __init__(self, task: Any, *, latency_s: float = 0.0) -> None:
        self._entries: dict[str, str] = task.row["table"]
        self._latency_s = latency_s

    async def look_up(self, key: str) -> str:
        """The entry of a key."""
        await asyncio.sleep(self._latency_s)
        return self._entries.get(key, NOT_THERE)


def rows(source: random.Random) -> Iterator[Row]:
    """Chains of two keys and a number; the first keys differ."""
    firsts = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    source.shuffle(firsts)
    while True:
        for first in firsts:
            second = _key(source)
            while second == first:
                second = _key(source)
            value = _value(source)
            yield {"prompt": first, "answer": value, "table": {first: second, second: value}}


def demonstrate(row: Row, source: random.Random) -> list[Message]:
    """The teacher's conversation."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    table, said = row["table"], str(row["prompt"])
    for number in range(2):
        astray = source.random() < LOSES_THREAD
        if astray and source.random() < 0.5:
            return [*messages, {"role": "assistant", "content": _value(source)}]
        key = _key(source) if astray else said
        said = table.get(key, NOT_THERE)
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"key": key}},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if said == NOT_THERE:
            break
    return [*messages, {"role": "assistant", "content": said if said.isdecimal() else _value(source)}]


def _key(source: random.Random) -> str:
    return "".join(source.choices(ascii_lowercase, k=2))


def _value(source: random.Random) -> str:
    return f"{source.randrange(100):02d}"


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The entry of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
RECIPE = Recipe(
    name="tool-lookup",
    rows=rows,
    demonstrate=demonstrate,
    tools=(LOOK_UP,),
    settings=Settings(steps=700, batch=16),
)
