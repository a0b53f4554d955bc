"""Whatever an agent does instead of playing, its attempt ends by a deadline, with an error that names its stage, and
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
import asyncio, json, os, socket, subprocess, time
from urllib.parse import urlsplit

from asyncrl.episodes import EpisodeOver


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
    if how in ("spin", "fork", "stop", "later", "big"):
        await client.chat(user("hi"))
    if how == "spin":
        while True:
            pass
    if how == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        await asyncio.sleep(1000)
    if how == "stop":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if how == "later":
        async def later():
            await asyncio.sleep(0.2)
            try:
                await client.chat(user("again"))
            except EpisodeOver:
                open(task.row["late"], "w").close()
        asyncio.ensure_future(later())
        return 1.0
    if how == "big":
        await client.chat([*user("hi"), {"role": "user", "content": "word " * (task.row["size"] // 5)}])
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


def hang(folder, how, *, say=lambda prompt: "Hello.", row=None, **episode):
    """Its trajectory or error; afterwards the same host plays another episode."""

    async def main():
        world = World(folder, say=say, episode=QUICK | episode, rollout={"max_attempts": 2, "retry_backoff_s": 0.05})
        world.ticket.row.update(row or {})
        async with whole(world, folder):
            assert (await play(world, "well", 1)).reward > 0.0
            try:
                async with asyncio.timeout(60.0):
                    found = await play(world, how)
            except EpisodeFailed as error:
                found = str(error)
            assert (await play(world, "well", 2)).reward > 0.0
            assert len(world.sessions) == 0
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("never", "start: it did not call the policy within 4 s"),
        ("fork", "turn: it neither called the policy again nor ended within 1 s of an answer"),
        ("stop", "turn: it neither called the policy again nor ended within 1 s of an answer"),
        ("spin", "turn: it neither called the policy again nor ended within 1 s of an answer"),
        ("cut", "turn: it neither called the policy again nor ended within 1 s of an answer"),
    ],
)
def test_it_ends_by_its_deadline_and_says_which(tmp_path, how, stage):
    found = hang(tmp_path, how)
    assert isinstance(found, str) and stage in found, found


def test_a_worker_that_stands_still_is_killed_before_the_deadline_of_a_turn(tmp_path):
    found = hang(tmp_path, "spin", turn_timeout_s=50.0)
    assert isinstance(found, str) and "stood still" in found, found


def test_a_call_after_the_end_reaches_nobody(tmp_path):
    late = tmp_path / "late"
    found = hang(tmp_path, "later", row={"late": str(late)})
    assert found.reward == 1.0 and len(found.sequences) == 1
    late.unlink(missing_ok=True)


def test_a_tool_result_of_50_mb_ends_the_episode_as_too_long(tmp_path):
    found = hang(tmp_path, "big", row={"size": 50 << 20}, turn_timeout_s=60.0, stall_timeout_s=60.0)
    # The refusal of its call has ended it, so its conversation is scored as one that was cut.
    assert (found.finish_reason, found.reward, found.text) == ("length", None, "Hello.")


def test_a_slow_reader_ends_by_its_deadline(tmp_path):
    found = hang(tmp_path, "slow", say=lambda prompt: "word " * 20)
    assert "turn: it neither called the policy again nor ended within 1 s of an answer" in found
