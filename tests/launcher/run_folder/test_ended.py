"""The end of a run, as its folder shows it, and the files that it leaves."""

import os

import msgspec
import pytest
from run_settings import simulated_run

from asyncrl.checkpoint.folder import Found
from asyncrl.launcher.common.agent_messages import EndedEvent
from asyncrl.launcher.run_folder.ended import (
    ENDED,
    RunProgress,
    describe_end,
    find_left,
    read_ended,
    write_command,
    write_ended,
)
from asyncrl.launcher.run_folder.folders import RunFolder

CONFIG = simulated_run()
STOPPED = EndedEvent(result="stopped", reason="Ctrl-C", exit_code=130)


def test_the_end_of_an_attempt_is_read_through_any_path_of_the_run_folder(tmp_path):
    run = tmp_path / "scratch" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    write_ended(run, str(RunFolder(path=run, run_id="").logs), STOPPED)
    assert read_ended(RunFolder(path=tmp_path / "link" / "mine", run_id="")) == STOPPED
    assert read_ended(RunFolder(path=run, run_id="", attempt=2)) is None
    (run / ENDED).write_bytes((run / ENDED).read_bytes().replace(b"Ctrl-C", b"Ctrl-\xff"))
    assert read_ended(RunFolder(path=run, run_id="")) is None


def test_steps_in_the_exported_model_do_not_count_as_lost(tmp_path):
    folder = RunFolder(path=tmp_path, run_id="")
    (tmp_path / "config.json").touch()
    (tmp_path / "export").mkdir()
    steps = CONFIG.learner.steps
    alone = f"left: no checkpoint; in the model of {tmp_path}/export alone: {steps} steps"
    assert find_left(CONFIG, folder, heard=steps).describe() == alone
    assert find_left(CONFIG, folder, heard=3).describe() == "left: no checkpoint; lost: 3 steps"
    # The model of an earlier attempt.
    os.utime(tmp_path / "export", (0, 0))
    assert find_left(CONFIG, folder, heard=steps).describe() == f"left: no checkpoint; lost: {steps} steps"


@pytest.mark.parametrize("result", ["preempted", "stopped", "failed"])
def test_the_command_that_resumes_a_run_has_the_path_of_its_folder(tmp_path, result):
    folder = RunFolder(path=tmp_path / "my run-2", run_id="")
    left = RunProgress(Found(34, 0, 34, tmp_path / "v00000034"), trained=36)
    ended = EndedEvent(result=result, actor="learner/0" if result == "failed" else "", reason="why", exit_code=1)
    rows = describe_end(folder, ended, left)
    assert any(f"to resume: the command that started it, with --resume '{folder.path}'" in row for row in rows)
    folder.logs.mkdir(parents=True)
    write_command(folder, "asyncrl-launch caf\udce9.toml --detach")
    resume = f"to resume: asyncrl-launch caf\udce9.toml --detach --resume '{folder.path}'"
    assert any(row.endswith(resume) for row in describe_end(folder, ended, left))
    refused = describe_end(folder, msgspec.structs.replace(ended, exit_code=78), left)
    put_right = resume.replace("to resume:", "to resume, once that is corrected:")
    assert any(row.endswith(put_right) for row in refused)
    assert any("lost: 2 steps trained since" in row for row in rows)
    assert "why" in rows[-1]


def test_a_run_without_a_signal_advises_to_export_its_checkpoint(tmp_path):
    folder = RunFolder(path=tmp_path, run_id="")
    ended = EndedEvent(result="failed", actor="learner/0", reason="no signal: none of the last 8 groups", exit_code=1)
    left = RunProgress(Found(34, 0, 34, tmp_path / "v00000034"), trained=36)
    last = describe_end(folder, ended, left)[-1]
    assert last.startswith("training stopped at step 36, because no prompt group has a signal any more")
    assert f"asyncrl-export {tmp_path} MODEL_DIR" in last
    assert describe_end(folder, ended, RunProgress(None, 0))[-1] == "learner/0: no signal: none of the last 8 groups"
