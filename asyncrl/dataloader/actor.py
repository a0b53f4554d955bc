"""The dataloader's shell: messages to events, grants to tickets, parked calls woken when something changed.

All decisions are made in ``tickets`` and the modules under it; reading and tokenizing happen on threads before the
actor is ready. Orphans of a dead rollouter are granted again only after the learner has said which it holds; when it
cannot be asked the run ends with the error that says so.
"""

from __future__ import annotations

import asyncio

from asyncrl.config import DataConfig
from asyncrl.dataloader.evals import EvalPrompt, EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.limit import WorkingLimit
from asyncrl.dataloader.order import EpochOrder
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.dataloader.prompts import PromptSet
from asyncrl.dataloader.sources import load_dataset
from asyncrl.dataloader.tickets import Ask, Grant, Tickets
from asyncrl.errors import DeadlineExceeded
from asyncrl.messages import (
    Done,
    Held,
    Holds,
    Lease,
    Leased,
    Outcomes,
    OutcomesSeen,
    ReturnTickets,
    Supply,
    Ticket,
    WatchSupply,
)
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.runtime.parking import ParkingLot
from asyncrl.tokenizer import Tokenizer, load_tokenizer

LEARNER = "learner/0"
TOKENIZED_AT_ONCE = 2000
"""Prompts between two looks at whether the actor is to end."""


