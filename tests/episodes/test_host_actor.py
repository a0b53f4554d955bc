import asyncio
import json
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
import structlog
from episodes.hosted import Hosted, Rollouter, config_with, hosting, is_over, refuses, until, waits, worker_pids
from structlog.testing import capture_logs

from asyncrl.config.load import validate_config
from asyncrl.episodes import actor as actor_module
from asyncrl.episodes.actor import EpisodesActor
from asyncrl.errors import EpisodeHostFull, InvalidRequest, RemoteError
from asyncrl.messages.actors import Dead
from asyncrl.messages.episodes import EpisodeDone, RunEpisode
from asyncrl.runtime.calls.call import CallFuture

HTTP = """
import json, os, urllib.error, urllib.request

def ask(path, body, base=None, key=None):
    request = urllib.request.Request(
        (base or os.environ["OPENAI_BASE_URL"]) + path,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def chat(base=None, key=None):
    return ask("/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "hi"}]}, base, key)

def play(task, client):
    status, answer = chat(client.base_url, client.api_key)
    return float(len(answer["choices"][0]["message"]["content"])) if status == 200 else -float(status)

if __name__ == "__main__":
    status, answer = chat()
    print(ask("/asyncrl/reward", {"value": 0.25})[0])
    print(json.dumps({"status": status, "length": len(answer["choices"][0]["message"]["content"])}))
"""


@pytest.fixture(autouse=True)
def by_http(tmp_path, plays):
    (tmp_path / "by_http.py").write_text(HTTP)


async def test_programs_and_functions_ask_over_http_the_same_conversation(tmp_path):
    rollouter = Rollouter("hello")
    async with hosting(config_with(command=[sys.executable, "by_http.py"]), tmp_path, rollouter) as host:
        done = await host.play(session="a" * 32)
        assert done.components == {"status": 200.0, "length": 5.0}
        assert [chat.session for chat in rollouter.chats] == ["a" * 32]
        assert rollouter.rewards == [("a" * 32, None, 0.25)]
        assert host.figure("http_requests") == 1
    async with hosting(config_with(function="by_http:play"), tmp_path, rollouter) as host:
        assert await host.play() == EpisodeDone(reward=5.0)
        rollouter.answers = [refuses("messages", "are odd")]
        assert await host.play() == EpisodeDone(reward=-400.0)
        assert host.figure("http_refused") == 1


async def asked_over_http(host: Hosted, key: str) -> tuple[CallFuture, str, str]:
    """An episode that is played, with where its key opens its conversation."""
    playing = host.run("wait", session=key)
    await until(lambda: host.figure("open") == 1)
    return playing, host.actor._players._setup.base_url, key


async def http(url: str, key: str, **changes: Any) -> tuple[int, str]:
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], **changes}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        return answer.status, await answer.text()


async def test_a_key_opens_its_own_conversation_while_the_episode_is_played(tmp_path):
    rollouter = Rollouter("hello")
    async with hosting(config_with(function="plays:play"), tmp_path, rollouter) as host:
        url = host.actor._players._setup.base_url
        key = "b" * 32
        assert (await http(url, key))[0] == 401
        playing = host.run("wait", session=key)
        await until(lambda: host.figure("open") == 1)
        assert (await http(url, key))[0] == 200
        assert rollouter.chats[-1].session == key
        playing.cancel()
        await until(lambda: host.figure("open") == 0)
        status, text = await http(url, key)
        assert (status, json.loads(text)["error"]["code"]) == (400, "episode_over")
        assert len(rollouter.chats) == 1
        assert host.actor._sessions == {}


async def test_a_request_under_way_ends_with_its_episode(tmp_path):
    rollouter = Rollouter(waits)
    async with hosting(config_with(function="plays:play"), tmp_path, rollouter) as host:
        playing, url, key = await asked_over_http(host, "e" * 32)
        asking = asyncio.create_task(http(url, key))
        await until(lambda: len(rollouter.chats) == 1)
        playing.cancel()
        status, text = await asking
        assert (status, json.loads(text)["error"]["code"]) == (400, "episode_over")
        await until(lambda: rollouter.cancelled == 1)


