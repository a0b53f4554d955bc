"""The actor around the endpoint of an episode host, played by a test: the known callers, and the policy's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psutil
import uvloop

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.episodes.http.calls import Patience
from asyncrl.episodes.http.endpoint import PolicyEndpoint
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply, ToolCall
from asyncrl.observe.logging import get_logger

KEY = "0123456789abcdef" * 2
OTHER_KEY = "fedcba9876543210" * 2
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

Script = Callable[["ScriptedCore", Chat, Callable[[ChatDelta], None]], Awaitable[ChatReply]]


def reply(
    content: str = "Hello.",
    *,
    node: int = 7,
    reasoning: str | None = None,
    calls: list[tuple[str, str]] | None = None,
    cut: bool = False,
) -> ChatReply:
    """An answer of 3 tokens to a context of 11."""
    tool_calls = [
        ToolCall(id=f"call_{node}_{at}", name=name, arguments=given) for at, (name, given) in enumerate(calls or [])
    ]
    return ChatReply(
        node=node,
        content=content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        finish_reason="length" if cut else "tool_calls" if tool_calls else "stop",
        prompt_tokens=11,
        completion_tokens=3,
    )


class ScriptedCore:
    """Answers as ``script`` says, and keeps the requests."""

    model = "policy"

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.keys = {KEY, OTHER_KEY}
        self.asked: list[Chat] = []
        self.cancelled: list[str] = []
        self.rewards: list[tuple[str, int | None, float]] = []
        self.over: str | None = None

    def knows(self, key: str) -> bool:
        return key in self.keys

    async def chat(self, key: str, call: Chat, on_delta: Callable[[ChatDelta], None]) -> ChatReply:
        assert call.session == key
        self.asked.append(call)
        if self.over is not None:
            raise EpisodeOver(self.over)
        if self.script is None:
            return reply(node=len(self.asked))
        try:
            return await self.script(self, call, on_delta)
        except asyncio.CancelledError:
            self.cancelled.append(call.call)
            raise

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        if self.over is not None:
            raise EpisodeOver(self.over)
        if node is not None and node >= 100:
            raise ChatRefused("completion", f"node {node} is not of this episode")
        self.rewards.append((key, node, value))
        return 1 if node is None else node


class Serving:
    """An endpoint that serves, its address, and its messages to the user."""

    def __init__(self, core: ScriptedCore, options: dict[str, Any], max_request_bytes: int) -> None:
        self.core = core
        self.notices: dict[str, tuple[str, int]] = {}
        """Text and count of each."""
        patience = Patience(**{"keep_alive_s": 0.2, **options})
        self.endpoint = PolicyEndpoint(
            core,
            max_request_bytes=max_request_bytes,
            notify=self._notify,
            log=get_logger("episodes/0"),
            patience=patience,
        )
        self.url = ""

    def _notify(self, key: str, text: str, *, count: int = 1) -> None:
        self.notices[key] = (text, count)

    @property
    def counts(self) -> dict[str, int]:
        return self.endpoint.counts

    @property
    def connections(self) -> list[Any]:
        """Connections that are open at this end."""
        found = psutil.Process().net_connections("tcp")
        return [each for each in found if each.laddr.port == self.port and each.status != psutil.CONN_LISTEN]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def serving(core: ScriptedCore, *, max_request_bytes: int = 1 << 20, **options: Any) -> AsyncIterator[Serving]:
    """The endpoint, as its actor keeps it."""
    served = Serving(core, options, max_request_bytes)
    served.url = await served.endpoint.start()
    watch = asyncio.create_task(served.endpoint.calls.cancel_abandoned())
    try:
        yield served
        assert not watch.done()
    finally:
        await served.endpoint.close()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def played(episode: Coroutine[Any, Any, None]) -> None:
    """Run it on the event loop of actors."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await episode

    uvloop.run(bounded())
