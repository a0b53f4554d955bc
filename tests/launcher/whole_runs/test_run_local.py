"""Launched runs of stub actors: real launcher, guard, agent and controller, real processes and signals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from launcher.launched import marked

from asyncrl.core.roles import drain_rank
from asyncrl.launcher.common.agent_messages import EndedEvent
from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder, next_attempt
from tools.waiting import wait_until


@pytest.fixture
def stub(stub):
    """As of every run: none of its processes and no secret of it is left behind."""
    runs = []

    def start(*arguments, **options):
        runs.append(stub(*arguments, **options))
        return runs[-1]

    yield start
    for run in runs:
        wait_until(lambda run=run: not marked(run.folder), f"the end of {marked(run.folder)}")
        assert not (run.run_dir / "private").exists()


def exits(run):
    """(actor, exit code) in the order in which they ended."""
    text = (run.run_dir / "logs" / "attempt_1" / "agent-0.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [(line["actor"], line["exit_code"]) for line in lines if line["event"] == "ended" and "exit_code" in line]


def assert_in_order(ends):
    """By themselves, those first that need the others."""
    ranks = [drain_rank(name) for name, _ in ends]
    assert ranks == sorted(ranks) and not any(code for _, code in ends), ends


def test_a_run_survives_the_death_of_each_actor_and_ends_in_order(stub):
    """I5: the frozen are started again alone, ranks together; a controller on its port, with its key, by its lock.

    Deaths while the controller is away are mended, whoever was there comes back to its successor, and an address file
    that is torn keeps nobody away.
    """
    sections = {"learner": {"backend": "sim", "steps": 3, "ranks": 2}, "security": {"curve": "required"}}
    behaviour = {"learner/0": {"finish": 3, "finish_on": "enough"}, "rollouter/0": {"children": True}}
    run = stub(behaviour, sections, heartbeat_s=0.2, silence_s=3.0, restart_window_s=60.0, backoff_s=0.5, drain_s=60.0)
    run.wait_to_show("step 3/3")
    before = {name: run.actor(name) for name in ("learner/0", "learner/1", "rollouter/0", "reward/0")}
    os.kill(before["rollouter/0"], signal.SIGSTOP)
    run.wait_to_show("rollouter/0 died (killed by SIGKILL: it did not beat for ")
    run.wait_to_show("rollouter/0 is ready again")
    second = run.actor("rollouter/0")
    os.kill(before["learner/1"], signal.SIGKILL)
    run.wait_to_show("learner/0 died (killed by SIGKILL: learner/1 died, and all of learner start again together)")
    for name in ("learner/0", "learner/1"):
        run.wait_to_show(f"{name} is ready again")
        assert run.actor(name) != before[name]
    assert run.actor("rollouter/0") == second
    (run.run_dir / "private" / "controller.json").write_bytes(b'{"address": "tcp:')
    for name in ("controller/0", "rollouter/0"):
        os.kill(run.actor(name), signal.SIGKILL)
    for name in ("controller/0", "rollouter/0"):
        run.wait_to_show(f"{name} died (killed by SIGKILL) and is started again")
    wait_until(lambda: run.shown.count("rollouter/0 is ready again") == 2, "the third of them")
    assert run.actor("reward/0") == before["reward/0"]
    (run.run_dir / "enough").touch()
    code, shown = run.end()
    assert code == 0, shown
    died = [line.partition(" died ")[0] for line in shown if " died " in line and "is started again" in line]
    assert sorted(died) == ["controller/0", "learner/0", "learner/1", "rollouter/0", "rollouter/0"], shown
    assert_in_order(exits(run)[-7:])
    assert shown[0] == f"run folder: {run.run_dir}" and shown[1].startswith("starting: waiting for dataloader/0")
    last = [line for line in shown if line.startswith("steps ")]
    summary = dict(re.split(" {2,}", line) for line in shown[shown.index(last[-1]) :])
    assert summary["steps"] == "3 of 3" and summary["replay"].startswith(f"asyncrl-top {run.run_dir} --replay")
    actors = ("agent", "controller", "dataloader", "learner", "parameter_server", "reward", "rollouter")
    logs = {log.name for log in (run.run_dir / "logs" / "attempt_1").iterdir()}
    assert logs >= {f"{actor}-0.log" for actor in actors} | {"learner-1.log"}


def test_a_signal_to_every_process_of_a_run_preempts_it_once(stub):
    """As a scheduler sends it: to guard, agent and actors, and to the launcher last; the controller is away."""
    run = stub({"learner/0": {"preempted": 7, "preempted_on": "enough"}}, restart_window_s=60.0, backoff_s=0.5)
    run.wait_to_show("running")
    agent, controller = run.node("agent"), run.actor("controller/0")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: controller not in run.processes(), "its end")
    os.kill(agent, signal.SIGUSR2)
    run.wait_to_show("preempted: writing a checkpoint")
    for pid in {*run.processes()} - {agent, run.process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    run.process.send_signal(signal.SIGUSR2)
    run.wait_to_show("stopping: a checkpoint is written within 60 s; a second Ctrl-C ends the run at once")
    (run.run_dir / "enough").touch()
    code, shown = run.end()
    assert code == 75, shown
    how = "preempted by SIGUSR2 with a checkpoint of version 7"
    assert shown[-1] == f"{how}; to resume: the command that started it, with --resume {run.run_dir}"
    assert read_ended(next_attempt(run.run_dir)) is None
    folder = RunFolder(path=run.run_dir, run_id="")
    assert read_ended(folder) == EndedEvent(result="preempted", reason=how, exit_code=75)


def test_a_signal_ends_the_run_in_order_and_a_second_one_at_once(stub):
    run = stub(
        {"learner/0": {"deaf": True}, "rollouter/0": {"children": True}}, {"preempt": {"grace_s": 0.5}}, drain_s=60.0
    )
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGUSR2)
    run.wait_to_show("draining: ending the actors in order")
    wait_until(lambda: len(exits(run)) == 4, "the end of those before the learner")
    assert_in_order(exits(run))
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 128 + signal.SIGUSR2
    assert dict(exits(run))["learner/0"] == -signal.SIGKILL
    assert "ending at once" in shown
    how = "preempted by SIGUSR2, and no checkpoint was complete after 0.5 s (preempt.grace_s)"
    assert shown[-1] == f"ended before the last step: {how}"


def test_an_interrupt_at_any_moment_of_the_start(stub):
    run = stub({"learner/0": {"slow": 600}}, drain_s=600.0)
    wait_until(run.run_dir.exists, "the run folder")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_i7_a_killed_agent_leaves_no_process_even_during_many_forks(stub):
    run = stub({"rollouter/0": {"children": True, "storm": True}})
    wait_until(lambda: len(marked(run.folder)) > 30, "the storm")
    os.kill(run.node("agent"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1 and shown[-1].startswith("agent/0: killed by SIGKILL (log: ")


def test_a_frozen_agent_is_reported_and_killed_by_its_guard_and_named_as_the_reason(stub):
    """I5: nothing that dies meanwhile is started again, and no command is obeyed. A shorter pause is no reason."""
    run = stub({}, heartbeat_s=0.2, silence_s=3.0)
    run.wait_to_show("running")
    agent, dataloader = run.node("agent"), run.actor("dataloader/0")
    os.kill(agent, signal.SIGSTOP)
    run.wait_to_show("agent/0: no sign of life for 5 s; it restarts no actor")
    os.kill(agent, signal.SIGCONT)
    run.wait_to_show("agent/0 is heard again")
    os.kill(agent, signal.SIGSTOP)
    os.kill(dataloader, signal.SIGKILL)
    code, shown = run.end()
    assert code == 1 and shown[-1].startswith("agent/0: frozen, without a sign of life for "), shown
    assert "then killed by SIGKILL (log: " in shown[-1]
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert "guard: the agent did not beat for 10 s (supervision.silence_s) and was killed" in agent_log(run)


def test_a_dying_replica_rests_until_the_user_restores_it_and_a_guard_ends_the_run(stub):
    behaviour = {"learner/0": {"preempted": 7}, "rollouter/1": {"children": True, "die": [0, 3, 2]}}
    run = stub(behaviour, {"rollout": {"engine": "sim", "replicas": 2}}, max_restarts=1)

    def bring_back(name):
        argv = [sys.executable, "-m", "asyncrl.cli.launch", "--bring-back", name, str(run.run_dir)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)

    run.wait_to_show("rollouter/1 died (exit code 3: these are my last words) and is started again")
    why = "exit code 3, after 1 restarts within 600 s: these are my last words"
    run.wait_to_show(f"controller/0: rollouter/1 is resting: {why}")
    assert "The run continues without it; it is tried again after 600 s" in run.shown
    refused = bring_back("rollouter/0")
    assert refused.returncode == 2, refused
    assert "rollouter/0 cannot be brought back: rollouter/1 is resting" in refused.stderr
    done = bring_back("rollouter/1")
    assert (done.returncode, done.stdout) == (0, "rollouter/1 is started again\n"), done
    run.actor("rollouter/1")
    run.wait_to_show("running")
    os.kill(run.node("guard"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1 and "draining: ending the actors in order" in shown
    log = run.run_dir / "logs" / "attempt_1" / "agent-0.log"
    assert shown[-1] == (
        "agent/0: its guard was killed, and an agent cannot continue without it (preempted by the death of a guard "
        f"with a checkpoint of version 7) (log: {log})"
    )
    assert f"rollouter/1 was resting ({why}" in run.shown.rpartition("run folder")[2], run.shown


def test_i7_a_run_with_all_processes_killed_is_resumed_in_its_folder(stub):
    """Nothing but files is left, and those are dealt with by the next start."""
    run = stub({"learner/0": {"preempted": 7}, "rollouter/0": {"children": True}})
    run.wait_to_show("running")
    # None is to see the death of another, and to put the folder in order.
    pids = {*run.processes(), *marked(run.folder)}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    run.process.wait()
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert (run.run_dir / "private").exists()
    code, shown = stub({"learner/0": {"finish": 3}}, resume="auto").end()
    assert code == 0, shown
    assert shown[0] == f"removed {run.run_dir / 'private'}, left behind by a run that was killed"
    assert shown[1] == f"resuming {run.run_dir} from the initial weights: it has no complete checkpoint"
    assert [entry.name for entry in sorted((run.run_dir / "logs").iterdir())] == ["attempt_1", "attempt_2"]
    assert (run.run_dir / "config_attempt_1.json").is_file()


def agent_log(run):
    return (run.run_dir / "logs" / "attempt_1" / "agent-0.log").read_text()
