"""Launched runs of stub actors: real launcher, guard, agent and controller, real processes and signals."""

import contextlib
import json
import os
import re
import signal
import time

import pytest
from launcher.launched import config_tree, marked, wait_until

from asyncrl.config.load import validate_config
from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder, create_run_folder, next_attempt
from asyncrl.launcher.terms.spec import EndedEvent
from asyncrl.roles import drain_rank

SOON = {"preempt": {"grace_s": 0.5}}
NO_CHECKPOINT = "and no checkpoint was complete after 0.5 s (preempt.grace_s)"


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


def test_a_run_from_start_to_end(stub):
    run = stub({"learner/0": {"finish": 3}, "rollouter/0": {"children": True, "die": [0, -11, 1]}})
    code, shown = run.end()
    assert code == 0, shown
    assert shown[0] == f"run folder: {run.run_dir}"
    assert shown[1].startswith("starting: waiting for dataloader/0")
    assert any(line.startswith("step 3/3") for line in shown)
    last = [line for line in shown if line.startswith("steps ")]
    summary = dict(re.split(" {2,}", line) for line in shown[shown.index(last[-1]) :])
    assert summary["steps"] == "3 of 3"
    assert summary["reward"] == "0.100 → 0.300 (mean of step 1 and of step 3)"
    assert summary["replay"].startswith(f"asyncrl-top {run.run_dir} --replay")
    actors = ("agent", "controller", "dataloader", "learner", "parameter_server", "reward", "rollouter")
    logs = {log.name for log in (run.run_dir / "logs" / "attempt_1").iterdir()}
    assert logs == {f"{actor}-0.log" for actor in actors}


def test_an_actor_that_keeps_dying_ends_the_run(stub):
    run = stub({"rollouter/0": {"children": True, "die": [0, 3, 99]}}, max_restarts=1)
    run.wait_to_show("rollouter/0 died (exit code 3: these are my last words) and is started again")
    code, shown = run.end()
    assert code == 1
    log = run.run_dir / "logs" / "attempt_1" / "rollouter-0.log"
    assert shown[-1] == (
        f"rollouter/0: exit code 3, after 1 restarts within 600 s: these are my last words (log: {log})"
    )
    assert log.read_text().count("these are my last words") == 2
    # No step was trained: the next start has the name, and the log that was named is still there.
    again = create_run_folder(validate_config(config_tree(run.folder)))
    assert (again.path, again.attempt, log.is_file()) == (run.run_dir, 2, True)


def test_who_is_frozen_is_started_again_alone_and_ranks_start_again_together(stub):
    sections = SOON | {"learner": {"backend": "sim", "ranks": 2}}
    behaviour = {"rollouter/0": {"children": True}, "learner/0": {"slow": 0.3}}
    run = stub(behaviour, sections, heartbeat_s=0.2, silence_s=1.5, restart_window_s=60.0)
    run.wait_to_show("running")
    before = {name: run.actor(name) for name in ("learner/0", "learner/1", "rollouter/0")}
    os.kill(before["rollouter/0"], signal.SIGSTOP)
    run.wait_to_show("rollouter/0 died (killed by SIGKILL: it did not beat for ")
    rollouter = wait_until(lambda: {run.actor("rollouter/0")} - {before["rollouter/0"]}, "its successor")
    os.kill(before["learner/1"], signal.SIGKILL)
    run.wait_to_show("learner/0 died (killed by SIGKILL: learner/1 died, and all of learner start again together)")
    for name in ("learner/0", "learner/1"):
        wait_until(lambda name=name: run.actor(name) != before[name], f"the successor of {name}")
    # Who was frozen is left alone from then on: it beats.
    time.sleep(2.0)
    assert {run.actor("rollouter/0")} == rollouter
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    died = [line.partition(" died ")[0] for line in shown if " died " in line and "is started again" in line]
    assert sorted(died) == ["learner/0", "learner/1", "rollouter/0"], shown


def test_what_an_actor_says_of_its_failure_is_the_last_line(stub):
    run = stub({"dataloader/0": {"raise": "no column 'prompt'"}})
    code, shown = run.end()
    assert code == 78
    log = run.run_dir / "logs" / "attempt_1" / "dataloader-0.log"
    assert shown[-1] == f"dataloader/0: prompts.jsonl:3: no column 'prompt' (log: {log})"


def test_ctrl_c_ends_in_order_and_the_deaf_by_force(stub):
    run = stub({"learner/0": {"deaf": True}, "rollouter/0": {"children": True}}, SOON, drain_s=4.0)
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    ends = exits(run)
    assert {name: code for name, code in ends if code} == {"learner/0": -signal.SIGKILL}
    by_themselves = [drain_rank(name) for name, code in ends if not code]
    assert by_themselves == sorted(by_themselves)
    assert len(ends) == 6
    assert "draining: ending the actors in order" in shown
    assert shown[-1] == f"ended before the last step: preempted by Ctrl-C, {NO_CHECKPOINT}"


def test_a_second_signal_ends_at_once(stub):
    run = stub({"learner/0": {"deaf": True}}, drain_s=600.0)
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGUSR2)
    run.wait_to_show("making way: waiting for a checkpoint")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 128 + signal.SIGUSR2
    assert "ending at once" in shown
    assert shown[-1] == "ended before the last step: ended at once by SIGUSR2"


