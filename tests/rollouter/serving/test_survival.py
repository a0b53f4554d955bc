"""On a whole system in one process: prompts that kill engines, and a rollouter that dies with finished groups."""

import asyncio

from inprocess import System, sim_config
from run_files import groups

from asyncrl.errors import EngineDied
from asyncrl.rollouter.engines.sim import SimEngine


def trained_uids(system):
    """Each uid once, as the ledger has it."""
    uids = [group["uid"] for group in groups(system.run_dir)]
    assert len(uids) == len(set(uids)) == system.lines("train")[-1]["ledger/trained"]
    return uids


def test_i1_a_prompt_that_kills_every_engine_is_quarantined_and_the_run_goes_on(tmp_path, monkeypatch):
    """The innocent are trained, and the engines' restarts are not used up."""
    generate, running, inside = SimEngine.generate, {}, {}

    async def poisoned(self, request):
        running.setdefault(self, set()).add(request.id)
        try:
            async for delta in generate(self, request):
                # Not where it is paused for an update: that would be no fault of the prompt.
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


def test_i1_what_a_dead_rollouter_had_finished_returns_to_the_gate_and_is_generated_again(tmp_path):
    """The groups that never reached the learner are trained once, by its successor's tickets."""
    config = sim_config(
        run={"samples_per_step": 100}, rollout={"replicas": 1}, learner={"steps": 4, "sim": {"step_s": 0.05}}
    )

    async def main():
        system = System(config, tmp_path / "run")
        running = asyncio.create_task(system.run())
        while (learner := system.actors.get("learner/0")) is None or not learner.ready or learner.step < 1:
            await asyncio.sleep(0.002)
        rollouter = system.actors["rollouter/0"]
        # Nothing that it delivers from here on arrives.
        rollouter.peer("learner/0")._transmit = lambda future: None
        while len(finished := {uid for uid, left in rollouter._ungenerated.items() if left == 0}) < 2:
            await asyncio.sleep(0.002)
        assert not any(learner._has(uid) for uid in finished)
        await system.replace("rollouter/0")
        return system, await running, finished

    system, state, finished = asyncio.run(asyncio.wait_for(main(), 60))
    assert state.phase == "done"
    assert finished <= set(trained_uids(system)) and len(trained_uids(system)) == 16
