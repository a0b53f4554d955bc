"""A whole run whose disk of checkpoints fills up: it says so, writes one when there is room, and ends as it did."""

import re

import pytest
from disks import fill, small_disk
from launcher.launched import wait_until

from asyncrl.checkpoint.folder import CheckpointFolder


@pytest.mark.slow
def test_a_checkpoint_waits_for_room_and_a_run_without_its_last_one_fails(launch, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        run = launch(
            *("--checkpoint.dir", str(disk), "--checkpoint.every_versions", "15", "--checkpoint.room_wait_s", "0.5"),
            *("--learner.steps", "45"),
        )
        folder = CheckpointFolder(disk / "trial")
        wait_until((folder.folder / "writer.json").exists, "the folder of checkpoints")
        ballast = fill(disk)
        run.wait_to_show("learner/0: no checkpoint of version 15: no space left on ")
        assert folder.newest() is None
        ballast.unlink()
        owed = wait_until(folder.newest, "a checkpoint")
        assert 15 < owed.step < 30, "it did not wait for the next one to be due"
        fill(disk)
        code, shown = run.end()
        assert code == 1, shown
        kept = folder.newest()
        assert not list(folder.folder.glob(".*")), "nothing is left of what was not complete"
        assert f"checkpoint  {kept.path}" in shown
    assert [row.split(maxsplit=1)[1] for row in shown if row.startswith("steps ")] == ["45 of 45"]
    assert run.steps() == list(range(1, 46)), "each was trained once"
    assert not any(" died " in row for row in shown), shown
    told = (
        "learner/0: no checkpoint of version 15: no space left on .*: (0 B|.* KiB) free, about .* KiB needed. Training"
    )
    assert any(re.match(told, row) for row in shown)
    assert shown[-1].startswith("learner/0: the last checkpoint (version 45) could not be written: no space left on ")
    assert f"the last complete checkpoint is {kept.path} (step {kept.step})" in shown[-1]
    assert f"--resume {run.run_dir} goes on from there" in shown[-1]
