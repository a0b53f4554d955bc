"""The working limit: its rule by tables, and its effect in a simulation on virtual time.

The simulation runs the real ticket book and gate against rollouters with a fixed number of slots and a learner with a
fixed step time. T_generate is the time in which all slots together generate the groups of one version, T_train that in
which the learner trains them; the throughput is measured against the bound 1 / max(T_generate, T_train).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from statistics import mean
from typing import Any

import pytest

from asyncrl.data.order import EpochOrder
from asyncrl.dataloader.evals import EvalRounds
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.holders import Ask
from asyncrl.dataloader.limit import PATIENCE, WorkingLimit
from asyncrl.dataloader.prompt_queue import PromptQueue
from asyncrl.dataloader.tickets import Tickets
from asyncrl.ledger import Ledger
from asyncrl.messages.dataloader import Outcome, Outcomes

LONGEST = 8.0
"""Longest response, in medians: max_tokens of the default configuration over the sim engine's median."""
WARM_STEPS = 30


def limit(*, staleness_max: int = 4, step: int = 8, version: int = 8, adapt: bool = True) -> WorkingLimit:
    return WorkingLimit(groups_per_step=step, groups_per_version=version, staleness_max=staleness_max, adapt=adapt)


# --- the rule ---


@pytest.mark.parametrize(
    ("made", "events", "groups"),
    [
        # It starts at one version.
        ({}, "", 8),
        ({"staleness_max": 0}, "", 0),
        # Without adaptation it stays at the maximum.
        ({"adapt": False}, "rw" + 20 * "f", 32),
        # A wait without a refusal changes nothing, and a refusal counts for one step only.
        ({}, "w", 8),
        ({}, "rsw", 8),
        # It grows by one group at least.
        ({"step": 1, "version": 1}, "rw", 2),
    ],
)
def test_refusals_waits_and_full_steps_make_the_limit(made: dict[str, Any], events: str, groups: int) -> None:
    """Somebody is (r)efused; a (s)tep begins, one that (w)aited, or one with a (f)ull buffer behind it."""
    it = limit(**made)
    for event in events:
        if event == "r":
            it.refused()
        else:
            it.step_began(99 if event == "f" else 0, waited=event == "w")
    assert it.groups == groups


def test_grows_by_half_a_version_when_a_refusal_made_the_learner_wait() -> None:
    it = limit()
    for expected in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0):
        it.refused()
        it.step_began(0, waited=True)
        assert it.versions == expected


def test_shrinks_slowly_after_full_steps_in_a_row() -> None:
    it = limit(step=16, version=16)
    for _ in range(PATIENCE - 1):
        it.step_began(16, waited=False)
    assert it.groups == 16
    it.step_began(15, waited=False)
    for _ in range(PATIENCE - 1):
        it.step_began(99, waited=False)
    assert it.groups == 16
    for expected in (15, 14, 13):
        it.step_began(99, waited=False)
        assert it.groups == expected
    for _ in range(100):
        it.step_began(99, waited=False)
    assert it.groups == 0


# --- the simulation ---


@dataclass
class Rollouter:
    name: str
    slots: int
    seen: int = 0
    queue: deque[str] = field(default_factory=deque)
    held: set[str] = field(default_factory=set)


@dataclass
class Measured:
    throughput: float
    """Against the bound."""
    staleness: float
    """Mean over trained tokens."""
    limits: list[float]


