import asyncio
import os
import re
import signal
import sys
from collections import Counter

import msgspec
import psutil
import pytest
import thief
from credentials import create_credentials
from episodes.hosted import Rollouter, config_with, hosting, until, waits, worker_pids
from harness import RUN_ID

from asyncrl.core.errors import ChatRefused, ConfigError, EpisodeOver
from asyncrl.episodes.playing import episode_frames as frames
from asyncrl.episodes.playing.episode_worker import STOPPED, EpisodePrinter, EpisodeWorker
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.workers.confinement import why_not
from asyncrl.workers.worker import FrameReader


def play(**episode):
    return config_with(**{"function": "plays:play", "workers": 1, **episode})


async def test_an_episode_asks_the_policy_and_its_value_or_its_turns_have_the_reward(tmp_path):
    rollouter = Rollouter("hello")
    async with hosting(play(options={"enable_thinking": False}), tmp_path, rollouter) as host:
        assert await host.play("reply") == EpisodeDone(reward=5.0)
        (chat,) = rollouter.chats
        assert chat.messages == [{"role": "user", "content": "reply"}]
        assert chat.template_options == {"enable_thinking": False}
        assert await host.play("components") == EpisodeDone(reward=1.5, components={"a": 1.0, "b": 0.5})
        seen = await host.play("seen", sample=3, attempt=2)
        assert seen.components == {"seed": 7.0, "sample": 3.0, "attempt": 2.0, "row": 1.0}
        rollouter.order.clear()
        assert await host.play("turns 3") == EpisodeDone()
        assert [(node, value) for _, node, value in rollouter.rewards] == [(1, 0.0), (2, 1.0), (3, 2.0)]
        assert rollouter.order == ["chat", "reward"] * 3
        assert [message["role"] for message in rollouter.chats[-1].messages] == ["user", *["assistant", "user"] * 2]
        rollouter.answers, rollouter.chats, rollouter.rewards = ["a", "a", EpisodeOver("turns")], [], []
        assert await host.play("turns 9") == EpisodeDone(), "one that is over has ended well"
        assert len(rollouter.rewards) == 2
        rollouter.answers = [ChatRefused("tools", "are none")]
        assert (await host.play("reply")).error.startswith("raised ChatRefused: tools: are none (")
        assert (host.figure("played"), host.figure("open")) == (6, 0)
        assert [each.state for each in host.actor.resources()] == ["idle"]


async def test_many_episodes_share_the_workers_and_begin_when_one_is_ready(tmp_path):
    rollouter = Rollouter("abc")
    async with hosting(play(workers=2), tmp_path, rollouter) as host:
        printed = host.watch_output()
        calls = [host.run("reply", uid=f"0-{number}") for number in range(30)]
        waiting = [host.run("where", uid=f"1-{number}") for number in range(8)]
        assert [done.reward for done in await asyncio.gather(*calls)] == [3.0] * 30
        await until(lambda: len(printed) == 8)
        assert Counter(int(text) for _, text, _ in printed) == dict.fromkeys(worker_pids(), 4)
        assert host.figure("open") == 8
        assert [each.state for each in host.actor.resources()] == ["playing", "playing"]
        for call in waiting:
            call.cancel()
        await until(lambda: host.figure("open") == 0)
        assert (host.figure("stopped"), host.figure("workers_killed")) == (8, 0)
        (tmp_path / "hang").touch()
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: [each.state for each in host.actor.resources()] == ["starting", "starting"])
        late = host.run("components", session="b" * 32)
        await until(lambda: host.figure("waiting") == 1)
        assert "b" * 32 not in rollouter.began
        (tmp_path / "hang").unlink()
        assert (await late).reward == 1.5
        await until(lambda: "b" * 32 in rollouter.began)


RAISED = {
    "raise": r"raised ValueError: no luck \(.*/plays\.py:\d+\)",
    "leave": r"raised SystemExit: 3 \(.*/plays\.py:\d+\)",
    "odd": r"returned str 'good'; a finite number is expected \(.*/plays\.py:\d+\)",
    "surrogate raise": r"raised ValueError: file \\udcff\.txt \(.*",
    "surrogate return": "ended with a result that cannot be sent: UnicodeEncodeError: .*",
}
MALFORMED = {
    "temperature 0.5": "temperature: cannot be set by an episode; the run's own sampling holds (",
    "max_tokens 0": "max_tokens: Expected `int` >= 1",
    "stop [1]": "stop[0]: Expected `str`, got `int`",
    'stop ""': "stop[0]: Expected `str` of length >= 1",
    'messages "text"': "messages: cannot be sent: 'utf-8' codec can't encode",
    'messages "object"': "messages: cannot be sent: Encoding objects of type object is unsupported",
}


