import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from episodes.hosted import Hosted, Rollouter, config_with, hosting, until, waits, worker_pids

from asyncrl.config.load import validate_config
from asyncrl.core.errors import EpisodeHostFull, EpisodeOver, InvalidRequest, RemoteError
from asyncrl.episodes import actor as actor_module
from asyncrl.messages.actors import Dead
from asyncrl.messages.episodes import EpisodeDone, RunEpisode
from asyncrl.rpc.heartbeat import gather_heartbeat

BY_HTTP = """
import json, os, urllib.request

def ask(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return answer.status, json.loads(answer.read())

status, answer = ask("/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "hi"}]})
print(ask("/asyncrl/reward", {"value": 0.25})[0])
print(json.dumps({"status": status, "length": len(answer["choices"][0]["message"]["content"])}))
"""
FUNCTION = config_with(function="plays:play", workers=1)


async def test_a_program_asks_over_http(tmp_path):
    (tmp_path / "by_http.py").write_text(BY_HTTP)
    rollouter = Rollouter("hello")
    async with hosting(config_with(command=[sys.executable, "by_http.py"]), tmp_path, rollouter) as host:
        done = await host.play(session="a" * 32)
        assert done.components == {"status": 200.0, "length": 5.0}
        assert [chat.session for chat in rollouter.chats] == ["a" * 32]
        assert rollouter.rewards == [("a" * 32, None, 0.25)]
        assert host.figure("http_requests") == 1


@asynccontextmanager
async def post(host: Hosted, key: str, path: str = "chat/completions", **body: Any) -> Any:
    body = body if path != "chat/completions" else {"messages": [{"role": "user", "content": "hi"}], **body}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client,
        client.post(f"{host.base_url}/{path}", json=body) as answer,
    ):
        yield answer


