"""An engine that sleeps while the learner has its GPU: no token is lost, and nothing is sampled without weights."""

import asyncio

import pytest
from managed_engine import Engine, ManagedEngine, Turns, simulated
from virtual import run_virtual

from asyncrl.core.errors import EngineDied

RESPONSE = 8


class Sleeper(Engine):
    """Notes its memory: it may compute, and hold weights, only while it has the GPU."""

    def __init__(self, config, turns):
        super().__init__(config)
        self.turns, self.calls, self.dies_in = turns, [], ""

    async def _note(self, call):
        self.calls.append(call)
        assert self.turns.has, f"{call} without the GPU"
        if self.dies_in == call:
            await self.close()
            raise EngineDied(self.name, f"in {call}")

    async def sleep(self):
        await super().sleep()
        await self._note("sleep")

    async def wake(self):
        await super().wake()
        await self._note("wake")

    async def load(self, weights, *, recompute_kv):
        await self._note("load")
        await super().load(weights, recompute_kv=recompute_kv)


async def sleeping(mode, *, dies_in=""):
    """A response during which the learner has the GPU for 5 s. Returns it, its managed engine and all engines."""
    turns = Turns()
    engines = []

    def make():
        engines.append(Sleeper(config, turns))
        return engines[-1]

    config = simulated(on_update=mode)
    managed = ManagedEngine(config, make, turns)
    await managed.manager.start()
    engines[0].dies_in = dies_in
    await managed.load(1)
    answering = asyncio.create_task(managed.response("0-1", RESPONSE))
    await asyncio.sleep(3.5)
    turns.free.clear()
    asyncio.get_running_loop().call_later(5.0, turns.free.set)
    try:
        await managed.manager.sleep()
    except EngineDied as error:
        managed.manager.declare_dead(str(error))
        await managed.manager.replace()
    assert managed.manager.version == -1 and not managed.manager.serves and turns.has
    await managed.load(2)
    return await answering, managed, engines


@pytest.mark.parametrize("mode", ["abort_resume", "keep", "drain"])
def test_a_response_continues_after_the_sleep(mode):
    async def main():
        response, managed, engines = await sleeping(mode)
        sequence = response.sequences[0]
        assert len(sequence.tokens) == RESPONSE
        assert engines[0].calls == ["load", "sleep", "wake", "load"]
        # Under drain it ended before the sleep, else it continued under the next version.
        assert {span.version for span in sequence.spans} == ({1} if mode == "drain" else {1, 2})
        states = [state for _, state in managed.entered]
        at = states.index("asleep", states.index("generating"))
        assert states[at - 1] == "pausing" and states[at + 1 : at + 3] == ["waking", "waiting"]
        asleep, awake = managed.entered[at][0], managed.entered[at + 1][0]
        # The learner gives the GPU back 5 s after it asks; the drain takes most of this time.
        assert awake - asleep == pytest.approx(5.0 if mode != "drain" else 0.5, abs=0.2)

    run_virtual(main())


@pytest.mark.parametrize("dies_in", ["sleep", "wake"])
def test_an_engine_that_dies_in_a_sleep_loses_nothing(dies_in):
    async def main():
        response, managed, engines = await sleeping("abort_resume", dies_in=dies_in)
        assert len(response.sequences[0].tokens) == RESPONSE
        assert len(engines) == 2 and engines[1].calls == ["load"]
        assert managed.manager.restarts == 1

    run_virtual(main())


def test_the_gpu_is_given_back_only_once_the_engine_has_ended():
    """Also if the call that ends it is cancelled, and another one follows."""

    class Slow(Sleeper):
        ended = False

        async def close(self):
            await asyncio.sleep(3.0)
            self.ended = True
            await super().close()

    async def main():
        turns, made = Turns(), []
        config = simulated()

        def make():
            made.append(Slow(config, turns))
            return made[-1]

        manager = ManagedEngine(config, make, turns).manager
        await manager.start()
        closing = asyncio.create_task(manager.close())
        await asyncio.sleep(1.0)
        closing.cancel()
        await asyncio.sleep(1.0)
        assert turns.has and not made[0].ended
        await manager.close()
        assert made[0].ended and not turns.has
        await manager.close()

    run_virtual(main())