async def test_an_exception_fails_only_its_episode_and_is_reported_once(tmp_path):
    async with hosting(play(max_request_bytes=3_000_000), tmp_path) as host:
        printed, beside = host.watch_output(), host.run("wait")
        for prompt, error in RAISED.items():
            for _ in range(2):
                done = await host.play(prompt, timeout=20)
                assert (done.blame, done.reward) == ("episode", None)
                assert re.fullmatch(error, done.error)
            ((count, text),) = host.notices().values()
            assert count == 2 and text.startswith("episode (function = plays:play): ") and text.endswith("(prompt 0-1)")
        for prompt, refused in MALFORMED.items():
            done = await host.play(f"malformed {prompt}")
            assert done.error.startswith(f"raised ChatRefused: {refused}")
            assert (done.blame, beside.done(), host.rollouter.chats) == ("episode", False, [])
        assert (host.figure("open"), printed) == (1, [])
        # A call beyond the limit is refused, and one as large as several frames goes through.
        for size, said in ((2_500_000, 1.0), (3_500_000, -1.0)):
            assert (await host.play(f"big {size}")).reward == said
        assert [len(chat.messages[0]["content"]) for chat in host.rollouter.chats] == [2_500_000]
        beside.cancel()


async def test_stopped_episodes_and_cancelled_calls_end_and_nothing_after_the_end_is_sent(tmp_path):
    rollouter = Rollouter(waits, waits, "a")
    async with hosting(play(close_timeout_s=4.0), tmp_path, rollouter) as host:
        printed = host.watch_output()
        stopped = [host.run("wait"), host.run("reply")]
        await until(lambda: len(rollouter.chats) == 1 and host.figure("open") == 2)
        for call in stopped:
            call.cancel()
        await until(lambda: host.figure("open") == 0 and rollouter.cancelled == 1)
        assert printed == [("0-1", "closed 0-1\n", 0)]
        gives_up = host.run("give-up")
        await until(lambda: len(rollouter.chats) == 2)
        (tmp_path / "asked").touch()
        await until(lambda: len(rollouter.chats) == 3 and rollouter.cancelled == 2)
        (tmp_path / "asked").unlink()
        assert host.figure("open") == 1
        gives_up.cancel()
        await until(lambda: host.figure("open") == 0)
        assert [(await host.play(prompt)).reward for prompt in ("leak", "tasks", "after")] == [1.0] * 3
        await until(lambda: any("over" in text for _, text, _ in printed))
        assert len(rollouter.chats) == 4
        assert (host.notices(), host.figure("workers_killed")) == ({}, 0)
        assert (await host.play("deaf-task")).reward == 1.0
        ((_, text),) = host.notices().values()
        assert "left 1 tasks behind that did not end within 2 s of being cancelled" in text


class Inside:
    """A worker in this process, with an episode; its host speaks by ``take``."""

    def __init__(self, player):
        self.data = b""
        setup = frames.EpisodeSetup("function", ["a:b"], {}, "m", "http://h", 1.0, 5.0, 1 << 20, 1 << 20)
        self.take = EpisodeWorker(setup, player, self).take
        self.take(frames.Play(SESSION, TASK))

    def write(self, data):
        self.data += data

    def ended(self):
        said = [msgspec.msgpack.decode(body, type=frames.ToHost) for body in FrameReader(1 << 30).feed(self.data)]
        return [each for each in said if isinstance(each, frames.Ended)]


SESSION = "a" * 32
TASK = {"prompt": "p", "messages": [], "row": {}, "seed": 1, "uid": "0-1", "sample": 0, "attempt": 0}


