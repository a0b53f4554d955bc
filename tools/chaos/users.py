"""The user's code of a simulated round: its prompts, its reward and its agent.

The reward follows from the kind of a row, so every outcome is known before the run. The agent plays some turns, with a
pause between them like that of a tool, and returns no reward. It is a function, and a program that calls over HTTP.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any

KINDS = {"good": "trained", "equal": "filtered", "bad": "quarantined"}
"""Outcome of a prompt by kind."""
RUN_S = 0.003
"""Time of a call, so that faults meet workers with a task."""
TURNS = 3
TOOL_S = 0.05
"""Time of a tool call, so that faults meet agents both in calls of the policy and in calls of tools."""


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Return the rows of the training prompts: mostly good, some of the other kinds."""
    for index in range(count):
        kind = "bad" if index % 53 == 7 else "equal" if index % 17 == 3 else "good"
        yield {"prompt": f"prompt {index}", "kind": kind}


def score(*, prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return a reward that differs between the responses to a good prompt."""
    time.sleep(RUN_S)
    if row["kind"] == "bad":
        raise ValueError("this prompt cannot be judged")
    if row["kind"] == "equal":
        return 0.5
    return zlib.crc32(completion.encode(errors="surrogatepass"), zlib.crc32(prompt.encode())) / 0xFFFFFFFF


async def play(task: Any, client: Any) -> None:
    """Play through the client."""
    # This import takes more than half as long as all others, and the program does not need it.
    import asyncio

    messages = [_user(task.prompt)]
    for turn in range(TURNS):
        reply = await client.chat(messages)
        messages += [reply.message, _user(f"turn {turn}")]
        await asyncio.sleep(TOOL_S)


def main() -> None:
    """Play over HTTP, with the address and key from the program's environment."""
    messages = [_user(json.loads(os.environ["ASYNCRL_TASK"])["prompt"])]
    for turn in range(TURNS):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            messages += [json.load(answer)["choices"][0]["message"], _user(f"turn {turn}")]
        time.sleep(TOOL_S)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


if __name__ == "__main__":
    main()