class Dataloader(Actor):
    """See the module."""

    role = "dataloader"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._prompts: PromptSet
        self._eval_prompts: dict[str, PromptSet] = {}
        self._tickets: Tickets
        self._leases = ParkingLot()
        self._watchers = ParkingLot()
        self._supply_number = -1
        self._orphaned = asyncio.Event()

    # --- life ---

    async def setup(self) -> None:
        """Read and tokenize all prompts. Raises DataError or ConfigError."""
        config = self.config
        tokenizer = await asyncio.to_thread(
            load_tokenizer, config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._prompts = await self._read("data", config.data, tokenizer)
        for name, evaluation in config.eval.items():
            self._eval_prompts[name] = await self._read(f"eval.{name}.data", evaluation.data, tokenizer)
        self._tickets = self._make_tickets()

    async def _read(self, key: str, data: DataConfig, tokenizer: Tokenizer) -> PromptSet:
        dataset = await asyncio.to_thread(load_dataset, data)
        prompts = PromptSet(dataset, data, tokenizer)
        while not await asyncio.to_thread(prompts.tokenize, TOKENIZED_AT_ONCE):
            self.progress()
        self.log.info(
            "prompts are ready",
            data=key,
            prompts=len(prompts),
            too_long=len(prompts.oversize),
            bad_rows=prompts.skipped,
            fingerprint=prompts.fingerprint,
        )
        return prompts

    def _make_tickets(self) -> Tickets:
        config, learner = self.config, self.config.learner
        order = EpochOrder(self._prompts.fingerprint, config.run.seed, len(self._prompts), shuffle=config.data.shuffle)
        limit = WorkingLimit(
            groups_per_step=learner.groups_per_step,
            groups_per_version=config.groups_per_version,
            staleness_max=config.staleness.max,
            adapt=config.staleness.adapt,
        )
        gate = Gate(
            limit,
            groups_per_version=config.groups_per_version,
            groups_of_run=learner.steps * learner.groups_per_step,
        )
        evals = EvalRounds(
            EvalSet(
                name,
                self._eval_prompts[name].admissible,
                every_versions=evaluation.every_versions,
                at_start=evaluation.at_start,
                at_end=evaluation.at_end,
            )
            for name, evaluation in config.eval.items()
        )
        return Tickets(PromptQueue(order, frozenset(self._prompts.oversize)), gate, evals)

    async def run(self) -> None:
        """Serve; ask the learner about orphans whenever there are any."""
        settling = self.tasks.create_task(self._settle_orphans())
        await self.drained()
        settling.cancel()

    async def _settle_orphans(self) -> None:
        while True:
            await self._orphaned.wait()
            self._orphaned.clear()
            orphans = self._tickets.orphans
            if not orphans:
                continue
            try:
                held: Held = await self.peer(LEARNER).call(Holds(uids=orphans))
            except DeadlineExceeded as error:
                self.log.warning("learner is away", error=str(error))
                self._orphaned.set()
                continue
            self._tickets.settle(orphans, held.uids)
            self.log.info("orphans settled", orphans=len(orphans), held=len(held.uids))
            self._changed()

    # --- rollouters ---

    def peer_replaced(self, name: str, incarnation: int) -> None:
        """What a dead rollouter held becomes orphans."""
        self._tickets.died(name, incarnation)
        if self._tickets.orphans:
            self._orphaned.set()

    @handler
    async def lease(self, request: Lease, caller: Caller) -> Leased:
        """Grant what may be granted; parked until that is something, answered before half of the deadline."""
        ask = Ask(
            caller.name,
            caller.incarnation,
            request.seen,
            request.free_groups,
            request.served_version,
            frozenset(request.holding),
        )
        self._tickets.meet(ask)
        if self._tickets.orphans:
            self._orphaned.set()
        return await self._leases.until(lambda: self._answer(ask), caller.park_s) or Leased()

    def _answer(self, ask: Ask) -> Leased | None:
        grants = self._tickets.lease(ask)
        if grants:
            self.progress()
            self._count()
            return Leased(tickets=[self._ticket(grant) for grant in grants])
        return Leased(closed=True) if self._tickets.closed else None

    @handler
    def return_tickets(self, request: ReturnTickets, caller: Caller) -> Done:
        """Somebody else is to generate these groups."""
        self._tickets.give_back(caller.name, caller.incarnation, request.uids)
        self._changed()
        return Done()

    # --- the learner ---

    @handler
    def outcomes(self, request: Outcomes, caller: Caller) -> OutcomesSeen:
        """Take in what became of groups. Raises ProtocolError for a group that was never granted."""
        number = self._tickets.report(request)
        self.param_version = self._tickets.newest_version
        self.progress()
        self._changed()
        return OutcomesSeen(number=number, limit=self._tickets.limit)

    @handler
    async def watch_supply(self, request: WatchSupply, caller: Caller) -> Supply:
        """Parked until the supply is newer than what the learner has seen."""

        def news() -> Supply | None:
            return self._tickets.supply if self._tickets.supply_number > request.seen else None

        return await self._watchers.until(news, caller.park_s) or self._tickets.supply

    # --- within ---

    def _ticket(self, grant: Grant) -> Ticket:
        prompt, rollout = grant.prompt, self.config.rollout
        if isinstance(prompt, EvalPrompt):
            evaluation = self.config.eval[prompt.name]
            ids, text, row = self._eval_prompts[prompt.name].prompt(prompt.index)
            purpose, epoch = f"eval/{prompt.name}", prompt.version
            samples, temperature = evaluation.n, evaluation.temperature
            max_tokens = evaluation.max_tokens or rollout.max_tokens
        else:
            ids, text, row = self._prompts.prompt(prompt.index)
            purpose, epoch = "train", prompt.epoch
            samples, temperature, max_tokens = (
                rollout.samples_per_prompt,
                rollout.temperature,
                rollout.max_tokens,
            )
        return Ticket(
            uid=prompt.uid,
            grant=grant.number,
            purpose=purpose,
            epoch=epoch,
            index=prompt.index,
            param_version=grant.param_version,
            attempt=prompt.attempt,
            prompt_ids=ids,
            prompt=text,
            row=row,
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
        )

    def _changed(self) -> None:
        """Whoever is parked asks again."""
        self._leases.wake()
        self._count()

    def _count(self) -> None:
        """Show the state, and wake whoever watches the supply if that has changed."""
        for name, count in self._tickets.counts.items():
            self.counters[f"tickets/{name}"] = count
        self.counters["tickets/outstanding"] = self._tickets.outstanding
        self.counters["staleness/limit"] = self._tickets.limit
        number = self._tickets.supply_number
        if number != self._supply_number:
            self._supply_number = number
            self._watchers.wake()


ACTOR = Dataloader
