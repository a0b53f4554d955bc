"""An engine manager on its event loop's time over simulated engines, and their answers to one prompt."""

import asyncio
from types import SimpleNamespace

import numpy as np
from harness import replace
from made_group import make_group
from run_settings import sim_config
from virtual import LoopClock

from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rollouter.engines.sim import SimEngine
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.generation import PolicyCall, SingleTurn
from asyncrl.rollouter.serving.group_events import SampleEvents
from asyncrl.rpc.awaits import Awaits
from asyncrl.text.stops import Stops


class Letters:
    """A tokenizer of one character an id."""

    eos_ids = frozenset()

    def decode(self, ids):
        return "".join(chr(0x100 + id) for id in ids)


def simulated(*, routes=False, **rollout):
    """Prefill takes no time, each token a second, and a response is as long as allowed."""
    sim = {"prefill_tokens_per_s": 1e9, "decode_step_s": 1.0, "length": "constant", "length_median": 64}
    sim["routes"] = routes
    return sim_config(rollout={"stream_interval": 1, "sim": sim, **rollout})


class Engine(SimEngine):
    """It takes weights without bytes."""

    def __init__(self, config):
        super().__init__(config, "rollouter/0")

    async def load(self, weights, *, recompute_kv):
        await asyncio.sleep(0.1)
        self._require_alive()
        self._batch.load(weights.version, recompute_kv=recompute_kv)


class Turns:
    """The engine's side of a GPU that the learner has while ``free`` is not set."""

    def __init__(self):
        self.asked, self.free, self.has = asyncio.Event(), asyncio.Event(), False
        self.free.set()

    async def take(self):
        await self.free.wait()
        self.has = True

    def give(self):
        self.has = False
        self.asked.clear()


class ManagedEngine:
    """A manager of such engines."""

    def __init__(self, config, make=None, slices=None):
        self.config, make = config, make or (lambda: Engine(config))
        self.entered = []
        """The states that it has entered: when, and which."""
        clock = LoopClock()
        states = StateLedger(clock.now, "engine")
        states.entered = lambda state, awaiting: self.entered.append((clock.now(), state))
        self.manager = EngineManager(config, make, clock, states, Awaits(clock.now), slices)

    async def load(self, version):
        """An update as the follower makes it. Raises EngineDied."""
        while not await self.manager.quiesced(5.0):
            pass
        await self.manager.pause(version)
        await self.manager.load(SimpleNamespace(version=version))
        await self.manager.commit()

    def lease(self, uid, tokens=8, prompt=(5,), **changes):
        chosen = {"max_tokens": tokens, "prompt_ids": np.array(prompt, np.int32), "temperature": 1.0}
        return replace(make_group(uid).lease, **chosen, **changes)

    async def generate(self, request):
        await PolicyCall(self.manager, Letters(), self.config, request).generate()

    async def response(self, uid, tokens=8, sample=0, prompt=(5,), **changes):
        events = SampleEvents(uid, sample, asyncio.get_running_loop().time)
        stops = Stops(strings=tuple(self.config.rollout.stop))
        return await SingleTurn(self, stops, Letters()).play(self.lease(uid, tokens, prompt, **changes), events)
