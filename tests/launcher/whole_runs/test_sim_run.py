"""Whole simulated runs of the command, with every real actor in its own process: killed, preempted, resumed."""

import json
import os
import signal

import pytest
from launcher.launched import STEPS, command_line, wait_until

from asyncrl.checkpoint.folder import CheckpointFolder


def trained_once(run):
    """I1: of the steps as they stand no group is trained twice; (groups, of which different)."""
    uids = []
    for step in run.steps():
        lines = (run.run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        uids += [line["uid"] for line in found if line["start"] == found[-1]["start"]]
    return len(uids), len(set(uids))


def troubles(run, attempt):
    """Warnings and errors that any actor logged in an attempt."""
    found = []
    for path in sorted((run.run_dir / "logs" / f"attempt_{attempt}").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        found += [line for line in lines if line["level"] in ("warning", "error")]
    return found


@pytest.mark.slow
def test_a_controller_is_found_again_though_its_address_file_is_torn(launch):
    run = launch("--learner.steps", "100")
    run.wait_to_show("step 8/")
    (run.run_dir / "private" / "controller.json").write_bytes(b'{"address": "tcp:')
    os.kill(run.actor("controller/0"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 0, shown
    assert sum(" died " in line for line in shown) == 1, shown
    assert run.steps() == list(range(1, 101))


@pytest.mark.slow
def test_a_preempted_run_is_resumed_where_it_stopped(launch):
    run = launch()
    run.wait_to_show("step 8/")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    left = CheckpointFolder(run.run_dir / "checkpoints").newest()
    assert run.steps() == list(range(1, left.step + 1))
    assert troubles(run, 1) == [], "it waited for nothing in vain"
    again = launch("--resume", "auto")
    code, shown = again.end()
    assert code == 0, shown
    assert f"resuming {run.run_dir} from version {left.version}, step {left.step}: {left.path}" in shown
    assert troubles(again, 2) == [], "whoever ends before others is no trouble to them"
    assert again.steps() == list(range(1, STEPS + 1))
    groups, different = trained_once(again)
    assert groups == different > 0
    assert sorted(entry.name for entry in (run.run_dir / "logs").iterdir()) == ["attempt_1", "attempt_2"]


@pytest.mark.slow
def test_a_run_that_was_killed_as_a_whole_is_resumed(launch):
    """I1, I7: nothing but files is left of it, and they are enough."""
    run = launch()
    run.wait_to_show("step 12/")
    processes = run.processes()
    assert len(processes) > 8, processes
    for pid, words in processes.items():
        # Actors do not outlive their agent, even if there is no guard any more.
        if not words.startswith("asyncrl "):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: not any(command_line(pid) for pid in processes), "the end of all")
    again = launch("--resume", "auto")
    code, shown = again.end()
    assert code == 0, shown
    assert "left behind by a run that was killed" in shown[0]
    assert again.steps() == list(range(1, STEPS + 1))
    groups, different = trained_once(again)
    assert groups == different > 0
