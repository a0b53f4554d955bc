"""A plan made early is used where the same would be planned when the step begins, and nowhere else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from examples import examples
from harness import until
from hypothesis import event, given, settings
from hypothesis import strategies as st
from inprocess import sim_config
from learner.learner_cases import make_group, make_trajectory
from msgspec.structs import replace

from asyncrl.config import Config
from asyncrl.errors import NonFiniteStep
from asyncrl.learner.algorithm.plan.batch import StepPlan, build_step
from asyncrl.learner.algorithm.plan.micro_batch import MicroBatch
from asyncrl.learner.exchange.sent_ahead import Sending
from asyncrl.learner.groups.buffer import GroupBuffer
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.steps.plan_ahead import Basis, Outlook, PlanAhead, groups_wanted, oldest_groups
from asyncrl.messages.dataloader import Supply
from asyncrl.messages.groups import Group
from asyncrl.telemetry.metrics import Figures
from tools.bench.planning import Loop, TimedTrainer

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


def build(basis: Basis, config: Config) -> StepPlan:
    return build_step(
        basis.groups,
        version=basis.version,
        fresh=basis.fresh,
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
        self.next, self.outlook = Outlook(1, 0, 0), Outlook(1, 0, 0)
        self.early: tuple[Basis, StepPlan] | None = None
        self.numbers = 0
        self.in_training: list[Group] = []

    def look(self) -> None:
        """Plan early what is expected now."""
        intake = self.intake
        if uids := oldest_groups(intake.buffer, self.outlook, self.config):
            basis = self.outlook.basis(intake.buffer.look_up(uids))
            self.early = basis, build(basis, self.config)

    def begin(self) -> bool:
        """Begin a step where that is possible; whether it had a plan, which is then the one that is made now."""
        intake = self.intake
        if self.in_training or len(intake.buffer) < groups_wanted(self.next, self.config):
            return False
        self.in_training, _ = intake.begin_step()
        basis = self.next.basis(self.in_training)
        self.outlook = self.next.after(self.config.learner.steps_per_version, self.numbers + 1)
        early, self.early = self.early, None
        if early is None or not early[0].is_that_of(basis):
            return False
        assert written(early[1]) == written(build(basis, self.config))
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
            self.next = Outlook(self.next.step + 1, self.next.version, self.next.unpublished + 1)
            if self.next.unpublished >= self.config.learner.steps_per_version:
                # A number is used up even if nothing comes of it.
                self.numbers += 1 + (how == "published at the second try")
                if how != "not published":
                    self.next = Outlook(self.next.step, self.numbers, 0)
        self.outlook = self.next


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
def test_an_early_plan_that_is_used_is_the_one_that_would_be_made_at_the_begin(
    late, limit, steps_per_version, rounds
) -> None:
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
        ("train", 1, 1, Outlook(2, 1, 0), [1, 0, 1], [0, 1]),
        ("train", 1, 1, Outlook(2, 1, 0), [1], []),
        # Without staleness all groups of a version have to be there.
        ("train", 0, 2, Outlook(1, 1, 0), [1, 1, 1], []),
        ("train", 0, 2, Outlook(2, 1, 1), [1, 1, 1], [0, 1]),
    ],
)
def test_the_groups_of_a_step_to_come(late, limit, steps_per_version, step, versions, chosen) -> None:
    groups = [group(index, version=version) for index, version in enumerate(versions)]
    config = configure(late, limit=limit, steps_per_version=steps_per_version)
    assert sorted(oldest_groups(buffer_of(*groups), step, config)) == [f"0-{index}" for index in chosen]


# --- beside the training ---


class Planner:
    """Plans at once; what is planned is sent."""

    def __init__(self, config: Config | None = None) -> None:
        self.expected: Basis | None = None
        self.errors: dict[str, Exception] = {}
        self.counters = Figures()
        self.config = config or configure()
        self.sent: list[int] = []
        self.ahead = PlanAhead(lambda: self.expected, self.plan, self._send, self.counters)

    def plan(self, basis: Basis) -> StepPlan:
        if "planning" in self.errors:
            raise self.errors["planning"]
        return build(basis, self.config)

    def _send(self, plan: StepPlan, sending: Sending) -> None:
        self.sent.append(sending.number)
        if "sending" in self.errors:
            raise self.errors["sending"]

    async def sends(self, basis: Basis, number: int) -> None:
        """A basis is expected, until its plan is sent under this number."""
        self.expected = basis
        self.ahead.look_again()
        await until(lambda: number in self.sent, f"plan {number}", WAIT_S)

    async def take(self, basis: Basis) -> tuple[list[Any], int]:
        """The plan of a basis that is expected, once it was made early."""
        self.expected = basis
        self.ahead.look_again()
        async with asyncio.timeout(WAIT_S):
            while (found := await self.ahead.take(basis)) is None:
                await asyncio.sleep(0)
        return written(found[0]), found[1]


def play(planner: Planner, scene: Callable[[], Any]) -> None:
    async def whole() -> None:
        running = asyncio.create_task(planner.ahead.run())
        try:
            await scene()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            planner.ahead.close()

    asyncio.run(whole())


FIRST = Outlook(1, 0, 0).basis([group(0), group(1)])
SECOND = Outlook(1, 0, 0).basis([group(0, seed=1), group(1)])


def test_a_plan_for_other_groups_is_made_anew_and_one_without_a_token_is_not_sent() -> None:
    planner = Planner(configure("mask"))

    async def scene() -> None:
        assert await planner.take(FIRST) == (written(build(FIRST, planner.config)), 1)
        await planner.sends(FIRST, 2)
        await planner.sends(SECOND, 3)
        found = await planner.ahead.take(SECOND)
        assert found is not None
        assert (written(found[0]), found[1]) == (written(build(SECOND, planner.config)), 3)
        await planner.sends(FIRST, 4)
        # A step with other groups does not wait for the plan that is of no use to it.
        assert await planner.ahead.take(SECOND) is None
        assert planner.counters == {"learner/plans_ahead": 2.0, "learner/plans_discarded": 2.0}
        masked = Outlook(1, 9, 0).basis([group(0), group(1)])
        await planner.take(masked)
        assert planner.sent == [1, 2, 3, 4]

    play(planner, scene)


def test_planning_ahead_takes_at_most_half_of_the_time_however_often_groups_become_others() -> None:
    times: list[tuple[float, float]] = []

    class Slow(Planner):
        def plan(self, basis: Basis) -> StepPlan:
            began = time.monotonic()
            time.sleep(0.02)
            plan = super().plan(basis)
            times.append((began, time.monotonic()))
            return plan

    planner = Slow()

    async def scene() -> None:
        for number, planner.expected in enumerate(itertools.islice(itertools.cycle((FIRST, SECOND)), 6), 1):
            await until(lambda: planner.ahead.look_again() or len(times) >= number, f"plan {number}", WAIT_S)  # noqa: B023

    play(planner, scene)
    # A busy machine makes pauses longer, never shorter.
    assert all(after - ended > 0.99 * (ended - began) for (began, ended), (after, _) in itertools.pairwise(times))


@pytest.mark.parametrize("where", ["planning", "sending"])
def test_an_error_is_raised_to_the_step_that_takes_the_plan_and_planning_goes_on(where: str) -> None:
    planner = Planner()

    async def scene() -> None:
        planner.errors[where] = RuntimeError("Connection closed by peer")
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            await planner.take(FIRST)
        planner.errors.clear()
        await planner.take(SECOND)

    play(planner, scene)


# --- the learner's own loop ---


class Held(TimedTrainer):
    """Trains a step until one more plan is sent ahead; the last step is not held."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sent, self.left = threading.Semaphore(0), config.learner.steps
        self.on_sent: Callable[[StepPlan], bool] = lambda plan: True
        """Whether the step in training may end now."""

        self.trained: list[int] = []
        """Numbers of what was sent ahead, as steps named it."""
        self.sent: dict[int, list[Any]] = {}

    def send(self, plan: StepPlan, sending: Sending) -> None:
        self.sent[sending.number] = written(plan)
        if self.on_sent(plan):
            self._sent.release()

    def train(self, plan: StepPlan, ahead: int = 0) -> dict[str, float]:
        self.left -= 1
        assert not self.left or self._sent.acquire(timeout=WAIT_S)
        self.trained.append(ahead)
        assert not ahead or self.sent[ahead] == written(plan)
        return super().train(plan, ahead)


