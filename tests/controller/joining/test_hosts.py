"""Hosts that are lost and come back, as the controller decides it: which they are, and what follows for the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.joining.hosts import BEATS, Hosts, ReportedHost
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned, Dead
from asyncrl.messages.monitor import Heartbeat
from asyncrl.roles import gang_of
from asyncrl.runtime.lifecycle.registry import Registry

LOST_S, BEAT_S = 30.0, 1.0
PLACED = {
    "agent/0": ["controller/0", "learner/0", "rollouter/0"],
    "agent/1": ["learner/1", "rollouter/1"],
    "agent/2": ["rollouter/2"],
}
ACTORS = [name for names in PLACED.values() for name in names if name != "controller/0"]
FAR = ReportedHost("agent/1", "b", frozenset(PLACED["agent/1"]))


class World:
    """A registry and hosts; everybody who is not cut off beats once a second."""

    def __init__(self):
        self.registry, self.now = Registry(gang_of), 0.0
        self.hosts = Hosts(LOST_S, BEAT_S, "controller/0")
        self.quiet = set()
        self.asleep = False
        self.beats = 0
        for agent, names in PLACED.items():
            told = ActorRecord(
                name=agent, incarnation=1, address="", host="abc"[int(agent[-1])], facts={"actors": names}
            )
            self.registry.register(told, 0.0)
            assert self.hosts.register(told, 0.0)
            for name in names:
                self.start(name, 1)

    def start(self, name, incarnation):
        if name != "controller/0":
            self.registry.register(ActorRecord(name=name, incarnation=incarnation, address="tcp://x:1"), self.now)

    def cut(self, agent):
        self.quiet |= {agent, *PLACED[agent]}

    def connect(self, agent):
        self.quiet -= {agent, *PLACED[agent]}

    def passes(self, seconds, *, asleep=False):
        """Let time pass; what was found lost and back, by agent."""
        lost, back = [], []
        for _ in range(int(seconds)):
            self.now += 1.0
            self.beats += 1
            if asleep:
                continue
            for name in sorted(self.registry.entries):
                if name not in self.quiet:
                    incarnation = self.registry.entries[name].record.incarnation
                    self.registry.heartbeat(
                        name, incarnation, Heartbeat(beat=self.beats, progress=0, state="ready"), self.now
                    )
            newly, again = self.hosts.look(self.registry, self.now)
            for host in newly:
                self.registry.lose(sorted(host.actors), "its host was lost", self.now)
            lost += [host.agent for host in newly]
            back += [host.agent for host in again]
        return lost, back

    def silent(self, silence_s):
        found = [actor for actor in self.registry.silent(self.now, silence_s) if actor.name in ACTORS]
        return [a.name for a in found if a.name not in self.hosts.in_doubt(self.registry, self.now)]


def test_a_host_that_falls_silent_is_lost_and_what_was_on_it_is_dead():
    world = World()
    world.passes(5)
    world.cut("agent/1")
    assert world.passes(LOST_S - 1) == ([], [])
    assert world.registry.dead == []
    assert world.passes(1) == (["agent/1"], [])
    assert world.hosts.lost == {"agent/1": FAR}
    assert sorted(dead.name for dead in world.registry.dead) == ["learner/1", "rollouter/1"]
    # And the gang of a rank that was there is to start again, without anybody counting it as dead.
    assert sorted(actor.name for actor in world.registry.condemned) == ["learner/0", "learner/1", "rollouter/1"]
    assert world.passes(100) == ([], [])


@pytest.mark.parametrize("who", ["agent/1", "learner/1", "rollouter/1"])
def test_one_word_of_anybody_there_shows_that_a_host_lives(who):
    world = World()
    world.cut("agent/1")
    world.quiet.discard(who)
    assert world.passes(10 * LOST_S) == ([], [])


def test_the_host_of_the_controller_cannot_be_lost_to_it():
    world = World()
    world.cut("agent/0")
    assert world.passes(10 * LOST_S) == ([], [])
    assert world.silent(60.0) == ["learner/0", "rollouter/0"]


def test_who_is_silent_is_not_judged_while_its_host_is_in_doubt():
    """The times in which actors freeze and hosts are lost may be set in any relation."""
    for silence_s in (BEATS * BEAT_S, 10.0, 60.0):
        world = World()
        world.passes(5)
        world.cut("agent/1")
        for _ in range(int(LOST_S) - 1):
            world.passes(1)
            assert world.silent(silence_s) == []
        assert world.passes(1) == (["agent/1"], [])
        assert world.silent(silence_s) == []


def test_who_is_silent_on_a_host_that_is_heard_of_is_judged_by_its_own_time():
    world = World()
    world.quiet.add("rollouter/1")
    world.passes(9)
    assert world.silent(10.0) == []
    world.passes(1)
    assert world.silent(10.0) == ["rollouter/1"]


def test_a_controller_that_slept_takes_no_host_for_lost():
    world = World()
    world.passes(20)
    world.passes(10 * LOST_S, asleep=True)
    world.quiet = {name for names in PLACED.items() for name in (names[0], *names[1])}
    assert world.passes(LOST_S - 1) == ([], [])
    assert world.passes(2)[0] == ["agent/1", "agent/2"]


def test_a_lost_host_is_back_when_its_agent_speaks_and_what_was_lost_there_is_never_heard_again():
    world = World()
    world.cut("agent/1")
    world.passes(LOST_S)
    world.connect("agent/1")
    world.quiet.add("agent/1")
    # Only its actors beat, and they are dead.
    assert world.passes(5) == ([], [])
    world.connect("agent/1")
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


def test_a_controller_that_slept_does_not_take_that_for_the_return_of_a_host():
    world = World()
    world.cut("agent/1")
    world.passes(LOST_S)
    world.passes(10 * LOST_S, asleep=True)
    assert world.passes(10) == ([], [])


def test_a_successor_of_the_controller_knows_the_hosts_that_cannot_speak():
    world = World()
    successor = Hosts(LOST_S, BEAT_S, "controller/0")
    registry = Registry()
    successor.recall(world.hosts.describe(), 100.0)
    assert successor.known == world.hosts.known
    found = [host.agent for now in range(100, 130) for host in successor.look(registry, float(now))[0]]
    assert found == []
    lost, _ = successor.look(registry, 130.0)
    assert [host.agent for host in lost] == ["agent/1", "agent/2"]


acts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["cut", "connect"]), st.sampled_from(["agent/1", "agent/2"])),
        st.tuples(st.sampled_from(["pass", "sleep"]), st.integers(1, 50)),
    ),
    max_size=12,
)


@given(acts)
def test_hosts_are_lost_in_their_time_and_only_then(history):
    """A host is lost if and only if nothing came for the time that was listened; the dead stay dead."""
    world, heard, dead = World(), {}, set()
    for kind, what in history:
        match kind:
            case "cut":
                world.cut(what)
            case "connect":
                world.connect(what)
            case "sleep":
                world.passes(what, asleep=True)
            case "pass":
                for _ in range(what):
                    world.passes(1)
                    for agent in ("agent/1", "agent/2"):
                        if agent not in world.quiet:
                            heard[agent] = world.now
                            assert agent not in world.hosts.lost
                        elif agent in world.hosts.lost:
                            assert world.now - heard.get(agent, 0.0) >= LOST_S
                    now_dead = {(d.name, d.incarnation) for d in world.registry.dead}
                    assert now_dead >= dead
                    dead = now_dead
    assert {name for name, _ in dead} <= set(PLACED["agent/1"]) | set(PLACED["agent/2"])
    world.passes(LOST_S + 2)
    assert set(world.hosts.lost) == {agent for agent in ("agent/1", "agent/2") if agent in world.quiet}


# --- the run ---

RUN = ("dataloader/0", "reward/0", "parameter_server/0", "learner/0", "learner/1", "rollouter/0", "rollouter/1")


def running(*more, started=True):
    names = {*RUN, *more}
    run = RunStateMachine(
        frozenset(names), now=0.0, start_timeout_s=15.0, drain_s=10.0, grace_s=30.0, host_grace_s=20.0
    )
    if started:
        run.ready(names, 1.0)
        assert run.phase == "running"
    return run


def without(*names):
    return set(RUN) - set(names)


def test_a_run_goes_on_without_a_replica_for_as_long_as_it_takes():
    run = running()
    assert run.host_lost("b (agent/1)", ["rollouter/1"], 10.0)
    run.ready(without("rollouter/1"), 10.0)
    assert run.lost_hosts == {"b (agent/1)": ["rollouter/1"]}
    assert run.next_deadline() is None
    assert not run.tick(1e6)
    assert run.phase == "running"
    # Back, it has the time of any start.
    assert run.host_back("b (agent/1)", 1e6)
    assert run.next_deadline() == 1e6 + 15.0
    run.ready(RUN, 1e6 + 1.0)
    assert run.next_deadline() is None and run.lost_hosts == {}


def test_a_run_starts_without_a_replica_whose_host_is_lost():
    run = running(started=False)
    run.ready(without("rollouter/1"), 1.0)
    assert run.phase == "starting"
    run.host_lost("b (agent/1)", ["rollouter/1"], 2.0)
    assert (run.phase, run.waiting_for) == ("running", [])


@pytest.mark.parametrize("name", ["learner/1", "dataloader/0", "reward/0"])
def test_a_run_waits_for_what_it_needs_and_then_names_the_host(name):
    run = running()
    run.host_lost("b (agent/1)", [name], 10.0)
    run.ready(without(name), 10.0)
    assert run.next_deadline() == 30.0
    assert not run.tick(29.9)
    assert run.tick(30.0)
    assert (run.outcome.actor, run.outcome.exit_code) == (name, 1)
    assert run.outcome.reason == "its host b (agent/1) has been lost for 20 s (supervision.host_grace_s)"


def test_ranks_that_wait_for_one_on_a_lost_host_are_not_late():
    run = running()
    run.host_lost("b (agent/1)", ["learner/1"], 10.0)
    run.ended("learner/0", -9, False, "", "", 10.5)
    run.started("learner/0")
    run.ready(without("learner/0", "learner/1"), 11.0)
    assert not run.tick(29.0)
    assert run.host_back("b (agent/1)", 29.0)
    assert run.next_deadline() == 44.0
    run.ready(RUN, 40.0)
    assert (run.phase, run.next_deadline()) == ("running", None)


def test_a_run_without_any_replica_waits_from_the_loss_of_the_last_one():
    run = running()
    run.host_lost("b (agent/1)", ["rollouter/0"], 10.0)
    run.host_lost("c (agent/2)", ["rollouter/1"], 100.0)
    assert run.next_deadline() == 120.0
    run.host_back("b (agent/1)", 110.0)
    run.ready(without("rollouter/1"), 111.0)
    assert run.next_deadline() is None
    run = running()
    run.host_lost("b (agent/1)", ["rollouter/0", "rollouter/1"], 10.0)
    assert run.tick(30.0) and run.outcome.actor.startswith("rollouter/")


def test_a_run_goes_on_without_one_of_its_reward_pools_and_waits_for_the_last():
    run = running("reward/1")
    run.host_lost("b (agent/1)", ["reward/0"], 10.0)
    assert run.next_deadline() is None
    run.host_lost("c (agent/2)", ["reward/1"], 50.0)
    # What else is lost later is another matter.
    run.host_lost("d (agent/3)", ["rollouter/0", "rollouter/1"], 60.0)
    assert run.next_deadline() == 70.0
    assert run.tick(70.0) and run.outcome.actor.startswith("reward/")


def test_a_drain_does_not_wait_for_a_lost_host_and_buries_nobody():
    run = running()
    run.finish(10.0)
    run.bury([Dead("rollouter/1", 1)])
    assert run.dead == []
    run.ended("rollouter/0", 0, False, "", "", 10.1)
    run.ended("reward/0", 0, False, "", "", 10.1)
    assert run.drain == 1
    run.host_lost("b (agent/1)", ["rollouter/1"], 10.2)
    assert run.drain == 2


def test_the_dead_are_told_once_for_each_change():
    run = running()
    assert run.bury([Dead("rollouter/1", 1), Dead("agent/1", 1)])
    assert run.dead == [Dead("rollouter/1", 1)]
    number = run.number
    assert not run.bury([Dead("rollouter/1", 1)])
    assert run.number == number
    assert run.bury([])


def test_a_reward_pool_that_is_given_up_is_set_aside_and_the_last_one_ends_the_run():
    run = running("reward/1")
    run.ended("reward/0", 1, True, "it dies", "", 10.0)
    assert (run.phase, [each.name for each in run.aside]) == ("running", ["reward/0"])
    run.ended("reward/1", 1, True, "it dies as well", "", 11.0)
    assert (run.outcome.actor, run.outcome.exit_code) == ("reward/1", 1)
    assert run.outcome.reason == "it dies as well; 0 of 2 reward pools are left; set aside before: reward/0 (it dies)"


def test_only_what_leaves_enough_can_be_spared():
    run = running("reward/1")
    assert [name for name in sorted({*RUN, "reward/1"}) if run.can_spare(name)] == [
        "reward/0",
        "reward/1",
        "rollouter/0",
        "rollouter/1",
    ]
    run.ended("reward/1", 1, True, "it dies", "", 10.0)
    run.ended("rollouter/0", 1, True, "it dies", "", 10.0)
    assert not run.can_spare("reward/0") and not run.can_spare("rollouter/1")
