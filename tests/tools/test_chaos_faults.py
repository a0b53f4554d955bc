"""Faults on a run: they end in time, and a replica that never serves again after one is found."""

import contextlib
import json
import subprocess
import time

import pytest

from tools.chaos import faults
from tools.chaos.faults import NotRecovered, Striker, torment
from tools.chaos.plan import Fault

STEPS = 200


class World:
    """Notes when the network was mended."""

    mended_at = None

    def cut(self):
        pass

    def mend(self):
        self.mended_at = time.monotonic()


class Run:
    """A run that trains and publishes a step at each look, and ends after the last one.

    Its process of any name is one that sleeps. ``struck``: the faults. ``back``: after a fault, its second replica
    serves more than the version that was on its way.
    """

    exit_code = None

    def __init__(self, run_dir, struck=(), back=True):
        self.run_dir, self.struck, self.back, self.trained = run_dir, struck, back, 0
        self._log = run_dir / "logs" / "attempt_0" / "parameter_server-0.log"
        self._log.parent.mkdir(parents=True)
        self.process = subprocess.Popen(["sleep", "600"])

    @property
    def step(self):
        if self.trained == STEPS:
            self.exit_code = 0
        else:
            self.trained += 1
            self.says(event="published", version=self.trained)
        return self.trained

    def says(self, **line):
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def served(self):
        others = [] if self.back else [one.version + 1 for one in self.struck]
        return {"rollouter/0": self.trained, "rollouter/1": min([self.trained, *others])}

    def pid(self, actor):
        return self.process.pid

    def engine_cores(self, actor):
        return [self.process.pid]


@pytest.fixture
def started(tmp_path):
    runs = []

    def start(**options):
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("in_updates", [True, False])
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("victim", ["rollouter/1", "engine_core/1", "learner/0", "parameter_server/0", "controller/0"])
def test_a_fault_in_an_update_ends_after_every_replica_serves_two_later_versions(
    started, monkeypatch, victim, back, in_updates
):
    monkeypatch.setattr(faults, "LOOK_S", 0.001)
    struck, recovered = [], []
    run = started(struck=struck, back=back)
    fault = Fault("kill", victim, after_step=3, after_s=0.0, lasts_s=None)
    recovers = back or victim == "controller/0"
    well = contextlib.nullcontext() if recovers or not in_updates else pytest.raises(NotRecovered, match=victim)
    with well:
        torment(
            run,
            Striker(run, World(), seed=1),
            [fault],
            struck,
            replicas=2,
            in_updates=in_updates,
            patience_s=60.0,
            reported=lambda one: recovered.append((run.exit_code, min(run.served().values()) - one.version)),
        )
    if recovers:
        [(exit_code, versions)] = recovered
        assert exit_code is None
        assert versions >= 2 or victim == "controller/0"
    else:
        assert recovered == ([] if in_updates else [(0, 1)])


def test_a_fault_ends_in_time_while_the_next_one_waits_for_a_phase(started, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "PHASE_WAIT_S", 3.0)
    run, world = started(), World()
    striker = Striker(run, world, seed=1)
    striker.strike(Fault("cut", "", after_step=0, after_s=0.0, lasts_s=0.1), 0)
    began = time.monotonic()
    striker.strike(Fault("kill", "rollouter/0", after_step=0, after_s=0.0, lasts_s=None, during="loading"), 0)
    assert time.monotonic() - began >= 3.0
    assert world.mended_at is not None
    assert world.mended_at - began < 2.5


def test_an_engine_is_struck_in_the_phase_of_its_replica(started):
    run = started()
    run.says(event="phase", replica="rollouter/0", phase="loading")
    run.says(event="phase", replica="rollouter/1", phase="serving")
    fault = Fault("kill", "engine_core/0", after_step=0, after_s=0.0, lasts_s=None, during="loading")
    assert Striker(run, World(), seed=1).strike(fault, 0).phase == "loading"
