"""An early plan is used only if the step begins with the same inputs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from draws import examples
from harness import until
from hypothesis import event, given, settings
from hypothesis import strategies as st
from learner.learner_cases import build_step, changed, make_group, make_trajectory
from learner.loop.lone_loop import Loop, NotingTrainer
from msgspec.structs import replace
from run_settings import sim_config
from services import services

from asyncrl.config import Config
from asyncrl.core.errors import NonFiniteStep
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.groups.intake import GroupBuffer, Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.step_planner import NextStep, PlanInputs, StepPlanner
from asyncrl.messages.dataloader import DataloaderStatus
from asyncrl.messages.groups import Group

SIZE = 2
"""Groups of a step."""
WAIT_S = 60.0


def configure(late: str = "train", *, limit: int = 1, steps_per_version: int = 1, steps: int = 60) -> Config:
    learner = {"groups_per_step": SIZE, "steps": steps, "steps_per_version": steps_per_version, "ranks": 2}
    learner |= {"dynamic_sampling": True, "tokens_per_microbatch": 8, "sim": {"step_s": 0.0}}
    staleness = {"max": limit, "late": late}
    return sim_config(learner=learner, staleness=staleness)


def group(index: int, *, version: int = 0, seed: int = 0, flat: bool = False) -> Group:
    """Two responses of a few tokens of ``version`` and the one after it."""
    random = np.random.default_rng((index, version, seed))
    lengths = random.integers(1, 5, 2).tolist()
    made = make_group(
        index,
        [1, 2],
        [
            make_trajectory(
                random.integers(0, 48, length).tolist(),
                version=sorted(random.integers(version, version + 2, length).tolist()),
                reward=0.0 if flat else float(sample),
            )
            for sample, length in enumerate(lengths)
        ],
    )
    return replace(made, lease=replace(made.lease, param_version=version))


def build(inputs: PlanInputs, config: Config) -> StepPlan:
    return build_step(
        inputs.groups,
        version=inputs.version,
        fresh=inputs.fresh,
        config=config,
        world_size=config.learner.ranks,
        packed=True,
    )


def written(plan: StepPlan) -> list[Any]:
    """Everything in a plan, arrays with their types and bytes."""
    found: list[Any] = [plan.temperature, plan.fresh, plan.metrics, plan.warm]
    for update in plan.updates:
        found += [update.denominator, update.sequences, update.tokens, update.supervised]
        for batch in (batch for rank in update.ranks for batch in rank):
            arrays = [getattr(batch, item.name) for item in fields(MicroBatch)]
            found += [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]
    return found


# --- the decision ---


class Steps:
    """Where a training is, without training anything."""

    def __init__(self, config: Config) -> None:
        self.config, self.intake = config, Intake(config.learner)
        self.next, self.expected = NextStep(1, 0, 0), NextStep(1, 0, 0)
        self.early: tuple[PlanInputs, StepPlan] | None = None
        self.numbers = 0
        self.in_training: list[Group] = []

    def look(self) -> None:
        """Plan early what is expected now."""
        intake = self.intake
        if (inputs := self.expected.inputs(intake.buffer, self.config)) is not None:
            self.early = inputs, build(inputs, self.config)

    def begin(self) -> bool:
        """Begin a step where that is possible; whether it had a plan, which is then the one that is made now."""
        intake = self.intake
        if self.in_training or len(intake.buffer) < self.next.groups_wanted(self.config):
            return False
        self.in_training, _ = intake.begin_step()
        inputs = self.next.inputs_of(self.in_training)
        self.expected = self.next.after(self.config.learner.steps_per_version, self.numbers + 1)
        early, self.early = self.early, None
        if early is None or not early[0].make_same_plan(inputs):
            return False
        assert written(early[1]) == written(build(inputs, self.config))
        return True

    def end(self, how: str) -> None:
        """End the step in training; a version is published where one is due, unless that fails."""
        if not self.in_training:
            return
        self.in_training = []
        if how == "masked":
            self.intake.filter_step()
        elif how == "not finite":
            self.intake.spoil_step([], "it is not finite")
        else:
            self.intake.end_step()
            self.next = NextStep(self.next.step + 1, self.next.version, self.next.unpublished + 1)
            if self.next.unpublished >= self.config.learner.steps_per_version:
                # A number is used up even if nothing comes of it.
                self.numbers += 1 + (how == "published at the second try")
                if how != "not published":
                    self.next = NextStep(self.next.step, self.numbers, 0)
        self.expected = self.next


ARRIVALS = st.lists(st.tuples(st.integers(0, 24), st.integers(-2, 0), st.integers(0, 9)), max_size=4)
"""Index, versions behind the newest one, and 0 for a group without a signal."""
ENDS = st.sampled_from(["trained"] * 4 + ["masked", "not finite", "not published", "published at the second try"])
ROUNDS = st.tuples(ARRIVALS, ARRIVALS, st.booleans(), ARRIVALS, ENDS, st.booleans())
"""Arrivals before a step begins and while it is trained, a look, those after that, its end, a look."""


@given(
    late=st.sampled_from(["train", "mask"]),
    limit=st.integers(1, 2),
    steps_per_version=st.integers(1, 2),
    rounds=st.lists(ROUNDS, min_size=2, max_size=10),
)
@settings(max_examples=examples(60), deadline=None)
def test_an_early_plan_equals_the_plan_at_the_start_of_the_step(late, limit, steps_per_version, rounds) -> None:
    steps = Steps(configure(late, limit=limit, steps_per_version=steps_per_version))
    numbers, used = itertools.count(), 0

    def deliver(arrivals: Sequence[tuple[int, int, int]]) -> None:
        for index, lag, signal in arrivals:
            version = max(0, steps.next.version + lag)
            made = group(index, version=version, seed=next(numbers), flat=not signal)
            steps.intake.deliver(made)

    for before, during, look, then, how, look_again in rounds:
        deliver(before)
        used += steps.begin()
        deliver(during)
        if look:
            steps.look()
        deliver(then)
        steps.end(how)
        if look_again:
            steps.look()
    event(f"early plans used: {min(used, 2)}")


def buffer_of(*groups: Group) -> GroupBuffer:
    buffer = GroupBuffer()
    for each in groups:
        buffer.add(each)
    return buffer


@pytest.mark.parametrize(
    ("late", "limit", "steps_per_version", "step", "versions", "chosen"),
    [
        ("train", 1, 1, NextStep(2, 1, 0), [1, 0, 1], [0, 1]),
        ("train", 1, 1, NextStep(2, 1, 0), [1], []),
        # Without staleness all groups of a version have to be there.
        ("train", 0, 2, NextStep(1, 1, 0), [1, 1, 1], []),
        ("train", 0, 2, NextStep(2, 1, 1), [1, 1, 1], [0, 1]),
    ],
)
def test_the_groups_of_a_step_to_come(late, limit, steps_per_version, step, versions, chosen) -> None:
    groups = [group(index, version=version) for index, version in enumerate(versions)]
    config = configure(late, limit=limit, steps_per_version=steps_per_version)
    inputs = step.inputs(buffer_of(*groups), config)
    found = inputs.groups if inputs is not None else ()
    assert sorted(each.lease.uid for each in found) == [f"0-{index}" for index in chosen]


# --- during the training ---


class Planner:
    """A planner whose plans may fail or take time; the groups of the next step are in the buffer."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or configure()
        self.progress, self.intake, shared = TrainingProgress(version=0), Intake(self.config.learner), services()
        self.counters = shared.counters
        self.error: Exception | None = None
        self.plan_s = 0.0
        self.times: list[tuple[float, float]] = []
        self.planner = StepPlanner(
            self.config,
            shared,
            progress=self.progress,
            backend=NotingTrainer(self.config),
            thread=ThreadPoolExecutor(1),
            intake=self.intake,
            # It does not wait for groups.
            dataloader=None,  # type: ignore[arg-type]
            versions=None,  # type: ignore[arg-type]
            track=None,  # type: ignore[arg-type]
            advantage=self._advantage,
            supervised=None,
            teacher=None,
        )
        self._find = find_advantage(self.config.learner)

    def _advantage(self, groups: Any) -> Any:
        began = time.monotonic()
        time.sleep(self.plan_s)
        self.times.append((began, time.monotonic()))
        if self.error is not None:
            raise self.error
        return self._find(groups)

    def expect(self, groups: Sequence[Group]) -> None:
        """These are the groups of the next step."""
        self.intake.buffer.take(self.intake.buffer.uids)
        for each in groups:
            self.intake.buffer.add(each)
        self.planner.plan_early(NextStep(1, 0, 0))

    async def planned(self, count: int) -> None:
        await until(lambda: len(self.times) >= count, f"plan {count}", WAIT_S)

    async def plan(self, groups: Sequence[Group]) -> list[Any]:
        return written(await self.planner.plan(NextStep(1, 0, 0).inputs_of(groups)))