async def test_text_streams_as_the_rollouter_tells_it(tmp_path):
    async def slowly(rollouter, request):
        assert request.stream
        rollouter.delta(request, 0, "hel")
        rollouter.delta(request, 3, "lo")
        await going_on.wait()
        return "hello!"

    going_on = asyncio.Event()
    rollouter = Rollouter(slowly)
    async with hosting(config_with(function="plays:play"), tmp_path, rollouter) as host:
        playing, url, key = await asked_over_http(host, "c" * 32)
        heard = []
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{url}/chat/completions",
                json={"model": "x", "messages": [{"role": "user", "content": "hi"}], "stream": True},
                headers={"Authorization": f"Bearer {key}"},
            ) as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    heard.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
                if "".join(heard) == "hello":
                    going_on.set()
        assert "".join(heard) == "hello!"
        playing.cancel()


@pytest.mark.parametrize("how", ["replaced", "fenced"])
async def test_episodes_of_a_dead_rollouter_end(tmp_path, how):
    async with hosting(config_with(function="plays:play"), tmp_path, Rollouter(waits)) as host:
        calls = [host.run("wait"), host.run("reply", uid="0-2")]
        await until(lambda: host.figure("open") == 2 and len(host.rollouter.chats) == 1)
        if how == "replaced":
            successor = host.net.client("episodes/0", "rollouter/0", incarnation=2)
            assert (await successor.call(_request("components"))).reward == 1.5
        else:
            host.actor.fence([Dead("rollouter/0", 1)])
        await until(lambda: host.figure("open") == 0)
        assert host.figure("stopped") == 2
        assert host.figure("workers_killed") == 0
        for call in calls:
            call.cancel()


def _request(prompt: str) -> Any:
    return RunEpisode(
        session="d" * 32, uid="0-9", sample=0, attempt=0, purpose="train", prompt=prompt, messages=[], row={}, seed=0
    )


async def test_a_host_for_all_plays_for_whoever_asks_as_many_as_a_rollouter_may_have(tmp_path):
    """Each episode asks the rollouter that it belongs to, and what is too much is refused."""
    tree = config_with(function="plays:play", extra_hosts=1).model_dump(mode="json")
    tree["rollout"] |= {"replicas": 2, "samples_per_prompt": 2, "episodes": 3}
    async with hosting(validate_config(tree), tmp_path, name="episodes/2") as host:
        second = Rollouter()
        host.net.serve(second, "rollouter/1")
        peer = host.net.client("episodes/2", "rollouter/1")
        assert (await peer.call(_request("reply"))).reward == 3.0
        assert (len(host.rollouter.chats), [chat.session for chat in second.chats]) == (0, ["d" * 32])
        calls = [host.run("wait", uid=f"0-{number}") for number in range(3)]
        await until(lambda: host.figure("open") == 3)
        with pytest.raises(RemoteError, match="3 episodes are open here") as refused:
            await peer.call(_request("reply"))
        assert (refused.value.code, refused.value.retryable) == (EpisodeHostFull.code, True)
        calls.pop().cancel()
        await until(lambda: host.figure("open") == 2)
        assert (await peer.call(_request("reply"))).reward == 3.0
        # Of a rollouter that dies nothing is left; others' go on.
        waiting = peer.call(_request("wait"))
        await until(lambda: host.figure("open") == 3)
        host.actor.fence([Dead("rollouter/0", 1)])
        await until(lambda: host.figure("open") == 1)
        for call in (*calls, waiting):
            call.cancel()


