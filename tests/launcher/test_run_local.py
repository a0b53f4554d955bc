"""Launched runs of stub actors: real launcher, guard, agent and controller, real processes and signals."""

import os
import signal
import time

import pytest
from launched import Launched, marked, wait_until


@pytest.fixture
def launched(tmp_path):
    runs = []

    def start(behaviour, **supervision):
        runs.append(Launched(tmp_path, behaviour, **supervision))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def assert_all_gone(run):
    wait_until(lambda: not marked(run.folder), f"the end of {marked(run.folder)}")
    assert not (run.run_dir / "private").exists()


def test_a_run_from_start_to_end(launched):
    run = launched({"learner/0": {"finish": 3}, "rollouter/0": {"children": True, "die": [0, -11, 1]}})
    code, shown = run.end()
    assert code == 0, shown
    assert_all_gone(run)
    assert shown[0] == f"run folder: {run.run_dir}"
    assert shown[1].startswith("starting: waiting for dataloader/0")
    assert any(line.startswith("step 3/3") for line in shown)
    summary = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in shown[-5:]}
    assert summary["steps"] == "3 of 3"
    assert summary["reward"] == "0.100 → 0.300"
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


def test_a_frozen_actor_is_killed_and_started_again_and_the_run_goes_on(launched):
    run = launched({"rollouter/0": {"children": True}}, heartbeat_s=0.2, stall_s=1.5, restart_window_s=60.0)
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


def test_a_frozen_actor_that_is_not_restarted_ends_the_run(launched):
    run = launched({}, heartbeat_s=0.2, stall_s=1.5, drain_s=1.0)
    run.wait_to_show("running")
    os.kill(run.actor("learner/0"), signal.SIGSTOP)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("learner/0: frozen: it did not beat for ")
    assert_all_gone(run)


def test_what_an_actor_says_of_its_failure_is_the_last_line(launched):
    run = launched({"dataloader/0": {"raise": "no column 'prompt'"}})
    code, shown = run.end()
    assert code == 78
    log = run.run_dir / "logs" / "attempt_1" / "dataloader-0.log"
    assert shown[-1] == f"dataloader/0: prompts.jsonl:3: no column 'prompt' (log: {log})"
    assert_all_gone(run)


def test_ctrl_c_ends_in_order_and_the_deaf_by_force(launched):
    run = launched({"learner/0": {"deaf": True}, "rollouter/0": {"children": True}}, drain_s=1.5)
    run.wait_to_show("running")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    assert time.monotonic() - began < 15
    assert "draining: ending the actors in order" in shown
    assert shown[-1] == "ended before the last step: Ctrl-C"
    assert_all_gone(run)


def test_a_second_ctrl_c_ends_at_once(launched):
    run = launched({"learner/0": {"deaf": True}}, drain_s=600.0)
    run.wait_to_show("running")
    run.process.send_signal(signal.SIGINT)
    run.wait_to_show("draining")
    run.process.send_signal(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    assert "ending at once" in shown
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
    run.wait_to_show("ending in good order")
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 1
    assert_all_gone(run)


def test_a_guard_that_is_killed_ends_the_run_in_order(launched):
    run = launched({"rollouter/0": {"children": True}})
    run.wait_to_show("running")
    os.kill(run.pid("guard"), signal.SIGKILL)
    code, shown = run.end()
    assert code == 130
    assert "draining: ending the actors in order" in shown
    assert shown[-1] == "ended before the last step: the agent lost its guard"
    assert_all_gone(run)


def test_a_run_goes_on_without_its_launcher(launched):
    run = launched({"learner/0": {"slow": 1, "finish": 3}, "reward/0": {"slow": 1}})
    run.wait_to_show("starting: waiting for learner/0")
    run.process.kill()
    assert_all_gone(run)
    assert (run.run_dir / "metrics.jsonl").read_text().count("\n") == 3


def test_a_controller_that_is_killed_ends_the_run(launched):
    run = launched({})
    run.wait_to_show("running")
    controller = next(pid for pid, words in marked(run.folder).items() if " controller/0 " in words)
    os.kill(controller, signal.SIGKILL)
    code, shown = run.end()
    assert code == 1
    assert shown[-1].startswith("controller/0: ended unasked (killed by SIGKILL)")
    assert_all_gone(run)
