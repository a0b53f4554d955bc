"""An engine host on its event loop's time, and what an engine answers to one prompt there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import replace
from test_messages import make_group
from virtual import LoopClock

from asyncrl.config import Config
from asyncrl.messages.groups import Trajectory
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall, single_turn
from asyncrl.rollouter.serving.group_events import SampleAccount
from asyncrl.runtime.awaits import Awaits
from asyncrl.stops import Stops
from asyncrl.telemetry.states import StateLedger


class Letters:
    """A tokenizer of one character an id."""

    eos_ids: set[int] = set()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + id) for id in ids)


class Hosted:
    """A host whose engines need no bytes of a version."""

    def __init__(self, config: Config, make: Callable[[], Any]) -> None:
        self.config = config
        clock = LoopClock()
        self.host = EngineHost(config, make, clock, StateLedger(clock.now, "engine"), Awaits(clock.now))

    async def load(self, version: int) -> None:
        """An update as the follower makes it. Raises EngineDied."""
        while not await self.host.quiesced(5.0):
            pass
        await self.host.pause(version)
        await self.host.load(SimpleNamespace(version=version))
        await self.host.commit()

    async def response(
        self, uid: str, tokens: int = 8, sample: int = 0, prompt: Sequence[int] = (5,), **changes: Any
    ) -> Trajectory:
        told = {"max_tokens": tokens, "prompt_ids": np.array(prompt, np.int32), "temperature": 1.0}
        ticket = replace(make_group(uid).ticket, **told, **changes)
        account = SampleAccount(uid, sample, LoopClock().now)
        call = PolicyCall(self.host, Letters(), self.config, ticket, account.call())
        return await single_turn(call, ticket, sample, Stops(strings=tuple(self.config.rollout.stop)), Letters())
