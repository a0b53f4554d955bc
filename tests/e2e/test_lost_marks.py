"""A run is killed as a whole and loses a file that marks complete or used data before it is resumed.

It continues from complete data and names the missing file, or refuses. No prompt is trained and no version is used
twice (I1).
"""

import subprocess
import sys
from contextlib import closing

import pytest
from run_settings import launched_run

from asyncrl.checkpoint.folder import COMPLETE, CheckpointFolder
from asyncrl.learner.publishing.versions import MARK_FILE
from tools.chaos.audit import Expected, audit
from tools.live_run import ROOT, LiveRun

STEPS, GROUPS, PROMPTS = 24, 4, 60
TREE = launched_run(
    run={"samples_per_step": GROUPS},
    data={"size": PROMPTS},
    learner={"steps": STEPS, "groups_per_step": GROUPS, "sim": {"step_s": 0.4}},
    checkpoint={"every_versions": 3, "keep": 3, "export_at_end": False},
)


@pytest.fixture
def killed(tmp_path):
    """A run with at least two checkpoints, and with steps trained after the newest."""
    with closing(LiveRun(TREE, tmp_path)) as run:
        folder = CheckpointFolder(run.run_dir / "checkpoints")
        run.until(lambda: len(folder.candidates()) >= 2, "two checkpoints", 120)
        newest = folder.newest()
        run.until(lambda: run.step > newest.step, "a step more", 60)
        run.kill_everything()
        yield run


def checkpoints(run):
    """The newest first."""
    return CheckpointFolder(run.run_dir / "checkpoints").candidates()


def is_exact(run):
    assert run.wait(200) == 0, run.output
    assert run.left() == []
    findings = audit(run.run_dir, Expected(steps=STEPS, groups_per_step=GROUPS, prompts=PROMPTS))
    assert [str(problem) for problem in findings.problems] == []
    assert findings.figures["trained"] == STEPS * GROUPS
    assert findings.figures["starts"] == 2


def resumption(run):
    """The line that names the checkpoint it resumes from."""
    return next(line for line in run.output.splitlines() if line.startswith("resuming "))


@pytest.mark.slow
def test_i1_without_the_mark_of_versions_no_number_is_used_twice(killed):
    newest, *_ = checkpoints(killed)
    (killed.run_dir / MARK_FILE).unlink()
    killed.resume()
    is_exact(killed)
    assert f"{killed.run_dir / MARK_FILE} is not there; new versions are above " in killed.output
    assert f": {newest}" in resumption(killed)


@pytest.mark.slow
def test_i1_checkpoints_without_their_mark_are_skipped_and_without_any_other_nothing_starts(killed):
    """The mark of versions is lost as well. Apart from metrics.jsonl, only the newest checkpoint holds the highest."""
    (killed.run_dir / MARK_FILE).unlink()
    newest, older, *_ = kept = {path: (path / COMPLETE).read_bytes() for path in checkpoints(killed)}
    for path in kept:
        (path / COMPLETE).unlink()
    before = sorted(path.name for path in newest.parent.iterdir())
    refused = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli.launch", str(killed.folder / "config.toml"), "--resume", "auto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode not in (0, 75), refused.stdout
    reported = refused.stdout + refused.stderr
    assert (
        "no checkpoint here is whole" in reported and str(newest) in reported and f"it holds no {COMPLETE}" in reported
    ), reported
    assert sorted(path.name for path in newest.parent.iterdir()) == before
    (older / COMPLETE).write_bytes(kept[older])
    killed.resume()
    is_exact(killed)
    shown = killed.output
    assert f"{killed.run_dir / MARK_FILE} is not there; new versions are above " in shown
    assert f": {older}" in resumption(killed)
    assert f"checkpoint {newest.name} is damaged: {newest}" in shown and f"it holds no {COMPLETE}" in shown
    assert f"continues from the newest whole one, {older.name} of step" in shown
    assert (newest.parent / f"damaged-{newest.name}").is_dir()
