"""Hosts join a run and leave it while it trains, in one process: no prompt is lost, none is trained twice."""

from __future__ import annotations

import asyncio

import pytest
from inprocess import System, until
from system.test_restarts import STEPS, audit, config

from asyncrl.core.errors import InvalidRequest
from asyncrl.messages.dataloader import WatchDataloader

SUPERVISION = {"supervision": {"silence_s": 1e6, "host_lost_s": 1e6}}
# Generation is the slower side. If training were, the few places that each step frees could go to the same
# rollouters for the whole run.
SLOWLY = {
    "learner": {"steps": STEPS, "groups_per_step": 4, "sim": {"step_s": 0.02}},
    "rollout": {"sim": {"decode_step_s": 0.015}},
}


def live(tmp_path, scenario):
    """Run to the end together with ``scenario``, which starts with the first step and ends by itself."""
    system, ended = System(config(**SUPERVISION, **SLOWLY), tmp_path / "run"), []

    async def acting():
        await system.at_step(1)
        await scenario(system)
        ended.append(True)

    state = system.play(acting)
    assert (state.phase, state.exit_code) == ("done", 0) and ended
    audit(tmp_path / "run")
    return system


async def step(system, more):
    await system.at_step(min(STEPS, system.actors["learner/0"].step + more))


def sharing(dataloader):
    """Number of rollouters that share the groups that the limit allows."""
    return len(dataloader._book.rollouters) - len(dataloader._book.leaving)


@pytest.mark.parametrize("within_s", [5.0, 0.0])
def test_i1_a_host_joins_serves_and_leaves(tmp_path, within_s):
    """Groups in flight are finished or returned, and the fair share is again that of the remaining rollouters."""

    async def scenario(system):
        found = await system.join("c")
        assert (found.agent, found.actors) == ("agent/0", ["rollouter/2"])
        await step(system, 3)
        dataloader = system.actors["dataloader/0"]
        async with asyncio.timeout(20):
            await until(lambda: system.actors["rollouter/2"].metrics()["rollout/sampled_tokens"])
            await until(lambda: sharing(dataloader) == 3)
        assert "rollouter/2" in dataloader.roster.actors
        await step(system, 2)
        await system.leave(found, within_s)
        await until(lambda: "rollouter/2" not in dataloader.roster.actors)
        assert sharing(dataloader) == 2
        assert system.actors["parameter_server/0"].metrics()["weights/replicas"] == 2
        assert dataloader.counters["tickets/granted_alone"] == 0
        # A name is given once.
        again = await system.join("c2")
        assert again.actors == ["rollouter/3"]
        await step(system, 2)

    async def status(system):
        return await system.actors["dataloader/0"].watch_dataloader(
            WatchDataloader(seen=-1), system.learner_as_caller()
        )

    system = live(tmp_path, scenario)
    assert not asyncio.run(status(system)).attempts


def test_i1_a_joined_host_dies_and_restarts_like_any_other(tmp_path):

    async def scenario(system):
        await system.join("c", replicas=2)
        await step(system, 2)
        for victim in ("rollouter/3", "dataloader/0", "rollouter/2", "learner/0", "parameter_server/0"):
            await system.replace(victim)
            await step(system, 1)
        assert "rollouter/3" in system.actors["dataloader/0"].roster.actors

    live(tmp_path, scenario)


def test_the_last_rollouter_cannot_leave(tmp_path):
    async def scenario(system):
        found = await system.join("c")
        await step(system, 2)
        for index in range(2):
            await system.kill(f"rollouter/{index}")
        with pytest.raises(InvalidRequest, match="c cannot leave: no other host has a rollouter that serves"):
            await system.leave(found, 1.0, answer_s=1.0)
        for index in range(2):
            system.start(f"rollouter/{index}")

    live(tmp_path, scenario)
