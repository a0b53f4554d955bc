"""The watchdog in the controller's shell: heartbeats in, RunState out, on the in-memory transport (I5)."""

import asyncio

from controller.test_controller_actor import OTHERS, on_cluster

from asyncrl.config.load import validate_config
from asyncrl.messages.actors import ActorEnded, WatchRun
from asyncrl.messages.monitor import AwaitRecord, Heartbeat, UnreachedRecord
from asyncrl.runtime.actor import CONTROLLER

BEAT_S = 0.02


def config(policy="report", silence_s=60.0, engine_timeout_s=0.1, stall_s=0.5):
    return validate_config(
        {
            "data": {"source": "synthetic"},
            "rollout": {"engine": "sim", "engine_timeout_s": engine_timeout_s},
            "learner": {"backend": "sim"},
            "supervision": {"drain_s": 0.4, "heartbeat_s": BEAT_S, "silence_s": silence_s},
            "watchdog": {"stall_s": stall_s, "policy": policy},
        }
    )


class Beating:
    """Every actor of a run beats; the learner waits for groups, and the rollouter for tokens of its engine."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.states = dict.fromkeys(OTHERS, ("ready", []))
        self.states["learner/0"] = ("waiting", [AwaitRecord("rollouter", "groups", 5.0)])
        self.states["rollouter/0"] = ("generating", [AwaitRecord("engine", "tokens", 5.0)])
        self.tokens = 0.0
        self.silent = set()

    async def __aenter__(self):
        await self.cluster.all_ready()
        self.task = asyncio.create_task(self.beat())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def beat(self):
        peers = {name: self.cluster.caller(name) for name in OTHERS}
        number = 0
        while True:
            number += 1
            for name in set(OTHERS) - self.silent:
                state, awaits = self.states[name]
                counters = {"rollout/sampled_tokens": self.tokens} if name == "rollouter/0" else {}
                peers[name].cast(
                    Heartbeat(beat=number, progress=0, state=state, state_s=5.0, awaits=awaits, counters=counters)
                )
            await asyncio.sleep(BEAT_S)


async def state_until(cluster, found):
    watcher, seen = cluster.caller(), -1
    while True:
        state = await watcher.call(WatchRun(seen=seen))
        if found(state):
            return state
        seen = state.number


@on_cluster(config())
async def test_a_stall_is_told_until_the_run_moves_and_told_again_while_it_lasts(cluster):
    async with Beating(cluster) as beating:
        first = await state_until(cluster, lambda state: state.stuck)
        (stuck,) = first.stuck
        assert (stuck.name, stuck.incarnation) == ("rollouter/0", 1)
        assert "rollouter/0 waits 5 s on its engine for tokens" in stuck.report
        again = await state_until(cluster, lambda state: state.stuck and state.stuck[0].number > stuck.number)
        assert again.stuck[0].name == "rollouter/0"
        assert (again.phase, again.condemned) == ("running", [])
        beating.tokens += 1
        assert (await state_until(cluster, lambda state: not state.stuck)).phase == "running"


@on_cluster(config("restart"))
async def test_policy_restart_condemns_exactly_the_culprit(cluster):
    async with Beating(cluster):
        state = await state_until(cluster, lambda state: state.condemned)
        assert [(actor.name, actor.incarnation) for actor in state.condemned] == [("rollouter/0", 1)]
        assert "held up the run" in state.condemned[0].reason
        assert state.stuck[0].name == "rollouter/0"
        assert state.stuck[0].report.endswith("; rollouter/0 is killed and started again (watchdog.policy = restart)")


@on_cluster(config("restart", engine_timeout_s=60.0))
async def test_who_may_still_be_at_work_is_told_and_left_alone(cluster):
    async with Beating(cluster):
        state = await state_until(cluster, lambda state: state.stuck and state.stuck[0].report)
        assert state.stuck[0].report.endswith("; rollouter/0 is left alone, as its work may take 60 s")
        assert state.condemned == []


class Cut(Beating):
    """As many rollouters as are there; of them ``cut_off`` tell that they do not reach the learner."""

    def __init__(self, cluster, cut_off):
        super().__init__(cluster)
        self.cut_off = cut_off

    async def comes_back(self, name):
        """Its successor beats in its place."""
        incarnation = self.peers[name][0] + 1
        await self.cluster.register(name, incarnation)
        self.peers[name] = incarnation, self.cluster.caller(name, incarnation)

    async def beat(self):
        names = [name for name in self.cluster.config.actors if name != CONTROLLER]
        self.peers = {name: (1, self.cluster.caller(name)) for name in names}
        began, number = asyncio.get_running_loop().time(), 0
        while True:
            number += 1
            for name in names:
                missed = asyncio.get_running_loop().time() - began
                unreached = [UnreachedRecord("learner/0", missed)] if name in self.cut_off else []
                beat = Heartbeat(beat=number, progress=0, state="ready", unreached=unreached)
                self.peers[name][1].cast(beat)
            await asyncio.sleep(BEAT_S)

    async def __aenter__(self):
        for name in self.cluster.config.actors:
            if name != CONTROLLER:
                await self.cluster.register(name)
        self.task = asyncio.create_task(self.beat())
        return self


def short_tree(replicas, **supervision):
    tree = config().model_dump()
    tree["rollout"]["replicas"] = replicas
    tree["supervision"] |= {"unreachable_s": 0.3} | supervision
    tree["watchdog"]["stall_s"] = 60.0
    return validate_config(tree)


async def is_killed(cluster, name, incarnation):
    """As its agent kills it, and starts it again."""
    state = await state_until(cluster, lambda state: state.condemned or state.phase == "draining")
    told = [(actor.name, actor.incarnation) for actor in state.condemned]
    if told:
        assert told == [(name, incarnation)]
        reason = state.condemned[0].reason
        end = ActorEnded(name=name, incarnation=incarnation, exit_code=-9, fatal=bool(state.aside), reason=reason)
        await cluster.caller().call(end)
    return state


@on_cluster(short_tree(3))
async def test_a_replica_that_is_cut_off_again_is_set_aside(cluster):
    async with Cut(cluster, ["rollouter/1"]) as cut:
        assert not (await is_killed(cluster, "rollouter/1", 1)).aside
        await cut.comes_back("rollouter/1")
        state = await is_killed(cluster, "rollouter/1", 2)
        (aside,) = state.aside
        assert aside.name == "rollouter/1" and aside.reason.startswith("it could not reach learner/0")
        state = await state_until(cluster, lambda state: not state.condemned)
        assert (state.phase, [actor.name for actor in state.aside]) == ("running", ["rollouter/1"])


@on_cluster(short_tree(1))
async def test_a_run_whose_only_rollouter_stays_cut_off_ends_and_says_so(cluster):
    async with Cut(cluster, ["rollouter/0"]) as cut:
        for incarnation in (1, 2):
            for name in ("rollouter/0", "learner/0"):
                state = await is_killed(cluster, name, incarnation)
                if state.phase == "draining":
                    assert (state.failed_actor, state.exit_code) == ("rollouter/0", 1)
                    assert state.reason.startswith("it could not reach learner/0 for ")
                    return
                await cut.comes_back(name)
        raise AssertionError("it goes on for ever")


@on_cluster(short_tree(2, max_restarts=1))
async def test_who_is_not_reached_however_often_it_is_started_again_ends_the_run(cluster):
    async with Cut(cluster, ["rollouter/0", "rollouter/1"]) as cut:
        assert (await is_killed(cluster, "learner/0", 1)).phase == "running"
        await cut.comes_back("learner/0")
        state = await state_until(cluster, lambda state: state.phase == "draining")
        assert state.failed_actor == "learner/0" and "after 1 restarts for that" in state.reason


@on_cluster(config("stop"))
async def test_policy_stop_ends_the_run_with_the_report_as_its_reason(cluster):
    async with Beating(cluster):
        state = await state_until(cluster, lambda state: state.phase == "draining")
        assert (state.failed_actor, state.exit_code) == ("rollouter/0", 1)
        assert "on its engine for tokens" in state.reason
        # Its stacks are still to be taken.
        assert state.stuck[0].name == "rollouter/0"


@on_cluster(config(silence_s=1.5, stall_s=60.0))
async def test_silence_is_told_in_the_same_words_before_the_kill(cluster):
    async with Beating(cluster) as beating:
        await asyncio.sleep(3 * BEAT_S)
        beating.silent.add("rollouter/0")
        state = await state_until(cluster, lambda state: state.condemned)
        assert [actor.name for actor in state.condemned] == ["rollouter/0"]
        assert state.stuck[0].report.startswith("rollouter/0 has not been heard of for ")
        assert "it was generating and waited on engine for tokens" in state.stuck[0].report