async def asked(host: Hosted, key: str, *path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """The status and the error."""
    async with post(host, key, *path, **body) as answer:
        return answer.status, json.loads(await answer.text()).get("error", {})


async def test_a_key_opens_its_own_conversation_while_the_episode_is_played(tmp_path):
    going_on = asyncio.Event()

    async def slowly(rollouter, request):
        assert request.stream
        rollouter.delta(request, 0, "hel")
        rollouter.delta(request, 3, "lo")
        await going_on.wait()
        return "hello!"

    rollouter, key = Rollouter("hello", slowly, waits), "b" * 32
    async with hosting(FUNCTION, tmp_path, rollouter) as host:
        assert (await asked(host, key))[0] == 401
        playing = host.run("wait", session=key)
        await until(lambda: host.figure("open") == 1)
        assert (await asked(host, key))[0] == 200
        assert rollouter.chats[-1].session == key
        heard = ""
        async with post(host, key, stream=True) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    heard += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if heard == "hello":
                    going_on.set()
        assert heard == "hello!", "text streams as the rollouter sends it"
        # A request under way ends with its episode, and so does one that comes later.
        asking = asyncio.create_task(asked(host, key))
        await until(lambda: len(rollouter.chats) == 3)
        playing.cancel()
        status, error = await asking
        assert (status, error["code"]) == (400, "episode_over")
        await until(lambda: rollouter.cancelled == 1 and host.figure("open") == 0)
        status, error = await asked(host, key)
        assert (status, error["code"], len(rollouter.chats)) == (400, "episode_over", 3)
        assert host.figure("http_refused") == 1


def requested(prompt: str) -> RunEpisode:
    return RunEpisode(
        session="d" * 32, uid="0-9", sample=0, attempt=0, purpose="train", prompt=prompt, messages=[], row={}, seed=0
    )


async def test_episodes_of_a_dead_rollouter_end_with_its_successor(tmp_path):
    async with hosting(FUNCTION, tmp_path, Rollouter(waits)) as host:
        calls = [host.run("wait"), host.run("reply", uid="0-2")]
        await until(lambda: host.figure("open") == 2 and len(host.rollouter.chats) == 1)
        # A heartbeat names the episode that keeps all waiting.
        said = gather_heartbeat(host.actor, 1)
        assert [resource.state for resource in said.resources] == ["playing"]
        (own,) = [wait for wait in said.awaits if wait.whom == "worker"]
        assert own.what == "function = plays:play of 0-1"
        assert [wait.what for wait in said.awaits if wait.whom == "rollouter/0"] == ["Chat"]
        before = host.actor.pulse()
        successor = host.net.client("episodes/0", "rollouter/0", incarnation=2)
        assert (await successor.call(requested("components"))).reward == 1.5
        await until(lambda: host.figure("open") == 0)
        assert (host.figure("stopped"), host.figure("workers_killed")) == (2, 0)
        assert host.actor.pulse() != before
        for call in calls:
            call.cancel()


async def test_late_news_of_a_death_ends_no_episode_of_the_successor(tmp_path):
    reported = asyncio.Event()

    async def answer(_rollouter, _request):
        await reported.wait()
        return "yes"

    async with hosting(FUNCTION, tmp_path) as host:
        second = Rollouter(answer)
        host.net.serve(second, "rollouter/0", 2)
        playing = host.net.client("episodes/0", "rollouter/0", incarnation=2).call(requested("reply"))
        await until(lambda: second.chats)
        host.actor.fence([Dead("rollouter/0", 1)])
        reported.set()
        assert await playing == EpisodeDone(reward=3.0)


async def test_an_extra_host_plays_the_maximum_of_episodes_for_every_rollouter(tmp_path):
    """Each episode asks the rollouter that it belongs to, and what is too much is refused."""
    tree = FUNCTION.model_dump(mode="json")
    tree["episode"]["extra_hosts"] = 1
    tree["rollout"] |= {"replicas": 2, "samples_per_prompt": 2, "episodes": 3}
    async with hosting(validate_config(tree), tmp_path, name="episodes/2") as host:
        second = Rollouter()
        host.net.serve(second, "rollouter/1")
        peer = host.net.client("episodes/2", "rollouter/1")
        assert (await peer.call(requested("reply"))).reward == 3.0
        assert (len(host.rollouter.chats), [chat.session for chat in second.chats]) == (0, ["d" * 32])
        calls = [host.run("wait", uid=f"0-{number}") for number in range(3)]
        await until(lambda: host.figure("open") == 3)
        with pytest.raises(RemoteError, match="3 episodes are open here") as refused:
            await peer.call(requested("reply"))
        assert (refused.value.code, refused.value.retryable) == (EpisodeHostFull.code, True)
        calls.pop().cancel()
        await until(lambda: host.figure("open") == 2)
        # The episodes of a dead rollouter end; those of others continue.
        waiting = peer.call(requested("wait"))
        await until(lambda: host.figure("open") == 3)
        host.actor.fence([Dead("rollouter/0", 1)])
        await until(lambda: host.figure("open") == 1)
        for call in (*calls, waiting):
            call.cancel()


async def test_an_unrecorded_reward_fails_the_episode_and_an_invalid_one_its_request(tmp_path):
    rollouter, key, path = Rollouter("a"), "f" * 32, "asyncrl/reward"
    rollouter.refusal = RuntimeError("no room")
    async with hosting(FUNCTION, tmp_path, rollouter) as host:
        done = await host.play("turns 1")
        assert (done.error.partition(": ")[0], done.blame) == ("the reward of a turn could not be noted", "host")
        # A reward after the end is not lost.
        rollouter.refusal = EpisodeOver("time")
        assert await host.play("turns 1") == EpisodeDone()
        playing = host.run("wait", session=key)
        await until(lambda: host.figure("open") == 1)
        status, error = await asked(host, key, path, value=1e300)
        assert (status, error["param"], rollouter.rewards) == (400, "value", [])
        assert "a number of a magnitude up to 1e+18 is expected" in error["message"]
        rollouter.refusal = InvalidRequest("a reward is for turn 7; the policy has given 2 answers")
        status, error = await asked(host, key, path, value=1, completion="chatcmpl-7")
        assert (status, error["param"]) == (400, "completion")
        assert "the policy has given 2 answers" in error["message"]
        rollouter.refusal = RuntimeError("no room")
        status, error = await asked(host, key, path, value=1)
        assert (status, error["message"]) == (500, "the rollouter could not be asked")
        playing.cancel()


async def test_a_host_that_leaves_stays_for_the_last_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(actor_module, "QUIET_S", 0.3)
    async with hosting(FUNCTION, tmp_path) as host:
        waiting = host.run("wait")
        await until(lambda: host.figure("open") == 1)
        host.actor.asked_to_leave(600.0)
        assert (await host.play("reply")).reward == 3.0
        enough = host.actor.clock.now() + 0.6
        await until(lambda: host.actor.clock.now() > enough)
        assert not host.actor.draining
        waiting.cancel()
        failed = host.actor.clock.now()
        await until(lambda: host.actor.draining)
        # The last of three attempts comes at most 1 s after the second has failed.
        assert host.actor.clock.now() - failed > 1.2


async def test_the_host_ends_while_episodes_hang(tmp_path):
    async with hosting(config_with(function="plays:play", workers=2), tmp_path) as host:
        calls = [host.run(prompt) for prompt in ("spin", "deaf", "fork", "wait")]
        await until(lambda: host.figure("open") + host.figure("played") >= 3)
    for call in calls:
        call.cancel()
    assert worker_pids() == []


def test_user_imports_load_no_heavy_packages():
    code = """
import sys
from asyncrl.episodes import BlockingClient, ChatRefused, Client, EpisodeOver, Reply, Task
heavy = {"zmq", "pydantic", "torch", "aiohttp", "structlog", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