async def test_the_reward_of_a_turn_that_cannot_be_noted_fails_the_episode(tmp_path):
    rollouter = Rollouter("a")
    rollouter.refusal = RuntimeError("no room")
    async with hosting(config_with(function="plays:play"), tmp_path, rollouter) as host:
        done = await host.play("turns 1")
        assert done.error.startswith("the reward of a turn could not be noted: ")
        assert done.blame == "host"
        # Who asks for a reward behind the end has not lost any.
        rollouter.refusal = is_over("time")
        assert await host.play("turns 1") == EpisodeDone()


async def test_a_reward_over_http_keeps_to_the_bounds_of_all_rewards_and_names_a_given_answer(tmp_path):
    async def credit(url, key, **body):
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/asyncrl/reward", json=body, headers=headers) as answer,
        ):
            return answer.status, (await answer.json(content_type=None)).get("error", {})

    rollouter = Rollouter("a")
    async with hosting(config_with(function="plays:play"), tmp_path, rollouter) as host:
        playing, url, key = await asked_over_http(host, "f" * 32)
        status, error = await credit(url, key, value=1e300)
        assert (status, error["param"]) == (400, "value")
        assert "a number of a magnitude up to 1e+18 is expected" in error["message"]
        assert rollouter.rewards == []
        rollouter.refusal = InvalidRequest("a reward is for turn 7; the policy has given 2 answers")
        status, error = await credit(url, key, value=1, completion="chatcmpl-7")
        assert (status, error["param"]) == (400, "completion")
        assert "the policy has given 2 answers" in error["message"]
        rollouter.refusal = RuntimeError("no room")
        with capture_logs() as logs:
            host.actor._http._log = structlog.get_logger()
            status, error = await credit(url, key, value=1)
        assert (status, error["message"]) == (500, "the rollouter could not be asked")
        assert [each["event"] for each in logs] == ["a request of an episode failed"]
        playing.cancel()


async def test_a_heartbeat_names_the_episode_that_keeps_all_waiting(tmp_path):
    async with hosting(config_with(function="plays:play"), tmp_path, Rollouter(waits)) as host:
        assert (await host.play("components")).reward == 1.5
        asking = host.run("reply", uid="0-2")
        await until(lambda: len(host.rollouter.chats) == 1)
        waiting = host.run("wait", uid="0-3")
        await until(lambda: host.figure("open") == 2)
        said = host.actor.heartbeat(1, 0.0)
        assert said.progress == 1
        assert [resource.state for resource in said.resources] == ["playing", "playing"]
        (own,) = [wait for wait in said.awaits if wait.whom == "worker"]
        assert own.what == "function = plays:play of 0-3"
        assert [wait.what for wait in said.awaits if wait.whom == "rollouter/0"] == ["Chat"]
        waiting.cancel()
        asking.cancel()


async def test_a_host_that_leaves_stays_for_the_last_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(actor_module, "QUIET_S", 0.3)
    async with hosting(config_with(function="plays:play"), tmp_path) as host:
        waiting = host.run("wait")
        await until(lambda: host.figure("open") == 1)
        host.actor.asked_to_leave(600.0)
        assert (await host.play("reply")).reward == 3.0
        enough = host.actor.clock.now() + 1.0
        await until(lambda: host.actor.clock.now() > enough)
        assert not host.actor.draining
        waiting.cancel()
        await until(lambda: host.actor.draining)


async def test_the_host_ends_while_episodes_hang(tmp_path):
    async with hosting(config_with(function="plays:play"), tmp_path) as host:
        calls = [host.run(prompt) for prompt in ("spin", "deaf", "fork", "wait")]
        await until(lambda: host.figure("open") + host.figure("played") >= 3)
    for call in calls:
        call.cancel()
    assert worker_pids() == []


def test_what_users_import_is_light():
    code = """
import sys
from asyncrl.episodes import BlockingClient, ChatRefused, Client, EpisodeOver, Reply, Task
heavy = {"zmq", "pydantic", "torch", "aiohttp", "structlog", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

    assert EpisodesActor.role == "episodes"
