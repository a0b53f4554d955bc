"""The agent of a simulated round with episodes: some turns with a pause as of a tool between them, and no reward of its
own, so that its conversation is scored by score.py. As a function, and as a program that asks over HTTP."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

TURNS = 3
TOOL_S = 0.05
"""Time of a tool, so that an agent that is struck is now with the policy, now with its tool."""


async def play(task: Any, client: Any) -> None:
    """Play through the client."""
    # It takes more than half as long as all other imports, and the program does without.
    import asyncio

    messages = [_user(task.prompt)]
    for turn in range(TURNS):
        reply = await client.chat(messages)
        messages += [reply.message, _user(f"turn {turn}")]
        await asyncio.sleep(TOOL_S)


def main() -> None:
    """Play over HTTP, with what a program's environment says."""
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
