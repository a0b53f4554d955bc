"""Runs whose terminal is closed, whose start fails unseen, and that are ended by --stop, with a launcher or without."""

import asyncio
import os
import pty
import signal
import subprocess
import sys

from launcher.launched import marked

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.launcher.live import commands
from asyncrl.launcher.live.live_run import find_live_run
from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.messages.hosts import WatchMembers
from tools.waiting import wait_until

LAUNCH = (sys.executable, "-m", "asyncrl.cli.launch")


def test_a_closed_terminal_preempts_a_run_without_regular_checkpoints(launch):
    ours, theirs = pty.openpty()
    run = launch("--checkpoint.every_versions", "0", terminal=theirs)
    os.close(theirs)
    shown = b""
    while b"step 8/" not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    agent = run.run_dir / "logs" / "attempt_1" / "agent-0.log"
    wait_until(lambda: "preempt a closed terminal" in agent.read_text(), "the wish")
    # The shell of the terminal gets the signal too, and passes it to its jobs.
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == 75
    left = CheckpointFolder(run.run_dir / "checkpoints").newest()
    assert run.steps_trained == list(range(1, left.step + 1)), "nothing is lost"
    ended = read_ended(RunFolder(path=run.run_dir, run_id=""))
    assert ended.reason == f"preempted by a closed terminal with a checkpoint of version {left.version}"


def test_a_failed_detached_start_prints_the_error_and_leaves_no_process(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    config = tmp_path / "wrong.toml"
    sections = f'[run]\ndir = "{tmp_path}/runs"\n[data]\npath = "{tmp_path}/rows.jsonl"\n'
    config.write_text(f'{sections}[rollout]\nengine = "sim"\n[learner]\nbackend = "sim"\n')
    done = subprocess.run([*LAUNCH, "--detach", str(config)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (78, "")
    assert "prompt" in done.stderr.splitlines()[-1], done.stderr
    wait_until(lambda: not marked(tmp_path), "the end of all")


def test_a_run_continues_without_its_launcher_until_it_is_stopped(stub):
    run = stub({"learner/0": {"slow": 3, "preempted": 7}, "reward/0": {"slow": 3}})
    run.wait_to_show("starting: waiting for dataloader/0")
    run.process.kill()
    run.process.wait()
    wait_until(lambda: run.is_running, "the run")
    # By its name, as asyncrl-top takes it; a folder of that name without a run is there too.
    (run.folder / run.run_dir.name).mkdir()
    argv = [*LAUNCH, "--stop", run.run_dir.name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=run.folder)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("preempted by asyncrl-launch --stop with a checkpoint of version 7; "), last
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert not (run.run_dir / "private").exists()


def test_an_agent_that_hangs_is_named_by_stop_and_ended_by_the_second_ctrl_c(stub, monkeypatch, capsys):
    monkeypatch.setattr(commands, "END_S", 0.5)
    run = stub({}, {"preempt": {"grace_s": 0.5}}, drain_s=0.5)
    run.wait_to_show("running")
    agent, controller = run.node("agent"), run.actor("controller/0")
    for pid in (agent, controller):
        os.kill(pid, signal.SIGSTOP)
    live = find_live_run(str(run.run_dir))

    async def answer():
        with live.connect() as caller:
            await caller.ask(WatchMembers(), timeout=60.0)

    def assert_named(frozen):
        assert asyncio.run(commands.stop_run(live)) == 1
        assert capsys.readouterr().err == (
            f"{run.run_dir}: {frozen} within 1.5 s; kill -9 {agent} ends it at once, with its last checkpoint "
            f"(logs: {run.run_dir / 'logs' / 'attempt_1'})\n"
        )

    assert_named("controller/0 has not answered")
    os.kill(controller, signal.SIGCONT)
    # It may need a while to wake and to shake hands.
    asyncio.run(answer())
    assert_named("agent/0 has not ended the run")
    run.process.send_signal(signal.SIGINT)
    run.wait_to_show("stopping: ")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    how = "stopped at once at your second Ctrl-C"
    assert (code, shown[-1]) == (130, f"ended before the last step: {how}"), shown
    assert read_ended(RunFolder(path=run.run_dir, run_id="")) is None
