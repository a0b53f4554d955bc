"""The agent of a simulated round with episodes: some turns, with a pause between them like that of a tool.

It returns no reward, so score.py scores its conversation. It exists as a function and as a program that calls over
HTTP.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

TURNS = 3
TOOL_S = 0.05
"""Time of a tool call, so that faults meet agents both in calls of the policy and in calls of tools."""


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
