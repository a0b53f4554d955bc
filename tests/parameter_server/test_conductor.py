"""The conductor: versions only grow, few pause at once, nobody waits for a replica that is gone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.parameter_server.conductor import Conductor


def test_a_replica_is_offered_what_is_newer_than_what_it_serves():
    conductor = Conductor(max_paused_fraction=0.5, deadline_s=10)
    assert conductor.offer("r/0", 1, -1) is None
    conductor.published(0)
    assert conductor.offer("r/0", 1, -1) == 0
    assert conductor.ask_pause("r/0", 1, 0, now=0)
    conductor.ended("r/0", 1, 0, committed=True)
    assert conductor.offer("r/0", 1, 0) is None
    assert conductor.replicas["r/0"].serving == 0


def test_a_version_number_is_never_reused():
    conductor = Conductor(max_paused_fraction=0.5, deadline_s=10)
    conductor.published(3)
    for version in (3, 2):
        with pytest.raises(ValueError, match="never reused"):
            conductor.published(version)


def test_a_version_stays_held_while_somebody_stages_it():
    conductor = Conductor(max_paused_fraction=0.5, deadline_s=10)
    conductor.published(0)
    conductor.offer("r/0", 1, -1)
    conductor.published(1)
    conductor.published(2)
    assert conductor.needed() == {0, 2}
    conductor.ask_pause("r/0", 1, 0, now=0)
    conductor.ended("r/0", 1, 0, committed=True)
    assert conductor.needed() == {2}


@pytest.mark.parametrize(("replicas", "fraction", "at_once"), [(1, 0.1, 1), (4, 0.5, 2), (5, 0.5, 2), (4, 1.0, 4)])
def test_only_a_fraction_pauses_at_once_first_come_first_served(replicas, fraction, at_once):
    conductor = Conductor(max_paused_fraction=fraction, deadline_s=10)
    conductor.published(0)
    names = [f"r/{i}" for i in range(replicas)]
    for name in names:
        conductor.offer(name, 1, -1)
    granted = [name for i, name in enumerate(names) if conductor.ask_pause(name, 1, 0, now=i)]
    assert granted == names[:at_once]
    for i in range(at_once, replicas):
        conductor.ended(names[i - at_once], 1, 0, committed=True)
        assert not any(conductor.ask_pause(name, 1, 0, now=50 + i) for name in names[i + 1 :]) or at_once > 1
        assert conductor.ask_pause(names[i], 1, 0, now=5)


def test_a_pause_past_its_deadline_is_free_again():
    conductor = Conductor(max_paused_fraction=0.1, deadline_s=10)
    conductor.published(0)
    for name in ("r/0", "r/1"):
        conductor.offer(name, 1, -1)
    assert conductor.ask_pause("r/0", 1, 0, now=0)
    assert not conductor.ask_pause("r/1", 1, 0, now=9)
    assert conductor.ask_pause("r/1", 1, 0, now=10)
    assert not conductor.ask_pause("r/0", 1, 0, now=11)


def test_asking_again_keeps_a_pause_and_an_old_report_changes_nothing():
    conductor = Conductor(max_paused_fraction=0.1, deadline_s=10)
    conductor.published(0)
    for name in ("r/0", "r/1"):
        conductor.offer(name, 1, -1)
    assert conductor.ask_pause("r/0", 1, 0, now=0)
    assert conductor.ask_pause("r/0", 1, 0, now=8)
    assert not conductor.ask_pause("r/1", 1, 0, now=12)
    conductor.ended("r/0", 1, 0, committed=True)
    conductor.published(1)
    conductor.offer("r/0", 1, 0)
    conductor.published(2)
    conductor.ended("r/0", 1, 0, committed=True)
    assert conductor.needed() == {0, 1, 2}


def test_a_dead_replica_blocks_nobody():
    conductor = Conductor(max_paused_fraction=0.1, deadline_s=10)
    conductor.published(0)
    for name in ("r/0", "r/1", "r/2"):
        conductor.offer(name, 1, -1)
    assert conductor.ask_pause("r/0", 1, 0, now=0)
    assert not conductor.ask_pause("r/1", 1, 0, now=1)
    assert not conductor.ask_pause("r/2", 1, 0, now=2)
    conductor.left("r/0", 1)
    conductor.left("r/1", 1)
    assert conductor.ask_pause("r/2", 1, 0, now=3)


class ConductorMachine(RuleBasedStateMachine):
    """Any order of publications, requests, ends, deaths and time."""

    def __init__(self):
        super().__init__()
        self.conductor = Conductor(max_paused_fraction=0.5, deadline_s=5)
        self.now = 0.0
        self.incarnations = dict.fromkeys(["r/0", "r/1", "r/2", "r/3"], 1)
        self.serving = dict.fromkeys(self.incarnations, -1)
        self.target = dict.fromkeys(self.incarnations, None)

    names = st.sampled_from(["r/0", "r/1", "r/2", "r/3"])

    @rule()
    def publish(self):
        self.conductor.published(self.conductor.newest + 1)

    @rule(name=names)
    def offer(self, name):
        if self.target[name] is None:
            version = self.conductor.offer(name, self.incarnations[name], self.serving[name])
            assert version is None or version == self.conductor.newest > self.serving[name]
            self.target[name] = version

    @rule(name=names)
    def ask(self, name):
        if self.target[name] is not None:
            assert self.target[name] in self.conductor.needed()
            self.conductor.ask_pause(name, self.incarnations[name], self.target[name], self.now)

    @rule(name=names, committed=st.booleans())
    def end(self, name, committed):
        if self.target[name] is not None:
            self.conductor.ended(name, self.incarnations[name], self.target[name], committed=committed)
            if committed:
                self.serving[name] = self.target[name]
            self.target[name] = None

    @rule(name=names)
    def restart(self, name):
        self.conductor.left(name, self.incarnations[name])
        self.incarnations[name] += 1
        self.serving[name], self.target[name] = -1, None

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds):
        self.now += seconds

    @invariant()
    def few_are_paused(self):
        paused = [r for r in self.conductor.replicas.values() if r.phase == "loading"]
        assert len(paused) <= max(1, len(self.conductor.replicas)) and len(paused) <= 2

    @invariant()
    def the_newest_is_held(self):
        if self.conductor.newest >= 0:
            assert self.conductor.newest in self.conductor.needed()

    def teardown(self):
        """Whatever happened, everybody reaches the newest version."""
        self.conductor.published(self.conductor.newest + 1)
        for name in self.incarnations:
            self.target[name] = None
        for _ in range(20):
            self.now += 1
            for name in self.incarnations:
                if self.serving[name] == self.conductor.newest:
                    continue
                if self.target[name] is None:
                    self.target[name] = self.conductor.offer(name, self.incarnations[name], self.serving[name])
                elif self.conductor.ask_pause(name, self.incarnations[name], self.target[name], self.now):
                    self.end(name, True)
        assert set(self.serving.values()) == {self.conductor.newest}


TestConductor = ConductorMachine.TestCase
TestConductor.settings = settings(max_examples=100, deadline=None)
