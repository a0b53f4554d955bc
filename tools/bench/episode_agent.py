"""The agent of ``python -m tools.bench episodes``: it calls the policy on request and reports the time.

It is an episode's function and lives in a worker of the episode host. It connects to the benchmark's socket; a line
``client`` or ``http`` is one call, by its client or through the endpoint, answered by a line with its seconds. It
carries one conversation on, and begins another after TURNS answers.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from asyncrl.episodes.playing.client import Client, Task

TURNS = 8
NEXT = "Continue, and report your findings in a line or two, then name the next step."


async def play(task: Task, client: Client, socket: str) -> float:
    """Call the policy until the benchmark hangs up."""
    reader, writer = await asyncio.open_unix_connection(socket)
    messages: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as web:
        while way := (await reader.readline()).decode().strip():
            if len(messages) >= 2 * TURNS:
                messages = []
            messages.append({"role": "user", "content": NEXT if messages else f"{task.prompt} {time.monotonic_ns()}"})
            began = time.perf_counter()
            if way == "client":
                answer = (await client.chat(messages)).message
            else:
                body = {"model": client.model, "messages": messages}
                async with web.post(f"{client.base_url}/chat/completions", json=body) as response:
                    answer = (await response.json())["choices"][0]["message"]
            seconds = time.perf_counter() - began
            messages.append({"role": "assistant", "content": answer["content"]})
            writer.write(f"{seconds}\n".encode())
    return 1.0