def simulate(
    *,
    ratio: float,
    staleness_max: int,
    adapt: bool = True,
    step: int = 8,
    steps_per_version: int = 1,
    samples: int = 8,
    slots: int = 32,
    replicas: int = 2,
    versions: int = 200,
    seed: int = 0,
) -> Measured:
    """Train ``versions`` versions; ``slots`` over all rollouters, ``ratio`` = T_train / T_generate."""
    per_version = step * steps_per_version
    steps = versions * steps_per_version
    working = limit(staleness_max=staleness_max, step=step, version=per_version, adapt=adapt)
    gate = Gate(working, groups_per_version=per_version, groups_left=steps * step)
    tickets = Tickets(PromptQueue(EpochOrder("sim", seed, 1000), Ledger()), gate, EvalRounds([]), max_attempts=3)
    random_ = random.Random(seed)
    generate_time = per_version * samples * mean_length() / slots
    train_time = ratio * generate_time

    events: list[tuple[float, int, str, object]] = []
    tie = count()
    rollouters = [Rollouter(f"rollouter/{i}", slots // replicas) for i in range(replicas)]
    spans: dict[str, list[tuple[float, float]]] = {}
    left: dict[str, int] = {}
    buffer: list[tuple[int, str]] = []
    grant_order = count()
    age: dict[str, int] = {}
    training: list[str] = []
    published = [0.0]
    step_number = report_number = 0
    waited = False
    measured_from = tokens = stale_tokens = 0.0
    limits = []
    now = 0.0

    def report(**fields: object) -> None:
        nonlocal report_number
        report_number += 1
        version = len(published) - 1
        tickets.report(
            Outcomes(number=report_number, version=version, trained_at_version=version * per_version, **fields)
        )

    def ask() -> None:
        for rollouter in rollouters:
            while rollouter.slots and not rollouter.queue:
                request = Ask(
                    rollouter.name,
                    1,
                    rollouter.seen,
                    math.ceil(rollouter.slots / samples),
                    len(published) - 1,
                    frozenset(rollouter.held),
                )
                tickets.meet(request)
                grants = tickets.lease(request)
                if not grants:
                    break
                for grant in grants:
                    uid = grant.prompt.uid
                    rollouter.seen = grant.number
                    rollouter.held.add(uid)
                    spans[uid], left[uid], age[uid] = [], samples, next(grant_order)
                    rollouter.queue.extend([uid] * samples)
                fill(rollouter)

    def fill(rollouter: Rollouter) -> None:
        while rollouter.slots and rollouter.queue:
            rollouter.slots -= 1
            uid = rollouter.queue.popleft()
            length = min(random_.lognormvariate(0.0, 1.0), LONGEST)
            heapq.heappush(events, (now + length, next(tie), "sampled", (rollouter, uid, now)))

    def begin() -> None:
        nonlocal waited, training
        if training or len(buffer) < step:
            return
        buffer.sort()
        training = [uid for _, uid in buffer[:step]]
        del buffer[:step]
        report(buffered_groups=len(buffer), waited=waited, step_began=True)
        limits.append(tickets.gate.limit.versions)
        waited = False
        heapq.heappush(events, (now + train_time / steps_per_version, next(tie), "trained", None))

    ask()
    while step_number < steps:
        now, _, kind, what = heapq.heappop(events)
        if kind == "sampled":
            rollouter, uid, began = what
            spans[uid].append((began, now))
            rollouter.slots += 1
            left[uid] -= 1
            if not left[uid]:
                rollouter.held.remove(uid)
                buffer.append((age[uid], uid))
            fill(rollouter)
        else:
            step_number += 1
            if step_number == WARM_STEPS:
                measured_from = now
            for uid in training:
                for version, share in split(spans.pop(uid), published):
                    if step_number > WARM_STEPS:
                        tokens += share
                        stale_tokens += share * (len(published) - 1 - version)
            outcomes = [Outcome(uid, "trained") for uid in training]
            training = []
            if step_number % steps_per_version == 0:
                published.append(now)
            report(outcomes=outcomes)
            waited = len(buffer) < step
        begin()
        ask()
    achieved = (steps - WARM_STEPS) / steps_per_version / (now - measured_from)
    return Measured(achieved * max(generate_time, train_time), stale_tokens / tokens, limits[WARM_STEPS:])


@cache
def mean_length() -> float:
    random_ = random.Random(1)
    return mean(min(random_.lognormvariate(0.0, 1.0), LONGEST) for _ in range(100_000))


def split(samples: list[tuple[float, float]], published: list[float]) -> Iterator[tuple[int, float]]:
    """(version, tokens) of samples that took up new weights the moment they were published."""
    for began, ended in samples:
        for version in range(bisect_right(published, began) - 1, bisect_right(published, ended)):
            until = published[version + 1] if version + 1 < len(published) else math.inf
            yield version, max(0.0, min(ended, until) - max(began, published[version]))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("system", [{}, {"steps_per_version": 2, "slots": 64}, {"samples": 16, "replicas": 4}])
def test_keeps_95_percent_of_the_bound_with_a_staleness_of_at_most_4(ratio: float, system: dict[str, int]) -> None:
    run = simulate(ratio=ratio, staleness_max=4, **system)
    assert run.throughput >= 0.95
    assert run.staleness <= 2.5


@pytest.mark.parametrize("system", [{}, {"step": 4, "steps_per_version": 4, "slots": 64}])
def test_a_slow_learner_gets_fresh_tokens_at_no_cost_and_the_limit_settles(system: dict[str, int]) -> None:
    adapted = simulate(ratio=2.0, staleness_max=8, **system)
    fixed = simulate(ratio=2.0, staleness_max=8, adapt=False, **system)
    assert adapted.staleness <= 2.5
    assert max(adapted.limits[70:]) - min(adapted.limits[70:]) <= 1.0
    assert adapted.throughput >= 0.98 * fixed.throughput
    # Without adaptation the same system sits at its limit, for nothing.
    assert fixed.staleness > 6
