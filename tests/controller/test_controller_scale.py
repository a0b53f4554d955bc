"""The controller's work for each actor does not grow with the number of actors."""

import asyncio

import pytest
from controller.test_controller_actor import CONTROLLER, Cluster
from played import played
from run_settings import simulated_run
from virtual import run_virtual
from work import steps_of

from asyncrl.controller.health.stalls import ActorStatus, describe_waits
from asyncrl.controller.health.unreachable import ReadyActor, UnreachableActors
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.messages.actors import WatchRun
from asyncrl.messages.monitor import Wait

SINGLE = ("dataloader/0", "learner/0", "parameter_server/0", "reward/0")


def run(tmp_path, scenario, rollouters):
    config = simulated_run(rollout={"replicas": rollouters})

    async def main():
        async with asyncio.timeout(3600), Cluster(tmp_path, config) as cluster:
            await scenario(cluster, [name for name in config.actors if name != CONTROLLER])

    run_virtual(main())


with_rollouters = played(run, given=2)


@with_rollouters(40)
async def test_no_actor_is_woken_for_the_others_while_a_run_starts(cluster, names):
    # All actors get its generation.
    await cluster.register("learner/0")
    names.remove("learner/0")
    first = await cluster.caller().call(WatchRun())
    parked = [cluster.caller(name).call(WatchRun(seen=first.number), timeout=1000.0) for name in names]
    follower = cluster.caller("agent/1")
    for name in names[:-1]:
        await cluster.register(name)
    done, _ = await asyncio.wait(parked, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    assert not done
    shown = await follower.call(WatchRun(seen=first.number, seen_line=0))
    assert shown.waiting_for == names[-1:] and shown.number > first.number
    # A call that reports what the actor has seen wakes none either.
    again = cluster.caller("agent/2").call(WatchRun(seen=shown.number), timeout=1000.0)
    done, _ = await asyncio.wait({again}, timeout=1.0)
    assert not done
    await cluster.register(names[-1])
    states = await asyncio.gather(*parked, again)
    assert {(state.phase, *state.waiting_for) for state in states} == {("running",)}


def broken_paths(rollouters):
    """Look at paths that are all broken."""
    unreachable = UnreachableActors(60.0, window_s=600.0)
    unreached = {f"rollouter/{i}": {"learner/0": 100.0} for i in range(0, rollouters, 2)}
    names = [*SINGLE, *(f"rollouter/{i}" for i in range(rollouters))]
    ready = [ReadyActor(name=name, incarnation=1, unreached=unreached.get(name, {})) for name in names]
    for now in range(60):
        assert unreachable.look(ready, 1000.0 + now, 0.0) == []

    def look():
        assert len(unreachable.look(ready, 1060.0, 0.0)) == rollouters / 2

    return look


def a_stall(rollouters):
    """The learner waits for any rollouter, and the rollouters wait for any reward pool."""
    waits = {"learner/0": "rollouter", "reward/0": "rollouter"}
    names = ["learner/0", "reward/0", *(f"rollouter/{i}" for i in range(rollouters))]
    actors = {
        name: ActorStatus(
            name=name,
            incarnation=1,
            state="ready",
            waits=[Wait(waits.get(name, "reward"), "Score", 10.0, False)],
        )
        for name in names
    }
    return lambda: describe_waits(actors, 60.0)


def late_replicas(rollouters):
    """A quarter of the replicas is lost; another one is not ready in time and is resting."""
    names = [f"rollouter/{i}" for i in range(rollouters)]
    run = RunStateMachine(
        expected=frozenset({*SINGLE, *names}),
        now=0.0,
        start_timeout_s=300.0,
        drain_s=10.0,
        grace_s=60.0,
        host_grace_s=60.0,
    )
    run.ready(run.expected - set(names[::2]), 1.0)
    run.host_lost("a (agent/1)", names[::4], 2.0)

    def tick():
        assert run.next_deadline() == 300.0 and run.tick(300.0)
        assert len(run.resting) == rollouters / 4 and run.phase == "running"

    return tick


@pytest.mark.parametrize("make", [broken_paths, a_stall, late_replicas])
def test_four_times_the_replicas_cost_four_times_the_work(make):
    assert steps_of(make(400)) < 5 * steps_of(make(100))
