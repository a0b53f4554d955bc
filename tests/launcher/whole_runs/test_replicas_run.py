"""Whole simulated runs in which a replica is cut off, or cannot be kept alive, with every actor in its own process."""

import json
import signal
import subprocess
import sys

import pytest
from faulty_actor import mark
from launcher.launched import FAULTY, GROUPS, sim_tree, wait_until

from asyncrl.telemetry.snapshots.recording import last_recorded
from tools.chaos.audit import Expected, audit

pytestmark = pytest.mark.slow
SIZE = 4096
SUPERVISION = {"heartbeat_s": 0.25, "backoff_s": 0.05, "unreachable_s": 3.0}


@pytest.fixture
def faulty(launch_placed, tmp_path):
    """Starts a run of actors with ``faults``."""

    def start(faults, steps, **tables):
        learner = sim_tree(tmp_path)["learner"] | {"steps": steps, "sim": {"step_s": 0.05, "publish_bytes": 4096}}
        tree = sim_tree(
            tmp_path,
            data={"size": SIZE},
            learner=learner,
            staleness={"max": 1},
            checkpoint={"export_at_end": False},
            monitor={"record_s": 0.5},
            network={"call_timeout_s": 4.0},
            supervision=SUPERVISION | tables.pop("supervision", {}),
            **tables,
        )
        return launch_placed(tree, [sys.executable, str(FAULTY), json.dumps(faults)])

    return start


def breaks(run, name):
    wait_until(run.run_dir.exists, "the run folder")
    mark(run.run_dir, name).touch()


def mends(run, name):
    mark(run.run_dir, name).unlink()


def trains(run, steps):
    """More than there are."""
    before = len(run.steps())
    wait_until(lambda: len(run.steps()) >= before + steps or run.process.poll() is not None, "more steps")


def recorded(run):
    return last_recorded(run.run_dir, 1)


def serves(run):
    actor = {actor.name: actor for actor in recorded(run).actors}["rollouter/1"]
    return actor.condition == "ready" and actor.figures.get("rollout/trajectories", 0) > 0


def end(run, steps=None):
    """Lines shown of a run of as many steps, each prompt from the first on trained once."""
    code, _ = run.end()
    assert code == (75 if steps is None else 0), run.shown
    if steps is not None:
        assert run.steps() == list(range(1, steps + 1))
        findings = audit(run.run_dir, Expected(steps=steps, groups_per_step=GROUPS, prompts=SIZE))
        assert not findings.problems, "\n".join(map(str, findings.problems))
    return run.shown


def bring_back(run, name):
    argv = [sys.executable, "-m", "asyncrl.cli.launch", "--bring-back", name, str(run.run_dir)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_who_is_cut_off_from_the_learner_is_fenced_and_a_learner_that_none_reaches_goes_back_to_its_checkpoint(faulty):
    """It beats, leases and generates; with a staleness bound of 1 the run would stand for what it holds."""
    cut = {"cut": ["learner/0"]}
    run = faulty({"rollouter/0": cut, "rollouter/1": cut}, steps=100)
    run.wait_to_show("step 8/")
    breaks(run, "rollouter/1")
    said = "rollouter/1 died (killed by SIGKILL: it could not reach learner/0, as 1 other rollouter did, for 3 s"
    run.wait_to_show(said)
    # Its successor is cut off too, and holds nothing that the others would wait for.
    trains(run, 10)
    assert "learner/0 died" not in run.shown and "rollouter/0 died" not in run.shown, run.shown
    breaks(run, "rollouter/0")
    run.wait_to_show("learner/0 died (killed by SIGKILL: it was not reached by rollouter/0")
    for name in ("rollouter/0", "rollouter/1"):
        mends(run, name)
    shown = end(run, steps=100)
    assert "rollouter/0 died" not in shown, shown


def test_a_replica_that_cannot_be_kept_alive_is_set_aside_until_somebody_brings_it_back(faulty):
    run = faulty({"rollouter/1": {"dies": True}}, steps=1_000_000, supervision={"max_restarts": 1})
    breaks(run, "rollouter/1")
    run.wait_to_show(
        "controller/0: rollouter/1 is set aside: exit code 3, after 1 restarts within 600 s: these are my last words"
    )
    assert "The run goes on without it; it is tried again after 600 s" in run.shown
    trains(run, 5)
    wait_until(lambda: recorded(run) and recorded(run).run.aside, "a snapshot that shows it")
    snapshot = recorded(run)
    assert list(snapshot.run.aside) == ["rollouter/1"] and "my last words" in snapshot.run.aside["rollouter/1"]
    assert {actor.name: actor.condition for actor in snapshot.actors}["rollouter/1"] == "aside"
    refused = bring_back(run, "rollouter/0")
    assert refused.returncode == 2, refused
    assert "rollouter/0 cannot be brought back: set aside is rollouter/1" in refused.stderr
    mends(run, "rollouter/1")
    done = bring_back(run, "rollouter/1")
    assert (done.returncode, done.stdout) == (0, "rollouter/1 is started again\n"), done
    wait_until(lambda: recorded(run).run.aside == {}, "a snapshot without it")
    wait_until(lambda: serves(run), "its trajectories")
    run.process.send_signal(signal.SIGTERM)
    summary = end(run).rpartition("run folder")[2]
    assert "controller/0: rollouter/1 was set aside (exit code 3, after 1 restarts within 600 s" in summary