def play(planner: Planner, scene: Callable[[], Any]) -> None:
    async def whole() -> None:
        running = asyncio.create_task(planner.planner.run())
        try:
            await scene()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            planner.planner.close()

    asyncio.run(whole())


FIRST = [group(0), group(1)]
SECOND = [group(0, seed=1), group(1)]


def test_a_plan_for_changed_groups_is_made_again() -> None:
    planner = Planner()

    async def scene() -> None:
        def expected(groups: Sequence[Group]) -> list[Any]:
            return written(build(NextStep(1, 0, 0).inputs_of(groups), planner.config))

        planner.expect(FIRST)
        await planner.planned(1)
        assert await planner.plan(FIRST) == expected(FIRST)
        planner.expect(FIRST)
        await planner.planned(2)
        planner.expect(SECOND)
        await planner.planned(3)
        assert await planner.plan(SECOND) == expected(SECOND)
        assert planner.counters == {"learner/plans_ahead": 2.0, "learner/plans_discarded": 1.0}
        planner.expect(FIRST)
        await planner.planned(4)
        # A step with other groups does not wait for a plan that it cannot use.
        assert await planner.plan(SECOND) == expected(SECOND)
        assert planner.counters == {"learner/plans_ahead": 2.0, "learner/plans_discarded": 2.0}

    play(planner, scene)