def feed(indices: Sequence[int]) -> Iterator[Group]:
    """These groups, and then none before a thousand."""
    return (group(index) for index in [*indices, *range(1000, 1100)])


def run(config: Config, indices: Sequence[int], *, ahead: bool, on: Callable[[Loop], None] = lambda loop: None) -> Loop:
    async def whole() -> Loop:
        loop = Loop(config, feed(indices), trainer=Held(config) if ahead else None)
        on(loop)
        async with asyncio.timeout(2 * WAIT_S):
            await loop.run(ahead=ahead)
        return loop

    return asyncio.run(whole())


@pytest.mark.parametrize("steps_per_version", [1, 2])
def test_steps_that_were_planned_ahead_are_those_that_would_be_planned_when_they_begin(steps_per_version) -> None:
    config = configure(steps=6, steps_per_version=steps_per_version)
    ahead, at_begin = (run(config, range(12), ahead=ahead) for ahead in (True, False))
    assert ahead.counters["learner/plans_ahead"] == 5
    assert "learner/plans_ahead" not in at_begin.counters
    assert ahead.trainer.trained == [0, 1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert list(map(written, ahead.trainer.plans)) == list(map(written, at_begin.trainer.plans))
    timed = ("time/", "buffer/", "rollout/granted_length_mean")
    lines = [
        [{name: value for name, value in line.items() if not name.startswith(timed)} for line in loop.lines]
        for loop in (ahead, at_begin)
    ]
    assert lines[0] == lines[1]


def test_a_run_that_makes_way_trains_nothing_that_was_sent_ahead() -> None:
    def make_way(loop: Loop) -> None:
        def sent(plan: StepPlan) -> bool:
            loop.training.preempted = True
            return True

        loop.trainer.on_sent = sent  # type: ignore[attr-defined]
        loop.supply.supply = Supply(number=0, exhausted=True, outstanding=0)

    loop = run(configure(steps=9), range(8), ahead=True, on=make_way)
    assert isinstance(loop.trainer, Held)
    assert 1 in loop.trainer.sent
    assert loop.trainer.trained == [0]
    assert loop.training.step == 1


def test_what_was_sent_ahead_of_a_step_that_is_not_finite_is_void() -> None:
    """The groups go to another step, under the number that was to be the refused one's."""
    config = configure(steps=2)
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"on_nonfinite": "skip", "max_quarantined_fraction": 1.0})}
    )
    refused: list[list[str]] = []

    def refuse_the_first(loop: Loop) -> None:
        train = loop.trainer.train
        # One training more than there are steps.
        loop.trainer.left += 1  # type: ignore[attr-defined]

        def refuses(plan: StepPlan, ahead: int = 0) -> dict[str, float]:
            found = train(plan, ahead)
            if refused:
                return found
            refused.append(plan.updates[0].uids)
            raise NonFiniteStep("loss", step=1, uids=refused[0])

        loop.trainer.train = refuses  # type: ignore[method-assign]

    loop = run(config, range(8), ahead=True, on=refuse_the_first)
    assert refused == [["0-0", "0-1"]]
    assert [plan.updates[0].uids for plan in loop.trainer.plans] == [["0-0", "0-1"], ["0-2", "0-3"], ["0-4", "0-5"]]
    trainer = loop.trainer
    assert isinstance(trainer, Held)
    # 1 was of the second step, under the version after the first.
    assert 1 in trainer.sent
    assert 1 not in trainer.trained
    named = [number for number in trainer.trained if number]
    assert len(set(named)) == len(named)