def test_an_interrupt_at_any_moment_of_the_start(stub):
    run = stub({"learner/0": {"slow": 600}}, drain_s=600.0)
    wait_until(run.run_dir.exists, "the run folder")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_an_agent_that_is_killed_takes_everything_along_in_the_middle_of_a_storm_of_forks(stub):
    run = stub({"rollouter/0": {"children": True, "storm": True}})
    wait_until(lambda: len(marked(run.folder)) > 60, "the storm")
    os.kill(run.node("agent"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("agent/0: killed by SIGKILL (log: ")


def test_an_agent_that_hangs_is_ended_by_the_second_ctrl_c(stub):
    run = stub({})
    run.wait_to_show("running")
    os.kill(run.node("agent"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.wait_to_show("making way")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("agent/0: it did not end its actors, and was killed (log: ")


def test_a_guard_that_is_killed_ends_the_run_in_order(stub):
    run = stub({"learner/0": {"preempted": 7}, "rollouter/0": {"children": True}})
    run.wait_to_show("running")
    os.kill(run.node("guard"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert "draining: ending the actors in order" in shown
    log = run.run_dir / "logs" / "attempt_1" / "agent-0.log"
    assert shown[-1] == (
        "agent/0: its guard was killed, without which no agent goes on (preempted by the death of a guard with a "
        f"checkpoint of version 7) (log: {log})"
    )


def test_a_run_goes_on_without_its_launcher(stub):
    run = stub({"learner/0": {"slow": 3, "finish": 3}, "reward/0": {"slow": 3}})
    run.wait_to_show("starting: waiting for learner/0")
    run.process.kill()
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert (run.run_dir / "metrics.jsonl").read_text().count("\n") == 3


def test_a_run_goes_on_without_its_controller(stub):
    """I5: it is started again on its port, with its key, and everybody who was there comes back to it.

    Deaths meanwhile are mended, and its successor hears of the wish to make way.
    """
    behaviour = {"learner/0": {"finish": 3, "finish_on": "never", "preempted": 7}}
    run = stub(behaviour, {"security": {"curve": "required"}}, restart_window_s=60.0, backoff_s=0.5)
    log = run.run_dir / "logs" / "attempt_1" / "controller-0.log"
    names = ("rollouter/0", "dataloader/0", "reward/0", "parameter_server/0")

    def have_registered(times):
        said = log.read_text() if log.exists() else ""
        return all(said.count(f'"{name}", "address": "tcp') >= times for name in ("learner/0", *names))

    wait_until(lambda: have_registered(1), "the start")
    others = {name: run.actor(name) for name in names}
    os.kill(run.actor("controller/0"), signal.SIGKILL)
    run.wait_to_show("controller/0 died (killed by SIGKILL) and is started again")
    wait_until(lambda: have_registered(2), "their return")
    assert {name: run.actor(name) for name in others} == others
    assert sum(" died " in line for line in run.shown.splitlines()) == 1, run.shown
    dead = ("controller/0", "rollouter/0", "learner/0")
    for name in dead:
        os.kill(run.actor(name), signal.SIGKILL)
    for name in dead[1:]:
        run.wait_to_show(f"{name} died (killed by SIGKILL) and is started again")
    wait_until(lambda: have_registered(3), "their return")
    controller = run.actor("controller/0")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: controller not in run.processes(), "its end")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    assert sum(" died " in line for line in shown) == 5, shown
    assert "draining: ending the actors in order" in shown


def test_a_preempted_run_writes_a_checkpoint_and_can_be_resumed(stub):
    run = stub({"learner/0": {"preempted": 7}})
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGUSR2)
    code, shown = run.end()
    assert code == 75, shown
    assert "making way: a checkpoint is written, within 60 s; again to end at once" in shown
    how = "preempted by SIGUSR2 with a checkpoint of version 7"
    assert shown[-1] == f"{how}; the command that began it with --resume {run.run_dir} goes on"
    assert read_ended(next_attempt(run.run_dir)) is None
    folder = RunFolder(path=run.run_dir, run_id="")
    assert read_ended(folder) == EndedEvent(result="preempted", reason=how, exit_code=75)


def test_a_signal_to_every_process_of_a_run_is_one_wish(stub):
    """As a scheduler sends it: to guard, agent and actors, and to the launcher last."""
    run = stub({}, {"preempt": {"grace_s": 4.0}})
    run.wait_to_show("running")
    agent = run.node("agent")
    os.kill(agent, signal.SIGTERM)
    run.wait_to_show("making way: waiting for a checkpoint")
    for pid in {*run.processes()} - {agent, run.process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 143, shown
    assert shown[-1] == f"ended before the last step: preempted by SIGTERM, {NO_CHECKPOINT.replace('0.5', '4')}"


def test_a_run_that_was_killed_as_a_whole_is_resumed_in_its_folder(stub):
    """I7: nothing but files is left, and those are dealt with by the next start."""
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
    assert shown[1].startswith(f"resuming {run.run_dir}: there is no complete checkpoint")
    assert [entry.name for entry in sorted((run.run_dir / "logs").iterdir())] == ["attempt_1", "attempt_2"]
    assert (run.run_dir / "config_attempt_1.json").is_file()
