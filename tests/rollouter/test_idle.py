"""The messages of an idle rollouter: few, and one at once when it gets a lease."""

import asyncio

from harness import until
from rollouter_cases import Dataloader, Learner
from test_adoption import between

from asyncrl.rollouter import actor


async def test_an_idle_rollouter_sends_no_statistics_until_it_gets_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "STATS_S", 0.02)
    learner, dataloader = Learner(), Dataloader()
    async with between(learner, dataloader, tmp_path) as life:
        await until(lambda: learner.stats and learner.stats[-1].idle)
        count = len(learner.stats)
        await asyncio.sleep(0.5)
        assert len(learner.stats) == count
        life.gates["0-1"] = asyncio.Event()
        dataloader.lease("0-1")
        # Long before the next statistics of an idle rollouter.
        await until(lambda: len(learner.stats) > count)
        assert not learner.stats[count].idle
        await until(lambda: len(learner.stats) > count + 3)
        life.gates["0-1"].set()
        await until(lambda: learner.stats[-1].idle and learner.stats[-1].in_flight == 0)
