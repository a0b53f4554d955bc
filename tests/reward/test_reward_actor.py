"""The actor of a reward pool: over the wire, what the user hears of failures, and what ends it."""

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
from credentials import create_credentials
from harness import RUN_ID, Net, actor_context, until
from reward.pools import MODULE, request, workers
from run_settings import simulated_run

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError, RemoteError, RewardBroken, RewardFailed
from asyncrl.messages.actors import ActorRecord
from asyncrl.observe.catalogue import edges_of
from asyncrl.reward import reward_pool as pool_module
from asyncrl.reward.actor import RewardActor
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.heartbeat import gather_heartbeat
from asyncrl.workers import worker_pool as workers_pool
from asyncrl.workers.confinement import why_not

pytestmark = pytest.mark.usefixtures("user_module")
RUN = uvloop.run


def config_with(**reward: Any) -> Config:
    return simulated_run(reward={"function": "act_rewards:act", "workers": 2, **reward})


class Served:
    """The actor, a rollouter's connection to it, and the notices of the actor by their keys."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.actor = RewardActor(actor_context(config, "reward/0", run_dir))
        self.notices: dict[str, tuple[str, dict[str, Any]]] = {}
        self.actor.notify = lambda key, text, **more: self.notices.update({key: (text, more)})
        self.life: asyncio.Task[None]
        self.rollouter: Peer

    async def failing(self, text: str, uid: str, **more: Any) -> RemoteError:
        with pytest.raises(RemoteError) as caught:
            await self.rollouter.call(request(text, uid=uid), **more)
        return caught.value


@asynccontextmanager
async def serving(config: Config, run_dir: Path) -> AsyncIterator[Served]:
    """The actor at work; it may end before the context does, and leaves no worker."""
    served = Served(config, run_dir)
    async with Net() as net:
        served.life = asyncio.create_task(served.actor.main())
        await until(lambda: served.actor.ready or served.life.done(), within_s=30.0)
        net.register(ActorRecord(name="reward/0", incarnation=1, address=served.actor.address))
        served.rollouter = net.client("reward/0", "rollouter/0")
        yield served
        served.actor.begin_drain()
        await asyncio.gather(served.life, return_exceptions=served.life.done())
    assert workers() == []


@pytest.mark.skipif(bool(asyncio.run(why_not([]))), reason="this system has no namespaces for its users")
async def test_a_stealing_function_gets_no_keys_of_the_run_and_no_access_to_its_actor(tmp_path):
    private = tmp_path / "runs" / "mine" / "private"
    private.parent.mkdir(parents=True)
    create_credentials(private, RUN_ID, ["reward/0"], curve=False)
    thief.prepare(tmp_path, private, actor=os.getpid())
    async with serving(config_with(function="thief:reward", timeout_s=60.0), private.parent) as served:
        scores = await served.rollouter.call(request("x"), timeout=60.0)
        assert (tmp_path / "loot").read_text() == "{}"
        assert scores.rewards == [0.0]
        assert not served.notices


async def test_scores_and_failures_reach_the_caller_and_each_kind_is_reported_with_its_place(tmp_path):
    async with serving(config_with(timeout_s=3.5), tmp_path) as served:
        calls = [served.rollouter.call(request("x" * size)) for size in range(1, 100)]
        assert [one.rewards for one in await asyncio.gather(*calls)] == [[float(size)] for size in range(1, 100)]
        for number in range(2):
            for text in ("raise", "exit", "text", "crash"):
                error = await served.failing(text, f"0-{number}")
                assert (error.code, error.retryable) == ("reward_failed", True)
        assert "ran longer than 3.5 s" in str(await served.failing("sleep 99", "0-7"))
        line = MODULE[: MODULE.index("no such judge")].count("\n") + 1
        defined = MODULE[: MODULE.index("def act(")].count("\n") + 1
        path = tmp_path / "act_rewards.py"
        then = "A trajectory is tried 3 times, then it is left out of its group (rollout.on_failed_trajectory)"
        hint = "; reward.on_timeout = NUMBER would give such a response that reward"
        late = "ran longer than 3.5 s (reward.timeout_s); its worker process was killed"
        kinds = {
            f"KeyError {path}:{line}": f"raised KeyError: 'no such judge' ({path}:{line})",
            "ended its worker process (exit code 3)": "ended its worker process (exit code 3)",
            "no reward": f"returned str 'good'; a finite number is expected ({path}:{defined})",
            "died with its worker process (SIGSEGV)": "died with its worker process (SIGSEGV)",
            "timed out": late,
        }
        assert served.notices == {
            f"reward: {kind}": (
                f"reward function act_rewards:act {reported} (prompt {'0-7' if reported == late else '0-0'})",
                {"count": 1, "of": "108 calls", "meanwhile": then + hint}
                if reported == late
                else {"count": 2, "of": f"{104 + at} calls", "meanwhile": then},
            )
            for at, (kind, reported) in enumerate(kinds.items())
        }
        said = gather_heartbeat(served.actor, 1)
        assert 99 in served.actor.pulse()
        counts = {"scored": 99, "failed": 9, "timed_out": 1, "workers_killed": 1, "queued": 0, "running": 0}
        assert {f"reward/{name}": count for name, count in counts.items()}.items() <= said.counters.items()
        assert sum(said.histograms["reward/score_s"].counts) == 99
        spent = said.histograms["reward/run_s"].counts
        assert sum(spent) == 108, "the calls that failed are among them"
        assert spent[edges_of("reward/run_s").index(10.0)] == 1, "one has run until its deadline"
        assert [resource.name for resource in said.resources] == ["worker/0", "worker/1"]
        assert {state for resource in said.resources for state in resource.seconds} == {"starting", "idle", "scoring"}


async def test_a_cancelled_call_ends_its_task_and_the_actor_ends_during_a_hanging_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 0.1)
    async with serving(config_with(workers=1, timeout_s=600.0), tmp_path) as served:
        figures = served.actor.metrics
        hanging, queued = (served.rollouter.call(request("sleep 500")) for _ in range(2))
        await until(lambda: (figures()["reward/running"], figures()["reward/queued"]) == (1, 1))
        hanging.cancel()
        queued.cancel()
        assert (await served.rollouter.call(request("abc"))).rewards == [3.0]
        assert gather_heartbeat(served.actor, 1).counters["reward/workers_killed"] == 1
        hanging = served.rollouter.call(request("sleep 500"))
        await until(lambda: figures()["reward/running"] == 1)
    hanging.cancel()


async def test_a_function_that_cannot_be_called_ends_the_actor_before_it_is_ready(tmp_path):
    served = Served(config_with(function="act_rewards:akt"), tmp_path)
    with pytest.raises(ConfigError, match=r"reward\.function: .*did you mean act") as caught:
        await served.actor.main()
    assert caught.value.exit_code == 78
    assert not served.actor.ready and workers() == []


async def test_a_broken_pool_ends_the_actor(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_pool, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(workers_pool, "MAX_START_FAILURES", 2)
    async with serving(config_with(workers=1), tmp_path) as served:
        (tmp_path / "act_rewards.py").write_text("")
        psutil.Process(workers()[0]).kill()
        with pytest.raises(RewardFailed, match="no worker process left"):
            await asyncio.wait_for(served.life, 60)


async def test_a_function_that_fails_in_every_call_ends_the_run(tmp_path):
    async with serving(config_with(), tmp_path) as served:
        calls = [
            asyncio.ensure_future(served.failing("raise", f"0-{number % 4}", timeout=600.0)) for number in range(64)
        ]
        with pytest.raises(RewardBroken, match="has failed in all of its 16 calls, for 4 prompts") as caught:
            await asyncio.wait_for(served.life, 60)
        assert "The first: it raised KeyError: 'no such judge'" in str(caught.value)
        assert (caught.value.exit_code, caught.value.restartable) == (1, False)
        # Tasks that reached no worker are not at fault.
        done, waiting = await asyncio.wait(calls, timeout=1)
        for call in waiting:
            call.cancel()
        assert [call.result().code for call in done].count("reward_failed") == 16


async def test_a_function_that_has_worked_may_fail_briefly_after_a_restart(tmp_path):
    async with serving(config_with(), tmp_path) as served:
        asked = [
            msgspec.structs.replace(request("raise", uid=f"0-{number % 4}"), has_worked=True) for number in range(64)
        ]
        outcomes = await asyncio.gather(*map(served.rollouter.call, asked), return_exceptions=True)
        assert {getattr(outcome, "code", "") for outcome in outcomes} == {"reward_failed"}
        assert (await served.rollouter.call(request("abc"))).rewards == [3.0]
