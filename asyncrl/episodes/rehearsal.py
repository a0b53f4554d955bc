"""A simulated agent: episodes with turns, tools, long tails and failures, for rehearsals of a run.

    [episode]
    function = "asyncrl.episodes.rehearsal:play"
    options = {turns = 6.0, tool_s = 2.0}

It runs as any user's function does: through the episode host, the chat template, the conversation and the engine. Only
its tools are pauses, and its observations made-up text. The number of turns, the time of a tool and the amount of text
are lognormal. They follow from the task's seed and the sample's number, so a repeated run plays the same. Failures
follow from the attempt too; a failed episode raises RuntimeError.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from asyncrl.core.errors import EpisodeOver
from asyncrl.episodes.playing.client import Client, Reply, Task

Message = dict[str, Any]
_WORDS = ("alpha", "bravo", "delta", "echo", "kilo", "lima", "oscar", "tango", "uniform", "zulu")


async def play(
    task: Task,
    client: Client,
    turns: float = 4.0,
    turns_sigma: float = 0.5,
    tool_s: float = 1.0,
    tool_sigma: float = 1.0,
    observation: float = 200.0,
    observation_sigma: float = 1.0,
    failure: float = 0.0,
    http: bool = False,
) -> float:
    """Play a task; the reward is 0 or 1 with equal chance.

    ``turns``, ``tool_s`` (s) and ``observation`` (characters) are medians, each with the sigma of its lognormal;
    ``failure`` is the chance of an attempt to fail, after one of its turns; ``http`` asks through the endpoint.
    """
    rng = random.Random(f"{task.seed}/{task.sample}")
    reward = float(rng.random() < 0.5)
    attempt_rng = random.Random(f"{task.seed}/{task.sample}/{task.attempt}")
    count = max(1, round(lognormal(rng, turns, turns_sigma)))
    fails_at = attempt_rng.randint(1, count) if attempt_rng.random() < failure else None
    messages: list[Message] = list(task.messages)
    with suppress(EpisodeOver):
        async with _asking(client, http=http) as ask:
            for turn in range(1, count + 1):
                messages.append(await ask(messages))
                if turn == fails_at:
                    raise RuntimeError(f"the tool of turn {turn} failed, by episode.options.failure = {failure:g}")
                if turn < count:
                    await asyncio.sleep(lognormal(rng, tool_s, tool_sigma))
                    observed = text(rng, lognormal(rng, observation, observation_sigma))
                    messages.append({"role": "user", "content": observed})
    return reward


def lognormal(chance: random.Random, median: float, sigma: float) -> float:
    """Draw a number from a lognormal distribution; a median of 0 gives 0."""
    return median * math.exp(sigma * chance.gauss(0.0, 1.0))


def text(chance: random.Random, characters: float) -> str:
    """Draw made-up words of about ``characters`` characters in all, at least one character."""
    size = max(1, round(characters))
    words = " ".join(chance.choices(_WORDS, k=size // 4 + 1))
    return words[:size]


@asynccontextmanager
async def _asking(client: Client, *, http: bool) -> AsyncIterator[Callable[[list[Message]], Awaitable[Message]]]:
    """Yield a function that sends messages to the policy and returns its answer: by the client, or with ``http`` by the
    endpoint.

    The function raises EpisodeOver, and RuntimeError if the endpoint refuses.
    """

    async def directly(messages: list[Message]) -> Message:
        reply: Reply = await client.chat(messages)
        return reply.message

    if not http:
        yield directly
        return
    import aiohttp

    async def by_http(messages: list[Message]) -> Message:
        asked = {"model": client.model, "messages": messages}
        async with web.post(f"{client.base_url}/chat/completions", json=asked) as response:
            answer = await response.json()
        if response.status != 200:
            error = answer["error"]
            if error.get("code") == EpisodeOver.code:
                raise EpisodeOver(error["message"])
            raise RuntimeError(f"the endpoint answered {response.status}: {error['message']}")
        return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}

    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as web:
        yield by_http
