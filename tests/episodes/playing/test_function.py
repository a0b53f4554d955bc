import asyncio
import os
import re
import signal
import sys

import psutil
import pytest
import thief
import uvloop
from episodes.hosted import Rollouter, config_with, hosting, is_over, refuses, until, waits, worker_pids
from harness import RUN_ID

from asyncrl.errors import ConfigError
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.runtime.workers.confinement import why_not
from asyncrl.wire.keys import create_credentials

PLAY = {"function": "plays:play"}


async def test_an_episode_asks_the_policy_and_its_value_is_the_reward(tmp_path):
    rollouter = Rollouter("hello")
    async with hosting(config_with(**PLAY, options={"enable_thinking": False}), tmp_path, rollouter) as host:
        assert await host.play("reply") == EpisodeDone(reward=5.0)
        (chat,) = rollouter.chats
        assert chat.messages == [{"role": "user", "content": "reply"}]
        assert chat.template_options == {"enable_thinking": False}
        assert await host.play("components") == EpisodeDone(reward=1.5, components={"a": 1.0, "b": 0.5})
        seen = await host.play("seen", sample=3, attempt=2)
        assert seen.components == {"seed": 7.0, "sample": 3.0, "attempt": 2.0, "row": 1.0}
        assert (host.figure("played"), host.figure("open")) == (3, 0)
        assert [each.state for each in host.actor.resources()] == ["idle", "idle"]


async def test_rewards_of_turns_arrive_in_order_and_an_episode_that_is_over_has_ended_well(tmp_path):
    rollouter = Rollouter("a")
    async with hosting(config_with(**PLAY), tmp_path, rollouter) as host:
        assert await host.play("turns 3") == EpisodeDone()
        assert [(node, value) for _, node, value in rollouter.rewards] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        assert rollouter.order == ["chat", "reward"] * 3
        assert [message["role"] for message in rollouter.chats[-1].messages] == ["user", *["assistant", "user"] * 2]
        rollouter.answers, rollouter.chats, rollouter.rewards = ["a", "a", is_over("turns")], [], []
        assert await host.play("turns 9") == EpisodeDone()
        assert len(rollouter.rewards) == 2
        rollouter.answers = [refuses("tools", "are none")]
        assert (await host.play("reply")).error.startswith("raised ChatRefused: tools: are none (")


def test_many_episodes_share_the_workers(tmp_path):
    async def body():
        rollouter = Rollouter("abc")
        async with hosting(config_with(**PLAY), tmp_path, rollouter) as host:
            calls = [host.run("reply", uid=f"0-{number}") for number in range(50)]
            waiting = [host.run("wait", uid=f"1-{number}") for number in range(8)]
            assert [done.reward for done in await asyncio.gather(*calls)] == [3.0] * 50
            await until(lambda: host.figure("open") == 8)
            assert sorted(len(slot.open) for slot in host.slots()) == [4, 4]
            assert [each.state for each in host.actor.resources()] == ["playing", "playing"]
            for call in waiting:
                call.cancel()
            await until(lambda: host.figure("open") == 0)
            assert host.figure("stopped") == 8
            assert host.figure("workers_killed") == 0

    # As an actor's process does.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


async def test_what_the_code_raises_fails_its_episode_alone_and_the_user_hears_of_it_once(tmp_path):
    errors = {
        "raise": r"raised ValueError: no luck \(.*/plays\.py:\d+\)",
        "leave": r"raised SystemExit: 3 \(.*/plays\.py:\d+\)",
        "odd": "returned str 'good'; a finite number is expected",
        "surrogate raise": r"raised ValueError: file \\udcff\.txt \(.*",
        "surrogate return": "ended in what cannot be told: UnicodeEncodeError: .*",
    }
    async with hosting(config_with(**PLAY, workers=1), tmp_path) as host:
        printed, beside = host.watch_output(), host.run("wait")
        for prompt, error in errors.items():
            for _ in range(2):
                done = await host.play(prompt, timeout=20)
                assert (done.blame, done.reward) == ("episode", None)
                assert re.fullmatch(error, done.error)
            ((count, text),) = host.notices().values()
            assert count == 2 and text.startswith("episode (function = plays:play): ") and text.endswith("(prompt 0-1)")
        assert (host.figure("open"), printed) == (1, [])
        assert (await host.play("surrogate print")).error == ""
        assert [text for _, text, _ in printed] == ["half \\ud83d"]
        beside.cancel()


async def test_a_stopped_episode_is_cancelled_and_closes(tmp_path):
    rollouter = Rollouter(waits)
    async with hosting(config_with(**PLAY), tmp_path, rollouter) as host:
        printed = host.watch_output()
        waiting = host.run("wait")
        asking = host.run("reply")
        await until(lambda: len(rollouter.chats) == 1 and host.figure("open") == 2)
        waiting.cancel()
        asking.cancel()
        await until(lambda: host.figure("open") == 0)
        await until(lambda: rollouter.cancelled == 1)
        assert ("0-1", "closed 0-1\n", 0) in printed
        assert host.figure("workers_killed") == 0


