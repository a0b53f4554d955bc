"""Runs whose terminal is closed, that outlive it, and that are ended by --stop, with a launcher and without."""

import os
import pty
import signal
import subprocess
import sys

from launcher.launched import marked, wait_until

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.launcher.live import stop as stopping
from asyncrl.launcher.live.live_run import find_living
from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder

LAUNCH = (sys.executable, "-m", "asyncrl.cli.launch")


def stop(run_dir, cwd=None):
    return subprocess.run([*LAUNCH, "--stop", str(run_dir)], capture_output=True, text=True, timeout=120, cwd=cwd)


def assert_nothing_is_lost(run_dir, steps):
    left = CheckpointFolder(run_dir / "checkpoints").newest()
    assert steps and steps == list(range(1, left.step + 1))
    return left


def test_a_closed_terminal_makes_way_though_no_checkpoints_are_wanted(launch):
    ours, theirs = pty.openpty()
    run = launch("--checkpoint.every_versions", "0", terminal=theirs)
    os.close(theirs)
    shown = b""
    while b"step 8/" not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    agent = run.run_dir / "logs" / "attempt_1" / "agent-0.log"
    wait_until(lambda: "preempt a closed terminal" in agent.read_text(), "the wish")
    # The shell of the terminal has been told, too, and tells its jobs.
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == 75
    left = assert_nothing_is_lost(run.run_dir, run.steps())
    ended = read_ended(RunFolder(path=run.run_dir, run_id=""))
    assert ended.reason == f"preempted by a closed terminal with a checkpoint of version {left.version}"


def test_a_detached_run_outlives_its_terminal_and_is_stopped_from_another(launch):
    run = launch("--detach", "--learner.steps", "4000")
    code, shown = run.end()
    assert code == 0, shown
    log = run.run_dir / "logs" / "attempt_1" / "launcher.log"
    assert shown[-4:] == [
        f"run folder  {run.run_dir}",
        f"output      {log}",
        f"watch       asyncrl-top {run.run_dir}",
        f"end         asyncrl-launch --stop {run.run_dir}",
    ]
    assert f"run folder: {run.run_dir}" in shown and "running" in shown
    launcher = int(shown[-5].split()[-1])
    assert os.getsid(launcher) == launcher
    wait_until(lambda: "step 3/" in log.read_text(), "steps")
    done = stop(run.run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    left = assert_nothing_is_lost(run.run_dir, run.steps())
    how = f"preempted by asyncrl-launch --stop with a checkpoint of version {left.version}"
    first, kept, last = done.stdout.splitlines()
    assert first.startswith(f"{run.run_dir} is asked to make way: ")
    assert kept == (
        f"left: the checkpoint of version {left.version}, step {left.step}: {left.path}; no trained step is lost"
    )
    began = f"asyncrl-launch {run.folder}/sim.toml --detach --learner.steps 4000"
    assert last == f"{how}; {began} --resume {run.run_dir} goes on"
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert log.read_text().splitlines()[0] == f"run folder: {run.run_dir}"
    assert log.read_text().splitlines()[-2:] == [kept, last]
    again = stop(run.run_dir)
    assert again.returncode == 2 and "the run in it has ended" in again.stderr


def test_a_detached_start_that_fails_says_why(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    config = tmp_path / "wrong.toml"
    sections = f'[run]\ndir = "{tmp_path}/runs"\n[data]\npath = "{tmp_path}/rows.jsonl"\n'
    config.write_text(f'{sections}[rollout]\nengine = "sim"\n[learner]\nbackend = "sim"\n')
    done = subprocess.run([*LAUNCH, "--detach", str(config)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (78, "")
    assert "prompt" in done.stderr.splitlines()[-1], done.stderr
    wait_until(lambda: not marked(tmp_path), "the end of all")


def test_a_run_whose_launcher_was_killed_is_stopped(stub):
    run = stub({"learner/0": {"preempted": 7}})
    run.wait_to_show("running")
    run.process.kill()
    run.process.wait()
    # By its name, as asyncrl-top takes it, beside a folder of that name which is none of a run.
    (run.folder / run.run_dir.name).mkdir()
    done = stop(run.run_dir.name, cwd=run.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "preempted by asyncrl-launch --stop with a checkpoint of version 7; "
    )
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert not (run.run_dir / "private").exists()


def test_who_does_not_end_a_run_is_named(stub, monkeypatch, capsys):
    monkeypatch.setattr(stopping, "END_S", 0.5)
    run = stub({}, {"preempt": {"grace_s": 0.5}}, drain_s=0.5)
    run.wait_to_show("running")
    agent, controller = run.node("agent"), run.actor("controller/0")
    for pid in (agent, controller):
        os.kill(pid, signal.SIGSTOP)
    for frozen in ("controller/0 has not answered", "agent/0 has not ended the run"):
        assert stopping.stop_run(find_living(str(run.run_dir))) == 1
        assert capsys.readouterr().err == (
            f"{run.run_dir}: {frozen} within 1.5 s; kill -9 {agent} ends it at once, with the checkpoint that is there "
            f"(logs: {run.run_dir / 'logs' / 'attempt_1'})\n"
        )
        os.kill(controller, signal.SIGCONT)
    os.kill(agent, signal.SIGKILL)
    assert run.end()[0] == 1
    assert read_ended(RunFolder(path=run.run_dir, run_id="")) is None