def test_early_plans_take_at_most_half_of_the_time() -> None:
    planner = Planner()
    planner.plan_s = 0.02

    async def scene() -> None:
        for number, groups in enumerate(itertools.islice(itertools.cycle((FIRST, SECOND)), 6), 1):
            planner.expect(groups)
            await planner.planned(number)

    play(planner, scene)
    # A busy machine makes pauses longer, never shorter.
    times = planner.times
    assert all(after - ended > 0.99 * (ended - began) for (began, ended), (after, _) in itertools.pairwise(times))


def test_an_error_is_raised_in_the_step_that_uses_the_plan_and_planning_continues() -> None:
    planner = Planner()

    async def scene() -> None:
        planner.error = RuntimeError("no memory")
        planner.expect(FIRST)
        await planner.planned(1)
        with pytest.raises(RuntimeError, match="no memory"):
            await planner.plan(FIRST)
        planner.error = None
        planner.expect(SECOND)
        await planner.planned(2)
        await planner.plan(SECOND)
        assert planner.counters == {"learner/plans_ahead": 2.0}

    play(planner, scene)


# --- the learner's own loop ---


class Held(NotingTrainer):
    """Trains a step until one more plan is made; the last step is not held."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._planned, self.left = threading.Semaphore(0), config.learner.steps
        self.on_planned: Callable[[], None] = lambda: None

    def planned(self) -> None:
        """A plan was made."""
        self.on_planned()
        self._planned.release()

    def train(self, plan: StepPlan) -> dict[str, float]:
        self.left -= 1
        # Its own plan, and the next one.
        assert not self.left or (self._planned.acquire(timeout=WAIT_S))
        return super().train(plan)


def feed(indices: Sequence[int]) -> Iterator[Group]:
    """These groups, and then none before a thousand."""
    return (group(index) for index in [*indices, *range(1000, 1100)])


def run(config: Config, indices: Sequence[int], *, early: bool, on: Callable[[Loop], None] = lambda loop: None) -> Loop:
    async def whole() -> Loop:
        trainer = Held(config) if early else None
        loop = Loop(config, feed(indices), trainer=trainer)
        if trainer is not None:
            planner = loop.training._planner
            make, at_begin = planner._make, iter([True])

            def noted(*given: Any) -> StepPlan:
                plan = make(*given)
                # The first step is planned when it begins.
                if not next(at_begin, False):
                    trainer.planned()
                return plan

            planner._make = noted  # type: ignore[method-assign]
        on(loop)
        async with asyncio.timeout(2 * WAIT_S):
            await loop.run(ahead=early)
        return loop

    return asyncio.run(whole())


@pytest.mark.parametrize("steps_per_version", [1, 2])
def test_steps_planned_early_equal_steps_planned_at_their_start(steps_per_version) -> None:
    config = configure(steps=6, steps_per_version=steps_per_version)
    early, at_begin = (run(config, range(12), early=early) for early in (True, False))
    assert early.counters["learner/plans_ahead"] == 5
    assert "learner/plans_ahead" not in at_begin.counters
    assert list(map(written, early.trainer.plans)) == list(map(written, at_begin.trainer.plans))
    timed = ("time/", "buffer/", "rollout/granted_length_mean")
    lines = [
        [{name: value for name, value in line.items() if not name.startswith(timed)} for line in loop.lines]
        for loop in (early, at_begin)
    ]
    assert lines[0] == lines[1]


def test_a_preempted_run_trains_no_step_that_was_planned_early() -> None:
    def preempt(loop: Loop) -> None:
        def planned() -> None:
            loop.progress.preempted = True

        loop.trainer.on_planned = planned  # type: ignore[attr-defined]
        loop.dataloader.status = DataloaderStatus(number=0, exhausted=True, outstanding=0)

    loop = run(configure(steps=9), range(8), early=True, on=preempt)
    assert (len(loop.trainer.plans), loop.progress.step) == (1, 1)


def test_a_plan_for_the_step_after_one_that_is_not_finite_is_not_used() -> None:
    """Its groups are planned again, for another step."""
    config = changed(configure(steps=2), learner={"on_nonfinite": "skip", "max_quarantined_fraction": 1.0})
    refused: list[list[str]] = []

    def refuse_the_first(loop: Loop) -> None:
        train = loop.trainer.train
        # One training more than there are steps.
        loop.trainer.left += 1  # type: ignore[attr-defined]

        def refuses(plan: StepPlan) -> dict[str, float]:
            found = train(plan)
            if refused:
                return found
            refused.append(plan.updates[0].uids)
            raise NonFiniteStep("loss", step=1, uids=refused[0])

        loop.trainer.train = refuses  # type: ignore[method-assign]

    loop = run(config, range(8), early=True, on=refuse_the_first)
    assert refused == [["0-0", "0-1"]]
    assert [plan.updates[0].uids for plan in loop.trainer.plans] == [["0-0", "0-1"], ["0-2", "0-3"], ["0-4", "0-5"]]
    assert loop.counters["learner/plans_discarded"] >= 1
