"""Launched runs of stub actors: real launcher, guard, agent and controller, real processes and signals."""

import contextlib
import json
import os
import re
import signal
import time

import pytest
from launcher.launched import Launched, marked, wait_until

from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder, next_attempt
from asyncrl.launcher.terms.spec import EndedEvent
from asyncrl.roles import drain_rank


@pytest.fixture
def launched(tmp_path):
    runs = []

    def start(behaviour, sections=None, **supervision):
        runs.append(Launched(tmp_path, behaviour, sections, **supervision))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def assert_all_gone(run):
    wait_until(lambda: not marked(run.folder), f"the end of {marked(run.folder)}")
    assert not (run.run_dir / "private").exists()


def exits(run):
    """(actor, exit code) in the order in which they ended."""
    text = (run.run_dir / "logs" / "attempt_1" / "agent-0.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [(line["actor"], line["exit_code"]) for line in lines if line["event"] == "ended" and "exit_code" in line]


def test_a_run_from_start_to_end(launched):
    run = launched({"learner/0": {"finish": 3}, "rollouter/0": {"children": True, "die": [0, -11, 1]}})
    code, shown = run.end()
    assert code == 0, shown
    assert_all_gone(run)
    assert shown[0] == f"run folder: {run.run_dir}"
    assert shown[1].startswith("starting: waiting for dataloader/0")
    assert any(line.startswith("step 3/3") for line in shown)
    last = [line for line in shown if line.startswith("steps ")]
    summary = dict(re.split(" {2,}", line) for line in shown[shown.index(last[-1]) :])
    assert summary["steps"] == "3 of 3"
    assert summary["reward"] == "0.100 → 0.300 (mean of step 1 and of step 3)"
    assert summary["replay"].startswith(f"asyncrl-top {run.run_dir} --replay")
    assert {log.name for log in (run.run_dir / "logs" / "attempt_1").iterdir()} == {
        "agent-0.log",
        "controller-0.log",
        "dataloader-0.log",
        "learner-0.log",
        "parameter_server-0.log",
        "reward-0.log",
        "rollouter-0.log",
    }


def test_an_actor_that_keeps_dying_ends_the_run(launched):
    run = launched({"rollouter/0": {"children": True, "die": [0, 3, 99]}}, max_restarts=1)
    run.wait_to_show("rollouter/0 died (exit code 3: these are my last words) and is started again")
    code, shown = run.end()
    assert code == 1
    log = run.run_dir / "logs" / "attempt_1" / "rollouter-0.log"
    assert shown[-1] == (
        f"rollouter/0: exit code 3, after 1 restarts within 600 s: these are my last words (log: {log})"
    )
    assert log.read_text().count("these are my last words") == 2
    assert_all_gone(run)
    # No step was trained: the next start has the name, and the log that was named is still there.
    again = launched({"learner/0": {"finish": 3}})
    code, shown = again.end()
    assert code == 0, shown
    assert shown[0].startswith(f"run folder: {run.run_dir}, attempt 2: the one before ended before its first step")
    assert log.read_text().count("these are my last words") == 2
    third = launched({"learner/0": {"finish": 3}})
    assert third.end()[1][0] == f"run folder: {run.run_dir}-2"


def test_a_frozen_actor_is_killed_and_started_again_and_the_run_goes_on(launched):
    sections = {"preempt": {"grace_s": 0.5}}
    run = launched({"rollouter/0": {"children": True}}, sections, heartbeat_s=0.2, silence_s=1.5, restart_window_s=60.0)
    run.wait_to_show("running")
    frozen = run.actor("rollouter/0")
    os.kill(frozen, signal.SIGSTOP)
    run.wait_to_show("rollouter/0 died (killed by SIGKILL: it did not beat for ")
    wait_until(lambda: run.actor("rollouter/0") != frozen, "its successor")
    assert "rollouter/1 died" not in run.shown
    # Its successor is left alone: it beats.
    time.sleep(2.5)
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    assert sum(" died " in line for line in shown) == 1, shown
    assert_all_gone(run)


def test_ranks_die_and_start_again_together(launched):
    sections = {"learner": {"backend": "sim", "ranks": 2}, "preempt": {"grace_s": 0.5}}
    run = launched({"learner/0": {"slow": 0.3}}, sections, restart_window_s=60.0)
    run.wait_to_show("running")
    before = {name: run.actor(name) for name in ("learner/0", "learner/1", "rollouter/0")}
    os.kill(before["learner/1"], signal.SIGKILL)
    run.wait_to_show("learner/0 died (killed by SIGKILL: learner/1 died, and all of learner start again together)")
    for name in ("learner/0", "learner/1"):
        wait_until(lambda name=name: run.actor(name) != before[name], f"the successor of {name}")
    time.sleep(1.0)
    assert run.actor("rollouter/0") == before["rollouter/0"]
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    # One restart each.
    assert sum(" died " in line and "is started again" in line for line in shown) == 2, shown
    assert_all_gone(run)


def test_what_an_actor_says_of_its_failure_is_the_last_line(launched):
    run = launched({"dataloader/0": {"raise": "no column 'prompt'"}})
    code, shown = run.end()
    assert code == 78
    log = run.run_dir / "logs" / "attempt_1" / "dataloader-0.log"
    assert shown[-1] == f"dataloader/0: prompts.jsonl:3: no column 'prompt' (log: {log})"
    assert_all_gone(run)


def test_ctrl_c_ends_in_order_and_the_deaf_by_force(launched):
    sections = {"preempt": {"grace_s": 0.5}}
    run = launched({"learner/0": {"deaf": True}, "rollouter/0": {"children": True}}, sections, drain_s=4.0)
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
    assert shown[-1] == (
        "ended before the last step: preempted by Ctrl-C, and no checkpoint was complete after 0.5 s (preempt.grace_s)"
    )
    assert_all_gone(run)


def test_a_second_ctrl_c_ends_at_once(launched):
    run = launched({"learner/0": {"deaf": True}}, drain_s=600.0)
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGINT)
    run.wait_to_show("making way: waiting for a checkpoint")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    assert "ending at once" in shown
    assert shown[-1] == "ended before the last step: ended at once by Ctrl-C"
    assert_all_gone(run)