async def test_plain_functions_run_in_threads_with_a_client_that_waits(tmp_path):
    rollouter = Rollouter("ab", "cde")
    async with hosting(
        config_with(function="plays:plain", workers=1, close_timeout_s=1.0), tmp_path, rollouter
    ) as host:
        assert await host.play("go") == EpisodeDone(reward=5.0)
        assert [(node, value) for _, node, value in rollouter.rewards] == [(0, 2.0)]
        rollouter.answers, rollouter.chats = [waits, waits, "ab", "cde"], []
        stopped = host.run("go")
        await until(lambda: len(rollouter.chats) == 1)
        stopped.cancel()
        await until(lambda: host.figure("open") == 0)
        assert host.figure("workers_killed") == 0
        # A thread that hangs costs the worker, and the others in it are told apart.
        rollouter.answers = [waits]
        hanging, beside = host.run("sleep"), host.run("go", uid="0-2")
        await until(lambda: host.figure("open") == 2)
        hanging.cancel()
        done = await beside
        assert done.blame == "host"
        assert "did not end within 1 s of being told to (episode.close_timeout_s)" in done.error
        assert host.figure("suspects") == 0


@pytest.mark.parametrize(
    ("prompt", "what", "figure"),
    [
        ("native", r"stood still for 1 s \(episode.stall_timeout_s\)", "stalled"),
        ("exit", r"ended its worker process \(exit code 1\)", "workers_died"),
        ("eat 200000000", "took more than 100000000 bytes of memory", "out_of_memory"),
    ],
)
async def test_the_guilty_of_the_death_of_workers_is_found_and_the_innocent_are_not_blamed(
    tmp_path, prompt, what, figure
):
    # On a busy machine memory takes its time, and is not to be taken for standing still.
    stall_s = 1.0 if figure == "stalled" else 30.0
    config = config_with(**PLAY, workers=1, stall_timeout_s=stall_s, max_memory_bytes=100_000_000)
    async with hosting(config, tmp_path) as host:
        for attempt in range(2):
            beside = host.run("wait", uid="0-2")
            await until(lambda: host.figure("open") == 1)
            bad = await host.play(prompt, attempt=attempt)
            good = await beside
            assert [bad.blame, good.blame] == ["host", "host"]
            assert re.search(what, bad.error)
        assert host.figure("suspects") == 2
        # Both are played alone from here on, beside the worker for all others.
        bad, good = await asyncio.gather(host.play(prompt, attempt=2), host.play("reply", uid="0-2"))
        assert good == EpisodeDone(reward=3.0)
        assert bad.blame == "episode"
        assert (await host.play("reply", uid="0-3")).reward == 3.0
        assert host.figure(figure) == 3
        assert host.figure("played_alone") == 2


async def test_a_worker_that_is_killed_is_replaced_and_what_it_started_goes_with_it(tmp_path):
    async with hosting(config_with(**PLAY, workers=1), tmp_path) as host:
        assert (await host.play("fork")).reward == 1.0
        (worker,) = {slot.process.pid for slot in host.slots()}
        children = psutil.Process(worker).children(recursive=True)
        assert len(children) == 2
        waiting = host.run("wait")
        await until(lambda: host.figure("open") == 1)
        psutil.Process(worker).children()[0].kill()
        os.kill(worker, signal.SIGKILL)
        done = await waiting
        assert done.blame == "host"
        assert "SIGKILL" in done.error
        assert (await host.play("reply")).reward == 3.0
        for child in children:
            if child.is_running():
                child.kill()


async def test_what_goes_on_behind_the_end_reaches_nobody_and_is_told_of_where_it_does_not_end(tmp_path):
    rollouter = Rollouter("a")
    async with hosting(config_with(**PLAY, workers=1, close_timeout_s=1.0), tmp_path, rollouter) as host:
        assert (await host.play("leak")).reward == 1.0
        assert (await host.play("tasks")).reward == 1.0
        printed = host.watch_output()
        assert (await host.play("after")).reward == 1.0
        await until(lambda: any("over" in text for _, text, _ in printed))
        assert len(rollouter.chats) == 1
        assert host.notices() == {}
        assert (await host.play("deaf-task")).reward == 1.0
        ((_, text),) = host.notices().values()
        assert "left tasks behind that did not end within 0.5 s of being cancelled, 1 of them" in text


async def test_a_request_beyond_the_limit_is_refused_and_a_large_one_goes_through(tmp_path):
    rollouter = Rollouter("a")
    async with hosting(config_with(**PLAY, max_request_bytes=60_000_000), tmp_path, rollouter) as host:
        assert (await host.play("big 50000000")).reward == 1.0
        assert len(rollouter.chats[0].messages[0]["content"]) == 50_000_000
        assert (await host.play("big 70000000")).reward == -1.0
        assert len(rollouter.chats) == 1


