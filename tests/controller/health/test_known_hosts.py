"""The controller's decisions about hosts that are lost and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.health.known_hosts import BEATS, KnownHosts
from asyncrl.core.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned, Dead
from asyncrl.messages.hosts import MemberHost
from asyncrl.messages.monitor import Heartbeat
from asyncrl.rpc.lifecycle.registry import Registry

LOST_S, BEAT_S, FROZEN_S = 30.0, 1.0, 90.0
IDLE = 3
PLACED = {
    "agent/0": ["controller/0", "learner/0", "rollouter/0"],
    "agent/1": ["learner/1", "rollouter/1"],
    "agent/2": ["rollouter/2"],
}
EVERYBODY = {name for agent, names in PLACED.items() for name in (agent, *names)}


class World:
    """A registry and hosts. Every actor that is not cut off beats once a second."""

    def __init__(self):
        self.registry, self.now = Registry(), 0.0
        self.hosts = KnownHosts(LOST_S, BEAT_S, FROZEN_S)
        self.quiet = set()
        self.idle = set()
        """Actors that announce that they skip IDLE beats in a row."""
        self.beats = 0
        for agent, names in PLACED.items():
            record = ActorRecord(name=agent, incarnation=1, address="", host=agent[-1], facts={"actors": names})
            self.registry.register(record, 0.0)
            assert self.hosts.register(record, 0.0)
            for name in names:
                if name != "controller/0":
                    self.start(name, 1)

    def start(self, name, incarnation):
        self.registry.register(ActorRecord(name=name, incarnation=incarnation, address="tcp://x:1"), self.now)

    def cut(self, agent):
        self.quiet |= {agent, *PLACED[agent]}

    def connect(self, agent):
        self.quiet -= {agent, *PLACED[agent]}

    def sleeps(self, seconds):
        """The controller itself is stopped."""
        self.now += seconds
        self.beats += int(seconds)

    def passes(self, seconds):
        """Let time pass. Returns what was found lost and back, by agent."""
        lost, back = [], []
        for _ in range(int(seconds)):
            self.now += 1.0
            self.beats += 1
            leaves_out = self.idle if self.beats % (1 + IDLE) else set()
            for name in sorted(self.registry.entries.keys() - self.quiet - leaves_out):
                incarnation = self.registry.entries[name].record.incarnation
                left_out = IDLE if name in self.idle else 0
                beat = Heartbeat(beat=self.beats, state="ready", left_out=left_out)
                self.registry.heartbeat(name, incarnation, beat, self.now)
            newly, again = self.hosts.look(self.registry, self.now)
            for host in newly:
                self.registry.lose(sorted(host.actors), "its host was lost", self.now)
            lost += [host.agent for host in newly]
            back += [host.agent for host in again]
        return lost, back

    def silent(self, silence_s):
        doubtful = self.hosts.in_doubt(self.registry, self.now)
        found = {actor.name for actor in self.registry.silent(self.now, silence_s)}
        return sorted(name for name in found - doubtful if not name.startswith("agent/"))


def test_a_silent_host_is_lost_and_its_actors_are_dead():
    world = World()
    world.passes(5)
    world.cut("agent/1")
    assert world.passes(LOST_S - 1) == ([], [])
    assert world.registry.dead == []
    assert world.passes(1) == (["agent/1"], [])
    assert world.hosts.lost == {"agent/1": world.now}
    described = MemberHost(agent="agent/1", host="1", actors=PLACED["agent/1"], also=["1"])
    assert world.hosts.known["agent/1"] == described
    assert sorted(dead.name for dead in world.registry.dead) == ["learner/1", "rollouter/1"]
    # And the rank group of a rank that was there has to start again, though no death was reported.
    assert sorted(actor.name for actor in world.registry.condemned) == ["learner/0", "learner/1", "rollouter/1"]


def test_a_message_of_any_actor_keeps_its_host_alive_and_the_head_cannot_be_lost():
    for who in ("agent/1", "learner/1", "rollouter/1"):
        world = World()
        world.cut("agent/1")
        world.quiet.discard(who)
        assert world.passes(FROZEN_S - 1) == ([], [])
    world = World()
    world.cut("agent/0")
    assert world.passes(5 * LOST_S) == ([], [])
    assert {"learner/0", "rollouter/0"} <= set(world.silent(60.0))


@pytest.mark.parametrize("silence_s", [BEATS * BEAT_S, 10.0, 60.0])
def test_a_silent_actor_is_judged_by_its_own_time_unless_its_host_is_in_doubt(silence_s):
    """The times after which actors count as frozen and hosts as lost may be in any relation."""
    world = World()
    world.quiet.add("rollouter/1")
    world.passes(silence_s - 1)
    assert world.silent(silence_s) == []
    world.passes(1)
    assert world.silent(silence_s) == ["rollouter/1"]
    world = World()
    world.passes(5)
    world.cut("agent/1")
    for _ in range(int(LOST_S)):
        assert world.silent(silence_s) == []
        found = world.passes(1)
    assert found == (["agent/1"], []) and world.silent(silence_s) == []


def test_sleep_of_the_controller_neither_loses_a_host_nor_restores_one():
    world = World()
    world.passes(20)
    world.sleeps(10 * LOST_S)
    world.quiet = set(EVERYBODY)
    assert world.passes(LOST_S - 1) == ([], [])
    assert world.passes(2)[0] == ["agent/1", "agent/2"]
    world.sleeps(10 * LOST_S)
    assert world.passes(10) == ([], [])


def test_a_lost_host_returns_with_its_agent_and_its_dead_actors_stay_dead():
    world = World()
    world.cut("agent/1")
    world.passes(LOST_S)
    world.quiet = {"agent/1"}
    # Only its actors beat, and they are dead.
    assert world.passes(5) == ([], [])
    world.quiet = set()
    assert world.passes(1) == ([], ["agent/1"])
    with pytest.raises(Refused, match="which is to be killed"):
        world.start("rollouter/1", 1)
    assert world.registry.resolve("rollouter/1") is None
    assert Condemned("rollouter/1", 1, "its host was lost") in world.registry.condemned
    world.registry.ended("rollouter/1", 1, world.now)
    assert Dead("rollouter/1", 1) in world.registry.dead
    world.start("rollouter/1", 2)
    assert Dead("rollouter/1", 1) not in world.registry.dead
    assert world.registry.resolve("rollouter/1").incarnation == 2
    world.cut("agent/1")
    assert world.passes(LOST_S) == (["agent/1"], [])


def test_a_successor_of_the_controller_knows_the_hosts_that_are_cut_off():
    world, registry = World(), Registry()
    for facts in ({}, {"actors": "rollouter/0"}, {"actors": None}):
        assert not world.hosts.register(ActorRecord(name="agent/9", incarnation=1, address="", facts=facts), 0.0)
    successor = KnownHosts(LOST_S, BEAT_S, FROZEN_S)
    successor.recall(world.hosts.describe(), 100.0)
    assert successor.known == world.hosts.known
    assert not any(successor.look(registry, float(now))[0] for now in range(100, 130))
    assert [host.agent for host in successor.look(registry, 130.0)[0]] == ["agent/1", "agent/2"]


acts = st.one_of(
    st.tuples(st.sampled_from(["cut", "connect"]), st.sampled_from(["agent/1", "agent/2"])),
    st.tuples(st.sampled_from(["passes", "sleeps"]), st.integers(1, 50)),
)


@given(st.lists(acts, max_size=12))
def test_hosts_are_lost_after_their_time_and_not_before(history):
    """A host is lost if and only if nothing came during the time that was listened. The dead stay dead."""
    world, heard, dead = World(), dict.fromkeys(("agent/1", "agent/2"), 0.0), set()
    for act, what in history:
        for each in [1] * what if act == "passes" else [what]:
            getattr(world, act)(each)
            if act == "passes":
                heard |= {agent: world.now for agent in heard if agent not in world.quiet}
                assert all(world.now - heard[agent] >= LOST_S for agent in world.hosts.lost)
                before, dead = dead, {(d.name, d.incarnation) for d in world.registry.dead}
                assert dead >= before
    assert {name for name, _ in dead} <= {*PLACED["agent/1"], *PLACED["agent/2"]}
    world.passes(LOST_S + 2)
    assert set(world.hosts.lost) == heard.keys() & world.quiet


def test_a_host_with_only_a_silent_agent_is_lost_later_and_returns_with_its_agent():
    world = World()
    world.passes(10)
    world.quiet.add("agent/1")
    assert world.passes(FROZEN_S - 1) == ([], [])
    assert world.hosts.silent_agents(world.registry, world.now)["agent/1"] == FROZEN_S - 1
    assert world.passes(1) == (["agent/1"], [])
    assert Dead("rollouter/1", 1) in world.registry.dead, "its messages from here on are refused"
    world.quiet.clear()
    assert world.passes(2) == ([], ["agent/1"])


def test_a_silent_agent_of_the_head_is_known_and_loses_no_host():
    world = World()
    world.passes(10)
    world.quiet.add("agent/0")
    assert world.passes(3 * FROZEN_S) == ([], [])
    silent = world.hosts.silent_agents(world.registry, world.now)
    assert silent["agent/0"] == 3 * FROZEN_S and silent["agent/1"] == 0.0


def test_an_agent_counts_as_silent_only_if_controller_and_host_are_heard():
    world = World()
    world.passes(10)
    world.quiet.add("agent/1")
    world.passes(10)
    world.sleeps(10 * FROZEN_S)
    assert world.passes(FROZEN_S - 1) == ([], [])
    world = World()
    world.passes(10)
    world.cut("agent/1")
    world.passes(10)
    assert "agent/1" not in world.hosts.silent_agents(world.registry, world.now), "its host may be lost"


def test_a_host_with_actors_that_skip_beats_is_in_doubt_only_when_a_beat_is_overdue():
    world = World()
    world.idle = set(PLACED["agent/1"])
    world.passes(4 * (1 + IDLE))
    world.quiet.add("agent/1")
    for _ in range(int(FROZEN_S) - 1):
        world.passes(1)
        assert "agent/1" in world.hosts.silent_agents(world.registry, world.now)
        assert world.hosts.in_doubt(world.registry, world.now) == set()
    world = World()
    world.idle = set(PLACED["agent/1"])
    world.passes(4 * (1 + IDLE))
    world.cut("agent/1")
    world.passes(BEATS + IDLE - 1)
    assert world.hosts.in_doubt(world.registry, world.now) == set()
    world.passes(1)
    assert world.hosts.in_doubt(world.registry, world.now) == set(PLACED["agent/1"])
