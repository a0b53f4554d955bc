import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import thief
import uvloop
from harness import RUN_ID, SECRET, Net
from reward.pools import MODULE, request, until

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.errors import ConfigError, RemoteError, RewardBroken, RewardFailed
from asyncrl.messages.actors import ActorRecord
from asyncrl.reward.actor import RewardActor
from asyncrl.reward.scoring import pool as pool_module
from asyncrl.runtime.actor import ActorContext
from asyncrl.runtime.calls.peer import Peer
from asyncrl.runtime.workers.confinement import why_not
from asyncrl.telemetry.catalogue import EDGES
from asyncrl.wire.keys import Credentials, create_credentials
from asyncrl.wire.zeromq import ZmqTransport
from tools.live_run import title


def workers() -> list[psutil.Process]:
    """The pool's processes; other tests' helpers may live beside them."""
    return [p for p in psutil.Process().children(recursive=True) if "asyncrl reward worker" in title(p)]


pytestmark = pytest.mark.usefixtures("user_module")


def config_with(**reward: Any) -> Config:
    reward = {"function": "act_rewards:act", "workers": 2, **reward}
    simulated = {"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}
    return validate_config({**simulated, "reward": reward})


def context_with(config: Config, run_dir: Path) -> ActorContext:
    credentials = Credentials(RUN_ID, SECRET)
    return ActorContext(
        config=config,
        name="reward/0",
        incarnation=1,
        run_dir=run_dir,
        transport=ZmqTransport(credentials, max_message_bytes=1 << 20),
        credentials=credentials,
        controller=None,
    )


async def until_ready(actor: RewardActor, life: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while not actor.ready and not life.done():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(config: Config, run_dir: Path) -> AsyncIterator[tuple[RewardActor, Peer]]:
    """The actor at work, and a rollouter's connection to it."""
    actor = RewardActor(context_with(config, run_dir))
    async with Net() as net, asyncio.TaskGroup() as tasks:
        life = tasks.create_task(actor.main())
        await until_ready(actor, life)
        net.register(ActorRecord(name="reward/0", incarnation=1, address=actor.address))
        yield actor, net.client("reward/0", "rollouter/0")
        actor.begin_drain()
    assert workers() == []


@pytest.mark.skipif(bool(asyncio.run(why_not([]))), reason="this system has no namespaces for its users")
async def test_a_function_that_steals_finds_neither_the_keys_of_the_run_nor_a_way_into_its_actor(tmp_path):
    private = tmp_path / "runs" / "mine" / "private"
    private.parent.mkdir(parents=True)
    create_credentials(private, RUN_ID, ["reward/0"], attempts=1, curve=False)
    thief.prepare(tmp_path, private, actor=os.getpid())
    config = config_with(function="thief:reward", timeout_s=60.0)
    async with serving(config, private.parent) as (actor, rollouter):
        scores = await rollouter.call(request("x"), timeout=60.0)
        assert (tmp_path / "loot").read_text() == "{}"
        assert scores.rewards == [0.0]
        assert actor._notices.take() == []


def test_scores_and_failures_go_over_the_wire(tmp_path):
    async def body():
        async with serving(config_with(timeout_s=1.0), tmp_path) as (actor, rollouter):
            calls = [rollouter.call(request("x" * size)) for size in range(1, 100)]
            scores = await asyncio.gather(*calls)
            assert [one.rewards for one in scores] == [[float(size)] for size in range(1, 100)]
            for text, named in (("raise", "raised KeyError: 'no such judge'"), ("sleep 99", "ran longer than 1 s")):
                with pytest.raises(RemoteError, match=named) as caught:
                    await rollouter.call(request(text))
                assert (caught.value.code, caught.value.retryable) == ("reward_failed", True)
            said = actor.heartbeat(1, 0.0)
            assert said.progress == 99
            counts = {"scored": 99, "failed": 2, "timed_out": 1, "workers_killed": 1, "queued": 0, "running": 0}
            assert {f"reward/{name}": count for name, count in counts.items()}.items() <= said.counters.items()
            assert sum(said.histograms["reward/score_s"].counts) == 99
            assert [resource.name for resource in said.resources] == [f"worker/{i}" for i in range(len(said.resources))]
            assert {state for resource in said.resources for state in resource.seconds} == {
                "starting",
                "idle",
                "scoring",
            }

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


async def test_a_caller_that_cancels_gives_up_its_task_and_the_actor_ends_while_another_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 0.1)
    async with serving(config_with(workers=1, timeout_s=600.0), tmp_path) as (actor, rollouter):
        hanging, queued = (rollouter.call(request("sleep 500")) for _ in range(2))
        await until(lambda: (actor.figures()["reward/running"], actor.figures()["reward/queued"]) == (1, 1))
        hanging.cancel()
        queued.cancel()
        assert (await rollouter.call(request("abc"))).rewards == [3.0]
        assert actor.heartbeat(1, 0.0).counters["reward/workers_killed"] == 1
        hanging = rollouter.call(request("sleep 500"))
        await until(lambda: actor.figures()["reward/running"] == 1)
    hanging.cancel()


async def test_a_function_that_cannot_be_called_ends_the_actor_before_it_is_ready(tmp_path):
    actor = RewardActor(context_with(config_with(function="act_rewards:akt"), tmp_path))
    with pytest.raises(ConfigError, match=r"reward\.function: .*did you mean act") as caught:
        await actor.main()
    assert caught.value.exit_code == 78
    assert not actor.ready
    assert workers() == []


async def test_the_pool_that_cannot_go_on_ends_the_actor(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(pool_module, "MAX_START_FAILURES", 2)
    actor = RewardActor(context_with(config_with(workers=1), tmp_path))
    life = asyncio.create_task(actor.main())
    await until_ready(actor, life)
    (tmp_path / "act_rewards.py").write_text("")
    workers()[0].kill()
    with pytest.raises(RewardFailed, match="no worker process left"):
        await asyncio.wait_for(life, 60)
    assert workers() == []


async def failing(rollouter: Peer, text: str, uid: str) -> str:
    """The code of what comes back."""
    with pytest.raises(RemoteError) as caught:
        await rollouter.call(request(text, uid=uid))
    return caught.value.code


async def test_the_user_hears_of_each_kind_of_failure_with_its_place_and_then_counts(tmp_path):
    async with serving(config_with(timeout_s=1.0), tmp_path) as (actor, rollouter):
        for number in range(3):
            assert (await rollouter.call(request("abc"))).rewards == [3.0]
            for text in ("raise", "exit", "text", "crash"):
                assert await failing(rollouter, text, f"0-{number}") == "reward_failed"
        assert await failing(rollouter, "sleep 99", "0-7") == "reward_failed"
        line = MODULE[: MODULE.index("no such judge")].count("\n") + 1
        notices = actor._notices.take()
        told = {notice.key: (notice.count, f"{notice.text}. {notice.meanwhile}") for notice in notices}
        function, path = "reward function act_rewards:act", tmp_path / "act_rewards.py"
        then = "A trajectory is tried 3 times, then it is left out of its group (rollout.on_failed_trajectory)"
        hint = "; reward.on_timeout = NUMBER would give such a response that reward"
        assert told == {
            f"reward: KeyError {path}:{line}": (
                3,
                f"{function} raised KeyError: 'no such judge' ({path}:{line}) (prompt 0-0). {then}",
            ),
            "reward: ended its worker process (exit code 3)": (
                3,
                f"{function} ended its worker process (exit code 3) (prompt 0-0). {then}",
            ),
            "reward: no reward": (
                3,
                f"{function} returned str 'good'; a finite number is expected (prompt 0-0). {then}",
            ),
            "reward: died with its worker process (SIGSEGV)": (
                3,
                f"{function} died with its worker process (SIGSEGV) (prompt 0-0). {then}",
            ),
            "reward: timed out": (
                1,
                f"{function} ran longer than 1 s (reward.timeout_s); its worker process was killed (prompt 0-7). "
                f"{then}{hint}",
            ),
        }
        assert [notice.of for notice in notices] == [f"{number} calls" for number in range(12, 17)]
        spent = actor.histograms.taken()["reward/run_s"]
        assert sum(spent.counts) == 16, "the calls that failed are among them"
        assert spent.counts[EDGES["reward/run_s"].index(1.0)] == 1, "one has run until its deadline"


@pytest.mark.parametrize("text", ["raise", "sleep 99"])
async def test_a_function_that_fails_whatever_it_is_given_ends_the_run(tmp_path, text):
    """Timeouts that have a number for a reward are failures as well."""
    named = {"raise": "raised KeyError: 'no such judge'", "sleep 99": "ran longer than 0.2 s"}[text]
    config = config_with(timeout_s=0.2, on_timeout=0.0)
    actor = RewardActor(context_with(config, tmp_path))
    async with Net() as net:
        life = asyncio.create_task(actor.main())
        await until_ready(actor, life)
        net.register(ActorRecord(name="reward/0", incarnation=1, address=actor.address))
        rollouter = net.client("reward/0", "rollouter/0")
        calls = [rollouter.call(request(text, uid=f"0-{number % 4}"), timeout=600.0) for number in range(64)]
        ending = asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RewardBroken, match="has failed in all of its 16 calls, for 4 prompts") as caught:
            await asyncio.wait_for(life, 60)
        assert f"The first: it {named}" in str(caught.value)
        assert (caught.value.exit_code, caught.value.restartable) == (1, False)
        for call in calls:
            call.cancel()
        # Those that did not make it to a worker are nobody's fault.
        codes = [getattr(outcome, "code", "") for outcome in await ending]
        assert codes.count("reward_failed") == (0 if text == "sleep 99" else 16)
        assert actor._pool is not None
        timed_out = actor._pool.counters.timed_out
        # Others may have been in the workers when the last of the 16 was killed.
        assert timed_out >= 16 if text == "sleep 99" else timed_out == 0
    assert workers() == []


async def test_after_a_restart_a_function_that_has_worked_may_fail_for_a_while(tmp_path):
    async with serving(config_with(), tmp_path) as (_, rollouter):
        asked = [
            msgspec.structs.replace(request("raise", uid=f"0-{number % 4}"), has_worked=True) for number in range(64)
        ]
        outcomes = await asyncio.gather(*(rollouter.call(each) for each in asked), return_exceptions=True)
        assert {getattr(outcome, "code", "") for outcome in outcomes} == {"reward_failed"}
        assert (await rollouter.call(request("abc"))).rewards == [3.0]
