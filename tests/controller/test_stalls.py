"""The watchdog and the look at paths in the controller's shell: heartbeats in, RunState out (I5)."""

import asyncio
import contextlib

from controller.test_controller_actor import on_cluster
from harness import until

from asyncrl.config.load import validate_config
from asyncrl.messages.actors import ActorEnded, WatchRun
from asyncrl.messages.monitor import AwaitRecord, Heartbeat, UnreachedRecord
from asyncrl.runtime.actor import CONTROLLER

BEAT_S = 0.02
STATES = {
    "learner/0": ("waiting", [AwaitRecord("rollouter", "groups", 5.0)]),
    "rollouter/0": ("generating", [AwaitRecord("engine", "tokens", 5.0)]),
}


def config(policy="report", stall_s=0.5, replicas=1, **supervision):
    return validate_config(
        {
            "data": {"source": "synthetic"},
            "rollout": {"engine": "sim", "engine_timeout_s": 0.1, "replicas": replicas},
            "learner": {"backend": "sim"},
            "supervision": {"drain_s": 0.4, "heartbeat_s": BEAT_S, "silence_s": 60.0} | supervision,
            "watchdog": {"stall_s": stall_s, "policy": policy},
        }
    )


def cut(replicas, **supervision):
    return config(stall_s=60.0, replicas=replicas, unreachable_s=0.3, **supervision)


class Beating:
    """Every actor of a run beats; ``cut_off`` tell that they do not reach the learner."""

    def __init__(self, cluster, cut_off=()):
        self.cluster, self.cut_off = cluster, cut_off
        self.peers, self.silent, self.tokens, self.beats = {}, set(), 0.0, 0

    async def comes_up(self, name, incarnation=1):
        """It beats in the place of the one before it."""
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
                    progress=0,
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


async def state_until(cluster, found):
    watcher, seen = cluster.caller(), -1
    while not found(state := await watcher.call(WatchRun(seen=seen))):
        seen = state.number
    return state


async def is_killed(cluster, name, incarnation):
    """As its agent kills it, and starts it again."""
    state = await state_until(cluster, lambda state: state.condemned or state.phase == "draining")
    if state.condemned:
        assert [(actor.name, actor.incarnation) for actor in state.condemned] == [(name, incarnation)]
        reason = state.condemned[0].reason
        end = ActorEnded(name=name, incarnation=incarnation, exit_code=-9, fatal=bool(state.aside), reason=reason)
        await cluster.caller().call(end)
    return state


@on_cluster(config())
async def test_a_stall_is_told_until_the_run_moves_and_told_again_while_it_lasts(cluster):
    async with beating(cluster) as actors:
        first = await state_until(cluster, lambda state: state.stuck)
        (stuck,) = first.stuck
        assert (stuck.name, stuck.incarnation) == ("rollouter/0", 1)
        assert "rollouter/0 waits 5 s on its engine for tokens" in stuck.report
        again = await state_until(cluster, lambda state: state.stuck and state.stuck[0].number > stuck.number)
        assert (again.stuck[0].name, again.phase, again.condemned) == ("rollouter/0", "running", [])
        actors.tokens += 1
        assert (await state_until(cluster, lambda state: not state.stuck)).phase == "running"


@on_cluster(config("restart"))
async def test_policy_restart_condemns_exactly_the_culprit(cluster):
    async with beating(cluster):
        state = await is_killed(cluster, "rollouter/0", 1)
        assert "held up the run" in state.condemned[0].reason
        assert state.stuck[0].report.endswith("; rollouter/0 is killed and started again (watchdog.policy = restart)")


@on_cluster(config("stop"))
async def test_policy_stop_ends_the_run_with_the_report_as_its_reason(cluster):
    async with beating(cluster):
        state = await state_until(cluster, lambda state: state.phase == "draining")
        assert (state.failed_actor, state.exit_code) == ("rollouter/0", 1)
        assert "on its engine for tokens" in state.reason
        # Its stacks are still to be taken.
        assert state.stuck[0].name == "rollouter/0"


@on_cluster(config(stall_s=60.0, silence_s=1.5))
async def test_silence_is_told_in_the_same_words_before_the_kill(cluster):
    async with beating(cluster) as actors:
        await until(lambda: actors.beats > 3)
        actors.silent.add("rollouter/0")
        state = await is_killed(cluster, "rollouter/0", 1)
        assert state.stuck[0].report.startswith("rollouter/0 has not been heard of for ")
        assert "it was generating and waited on engine for tokens" in state.stuck[0].report


@on_cluster(cut(replicas=3))
async def test_a_replica_that_is_cut_off_again_is_set_aside(cluster):
    async with beating(cluster, "rollouter/1") as actors:
        assert not (await is_killed(cluster, "rollouter/1", 1)).aside
        await actors.comes_up("rollouter/1", 2)
        state = await is_killed(cluster, "rollouter/1", 2)
        (aside,) = state.aside
        assert aside.name == "rollouter/1" and aside.reason.startswith("it could not reach learner/0")
        state = await state_until(cluster, lambda state: not state.condemned)
        assert (state.phase, [actor.name for actor in state.aside]) == ("running", ["rollouter/1"])


@on_cluster(cut(replicas=1))
async def test_a_run_whose_only_rollouter_stays_cut_off_ends_and_says_so(cluster):
    async with beating(cluster, "rollouter/0") as actors:
        for name, incarnation in [("rollouter/0", 1), ("learner/0", 1), ("rollouter/0", 2), ("learner/0", 2)]:
            state = await is_killed(cluster, name, incarnation)
            if state.phase == "draining":
                break
            await actors.comes_up(name, incarnation + 1)
        assert (state.failed_actor, state.exit_code) == ("rollouter/0", 1)
        assert state.reason.startswith("it could not reach learner/0 for ")


@on_cluster(cut(replicas=2, max_restarts=1))
async def test_who_is_not_reached_however_often_it_is_started_again_ends_the_run(cluster):
    async with beating(cluster, "rollouter/0", "rollouter/1") as actors:
        assert (await is_killed(cluster, "learner/0", 1)).phase == "running"
        await actors.comes_up("learner/0", 2)
        state = await state_until(cluster, lambda state: state.phase == "draining")
        assert state.failed_actor == "learner/0" and "after 1 restarts for that" in state.reason
