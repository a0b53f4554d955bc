"""The learner's actor: one rank. Its messages are handled on the event loop, its training runs on a thread of its own.

Only rank 0 exchanges data with other actors: it takes groups, directs the training, publishes versions and reports
every outcome (rank_0.py). The other ranks follow its collectives and keep only their connection to the controller.

At every start the learner continues from the newest whole checkpoint, or from the initial weights. It publishes the
weights under a new number and reports the state of the run to the dataloader. When a rank dies, all ranks start again:
a surviving rank fails in the next collective, or is ended before.

A start of all ranks is a generation of the learner; its number is the incarnation of the ranks. The ranks meet in a
store of torch.distributed. Invariant: a rank joins the store of its own generation, even if the controller knows other
generations. Calls to the controller are repeated until it or its successor answers.

Fails with RemoteError when the controller refuses, and with DeadlineExceeded when rank 0 is not found in time. Fails
with Refused when rank 0 is of a newer generation: this rank must start again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.core.errors import DeadlineExceeded, NonFiniteStep, Refused
from asyncrl.core.threads import run_on
from asyncrl.learner.backends.backend import Backend, create
from asyncrl.learner.groups.intake import Deliveries
from asyncrl.learner.rank_0 import Rank0
from asyncrl.messages import Request
from asyncrl.messages.actors import ActorRecord, Resolve, Resolved
from asyncrl.messages.learner import RolloutStats
from asyncrl.messages.monitor import Resource
from asyncrl.observe.group_log import GroupLog
from asyncrl.observe.trace import PHASES, Track
from asyncrl.rpc.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.rpc.calls.retry import reply_unless_away

RANK_0 = "learner/0"
PHASE_STATES = {"copy": "publishing", "probe": "publishing", "take the GPU": "waiting"}
"""State of a rank above 0 in a phase of the backend's work; in all other phases it is ``training``."""


class Learner(Actor):
    """The actor of one rank of the learner."""

    role = "learner"
    kind = "rank"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._backend: Backend | None = None
        """The backend of this rank; None before ``setup`` has made it."""
        self._group_log = GroupLog(self.name)
        self._deliveries = Deliveries(self.config, self.services, self._group_log, context.credentials.seal_key)
        self._rank_0: Rank0 | None = None
        """The objects of rank 0; None before ``setup`` has made them, and on other ranks."""

    @property
    def _is_rank_0(self) -> bool:
        return self.context.index == 0

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return self._rank_0.progress.step if self._rank_0 is not None else 0

    def handling_parts(self) -> Iterable[object]:
        return (self, self._deliveries) if self._is_rank_0 else (self,)

    # --- life ---

    async def setup(self) -> None:
        """Make the backend and meet the other ranks; on rank 0 also restore the run and begin to publish versions."""
        self.states.enter("starting", "imports")
        self._backend = backend = await run_on(self._thread, create, self.config, self.context.index)
        phases = self.trace.track("phases", PHASES)
        backend.on_phase = lambda name: self._phase(phases, name)
        if not self._is_rank_0:
            host, port = await self._find_store()
            self.states.enter("starting", "model")
            await run_on(self._thread, backend.setup, host, port)
            return
        rank_0 = Rank0(self, backend, self._thread, self._report_to_controller, self._deliveries, self._group_log)
        await rank_0.setup()
        self._rank_0 = rank_0
        await rank_0.start()

    async def _find_store(self) -> tuple[str, int]:
        """Ask the controller for rank 0 of this generation until it is known. Returns host and port of its store."""
        loop, generation = asyncio.get_running_loop(), self.context.incarnation
        timeout_s = self.config.supervision.start_timeout_s
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            # ``unready``: rank 0 becomes ready only after all ranks have met. ``above`` skips earlier generations.
            request = Resolve(name=RANK_0, above=generation - 1, unready=True)
            reply: Resolved | None = await self._ask_controller(request)
            if reply is not None and reply.record is not None:
                return store_of(reply.record, generation)
        raise DeadlineExceeded(self.name, RANK_0, "the rendezvous of the ranks", timeout_s)

    async def _report_to_controller(self, request: Request) -> None:
        """Send a request to the controller until it is answered. Raises RemoteError."""
        with self.awaits.on(CONTROLLER, type(request).__name__):
            while await self._ask_controller(request) is None:
                pass

    async def _ask_controller(self, request: Request) -> Any:
        """Call the controller once. Returns None, after a pause, if the call must be repeated. Raises RemoteError."""
        return await reply_unless_away(self.peer(CONTROLLER).call(request), self.log, "controller")

    def _phase(self, track: Track, name: str) -> None:
        """Enter a phase of the backend's work, or leave it if the name is empty. Runs on the training thread."""
        if name:
            track.enter(name)
        else:
            track.leave()
        # On rank 0 the training loop sets the states, and during a start ``setup`` does.
        if not self._is_rank_0 and self.ready:
            self.states.enter(PHASE_STATES.get(name, "training") if name else "following", "" if name else RANK_0)

    async def run(self) -> None:
        """Run the training loop on rank 0, follow it on other ranks, until the actor drains."""
        if self._rank_0 is None:
            assert self._backend is not None
            self.states.enter("following", RANK_0)
            following = self.tasks.create_task(self._follow(self._backend))
            await self.drained()
            self._backend.interrupt()
            await following
            return
        training = self.tasks.create_task(self._rank_0.run())
        draining = self.tasks.create_task(self.drained())
        await asyncio.wait({training, draining}, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            # Stay until the drain: rollouters and dataloader end before the learner (core/roles.py) and still call it.
            await draining

    async def _follow(self, backend: Backend) -> None:
        """Follow the commands of rank 0 until they end, or a step is not finite and may not be skipped."""
        while True:
            try:
                await run_on(self._thread, backend.follow)
            except NonFiniteStep as error:
                self.log.error("step was not finite", error=str(error))
                if self.config.learner.on_nonfinite == "skip":
                    continue
                # Rank 0 knows the groups and ends the run. An error raised here could arrive before that.
                await self.drained()
            return

    def metrics(self) -> dict[str, float]:
        """Metrics of this rank; on rank 0 also those of the run, once it is restored."""
        return super().metrics() | (self._rank_0.metrics() if self._rank_0 is not None else {})

    def preempted(self) -> None:
        """Let rank 0 stop at the next version boundary, with a checkpoint."""
        if self._rank_0 is not None:
            self._rank_0.preempt()

    async def close(self) -> None:
        # ``setup`` may have failed at any point, so close only the parts that exist.
        if self._backend is not None:
            self._backend.interrupt()
            await run_on(self._thread, self._backend.stop)
        if self._rank_0 is not None:
            await self._rank_0.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def resources(self) -> list[Resource]:
        return [self.states.record("rank")]

    # --- messages ---

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        """Take the statistics of a rollouter since its last report."""
        if self._rank_0 is not None:
            self._rank_0.lines.stats(caller.name, caller.incarnation, request)


def store_of(rank_0: ActorRecord, generation: int) -> tuple[str, int]:
    """Host and port of the store in the record ``rank_0``. Raises Refused if the record is of another generation."""
    if rank_0.incarnation != generation:
        raise Refused(RANK_0, "incarnation", ours=str(generation), theirs=str(rank_0.incarnation))
    return rank_0.facts["store_host"], rank_0.facts["store_port"]
