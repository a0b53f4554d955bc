"""A launched run in which an actor freezes or hangs: standard error shows which actor waits for which, with stacks
(I5).
"""

import os
import signal
import time

import pytest
from run_settings import launched_run

from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 100.0
STALL_S = 4.0
HANGING = """
import os, time

def score(**_):
    while os.path.exists(os.environ["HANG_IF"]):
        time.sleep(0.1)
    return 0.5
"""


def tree(policy, replicas=1, silence_s=600.0):
    return launched_run(
        rollout={"replicas": replicas, "sim": {"length_median": 16.0, "decode_step_s": 0.005}},
        learner={"steps": 1_000_000, "sim": {"publish_bytes": 65536}},
        network={"call_timeout_s": 6.0},
        watchdog={"stall_s": STALL_S, "policy": policy},
        supervision={"heartbeat_s": 0.25, "silence_s": silence_s, "backoff_s": 0.05, "max_restarts": 100},
        checkpoint={"export_at_end": False, "every_versions": 0},
    )


@pytest.fixture
def launch(tmp_path):
    runs = []

    def start(config):
        runs.append(LiveRun(config, tmp_path))
        runs[-1].until(lambda: runs[-1].step >= 2, "the run to start", WAIT_S)
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        assert run.left() == []


def freeze(run, name):
    pid = run.until(lambda: run.pid(name), f"a process of {name}", WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    return pid


def shows(run, text, after=0):
    run.until(lambda: text in run.output[after:], repr(text), WAIT_S)


def continues(run):
    step = run.step
    run.until(lambda: run.step >= step + 3, "training to continue", WAIT_S)


def test_a_stall_ends_the_run_with_policy_stop_and_names_the_waits(launch, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.setenv("HANG_IF", str(tmp_path / "hang"))
    run = launch(
        tree("stop")
        | {"reward": {"function": "hanging:score", "workers": 1, "timeout_s": 600.0}}
        | {"security": {"user_environment": ["HANG_IF"]}}
    )
    (tmp_path / "hang").touch()
    assert run.wait(WAIT_S) == 1
    last = run.output.splitlines()[-1]
    assert last.startswith("controller/0: nothing has moved for "), last
    assert "learner/0 waits " in last
    assert "rollouter/0 waits " in last
    assert " on reward/0 for Score; " in last
    assert "reward/0 waits " in last
    assert " on its worker for hanging:score of " in last
    assert "stacks of reward/0:" in run.output
    assert "in WorkerPool.watch" in (run.run_dir / "logs" / "attempt_1" / "agent-0.log").read_text()


def test_a_silent_actor_is_reported_before_it_is_killed_the_controller_too(launch):
    run = launch(tree("report", replicas=2, silence_s=4.0))
    pid = freeze(run, "rollouter/1")
    shows(run, "rollouter/1 died (killed by SIGKILL: it did not beat for ")
    reported = run.output
    assert "watchdog: rollouter/1 has not been heard of for " in reported
    assert f"stacks of rollouter/1: process {pid}: T (stopped)" in reported
    continues(run)
    pid = freeze(run, "controller/0")
    shows(run, "controller/0 died (killed by SIGKILL: it did not answer for ")
    assert "watchdog: controller/0 holds up the run: it did not answer for " in run.output
    assert f"stacks of controller/0: process {pid}: T (stopped)" in run.output
    continues(run)
    run.stop()


def test_a_report_restarts_no_actor_and_is_withdrawn_when_the_run_moves(launch):
    run = launch(tree("report"))
    pid = freeze(run, "rollouter/0")
    shows(run, "nothing has moved for ")
    shows(run, f"stacks of rollouter/0: process {pid}: T (stopped)")
    # The terminal shows one notice of a kind in ten seconds.
    time.sleep(10.0)
    os.kill(pid, signal.SIGCONT)
    shows(run, "controller/0: the run moves again")
    continues(run)
    assert run.pid("rollouter/0") == pid
    run.stop()
