"""The policy as calls reach it: a slot of the engine, then a PolicyCall. The number of slots may adapt.

    GroupRunner -> SingleTurn | EpisodePlayer -> Sessions -> Policy -> EngineHost -> Engine

Slots are places in the engine for calls; places are those of open episodes, of which several may share a slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.config.rollout import AUTO_START
from asyncrl.messages.groups import Lease, Trajectory
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall, single_turn
from asyncrl.rollouter.serving.group_events import CallAccount, SampleAccount
from asyncrl.rollouter.serving.slots import LOOK_S, Concurrency, Slots
from asyncrl.runtime.services import ActorServices
from asyncrl.stops import Stops
from asyncrl.telemetry.trace import FIRST_SLOT, Trace
from asyncrl.tokenizer import Tokenizer


class Player(Protocol):
    """Makes a trajectory of a sample."""

    async def play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        """One attempt. Raises TrajectoryFailed where nothing can come of the lease any more."""


class Policy:
    """The policy of one rollouter. ``tokenizer`` is set before the first call."""

    tokenizer: Tokenizer

    def __init__(self, config: Config, services: ActorServices, host: EngineHost, trace: Trace) -> None:
        self._config, self._host, self._trace, self._log = config, host, trace, services.log
        self._concurrency = Concurrency(*config.rollout.concurrency_bounds, start=AUTO_START)
        self.slots = Slots(self._concurrency.limit)
        """Slots of the engine."""
        self.places = Slots(config.episodes_open(self.slots.size))
        """Places of open episodes."""

    def call(self, lease: Lease, account: CallAccount, **watch: Callable[[Any], None]) -> PolicyCall:
        """A call of the policy, to be made in a slot."""
        return PolicyCall(self._host, self.tokenizer, self._config, lease, account, **watch)

    @asynccontextmanager
    async def slot(self, account: CallAccount) -> AsyncIterator[None]:
        """A slot of the engine for one call."""
        async with self.slots.take() as slot:
            account.took_slot(self._trace.track(f"slot {slot}", FIRST_SLOT + slot))
            try:
                yield
            finally:
                account.left_slot()

    async def adapt(self, resized: Callable[[], None]) -> None:
        """Adapt the number of slots for ever; ``resized`` is called after each change."""
        loads = self._host.loads
        while True:
            await asyncio.sleep(LOOK_S)
            load = self._host.load_now
            if load is None:
                continue
            if loads != self._host.loads:
                loads = self._host.loads
                self._concurrency.engine_reloaded(load)
            before = self.slots.size
            limit = self._concurrency.look(load, running=self.slots.taken)
            if limit != before:
                self._log.debug("concurrency", limit=limit, kv_use=load.kv_use, preemptions=load.preemptions)
                self.slots.resize(limit)
                self.places.resize(self._config.episodes_open(limit))
                resized()


class SingleTurn:
    """The player of prompts with one response."""

    def __init__(self, policy: Policy, stops: Stops) -> None:
        self._policy, self._stops = policy, stops

    async def play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        """One response. Raises TrajectoryFailed."""
        call = account.call()
        async with self._policy.slot(call):
            policy = self._policy.call(lease, call)
            return await single_turn(policy, lease, account.sample, self._stops, self._policy.tokenizer)
