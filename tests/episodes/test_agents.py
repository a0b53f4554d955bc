"""Unmodified agents of the common frameworks play against the endpoint, from an environment of their own."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from plays_weather import PROGRAMS
from scripted_core import KEY, ScriptedCore, played, reply, serving

RUN = played
PYTHON = os.environ.get("ASYNCRL_AGENTS_PYTHON", "")
PLAYS = Path(__file__).parent / "plays_weather.py"
ARGUMENTS = '{"city":   "Bern"}'


async def guide(core, call, on_delta):
    """Asks for the weather, then tells it, as each framework wants to be told."""
    node = len(core.asked)
    offered = {tool["function"]["name"] for tool in call.tools}
    seen = json.dumps(call.messages)
    if "Sunny in Bern" not in seen:
        if not offered:
            return reply("<code>\nprint(weather(city='Bern'))\n</code>", node=node)
        return reply("", node=node, reasoning="Which city?", calls=[("weather", ARGUMENTS)])
    if "final_answer" in offered:
        return reply("", node=node, calls=[("final_answer", '{"answer": "Sunny in Bern"}')])
    if not offered:
        return reply("<code>\nfinal_answer('Sunny in Bern')\n</code>", node=node)
    return reply("Sunny in Bern", node=node)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="ASYNCRL_AGENTS_PYTHON names no interpreter with the frameworks of agents")
@pytest.mark.parametrize("name", PROGRAMS)
async def test_an_unmodified_agent_plays(name):
    core = ScriptedCore(guide)
    async with serving(core) as served:
        agent = await asyncio.create_subprocess_exec(
            PYTHON,
            str(PLAYS),
            name,
            env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await agent.communicate()
        finally:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
    assert agent.returncode == 0, printed.decode()
    assert "answer: Sunny in Bern" in printed.decode()
    assert len(core.asked) == 2
    assert not [each for each in served.counts if each.startswith(("refused", "unknown", "failed", "cut"))]
