"""The loop of rank 0 on its own: its checkpoints, and the end of a preempted run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from learner.learner_cases import make_group, make_trajectory
from learner.loop.lone_loop import LoneTraining
from virtual import LoopClock, run_virtual

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ActorFailed
from asyncrl.learner.backends.backend import create
from asyncrl.learner.publishing.versions import RETRY_IN_TURN_S, RETRY_S
from asyncrl.messages.dataloader import DataloaderStatus

ASKED_S = 1.0
"""Time that the dataloader takes to say whether a round is open."""


class Dataloader:
    """Has no more groups than were delivered, and a round of evaluation that stays open."""

    limit, status = 1.0, DataloaderStatus(number=0, exhausted=True, outstanding=0)

    def changed(self) -> None:
        """Reports nothing."""

    async def all_acknowledged(self) -> None:
        """Everything is."""

    async def rounds_over(self) -> bool:
        await asyncio.sleep(ASKED_S)
        return False


class Scene(LoneTraining):
    """The training of a run. These ``groups`` are in the buffer, by default one for each step from ``step`` on."""

    def __init__(self, *, step: int = 0, steps: int, groups: range | None = None, **tables: Any) -> None:
        learner = tables.pop("learner", {})
        config = validate_config(
            {
                "data": {"source": "synthetic"},
                "rollout": {"engine": "sim", **tables.pop("rollout", {})},
                "reward": {"function": "constant"},
                "learner": {
                    "backend": "sim",
                    "steps": steps,
                    "groups_per_step": 1,
                    "dynamic_sampling": False,
                    "sim": {"step_s": 0.0},
                    **learner,
                },
                **tables,
            }
        )
        backend = create(config, 0)
        backend.engines_in_turn = int(config.placement.share == "time_slice")
        super().__init__(config, backend, clock=LoopClock(), dataloader=Dataloader(), step=step)
        for index in groups if groups is not None else range(step, steps):
            self.come(index)

    def come(self, index: int) -> None:
        """A group of this index comes."""
        trajectories = [make_trajectory([3, 4], reward=float(at)) for at in range(2)]
        self.deliver(make_group(index, [1, 2], trajectories))

    async def run(self) -> None:
        await self.training.begin([])
        await self.training.run()

    def preempt(self) -> None:
        self.progress.preempted = True
        self.progress.news.announce()


def resting(scene: Scene, noted: Callable[[], int]) -> list[int]:
    """Return the value of ``noted`` at each rest of the backend. A version takes the GPU back, as a step does."""
    rests: list[int] = []
    publish, rest = scene.versions.publish, scene.backend.rest

    async def taking() -> bool:
        scene.backend.is_resting = False
        return await publish()

    def noting() -> None:
        rests.append(noted())
        rest()

    scene.versions.publish, scene.backend.rest = taking, noting  # type: ignore[method-assign]
    return rests


@pytest.mark.parametrize(("begins", "written"), [(0, [6, 12]), (6, [12]), (7, [13]), (11, [13])])
def test_checkpoints_come_as_often_after_a_resumption_inside_a_version(begins: int, written: list[int]) -> None:
    async def main() -> list[int]:
        scene = Scene(step=begins, steps=16, learner={"steps_per_version": 2}, checkpoint={"every_versions": 3})
        await scene.run()
        scene.close()
        return scene.written

    assert run_virtual(main()) == written


def test_a_checkpoint_begins_at_the_next_version_once_a_full_disk_has_room_again() -> None:
    async def main() -> list[int]:
        scene = Scene(steps=6, learner={"steps_per_version": 2}, checkpoint={"every_versions": 0})
        scene.has_room_again = True
        await scene.run()
        scene.close()
        return scene.written

    assert run_virtual(main()) == [2, 4]


@pytest.mark.parametrize("after_s", [0.5 * ASKED_S, 1.5 * ASKED_S])
def test_a_preempted_run_gives_up_its_last_evaluations(after_s: float) -> None:
    """Also while the dataloader is asked whether they are over."""

    async def main() -> None:
        scene = Scene(steps=2)
        await scene.run()
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(scene.training.finish())
            await asyncio.sleep(after_s)
            scene.preempt()
        scene.close()

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 1.5 * RETRY_S])
def test_a_preempted_run_does_not_wait_for_an_overdue_version(after_s: float) -> None:
    """From the beginning of the wait for that version, or in the middle of it; its steps are for the checkpoint."""

    async def main() -> None:
        scene, clock = Scene(steps=2), LoopClock()
        await scene.training.begin([])
        scene.versions.before = clock.now() + 1e6
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(after_s)
        scene.preempt()
        asked = clock.now()
        await running
        assert clock.now() - asked <= RETRY_S
        assert (scene.progress.version, scene.progress.unpublished) == (0, scene.progress.step)
        assert scene.progress.step
        scene.close()

    run_virtual(main())


def test_a_run_that_is_preempted_inside_a_version_publishes_its_steps() -> None:
    async def main() -> None:
        scene = Scene(steps=4, learner={"steps_per_version": 4})
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        while not scene.progress.step:
            await asyncio.sleep(0)
        scene.preempt()
        await running
        assert 0 < scene.progress.step < 4
        assert (scene.progress.version, scene.progress.unpublished) == (1, 0)
        scene.close()

    run_virtual(main())


def test_a_version_still_overdue_at_the_end_fails_the_run_after_room_wait_s() -> None:
    async def main() -> None:
        scene, clock = Scene(steps=2, checkpoint={"room_wait_s": 60}), LoopClock()
        await scene.training.begin([])
        scene.versions.before = 1e6
        with pytest.raises(ActorFailed, match=r"no version could be published for 60 s .*no memory"):
            await scene.training.run()
        assert 60 <= clock.now() <= 60 + 2 * RETRY_S
        scene.close()

    run_virtual(main())


def test_a_run_resumed_with_fewer_steps_than_it_trained_ends_at_once() -> None:
    async def main() -> None:
        scene = Scene(step=5, steps=4)
        await scene.run()
        assert (scene.progress.step, scene.progress.version) == (5, 0)
        scene.close()

    run_virtual(main())


def test_i1_a_step_waits_for_all_its_groups_even_if_the_dataloader_leases_no_more() -> None:
    """A preemption may reach the dataloader before the learner: then it leases no more, and the step stays whole."""

    async def main() -> None:
        scene = Scene(steps=2, groups=range(3), learner={"groups_per_step": 2})
        scene.dataloader.status = DataloaderStatus(number=0, exhausted=True, outstanding=1)
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(1.0)
        assert (scene.progress.step, len(scene.intake.buffer)) == (1, 1)
        scene.preempt()
        await running
        assert (scene.progress.step, scene.intake.buffer.uids) == (1, ["0-2"])
        scene.close()

    run_virtual(main())


def test_the_last_version_waits_only_for_the_groups_of_its_steps() -> None:
    """Without staleness a step waits for all groups of its version. A run resumed inside a version has fewer left."""

    async def main() -> None:
        scene = Scene(step=1, steps=2, learner={"steps_per_version": 2}, staleness={"max": 0})
        await scene.training.begin([])
        await scene.training.run()
        assert (scene.progress.step, scene.progress.unpublished) == (2, 0)
        scene.close()

    run_virtual(main())


def test_an_overdue_version_is_tried_again_rarely_while_engines_have_the_gpu() -> None:
    """In time slices each try takes the GPU from the engines, which still generate under the version before."""

    async def main() -> None:
        scene, clock = Scene(steps=2, groups=range(1), placement={"share": "time_slice"}), LoopClock()
        rests = resting(scene, lambda: scene.progress.version)
        await scene.training.begin([])
        scene.versions.before = clock.now() + 1.5 * RETRY_IN_TURN_S
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(3 * RETRY_IN_TURN_S)
        # One rest before each of two tries, and one under the version of the second.
        assert (rests, scene.progress.version) == ([0, 0, 1], 1)
        scene.come(1)
        await running
        scene.close()

    run_virtual(main())


def test_engines_have_the_gpu_once_between_steps_and_in_the_last_evaluations() -> None:
    async def main() -> None:
        scene = Scene(steps=2, groups=range(0), placement={"share": "time_slice"})
        rests = resting(scene, lambda: scene.progress.step)
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        for index in range(2):
            for _ in range(3):
                # News that changes nothing.
                scene.progress.news.announce()
                await asyncio.sleep(1.0)
            scene.come(index)
            await asyncio.sleep(1.0)
        await running
        finishing = asyncio.create_task(scene.training.finish())
        await asyncio.sleep(10 * ASKED_S)
        assert rests == [0, 1, 2]
        scene.preempt()
        await finishing
        scene.close()

    run_virtual(main())


def test_a_wait_for_the_parameter_server_ends_with_news_and_a_preempted_run_gives_no_gpu_away() -> None:
    async def main() -> None:
        scene, clock = Scene(steps=3, groups=range(0), placement={"share": "time_slice"}), LoopClock()
        rests, away = resting(scene, lambda: scene.progress.step), asyncio.Event()
        scene.versions.handed_over = away.wait  # type: ignore[method-assign,assignment]
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(1.0)
        scene.come(0)
        await asyncio.sleep(1.0)
        assert (scene.progress.step, rests) == (1, [])
        asked = clock.now()
        scene.preempt()
        await running
        assert clock.now() - asked < 1.0 and rests == []
        scene.close()

    run_virtual(main())


@pytest.mark.parametrize(("replicas", "waited"), [(1, False), (2, True)])
def test_a_wait_raises_the_staleness_limit_unless_all_engines_sleep_while_the_learner_computes(
    replicas: int, waited: bool
) -> None:
    async def main() -> None:
        scene = Scene(steps=2, groups=range(0), placement={"share": "time_slice"}, rollout={"replicas": replicas})
        began: list[bool] = []
        scene.intake.outcomes.step_began = lambda buffered, waited: began.append(waited)  # type: ignore[method-assign]
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        for index in range(2):
            await asyncio.sleep(1.0)
            scene.come(index)
        await running
        # A wait under the first version never counts.
        assert began == [False, waited]
        scene.close()

    run_virtual(main())


def test_a_version_has_its_whole_time_even_after_a_long_wait_for_groups() -> None:
    async def main() -> None:
        scene, clock = Scene(steps=2, groups=range(1), checkpoint={"room_wait_s": 60}), LoopClock()
        await scene.training.begin([])
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(100.0)
        # The parameter server loses the version, and there is no memory for the next one at first.
        scene.versions.spoiled, scene.versions.before = True, clock.now() + 1.5 * RETRY_S
        scene.progress.news.announce()
        await asyncio.sleep(4 * RETRY_S)
        assert not running.done() and scene.progress.version > 1
        scene.versions.spoiled = False
        scene.come(1)
        await running
        scene.close()

    run_virtual(main())


def test_i8_steps_after_an_overdue_version_wait_for_all_groups_of_the_next() -> None:
    """Under the limit 0, where a step of the groups that came first would be a matter of their arrival."""

    async def main() -> None:
        scene, clock = (
            Scene(steps=4, groups=range(2), learner={"steps_per_version": 2}, staleness={"max": 0}),
            LoopClock(),
        )
        scene.dataloader.status = DataloaderStatus(number=0, exhausted=False, outstanding=2)
        await scene.training.begin([])
        scene.versions.before = clock.now() + 0.5 * RETRY_S
        running = asyncio.create_task(scene.training.run())
        await asyncio.sleep(1.5 * RETRY_S)
        assert (scene.progress.step, scene.progress.version) == (2, 1)
        for index, step in ((3, 2), (2, 4)):
            scene.come(index)
            await asyncio.sleep(1.0)
            assert scene.progress.step == step
        await running
        scene.close()

    run_virtual(main())
