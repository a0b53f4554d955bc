"""A rank of a real FSDP2 learner is killed. All ranks restart from the newest checkpoint by themselves, and no other
actor does; each prompt is trained once (I1).
"""

import os
import re
import signal
from contextlib import closing

import pytest
from parity import configuration

from asyncrl.checkpoint.folder import CheckpointFolder
from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_all_ranks_restart_from_the_newest_checkpoint_when_one_dies(parity_folder, tmp_path):
    tree = configuration(
        parity_folder,
        learner={"steps": 14, "ranks": 2, "groups_per_step": 3, "dynamic_sampling": False},
        staleness={"max": 1},
        checkpoint={"every_versions": 2},
    )
    with closing(LiveRun(tree, tmp_path, env={"PYTHONPATH": str(parity_folder)})) as run:
        newest = CheckpointFolder(run.run_dir / "checkpoints").newest
        run.until(lambda: run.step >= 5 and newest() is not None, "a checkpoint and step 5", 200)
        others = {name: run.pid(name) for name in ("rollouter/0", "rollouter/1", "dataloader/0", "parameter_server/0")}
        ranks = [run.pid("learner/0"), run.pid("learner/1")]
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(250) == 0, run.output
        assert run.left() == []
    for name in ("learner/0", "learner/1"):
        assert re.search(rf"{name} died .* is started again", run.output), run.output
    for name in others:
        assert f"{name} died" not in run.output
    found = re.search(r"training continues: step (\d+) ([\d.]+) s after learner/1 died", run.output)
    assert found is not None, run.output
    print(f"from the kill to step {found[1]}: {found[2]} s")
    starts = {line["step"]: line["start"] for line in run.lines("train")}
    assert sorted(starts) == list(range(1, 15))
    assert starts[14] == 2
    assert starts[1] == 1
    assert run.lines("train")[-1]["ledger/trained"] == 14 * 3
