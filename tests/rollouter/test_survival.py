"""On a whole system in one process: prompts that kill engines, and rollouters that die with finished groups."""

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


def test_rollouters_with_a_spool_die_with_finished_groups_and_nothing_is_generated_twice(tmp_path):
    """I1: what was finished is delivered by the next incarnation, before its prompts could be granted again."""
    config = sim_config(
        run={"samples_per_step": 100},
        rollout={"spool": True, "replicas": 1},
        learner={"steps": 8, "sim": {"step_s": 0.05}},
    )

    async def main():
        system = System(config, tmp_path / "run")
        running = asyncio.create_task(system.run())
        recovered = deaths = 0
        while not running.done() and deaths < 3:
            await asyncio.sleep(0.005)
            rollouter, learner = system.actors.get("rollouter/0"), system.actors.get("learner/0")
            if rollouter is None or learner is None or not rollouter.ready or learner.step <= 2 * deaths:
                continue
            # The acknowledgements of the next groups are lost, and the rollouter with them.
            rollouter.peer("learner/0")._on_reply = lambda header, frames: None
            while rollouter.counters["rollout/spool_groups"] < 2:
                await asyncio.sleep(0.002)
            spooled = set(rollouter._spool._file.uids)
            await system.replace("rollouter/0")
            deaths += 1
            while (successor := system.actors["rollouter/0"]) is rollouter or not successor.ready:
                await asyncio.sleep(0.002)
            recovered += successor.counters["rollout/spool_recovered"]
            # The gate is asked again only now, and has them as held by the learner.
            assert not spooled & set(successor._held)
        return system, await running, recovered

    system, state, recovered = asyncio.run(asyncio.wait_for(main(), 60))
    assert state.phase == "done"
    assert recovered >= 6
    uids = trained_uids(system)
    assert len(uids) == len(set(uids)) == system.lines("train")[-1]["ledger/trained"] == 32
    assert list((system.run_dir / "spool").iterdir()) == []
