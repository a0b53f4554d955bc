"""A rollouter that does not reach the learner takes no tickets along, and tells whom it misses."""

import asyncio

from cuts import way_to
from harness import Net, replace
from rollouter_cases import Dataloader, Learner, living

from asyncrl.runtime.calls import peer as peer_module


def told(life):
    return {record.whom: record.seconds for record in life.rollouter.heartbeat(1, 0.0).unreached}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def test_it_asks_for_nothing_before_it_has_reached_the_learner_and_tells_that_it_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_module, "REPEAT_S", 0.2)
    async with Net() as net:
        learner, dataloader = Learner(), Dataloader()
        net.serve(learner, "learner/0")
        net.serve(dataloader, "dataloader/0")
        async with way_to(net.records["learner/0"].address) as way:
            net.register(replace(net.records["learner/0"], address=way.address))
            way.cut()
            dataloader.grant("0-1")
            async with living(net, tmp_path) as life:
                await until(lambda: told(life).get("learner/0", 0.0) > 0.5)
                assert set(told(life)) == {"learner/0"}
                assert (dataloader.asked, life.held) == ([], set())
                await way.open()
                await until(lambda: learner.uids == ["0-1"] and not life.held)
                assert told(life) == {}
                # Once it was reached, it is kept busy: its learner may only be starting again.
                way.cut()
                dataloader.grant("0-2")
                await until(lambda: life.held == {"0-2"} and told(life).get("learner/0", 0.0) > 0.1)
                await way.open()
                await until(lambda: not life.held)
