"""Stalls, silent and unreachable actors in the controller: heartbeats in, RunState out (I5)."""

import asyncio
import contextlib

import pytest
from controller.test_controller_actor import on_cluster
from harness import until
from run_settings import simulated_run

from asyncrl.messages.actors import ActorEnded, WatchRun
from asyncrl.messages.monitor import Heartbeat, UnreachedRecord, Wait
from asyncrl.rpc.actor import CONTROLLER

BEAT_S = 0.02
STATES = {
    "learner/0": ("waiting", [Wait("rollouter", "groups", 5.0)]),
    "rollouter/0": ("generating", [Wait("engine", "tokens", 5.0)]),
}


def config(policy="report", stall_s=0.5, replicas=1, **supervision):
    return simulated_run(
        rollout={"engine_timeout_s": 0.1, "replicas": replicas},
        supervision={"drain_s": 0.4, "heartbeat_s": BEAT_S, "silence_s": 60.0} | supervision,
        watchdog={"stall_s": stall_s, "policy": policy},
    )


def cut(replicas, **supervision):
    # Ten times the interval at which the actors of the test beat: a busy machine does not look silent.
    return config(stall_s=60.0, replicas=replicas, unreachable_s=1.0, heartbeat_s=10 * BEAT_S, **supervision)


class Beating:
    """Every actor of a run beats; ``cut_off`` report that they cannot reach the learner."""

    def __init__(self, cluster, cut_off=()):
        self.cluster, self.cut_off = cluster, cut_off
        self.peers, self.silent, self.tokens, self.beats = {}, set(), 0.0, 0

    async def comes_up(self, name, incarnation=1):
        """It beats in the place of its predecessor."""
        await self.cluster.register(name, incarnation)
        self.peers[name] = self.cluster.caller(name, incarnation)

    async def beat(self):
        began = asyncio.get_running_loop().time()
        while True:
            self.beats += 1
            for name in self.peers.keys() - self.silent:
                state, awaits = STATES.get(name, ("ready", []))
                missed = UnreachedRecord("learner/0", asyncio.get_running_loop().time() - began)
                beat = Heartbeat(
                    beat=self.beats,
                    state=state,
                    state_s=5.0,
                    awaits=awaits,
                    counters={"rollout/sampled_tokens": self.tokens},
                    unreached=[missed] if name in self.cut_off else [],
                )
                self.peers[name].cast(beat)
            await asyncio.sleep(BEAT_S)


@contextlib.asynccontextmanager
async def beating(cluster, *cut_off):
    all_beat = Beating(cluster, cut_off)
    for name in cluster.config.actors:
        if name != CONTROLLER:
            await all_beat.comes_up(name)
    task = asyncio.create_task(all_beat.beat())
    yield all_beat
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_killed(cluster, name, incarnation):
    """Simulate its agent, which kills it and starts it again."""
    state = await cluster.state(lambda state: state.condemned or state.phase == "draining")
    if state.condemned:
        assert [(actor.name, actor.incarnation) for actor in state.condemned] == [(name, incarnation)]
        reason = state.condemned[0].reason
        end = ActorEnded(name=name, incarnation=incarnation, exit_code=-9, fatal=bool(state.resting), reason=reason)
        await cluster.caller().call(end)
    return state


async def notice_until(cluster, found):
    """The first notice on a stall whose text matches."""
    watcher, number, line = cluster.caller(), -1, 0
    while True:
        state = await watcher.call(WatchRun(seen=number, seen_line=line))
        for notice in state.lines:
            if notice.get("key") == "stall" and found(notice["text"]):
                return notice
        number, line = state.number, state.last_line


@on_cluster(config())
async def test_a_stall_is_reported_again_while_it_lasts_and_restarts_no_actor(cluster):
    async with beating(cluster) as actors:
        first = await cluster.state(lambda state: state.stuck)
        assert ("rollouter/0", 1, "") in [(each.name, each.incarnation, each.report) for each in first.stuck]
        again = await cluster.state(lambda state: state.stuck and state.stuck[0].number > first.stuck[0].number)
        assert (again.phase, again.condemned) == ("running", [])
        notice = await notice_until(cluster, lambda text: text.startswith("nothing has moved for "))
        assert "learner/0 waits 5 s for groups; rollouter/0 waits 5 s on its engine for tokens" in notice["text"]
        actors.tokens += 1
        assert (await cluster.state(lambda state: not state.stuck)).phase == "running"
        assert (await notice_until(cluster, lambda text: text.startswith("the run moves again")))["count"] == 1


@on_cluster(config("stop"))
async def test_policy_stop_ends_the_run_with_the_report_as_the_reason(cluster):
    async with beating(cluster):
        state = await cluster.state(lambda state: state.phase == "draining")
        assert (state.failed_actor, state.exit_code) == (CONTROLLER, 1)
        assert "rollouter/0 waits 5 s on its engine for tokens" in state.reason
        # Its stacks have not been taken yet.
        assert "rollouter/0" in [each.name for each in state.stuck]


@on_cluster(config(stall_s=60.0, silence_s=1.5))
async def test_a_silent_actor_is_reported_before_it_is_killed(cluster):
    async with beating(cluster) as actors:
        await until(lambda: actors.beats > 3)
        actors.silent.add("rollouter/0")
        state = await is_killed(cluster, "rollouter/0", 1)
        assert state.stuck[0].report.startswith("rollouter/0 has not been heard of for ")
        assert "it was generating and waited on engine for tokens" in state.stuck[0].report


@on_cluster(cut(replicas=3))
async def test_a_replica_that_cannot_reach_another_actor_is_restarted_once_and_then_rests(cluster):
    async with beating(cluster, "rollouter/1") as actors:
        for incarnation in (1, 2):
            state = await is_killed(cluster, "rollouter/1", incarnation)
            assert state.condemned[0].reason.startswith("it could not reach learner/0 for ")
            if incarnation == 1:
                assert state.resting == []
                await actors.comes_up("rollouter/1", 2)
        state = await cluster.state(lambda state: not state.condemned)
        assert state.phase == "running"
        assert [actor.name for actor in state.resting] == ["rollouter/1"]
        assert state.resting[0].reason.startswith("it could not reach learner/0 for ")


@pytest.mark.parametrize("name", ["dataloader/0", "rollouter/0"])
@on_cluster(cut(replicas=1, max_restarts=1))
async def test_the_run_fails_if_restarts_of_an_actor_that_it_needs_do_not_help(cluster, name):
    async with beating(cluster, name) as actors:
        await is_killed(cluster, name, 1)
        await actors.comes_up(name, 2)
        state = await cluster.state(lambda state: state.phase == "draining")
        assert (state.failed_actor, state.exit_code) == (name, 1)
        assert state.reason.startswith("it could not reach learner/0 for ")
        assert state.reason.endswith(", after 1 restarts for this (supervision.max_restarts)")