async def test_an_episode_stopped_before_or_after_its_code_reports_its_end():
    closing, close, left = asyncio.Event(), asyncio.Event(), []

    async def lingers():
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            await close.wait()

    async def play(task, client):
        left.append(asyncio.create_task(lingers()))
        await asyncio.sleep(0)
        return 1.0

    worker = Inside(play)
    worker.take(frames.StopEpisode(SESSION))
    await until(worker.ended, within_s=5.0)
    assert worker.ended() == [frames.Ended(SESSION, error=STOPPED)] and not left
    worker = Inside(play)
    await closing.wait()
    worker.take(frames.StopEpisode(SESSION))
    close.set()
    await until(worker.ended, within_s=5.0)
    assert worker.ended() == [frames.Ended(SESSION, reward=1.0)]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_of_an_episode_inside_a_task_group_is_not_a_failure(fails):
    async def fumbles(client):
        try:
            await client.chat([])
        except EpisodeOver:
            raise ValueError("no luck") from None

    async def play(task, client):
        async with asyncio.TaskGroup() as asking:
            asking.create_task(client.chat([]))
            asking.create_task(fumbles(client) if fails else client.chat([]))

    worker = Inside(play)
    await until(lambda: worker.data.count(b"client-") == 2, within_s=5.0)
    for number in (1, 2):
        worker.take(frames.Denied(SESSION, f"client-{number}", "turns", over=True))
    await until(worker.ended, within_s=5.0)
    (ended,) = worker.ended()
    assert ended.error.startswith("raised ExceptionGroup: ") if fails else ended == frames.Ended(SESSION)


@pytest.mark.parametrize("function", ["decorated", "embedded"])
async def test_a_plain_function_may_return_a_coroutine_or_run_a_loop_of_its_own(tmp_path, function):
    """As one behind a decorator that is not asynchronous itself."""
    async with hosting(play(function=f"plays:{function}"), tmp_path, Rollouter("ab")) as host:
        assert await host.play("go") == EpisodeDone(reward=2.0)


async def test_plain_functions_run_in_threads_with_a_client_that_waits(tmp_path):
    rollouter = Rollouter("ab", "cde")
    async with hosting(play(function="plays:plain", close_timeout_s=4.0), tmp_path, rollouter) as host:
        assert await host.play("go") == EpisodeDone(reward=5.0)
        assert [(node, value) for _, node, value in rollouter.rewards] == [(0, 2.0)]
        rollouter.answers, rollouter.chats = [waits], []
        stopped = host.run("go")
        await until(lambda: len(rollouter.chats) == 1)
        stopped.cancel()
        await until(lambda: host.figure("open") == 0)
        assert host.figure("workers_killed") == 0
        # A thread that hangs costs the worker; the other episodes in it are not blamed.
        hanging, beside = host.run("sleep"), host.run("go", uid="0-2")
        # Episodes begin in order, so the thread hangs once the other one asks.
        await until(lambda: len(rollouter.chats) == 2)
        hanging.cancel()
        done = await beside
        assert done.blame == "host"
        assert "did not end within 4 s of being asked to (episode.close_timeout_s)" in done.error
        assert host.figure("suspects") == 0


async def test_the_episode_that_kills_workers_is_found_and_others_are_not_blamed(tmp_path):
    # On a busy machine memory takes its time, and is not to be taken for standing still.
    async with hosting(play(stall_timeout_s=4.0, max_memory_bytes=100_000_000), tmp_path) as host:

        async def dies(prompt, attempt, what):
            beside = host.run("wait", uid="0-2")
            await until(lambda: host.figure("open") == 1)
            bad = await host.play(prompt, attempt=attempt)
            assert [bad.blame, (await beside).blame] == ["host", "host"]
            assert re.search(what, bad.error), bad.error

        await dies("native", 0, r"stood still for 4 s \(episode.stall_timeout_s\)")
        await dies("eat 200000000", 1, "took more than 100000000 bytes of memory")
        assert host.figure("suspects") == 2
        # Both get lone workers from here on.
        bad, good = await asyncio.gather(host.play("exit", attempt=2), host.play("reply", uid="0-2"))
        assert (good, bad.blame) == (EpisodeDone(reward=3.0), "episode")
        assert "ended its worker process (exit code 1)" in bad.error
        assert (await host.play("reply", uid="0-3")).reward == 3.0
        names = ("stalled", "out_of_memory", "workers_died", "played_alone")
        assert [host.figure(name) for name in names] == [1, 1, 1, 2]


async def test_an_episode_is_not_blamed_for_a_worker_that_dies_before_it_starts(tmp_path):
    async with hosting(play(), tmp_path) as host:
        assert [(await host.play("exit", attempt=attempt)).blame for attempt in range(2)] == ["host", "host"]
        assert (await host.play("reply", uid="0-2")).reward == 3.0
        (other,) = worker_pids()
        (tmp_path / "hang").touch()
        playing = host.run("reply", attempt=2)
        await until(lambda: len(worker_pids()) == 2)
        (lone,) = set(worker_pids()) - {other}
        os.kill(lone, signal.SIGKILL)
        done = await playing
        assert done.blame == "host" and "SIGKILL" in done.error
        (tmp_path / "hang").unlink()
        assert (await host.play("reply", attempt=2)).reward == 3.0
        assert host.figure("played_alone") == 2


