"""A run is resumed with another configuration. Groups that a change affects are generated again, exactly once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from inprocess import System, until
from run_files import groups, metrics
from test_restarts import STEPS, audit, config

from asyncrl.checkpoint.contents import read_contents
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.checkpoint.origin import record
from asyncrl.config import Config
from asyncrl.learner.loop.step_planner import PlanInputs, StepPlanner
from asyncrl.messages.groups import Group
from asyncrl.rpc.lifecycle.incarnations import attempt_begins_above

OLD, NEW = 1.0, 2.0


def settings(temperature: float, value: float, **tables: dict[str, Any]) -> Config:
    # The learner is slower than generation, so that groups wait in its buffer.
    return config(
        rollout={"temperature": temperature, "sim": {"decode_step_s": 0.001, "length_median": 4.0}},
        reward={"options": {"value": value}},
        learner={"steps": STEPS, "sim": {"step_s": 0.05}},
        staleness={"max": 4, "adapt": False},
        # One at the end and one when it is preempted, and none between.
        checkpoint={"every_versions": 1000},
        **tables,
    )


def leave(run_dir: Path) -> dict[str, list[list[int]]]:
    """A run that is preempted with groups in its buffer, and the tokens of these groups by uid."""
    system = System(settings(0.8, OLD), run_dir)

    async def preempt() -> None:
        learner = await system.at_step(4)
        await until(lambda: learner._rank_0 is not None and len(learner._rank_0.intake.buffer) >= 4)
        await system.stop(preempt=True)

    assert system.play(preempt).phase == "done"
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    found = {group.lease.uid: tokens(group) for group in read_contents(newest.path).buffered}
    assert found, "groups wait in the checkpoint"
    return found


def tokens(group: Group) -> list[list[int]]:
    return [sequence.tokens.tolist() for trajectory in group.trajectories for sequence in trajectory.sequences]


class Resumed(System):
    """The next attempt of a run, in its folder."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        shutil.rmtree(run_dir / "private")
        super().__init__(config, run_dir)
        self._incarnations.above = attempt_begins_above(2, CheckpointFolder(run_dir / "checkpoints").newest_writer())


@pytest.fixture
def trained(monkeypatch) -> list[Group]:
    """Collects every group that is planned for a step."""
    seen: list[Group] = []
    plan = StepPlanner.plan

    async def watched(self: StepPlanner, inputs: PlanInputs) -> Any:
        seen.extend(inputs.groups)
        return await plan(self, inputs)

    monkeypatch.setattr(StepPlanner, "plan", watched)
    return seen


@pytest.mark.parametrize("victim", [None, "learner/0", "dataloader/0"])
def test_i1_groups_that_a_changed_key_affects_are_generated_again_once(tmp_path, trained, victim) -> None:
    run_dir = tmp_path / "run"
    waiting = leave(run_dir)
    trained.clear()
    # Only the last step writes a checkpoint: a learner that dies meets the old one again.
    system = Resumed(settings(0.3, NEW), run_dir)

    async def kill() -> None:
        await system.at_step(9)
        if victim is not None:
            await system.replace(victim)

    assert system.play(kill, timeout=100).phase == "done"
    assert {group.lease.temperature for group in trained} == {0.3}
    assert {t.reward for group in trained for t in group.trajectories} == {NEW}
    assert system.actors["learner/0"].counters["groups/given_back"] == len(waiting)
    audit(run_dir)
    last = {line["step"]: line["start"] for line in metrics(run_dir, "train")}
    uids = [group["uid"] for group in groups(run_dir) if group["start"] == last[group["step"]]]
    assert all(uids.count(uid) == 1 for uid in waiting)


@pytest.mark.parametrize("digest", ["as it was", "edited"])
def test_code_is_compared_by_its_digests_at_the_start_of_an_attempt(tmp_path, trained, digest) -> None:
    """Files may be edited during the run; a learner that starts then does not read them. Groups that nothing affects
    are trained as they are.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record(run_dir, {"reward.function": "as it was"})
    waiting = leave(run_dir)
    trained.clear()
    record(run_dir, {"reward.function": digest})
    system = Resumed(settings(0.8, OLD, drift={"warn": 1.0}), run_dir)
    assert system.play(timeout=100).phase == "done"
    counters = system.actors["learner/0"].counters
    if digest == "edited":
        assert counters["groups/given_back"] == len(waiting)
    else:
        assert "groups/given_back" not in counters
        assert waiting.items() <= {group.lease.uid: tokens(group) for group in trained}.items()
    audit(run_dir)
