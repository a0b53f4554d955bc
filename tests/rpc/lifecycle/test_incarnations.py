"""Incarnations grow in every order of deaths, restarts, moves, losses of memory and reports."""

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.core.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned, Dead
from asyncrl.rpc.lifecycle.incarnations import LEAP, SPAN, Incarnations, attempt_begins_above, numbers_begin_above
from asyncrl.rpc.lifecycle.registry import Registry

ROLLOUTER = "rollouter/0"
RANKS = ("learner/0", "learner/1", "learner/2")
NAMES = (*RANKS, ROLLOUTER)
FROZEN = "it did not beat for 61 s"


@pytest.mark.parametrize(
    ("starts", "numbers"),
    [
        ([ROLLOUTER, ROLLOUTER, "reward/0"], [1, 2, 1]),
        # The ranks that start together share a generation, and a successor begins the next.
        ([*RANKS, "learner/1", "learner/0", "learner/2"], [1, 1, 1, 2, 2, 2]),
        (["learner/0", "learner/1", "learner/0", "learner/0", "learner/1"], [1, 1, 2, 3, 3]),
    ],
)
def test_an_agent_numbers_incarnations_by_itself(starts, numbers):
    own = Incarnations(4 * SPAN)
    assert [own.next(name) - 4 * SPAN for name in starts] == numbers


def test_the_number_of_the_controller_wins():
    own = Incarnations(0)
    assert own.next("learner/0") == 1
    own.stay_above([Dead("learner/0", 1), Dead(ROLLOUTER, 5)], {"learner": 9})
    assert own.next("learner/0") == 9
    # The host that has assigned 5 may have assigned more since.
    assert own.next(ROLLOUTER) > 5 + LEAP
    # An older message changes nothing, nor does a repeat of the same one.
    own.stay_above([Dead("learner/0", 1), Dead(ROLLOUTER, 5)], {"learner": 3})
    assert (own.next("learner/0"), own.next(ROLLOUTER)) == (10, 5 + LEAP + 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20), st.integers(0, 1 << 61))
def test_each_attempt_starts_above_all_earlier_numbers(attempts, written):
    """Even above a folder of checkpoints whose writers were numbered by time, which few attempts have."""
    newest, attempt = written, 0
    for skipped, claims in attempts:
        attempt += 1 + skipped
        above = attempt_begins_above(attempt, written)
        assert above >= newest
        newest = above + SPAN - 1
        written = max(written, newest if claims else 0)


def test_the_numbers_of_successors_do_not_overlap():
    # Two snapshots a second for a year.
    in_a_year = 2 * 366 * 86400 << 19
    for life in (1, 2, 1000):
        first = numbers_begin_above(7 * SPAN + life)
        assert first + in_a_year < numbers_begin_above(7 * SPAN + life + 1) < 1 << 63


@dataclass
class Agent:
    """One host. A host that is cut off neither sends nor receives."""

    incarnations: Incarnations
    actors: set[str]
    living: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    """The last number of each."""
    ends: dict[str, int] = field(default_factory=dict)
    """The last of each, which a successor of the controller gets."""
    untold: list[tuple[str, int]] = field(default_factory=list)
    is_cut_off: bool = False
    heard: Registry | None = None
    """The controller that has its reports."""


