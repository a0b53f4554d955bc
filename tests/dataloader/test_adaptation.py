"""The working limit in a simulation on virtual time.

It runs the real ticket book and gate against rollouters with a fixed number of slots and a learner with a fixed step
time. T_generate is the time in which all slots together generate the groups of one version, T_train that in which the
learner trains them; the throughput is measured against the bound 1 / max(T_generate, T_train).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from asyncrl.data.order import EpochOrder
from asyncrl.dataloader.evals import EvalRounds
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.holders import Ask
from asyncrl.dataloader.limit import WorkingLimit
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.dataloader.tickets import Tickets
from asyncrl.ledger import Ledger
from asyncrl.messages.dataloader import Outcome, Outcomes

LONGEST = 8.0
"""Longest response, in medians: max_tokens of the default configuration over the sim engine's median."""
MEAN_LENGTH = 1.5714
WARM_STEPS = 30


@dataclass
class Rollouter:
    name: str
    slots: int
    seen: int = 0
    queue: deque[str] = field(default_factory=deque)
    held: set[str] = field(default_factory=set)


class Simulation:
    """Trains ``versions`` versions with ``slots`` over all rollouters; ``ratio`` = T_train / T_generate."""

    def __init__(
        self,
        *,
        ratio: float,
        staleness_max: int,
        adapt: bool = True,
        step: int = 8,
        steps_per_version: int = 1,
        samples: int = 8,
        slots: int = 32,
        replicas: int = 2,
        versions: int = 150,
    ) -> None:
        self.step, self.steps_per_version, self.samples = step, steps_per_version, samples
        self.per_version, self.steps = step * steps_per_version, versions * steps_per_version
        limit = WorkingLimit(
            groups_per_step=step, groups_per_version=self.per_version, staleness_max=staleness_max, adapt=adapt
        )
        gate = Gate(limit, groups_per_version=self.per_version, groups_left=self.steps * step)
        self.tickets = Tickets(PromptQueue(EpochOrder("sim", 0, 1000), Ledger()), gate, EvalRounds([]), max_attempts=3)
        self.random = random.Random(0)
        self.generate_time = self.per_version * samples * MEAN_LENGTH / slots
        self.train_time = ratio * self.generate_time
        self.rollouters = [Rollouter(f"rollouter/{i}", slots // replicas) for i in range(replicas)]
        self.now = 0.0
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = count()
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.age: dict[str, int] = {}
        self.buffer: list[tuple[int, str]] = []
        self.training: list[str] = []
        self.published = [0.0]
        self.waited = False
        self.limits: list[float] = []
        self.tokens = self.stale_tokens = 0.0
        """Trained after the warm steps; the latter times their staleness."""

    def run(self) -> None:
        done, measured_from = 0, 0.0
        self.ask()
        while done < self.steps:
            self.now, _, kind, what = heapq.heappop(self.events)
            if kind == "sampled":
                self.sampled(*what)
            else:
                done += 1
                if done == WARM_STEPS:
                    measured_from = self.now
                self.trained(measured=done > WARM_STEPS, publishes=done % self.steps_per_version == 0)
            self.begin()
            self.ask()
        achieved = (self.steps - WARM_STEPS) / self.steps_per_version / (self.now - measured_from)
        self.throughput = achieved * max(self.generate_time, self.train_time)
        self.staleness = self.stale_tokens / self.tokens

    @property
    def version(self) -> int:
        return len(self.published) - 1

    def later(self, seconds: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), kind, what))

    def report(self, **fields: Any) -> None:
        at = self.version * self.per_version
        number = self.tickets.number + 1
        self.tickets.report(Outcomes(number=number, version=self.version, trained_at_version=at, **fields))

    def ask(self) -> None:
        for rollouter in self.rollouters:
            while rollouter.slots and not rollouter.queue:
                free = math.ceil(rollouter.slots / self.samples)
                ask = Ask(rollouter.name, 1, rollouter.seen, free, self.version, frozenset(rollouter.held))
                self.tickets.meet(ask)
                grants = self.tickets.lease(ask)
                if not grants:
                    break
                for grant in grants:
                    uid = grant.prompt.uid
                    rollouter.seen = grant.number
                    rollouter.held.add(uid)
                    self.spans[uid], self.age[uid] = [], next(self.order)
                    rollouter.queue.extend([uid] * self.samples)
                self.fill(rollouter)

    def fill(self, rollouter: Rollouter) -> None:
        while rollouter.slots and rollouter.queue:
            rollouter.slots -= 1
            length = min(self.random.lognormvariate(0.0, 1.0), LONGEST)
            self.later(length, "sampled", (rollouter, rollouter.queue.popleft(), self.now))

    def sampled(self, rollouter: Rollouter, uid: str, began: float) -> None:
        self.spans[uid].append((began, self.now))
        rollouter.slots += 1
        if len(self.spans[uid]) == self.samples:
            rollouter.held.remove(uid)
            self.buffer.append((self.age[uid], uid))
        self.fill(rollouter)

    def begin(self) -> None:
        if self.training or len(self.buffer) < self.step:
            return
        self.buffer.sort()
        self.training = [uid for _, uid in self.buffer[: self.step]]
        del self.buffer[: self.step]
        self.report(buffered_groups=len(self.buffer), waited=self.waited, step_began=True)
        self.limits.append(self.tickets.gate.limit.versions)
        self.waited = False
        self.later(self.train_time / self.steps_per_version, "trained", None)

    def trained(self, *, measured: bool, publishes: bool) -> None:
        for uid in self.training:
            for began, ended in self.spans.pop(uid):
                # New weights are taken up the moment they are published.
                for version in range(bisect_right(self.published, began) - 1, bisect_right(self.published, ended)):
                    until = self.published[version + 1] if version < self.version else math.inf
                    tokens = measured * max(0.0, min(ended, until) - max(began, self.published[version]))
                    self.tokens += tokens
                    self.stale_tokens += tokens * (self.version - version)
        outcomes = [Outcome(uid, "trained") for uid in self.training]
        self.training = []
        if publishes:
            self.published.append(self.now)
        self.report(outcomes=outcomes)
        self.waited = len(self.buffer) < self.step


def simulate(**system: Any) -> Simulation:
    simulation = Simulation(**system)
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    ("ratio", "system"),
    [(0.5, {}), (1.0, {"steps_per_version": 2, "slots": 64}), (1.0, {"samples": 16, "replicas": 4, "versions": 200})],
)
def test_keeps_95_percent_of_the_bound_with_a_staleness_of_at_most_4(ratio: float, system: dict[str, int]) -> None:
    run = simulate(ratio=ratio, staleness_max=4, **system)
    assert run.throughput >= 0.95
    assert run.staleness <= 2.5


def test_a_slow_learner_gets_fresh_tokens_at_no_cost_and_the_limit_settles() -> None:
    adapted, fixed = (simulate(ratio=2.0, staleness_max=8, adapt=adapt) for adapt in (True, False))
    assert adapted.staleness <= 2.5
    assert max(adapted.limits[100:]) - min(adapted.limits[100:]) <= 1.0
    assert adapted.throughput >= 0.98 * fixed.throughput
    # Without adaptation the same system sits at its limit, for nothing.
    assert fixed.staleness > 6
