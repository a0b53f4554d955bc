"""On a whole system in one process: prompts that kill engines, and a rollouter that dies with finished groups."""

import asyncio

from harness import until
from inprocess import System
from run_files import groups
from run_settings import sim_config

from asyncrl.core.errors import EngineDied
from asyncrl.messages.dataloader import OpenLeases
from asyncrl.messages.groups import Holds
from asyncrl.rollouter.engines.sim import SimEngine
from asyncrl.rpc.calls.handlers import Caller


def trained_uids(system):
    """Each uid once, as in the ledger."""
    uids = [group["uid"] for group in groups(system.run_dir)]
    assert len(uids) == len(set(uids)) == system.lines("train")[-1]["ledger/trained"]
    return uids


def test_i1_a_prompt_that_kills_every_engine_is_quarantined_and_the_run_continues(tmp_path, monkeypatch):
    """The other prompts are trained, and the engines' restarts are not used up."""
    generate, running, inside = SimEngine.generate, {}, {}

    async def poisoned(self, request):
        running.setdefault(self, set()).add(request.id)
        try:
            async for delta in generate(self, request):
                # Except when it is paused for an update: that would not be blamed on the prompt.
                if request.key.startswith("0-7/") and delta.finish_reason != "abort":
                    inside.setdefault(self, {id.partition("/")[0] for id in running[self]})
                    await self.close()
                    raise EngineDied(self.name, "killed by its prompt")
                yield delta
        finally:
            running[self].discard(request.id)

    monkeypatch.setattr(SimEngine, "generate", poisoned)
    config = sim_config(
        data={"size": 24, "shuffle": False},
        run={"samples_per_step": 100},
        rollout={"max_attempts": 2, "stream_interval": 4, "sim": {"length": "constant", "decode_step_s": 0.002}},
        supervision={"backoff_s": 0.02},
        learner={"steps": 7, "max_filtered_ratio": 10.0},
    )
    system = System(config, tmp_path / "run")
    state = asyncio.run(system.run())
    assert state.phase == "done", state
    uids = trained_uids(system)
    assert len(uids) == 28 and "0-7" not in uids
    assert system.lines("train")[-1]["ledger/quarantined"] == 1
    deaths = list(inside.values())
    assert deaths[-2:] == [{"0-7"}] * 2
    assert 2 + 2 <= len(deaths) <= 2 + 2 + 1


def test_i1_finished_groups_of_a_dead_rollouter_are_generated_again(tmp_path):
    """The groups that never reached the learner are trained once, by its successor's leases."""
    config = sim_config(
        run={"samples_per_step": 100}, rollout={"replicas": 1}, learner={"steps": 4, "sim": {"step_s": 0.05}}
    )

    async def main():
        system = System(config, tmp_path / "run")
        running = asyncio.create_task(system.run())
        learner = None

        def has_trained():
            nonlocal learner
            learner = system.actors.get("learner/0")
            return learner is not None and learner.ready and learner.step >= 1

        await until(has_trained, "the first step", 60)
        rollouter, server = system.actors["rollouter/0"], system.network.servers[learner.address]
        deliver, its_own = server.deliver, f"{rollouter.name}/{rollouter.context.incarnation}/".encode()

        def deliver_others(client, frames):
            if not client.routing_id.startswith(its_own):
                deliver(client, frames)

        # No message that it sends from here on arrives.
        server.deliver = deliver_others
        anybody = Caller("dataloader/0", 0, -1, asyncio.get_running_loop().time() + 60)

        def finished_alone():
            """Groups that it has finished and the learner does not have, once it has stopped generating."""
            held = list(rollouter.open_leases(OpenLeases(learner=0), anybody).attempts)
            has = learner._deliveries.holds(Holds(uids=held), anybody).uids
            return set() if rollouter.metrics()["rollout/in_flight"] or has else set(held)

        await until(lambda: len(finished_alone()) >= 2, "groups without a holder", 60)
        finished = finished_alone()
        await system.replace("rollouter/0")
        return system, await running, finished

    system, state, finished = asyncio.run(asyncio.wait_for(main(), 60))
    assert state.phase == "done"
    assert finished <= set(trained_uids(system)) and len(trained_uids(system)) == 16
