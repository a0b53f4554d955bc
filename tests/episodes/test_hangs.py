"""An agent's attempt ends by a deadline, whatever it does instead of playing, with an error that names its stage, and
the next one plays. Rollouter's sessions, episode host and endpoint are real, the engine speaks by a script; ``hosting``
sees to it that no process, port or file is left.
"""

import asyncio
from pathlib import Path

import pytest
from session_cases import World
from whole import play, whole

from asyncrl.rollouter.episode.player import EpisodeFailed

AGENT = '''
import asyncio, json, socket
from urllib.parse import urlsplit


def user(text):
    return [{"role": "user", "content": text}]


def asked(client, **more):
    """A connection on which the policy is asked for a stream, without a client that would ask again."""
    url = urlsplit(client.base_url)
    body = json.dumps({"model": "x", "messages": user("hi"), "stream": True} | more).encode()
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(
        f"POST {url.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
        f"Authorization: Bearer {client.api_key}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body
    )
    return connection


async def play(task, client):
    how = task.prompt
    if how == "never":
        await asyncio.sleep(1000)
    if how == "well":
        return float(len((await client.chat(user("hi"))).content))
    if how in ("spin", "big"):
        await client.chat(user("hi"))
    if how == "spin":
        while True:
            pass
    if how == "big":
        await client.chat([*user("hi"), {"role": "user", "content": "word " * 400_000}])
        return 1.0
    if how == "cut":
        with asked(client) as connection:
            connection.recv(1)
        await asyncio.sleep(1000)
    if how == "slow":
        with asked(client) as connection:
            while True:
                await asyncio.sleep(0.5)
                connection.recv(1)
    raise AssertionError(how)
'''
QUICK = {
    "function": "agent:play",
    "workers": 1,
    "start_timeout_s": 4.0,
    "turn_timeout_s": 1.0,
    "close_timeout_s": 0.5,
    "stall_timeout_s": 1.0,
}


@pytest.fixture(autouse=True)
def agent():
    Path("agent.py").write_text(AGENT)


HANGS = {"never": "start: it did not call the policy within 4 s"} | dict.fromkeys(
    ["spin", "cut", "slow"], "turn: it neither called the policy again nor ended within 1 s of an answer"
)


def test_it_ends_by_its_deadline_and_says_which(tmp_path):
    """After each of them the same host plays another episode."""
    found = {}

    async def main():
        rollout = {"max_attempts": 2, "retry_backoff_s": 0.05}
        world = World(tmp_path, say=lambda prompt: "word " * 20, episode=QUICK, rollout=rollout)
        async with whole(world, tmp_path):
            for number, how in enumerate([*HANGS, "big"]):
                try:
                    async with asyncio.timeout(60.0):
                        found[how] = await play(world, how, 2 * number)
                except EpisodeFailed as error:
                    found[how] = str(error)
                assert (await play(world, "well", 2 * number + 1)).reward > 0.0
                assert len(world.sessions) == 0

    asyncio.run(main())
    # The refusal of a call with megabytes has ended it, so its conversation is scored as one that was cut.
    big = found.pop("big")
    assert (big.finish_reason, big.reward) == ("length", None) and big.text.startswith("word ")
    for how, told in found.items():
        assert isinstance(told, str) and HANGS[how] in told, (how, told)
