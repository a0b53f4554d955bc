"""An engine host on its event loop's time, and what an engine answers to one prompt there."""

import asyncio
from types import SimpleNamespace

import numpy as np
from harness import replace
from test_messages import make_group
from virtual import LoopClock

from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall, single_turn
from asyncrl.rollouter.serving.group_events import SampleAccount
from asyncrl.runtime.awaits import Awaits
from asyncrl.stops import Stops
from asyncrl.telemetry.states import StateLedger


class Letters:
    """A tokenizer of one character an id."""

    eos_ids = frozenset()

    def decode(self, ids):
        return "".join(chr(0x100 + id) for id in ids)


class Hosted:
    """A host whose engines need no bytes of a version."""

    def __init__(self, config, make):
        self.config = config
        self.entered = []
        """The states that it has entered: when, and which."""
        clock = LoopClock()
        states = StateLedger(clock.now, "engine")
        states.entered = lambda state, awaiting: self.entered.append((clock.now(), state))
        self.host = EngineHost(config, make, clock, states, Awaits(clock.now))

    async def load(self, version):
        """An update as the follower makes it. Raises EngineDied."""
        while not await self.host.quiesced(5.0):
            pass
        await self.host.pause(version)
        await self.host.load(SimpleNamespace(version=version))
        await self.host.commit()

    async def response(self, uid, tokens=8, sample=0, prompt=(5,), **changes):
        told = {"max_tokens": tokens, "prompt_ids": np.array(prompt, np.int32), "temperature": 1.0}
        ticket = replace(make_group(uid).ticket, **told, **changes)
        account = SampleAccount(uid, sample, asyncio.get_running_loop().time)
        call = PolicyCall(self.host, Letters(), self.config, ticket, account.call())
        return await single_turn(call, ticket, sample, Stops(strings=tuple(self.config.rollout.stop)), Letters())
