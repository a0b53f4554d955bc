"""On a whole system in one process: prompts that kill engines, and a rollouter that dies with finished groups."""

import asyncio
import json

import pytest
from inprocess import System, sim_config

from asyncrl.rollouter.engines.sim import SimEngine


def trained_uids(system):
    uids = []
    for path in sorted((system.run_dir / "samples").iterdir()):
        uids += [json.loads(line)["uid"] for line in path.read_text().splitlines()]
    return uids


@pytest.mark.parametrize("on_update", ["abort_resume", "keep", "drain"])
def test_a_prompt_that_kills_every_engine_is_quarantined_and_the_run_goes_on(tmp_path, monkeypatch, on_update):
    """The innocent are trained, and the engines' restarts are not used up (I1)."""
    generate, deaths = SimEngine.generate, []

    async def poisoned(self, request):
        async for delta in generate(self, request):
            if request.key.startswith("0-7/") and self._dead is None and not self._paused:
                deaths.append({id.partition("/")[0] for id in self._streams})
                self._die("killed by its prompt")
                self._require_alive()
            yield delta

    monkeypatch.setattr(SimEngine, "generate", poisoned)
    config = sim_config(
        data={"size": 24, "shuffle": False},
        run={"samples_per_step": 100},
        rollout={
            "on_update": on_update,
            "max_attempts": 2,
            "stream_interval": 4,
            "sim": {"length": "constant", "decode_step_s": 0.002},
        },
        supervision={"backoff_s": 0.02},
        learner={"steps": 7, "max_filtered_ratio": 10.0},
    )
    system = System(config, tmp_path / "run")
    state = asyncio.run(system.run())
    assert state.phase == "done", state
    line = system.lines("train")[-1]
    uids = trained_uids(system)
    assert len(uids) == len(set(uids)) == line["ledger/trained"] == 28
    assert "0-7" not in uids
    assert line["ledger/quarantined"] == 1
    assert [inside for inside in deaths if inside == {"0-7"}][-2:] == deaths[-2:] == [{"0-7"}] * 2
    assert 2 + 2 <= len(deaths) <= 2 + 2 + 1


def test_what_a_dead_rollouter_had_finished_returns_to_the_gate_and_is_generated_again(tmp_path):
    """I1: the groups that never reached the learner are trained once, by its successor's tickets."""
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
        assert finished <= rollouter._held.keys()
        assert not any(learner._has(uid) for uid in finished)
        await system.replace("rollouter/0")
        granted = set()
        while not finished <= granted and not running.done():
            await asyncio.sleep(0.001)
            granted |= set(getattr(system.actors["rollouter/0"], "_held", ()))
        return system, await running, finished

    system, state, finished = asyncio.run(asyncio.wait_for(main(), 60))
    assert state.phase == "done"
    uids = trained_uids(system)
    assert finished <= set(uids)
    assert len(uids) == len(set(uids)) == system.lines("train")[-1]["ledger/trained"] == 16
