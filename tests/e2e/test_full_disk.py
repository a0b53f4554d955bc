"""A real model on a disk without room for a checkpoint or the export. The run says so and fails, with every step
trained once.
"""

import time
from contextlib import closing

import pytest
from disks import fill, small_disk
from parity import configuration
from run_settings import launched_run

from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_i1_a_run_without_disk_space_for_checkpoints_trains_nothing_twice(parity_folder, tmp_path):
    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        tree = configuration(
            parity_folder,
            learner={"steps": 4, "groups_per_step": 2, "dynamic_sampling": False},
            rollout={"replicas": 1},
            checkpoint={"every_versions": 2, "room_wait_s": 1.0},
            staleness={"max": 1},
            run={"samples_per_step": 0, "seed": 3},
        )
        with closing(LiveRun(tree, disk, env={"PYTHONPATH": str(parity_folder)})) as run:
            # With so little room at the start it would be refused.
            run.until(lambda: "run folder: " in run.output, "its folder", 60)
            fill(disk, 1 << 20)
            code = run.wait(400)
            assert code == 1, run.output
            assert run.left() == []
        assert sorted(line["step"] for line in run.lines("train")) == [1, 2, 3, 4]
        assert {line["start"] for line in run.lines("train")} == {1}, "no actor restarted"
        assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["writer.json"]
        assert not list(run.run_dir.glob("*export*")) and not list(run.run_dir.glob(".*export*"))
        shown = run.output.splitlines()
        assert any(row.startswith("learner/0: no checkpoint of version 2: no space left on ") for row in shown)
        assert not any(row.startswith(("checkpoint ", "model ")) for row in shown)
        assert any(row.split() == ["steps", "4", "of", "4"] for row in shown)
        last = shown[-1]
        assert last.startswith("learner/0: the last checkpoint (version 4) could not be written: no space left on ")
        assert "the model could not be exported to " in last and "steps 1 to 4 are lost" in last


def test_a_disk_that_is_full_for_a_moment_costs_no_line(tmp_path):
    steps = 40
    tree = launched_run(
        rollout={"sim": {"decode_step_s": 0.01, "load_s": 0.05}},
        learner={"steps": steps, "sim": {"step_s": 0.2}},
        checkpoint={"every_versions": 0, "export_at_end": False},
    )
    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        with closing(LiveRun(tree, disk)) as run:
            run.until(lambda: run.step >= 5, "step 5", 120)
            ballast = fill(disk)
            time.sleep(0.9)
            ballast.unlink()
            assert run.wait(240) == 0, run.output
        assert [line["step"] for line in run.lines("train")] == list(range(1, steps + 1))
        assert sorted(path.name for path in (run.run_dir / "samples").iterdir()) == [
            f"step_{step:06d}.jsonl" for step in range(1, steps + 1)
        ]
        assert "lines of metrics.jsonl, quarantine.jsonl, evaluations.jsonl or samples/ were written late" in run.output