async def test_a_malformed_call_is_refused_to_its_sender_alone(tmp_path):
    malformed = {
        "temperature 0.5": "temperature: is not for an episode to say; the run's own sampling holds (",
        "max_tokens 0": "max_tokens: Expected `int` >= 1",
        "max_tokens 1.5": "max_tokens: Expected `int | null`, got `float`",
        "stop [1]": "stop[0]: Expected `str`, got `int`",
        'messages "text"': "messages: cannot be sent: 'utf-8' codec can't encode",
        'messages "object"': "messages: cannot be sent: Encoding objects of type object is unsupported",
    }
    async with hosting(config_with(**PLAY, workers=1), tmp_path) as host:
        beside = host.run("wait", uid="0-2")
        for prompt, refused in malformed.items():
            done = await host.play(f"malformed {prompt}")
            assert done.error.startswith(f"raised ChatRefused: {refused}")
            assert (done.blame, beside.done(), host.rollouter.chats) == ("episode", False, [])
        beside.cancel()


async def test_a_call_that_the_code_gives_up_is_given_up(tmp_path):
    rollouter = Rollouter(waits, "abc")
    async with hosting(config_with(**PLAY, workers=1), tmp_path, rollouter) as host:
        playing = host.run("give-up")
        await until(lambda: len(rollouter.chats) == 1)
        (tmp_path / "asked").touch()
        await until(lambda: len(rollouter.chats) == 2 and rollouter.cancelled == 1)
        (tmp_path / "asked").unlink()
        assert host.figure("open") == 1
        playing.cancel()


async def test_the_rollouter_is_told_when_a_worker_begins_with_an_episode(tmp_path):
    rollouter = Rollouter("a")
    async with hosting(config_with(**PLAY, workers=1), tmp_path, rollouter) as host:
        playing = host.run("wait", session="a" * 32)
        await until(lambda: rollouter.began == ["a" * 32])
        (slot,) = host.slots()
        slot.is_ready = False
        waiting = host.run("components", session="b" * 32)
        await until(lambda: host.figure("waiting") == 1)
        assert rollouter.began == ["a" * 32]
        slot.is_ready = True
        host.actor._players._assign()
        assert (await waiting).reward == 1.5
        await until(lambda: rollouter.began == ["a" * 32, "b" * 32])
        playing.cancel()


async def test_a_replaced_worker_that_never_gets_ready_is_killed_and_tried_again(tmp_path):
    async with hosting(config_with(**PLAY, workers=1), tmp_path) as host:
        host.actor._players._start_timeout_s = 3.0
        (tmp_path / "hang").touch()
        assert (await host.play("exit")).blame == "host"
        playing = host.run("reply", uid="0-2", timeout=40)
        await until(lambda: host.figure("workers_killed") == 1)
        (tmp_path / "hang").unlink()
        assert (await playing).reward == 3.0


@pytest.mark.skipif(bool(asyncio.run(why_not([]))), reason="this system has no namespaces for its users")
@pytest.mark.parametrize("play", [{"function": "thief:episode"}, {"command": [sys.executable, "thief.py"]}])
async def test_an_episode_that_steals_finds_neither_the_keys_of_the_run_nor_a_way_into_its_host(tmp_path, play):
    private = tmp_path / "runs" / "mine" / "private"
    private.parent.mkdir(parents=True)
    create_credentials(private, RUN_ID, ["episodes/0"], attempts=1, curve=False)
    thief.prepare(tmp_path, private, host=os.getpid())
    async with hosting(config_with(**play, workers=1), private.parent) as host:
        assert (await host.play()).reward == 0.0
        assert host.notices() == {}
        loot = tmp_path / "loot"
        assert loot.read_text() == "{}"
        loot.unlink()


async def test_a_host_without_the_endpoints_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncrl.episodes.http.endpoint", None)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with hosting(config_with(**PLAY), tmp_path):
            pass
    assert caught.group_contains(ConfigError, match=r"pip install 'asyncrl\[episodes\]'")


async def test_output_is_told_apart_and_bounded(tmp_path):
    async with hosting(config_with(**PLAY, workers=1, max_output_bytes=100_000), tmp_path) as host:
        printed = host.watch_output()
        await asyncio.gather(*(host.play("print", uid=f"0-{number}") for number in range(5)))
        for number in range(5):
            text = "".join(text for uid, text, _ in printed if uid == f"0-{number}")
            assert text == f"hello from 0-{number}\nand on the error stream\n"
        printed.clear()
        await host.play("flood")
        kept = sum(len(text) for _, text, _ in printed)
        assert 90_000 < kept <= 100_000
        assert kept + sum(dropped for *_, dropped in printed) == 2000 * 1001
        assert host.figure("output_dropped_bytes") == 2000 * 1001 - kept


async def test_code_that_cannot_be_played_ends_the_actor_before_it_is_ready(tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with hosting(config_with(function="plays:pay"), tmp_path):
            pass
    assert caught.group_contains(ConfigError, match=r"episode\.function: .*did you mean play")
    assert worker_pids() == []