def test_sigterm_while_actors_start(launched):
    run = launched({"learner/0": {"slow": 600}}, drain_s=600.0)
    run.wait_to_show("starting: waiting for learner/0")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    assert_all_gone(run)


def test_an_interrupt_at_any_moment_of_the_start(launched):
    run = launched({"learner/0": {"slow": 600}}, drain_s=600.0)
    wait_until(run.run_dir.exists, "the run folder")
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert_all_gone(run)


def test_an_agent_that_is_killed_takes_everything_along(launched):
    run = launched({"rollouter/0": {"children": True}})
    run.wait_to_show("running")
    assert len(marked(run.folder)) > 6
    os.kill(run.pid("agent"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("agent/0: killed by SIGKILL (log: ")
    assert_all_gone(run)


def test_an_agent_that_hangs_is_ended_by_the_second_ctrl_c(launched):
    run = launched({})
    run.wait_to_show("running")
    agent = run.pid("agent")
    os.kill(agent, signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.wait_to_show("making way")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("agent/0: it did not end its actors, and was killed (log: ")
    assert_all_gone(run)


def test_a_guard_that_is_killed_ends_the_run_in_order(launched):
    run = launched({"learner/0": {"preempted": 7}, "rollouter/0": {"children": True}})
    run.wait_to_show("running")
    os.kill(run.pid("guard"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert "draining: ending the actors in order" in shown
    log = run.run_dir / "logs" / "attempt_1" / "agent-0.log"
    assert shown[-1] == (
        "agent/0: its guard was killed, without which no agent goes on (preempted by the death of a guard with a "
        f"checkpoint of version 7) (log: {log})"
    )
    assert_all_gone(run)


def test_a_run_goes_on_without_its_launcher(launched):
    run = launched({"learner/0": {"slow": 3, "finish": 3}, "reward/0": {"slow": 3}})
    run.wait_to_show("starting: waiting for learner/0")
    run.process.kill()
    assert_all_gone(run)
    assert (run.run_dir / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("curve", ["off", "required"])
def test_a_run_goes_on_without_its_controller(launched, curve):
    """I5: it is started again on its port, with its key, and everybody who was there comes back to it."""
    sections = {"security": {"curve": curve}}
    run = launched({"learner/0": {"finish": 3, "finish_on": "go"}}, sections, restart_window_s=60.0)
    log = run.run_dir / "logs" / "attempt_1" / "controller-0.log"

    def have_registered(times):
        said = log.read_text() if log.exists() else ""
        return all(said.count(f'"{name}", "address": "tcp') >= times for name in ("learner/0", *names))

    names = ("rollouter/0", "dataloader/0", "reward/0", "parameter_server/0")
    wait_until(lambda: have_registered(1), "the start")
    others = {name: run.actor(name) for name in names}
    os.kill(run.actor("controller/0"), signal.SIGKILL)
    run.wait_to_show("controller/0 died (killed by SIGKILL) and is started again")
    wait_until(lambda: have_registered(2), "their return")
    assert {name: run.actor(name) for name in others} == others
    (run.run_dir / "go").touch()
    code, shown = run.end()
    assert code == 0, shown
    assert sum(" died " in line for line in shown) == 1, shown
    assert "draining: ending the actors in order" in shown
    assert_all_gone(run)


def test_a_controller_that_keeps_dying_ends_the_run_with_its_name(launched):
    run = launched({}, max_restarts=1)
    run.wait_to_show("running")
    first = run.actor("controller/0")
    os.kill(first, signal.SIGKILL)
    second = wait_until(lambda: next((pid for pid in (run.actor("controller/0"),) if pid != first), None), "another")
    os.kill(second, signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("controller/0: killed by SIGKILL, after 1 restarts within 600 s")
    assert_all_gone(run)


def test_deaths_while_the_controller_is_away_are_mended(launched):
    run = launched({"learner/0": {"finish": 3, "finish_on": "go"}}, restart_window_s=60.0, backoff_s=0.5)
    run.wait_to_show("step 3/3")
    for name in ("controller/0", "rollouter/0", "learner/0"):
        os.kill(run.actor(name), signal.SIGKILL)
    for name in ("controller/0", "rollouter/0", "learner/0"):
        run.wait_to_show(f"{name} died (killed by SIGKILL) and is started again")
    (run.run_dir / "go").touch()
    code, shown = run.end()
    assert code == 0, shown
    assert_all_gone(run)


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGUSR2, "SIGUSR2")])
def test_a_preempted_run_writes_a_checkpoint_and_can_be_resumed(launched, number, cause):
    run = launched({"learner/0": {"preempted": 7}})
    run.wait_to_show("running")
    run.process.send_signal(number)
    code, shown = run.end()
    assert code == 75, shown
    assert "making way: a checkpoint is written, within 60 s; again to end at once" in shown
    how = f"preempted by {cause} with a checkpoint of version 7"
    assert shown[-1] == f"{how}; the command that began it with --resume {run.run_dir} goes on"
    assert read_ended(next_attempt(run.run_dir)) is None
    folder = RunFolder(path=run.run_dir, run_id="")
    assert read_ended(folder) == EndedEvent(result="preempted", reason=how, exit_code=75)
    assert_all_gone(run)


def test_the_wish_to_make_way_reaches_the_successor_of_the_controller(launched):
    run = launched({"learner/0": {"preempted": 7}}, restart_window_s=60.0, backoff_s=1.0)
    run.wait_to_show("running")
    controller = run.actor("controller/0")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: controller not in marked(run.run_dir), "its end")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    assert_all_gone(run)


def test_past_its_grace_a_run_without_a_checkpoint_is_just_ended(launched):
    run = launched({}, {"preempt": {"grace_s": 0.5}})
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 143, shown
    assert shown[-1] == (
        "ended before the last step: preempted by SIGTERM, and no checkpoint was complete after 0.5 s (preempt.grace_s)"
    )
    assert_all_gone(run)


def test_a_second_signal_does_not_let_it_make_way(launched):
    run = launched({}, {"preempt": {"grace_s": 600.0}})
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGUSR2)
    run.wait_to_show("making way: waiting for a checkpoint")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 128 + signal.SIGUSR2
    assert "ending at once" in shown
    assert_all_gone(run)


def test_a_signal_to_every_process_of_a_run_is_one_wish(launched):
    """As a scheduler sends it: launcher, guard, agent and actors."""
    run = launched({"learner/0": {"preempted": 7}})
    run.wait_to_show("running")
    for pid in {*marked(run.folder), run.pid("agent")}:
        os.kill(pid, signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    assert_all_gone(run)


def test_a_signal_that_reaches_the_launcher_last_is_the_same_wish(launched):
    run = launched({}, {"preempt": {"grace_s": 4.0}})
    run.wait_to_show("running")
    os.kill(run.pid("agent"), signal.SIGTERM)
    run.wait_to_show("making way: waiting for a checkpoint")
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 143, shown
    assert shown[-1] == (
        "ended before the last step: preempted by SIGTERM, and no checkpoint was complete after 4 s (preempt.grace_s)"
    )
    assert_all_gone(run)


def test_a_run_that_was_killed_as_a_whole_is_resumed_in_its_folder(launched):
    """I7: nothing but files is left, and those are dealt with by the next start."""
    run = launched({"learner/0": {"preempted": 7}, "rollouter/0": {"children": True}})
    run.wait_to_show("running")
    # None is to see the death of another, and to put the folder in order.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (run.process.pid, run.pid("guard"), run.pid("agent"), *marked(run.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    run.process.wait()
    wait_until(lambda: not marked(run.folder), "the end of all")
    assert (run.run_dir / "private").exists()
    again = launched({"learner/0": {"finish": 3}}, resume="auto")
    code, shown = again.end()
    assert code == 0, shown
    assert shown[0] == f"removed {run.run_dir / 'private'}, left behind by a run that was killed"
    assert shown[1].startswith(f"resuming {run.run_dir}: there is no complete checkpoint")
    assert [entry.name for entry in sorted((run.run_dir / "logs").iterdir())] == ["attempt_1", "attempt_2"]
    assert (run.run_dir / "config_attempt_1.json").is_file()
    assert_all_gone(again)


def test_a_run_that_lives_cannot_be_resumed(launched):
    run = launched({}, {"preempt": {"grace_s": 0.5}})
    run.wait_to_show("running")
    code, shown = launched({}, resume="auto").end()
    assert code == 1
    assert f"{run.run_dir} is in use: the run in it is still going on; end that first" in shown[-1]
    assert (run.run_dir / "private" / "lock").exists()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