async def test_a_killed_worker_is_replaced_and_its_child_processes_end(tmp_path):
    # Its workers have ten seconds.
    async with hosting(play(supervision={"start_timeout_s": 12.5}), tmp_path) as host:
        (worker,) = worker_pids()
        assert (await host.play("fork")).reward == 1.0
        children = psutil.Process(worker).children(recursive=True)
        assert len(children) == 2
        waiting = host.run("wait")
        await until(lambda: host.figure("open") == 1)
        # The next one never gets ready, is killed as well and tried again.
        (tmp_path / "hang").touch()
        psutil.Process(worker).children()[0].kill()
        os.kill(worker, signal.SIGKILL)
        done = await waiting
        assert done.blame == "host" and "SIGKILL" in done.error
        playing = host.run("reply", uid="0-2", timeout=40)
        await until(lambda: host.figure("workers_killed") == 1)
        (tmp_path / "hang").unlink()
        assert (await playing).reward == 3.0
        for child in children:
            if child.is_running():
                child.kill()


@pytest.mark.skipif(bool(asyncio.run(why_not([]))), reason="this system has no namespaces for its users")
@pytest.mark.parametrize("play", [{"function": "thief:episode"}, {"command": [sys.executable, "thief.py"]}])
async def test_a_stealing_episode_gets_no_keys_of_the_run_and_no_access_to_its_host(tmp_path, play):
    private = tmp_path / "runs" / "mine" / "private"
    private.parent.mkdir(parents=True)
    create_credentials(private, RUN_ID, ["episodes/0"], curve=False)
    thief.prepare(tmp_path, private, host=os.getpid())
    async with hosting(config_with(**play, workers=1), private.parent) as host:
        assert (await host.play()).reward == 0.0
        assert host.notices() == {}
        loot = tmp_path / "loot"
        assert loot.read_text() == "{}"
        loot.unlink()


async def test_output_is_separated_by_episode_and_bounded(tmp_path):
    async with hosting(play(max_output_bytes=100_000), tmp_path) as host:
        printed = host.watch_output()
        await asyncio.gather(*(host.play("print", uid=f"0-{number}") for number in range(5)))
        for number in range(5):
            text = "".join(text for uid, text, _ in printed if uid == f"0-{number}")
            assert text == f"hello from 0-{number}\nand on the error stream\n"
        printed.clear()
        await host.play("surrogate print")
        assert [text for _, text, _ in printed] == ["half \\ud83d"]
        printed.clear()
        await host.play("flood")
        kept = sum(len(text) for _, text, _ in printed)
        assert 90_000 < kept <= 100_000
        assert kept + sum(dropped for *_, dropped in printed) == 2000 * 1001
        assert host.figure("output_dropped_bytes") == 2000 * 1001 - kept
        # Output that does not pass through Python's streams has one limit for all, up to the end of an episode.
        printed.clear()
        beside = host.run("wait", uid="0-2")
        await until(lambda: host.figure("open") == 1)
        for _ in range(3):
            await host.play("write 60000")
        assert sum(len(text) for _, text, _ in printed) == 180_000
        beside.cancel()


async def test_output_after_the_last_episode_is_kept(tmp_path):
    async with hosting(play(max_output_bytes=150_000, workers=1), tmp_path) as host:
        printed = host.watch_output()
        await host.play("write-later")
        await until(lambda: sum(len(text) + dropped for _, text, dropped in printed) == 180_000)
        assert sum(dropped for *_, dropped in printed) == 0


def test_a_long_print_is_cut_to_what_is_left_of_the_limit():
    sent = []
    printer = EpisodePrinter(10, lambda text, dropped: sent.append((text, dropped)))
    for text in ("abc\n", "12345é\n", "late\n"):
        printer.write(text)
    printer.flush()
    assert sent == [("abc\n", 0), ("12345", 8)]


@pytest.mark.parametrize("missing", ["code", "library"])
async def test_episode_code_that_cannot_run_ends_the_actor_before_it_is_ready(tmp_path, monkeypatch, missing):
    if missing == "library":
        monkeypatch.setitem(sys.modules, "asyncrl.episodes.http.endpoint", None)
    reported = {"code": r"episode\.function: .*did you mean play", "library": r"pip install 'asyncrl\[episodes\]'"}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with hosting(play(function="plays:pay"), tmp_path):
            pass
    assert caught.group_contains(ConfigError, match=reported[missing])
    assert worker_pids() == []