class World:
    """Two hosts and a controller, whose records may be lost."""

    def __init__(self):
        self.attempt, self.written = 0, 0
        self.lives = {name: [] for name in NAMES}
        self.resume()

    def resume(self):
        """The run ends and is resumed as another attempt."""
        self.attempt += 1
        self.above = attempt_begins_above(self.attempt, self.written)
        assert all(number <= self.above for numbers in self.lives.values() for number in numbers)
        self.agents = [Agent(Incarnations(self.above), actors) for actors in ({RANKS[0], ROLLOUTER}, set(RANKS[1:]))]
        self.registry, self.met = Registry(), {}
        for name in NAMES:
            self.start(name)
        self.settle()

    def agent_of(self, name):
        return next(agent for agent in self.agents if name in agent.actors)

    def start(self, name):
        agent = self.agent_of(name)
        if name in agent.living:
            return
        self.hear(agent)
        number = agent.incarnations.next(name)
        assert number not in self.lives[name]
        assert number > agent.given.get(name, 0)
        if not agent.is_cut_off:
            assert number > self.registry.newest.get(name, 0)
        self.lives[name].append(number)
        agent.given[name] = agent.living[name] = number
        if name == RANKS[0]:
            self.written = max(self.written, number)
        self.report(agent)
        self.meet(agent, name, number)

    def meet(self, agent, name, number):
        if agent.is_cut_off or name not in RANKS:
            return
        found = [self.registry.resolve(rank, number - 1, unready=True) for rank in RANKS]
        # A rank accepts only ranks of its generation.
        self.met[name, number] = {r.name for r in found if r is not None and r.incarnation == number} - {name}
        for other in self.met[name, number]:
            self.met.setdefault((other, number), set()).add(name)

    def end(self, agent, name):
        number = agent.living.pop(name)
        agent.ends[name] = number
        agent.untold.append((name, number))

    def report(self, agent):
        """An agent and its actors report; a new controller gets all reports."""
        if agent.is_cut_off:
            return
        if agent.heard is not self.registry:
            agent.heard = self.registry
            agent.untold = list(agent.ends.items())
        for name, number in agent.living.items():
            with contextlib.suppress(Refused):
                self.registry.started(name, number, 0.0)
                self.registry.register(ActorRecord(name=name, incarnation=number, address="tcp://x:1"), 0.0)
        for name, number in agent.untold:
            self.registry.ended(name, number, 0.0)
        agent.untold.clear()

    def hear(self, agent):
        if agent.is_cut_off:
            return
        agent.incarnations.stay_above(self.registry.dead, self.registry.generations)
        for actor in self.registry.condemned:
            if agent.living.get(actor.name) == actor.incarnation:
                self.end(agent, actor.name)

    def do(self, kind, name):
        agent = self.agent_of(name)
        match kind:
            case "die" if name in agent.living:
                self.end(agent, name)
            case "start":
                self.start(name)
            case "report":
                self.report(agent)
            case "hear":
                self.hear(agent)
            case "freeze" if name in agent.living:
                self.registry.condemn([Condemned(name, agent.living[name], FROZEN)])
            case "restart":
                before, self.registry = self.registry, Registry()
                self.registry.recall(before.newest, before.generations)
            case "forget":
                self.registry = Registry()
            case "cut":
                agent.is_cut_off = True
                self.registry.lose(agent.actors, "its host was lost", 0.0)
            case "back":
                agent.is_cut_off = False
                self.report(agent)
            case "move" if agent.is_cut_off and agent.actors <= {dead.name for dead in self.registry.dead}:
                # Its host is lost for good. Another agent takes over its actors and reports that
                # it starts them: a later agent counts from the reported numbers.
                self.agents.remove(agent)
                self.agents.append(Agent(Incarnations(self.above), agent.actors))
                for each in sorted(agent.actors):
                    self.start(each)
            case "resume":
                self.resume()

    def settle(self):
        """All hosts are connected and restart the actors that have ended."""
        for agent in self.agents:
            agent.is_cut_off = False
        for _ in range(3):
            for agent in self.agents:
                self.report(agent)
            for agent in self.agents:
                self.hear(agent)
                self.report(agent)
            for name in NAMES:
                self.start(name)
        assert self.registry.condemned == []
        assert self.registry.ready() == set(NAMES)
        living = {name: self.agent_of(name).living[name] for name in NAMES}
        assert len({living[rank] for rank in RANKS}) == 1
        for rank in RANKS:
            # The ranks it has met are there; it does not wait for a rank that has died since.
            assert all(living[other] == living[rank] for other in self.met.get((rank, living[rank]), ()))
        before = {name: list(numbers) for name, numbers in self.lives.items()}
        for agent in self.agents:
            self.report(agent)
            self.hear(agent)
        for name in NAMES:
            self.start(name)
        assert self.lives == before


KINDS = ("die", "start", "report", "hear", "freeze", "restart", "forget", "cut", "back", "move", "resume")


def history(text):
    """Steps, each a verb with the name of the actor."""
    return [tuple(step.split()) for step in text.split(", ")]


@example(history("die learner/0, start learner/0, die learner/0, start learner/0, forget learner/0, report learner/1"))
@example(history("die learner/0, forget learner/0, start learner/0, report learner/1, start learner/1"))
@example(history("cut learner/1, die learner/1, start learner/1, move learner/1, start learner/1"))
@example(history("cut learner/0, move learner/0, cut learner/0, start learner/0, move learner/0"))
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES)), max_size=40))
def test_no_two_incarnations_share_a_number_and_the_ranks_come_together(steps):
    world = World()
    for kind, name in steps:
        world.do(kind, name)
    world.settle()
