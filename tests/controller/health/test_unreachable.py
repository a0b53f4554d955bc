"""The choice of the actor that is restarted if live actors cannot reach each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.health.unreachable import WATCHED, ReadyActor, UnreachableActors, action_after
from asyncrl.messages.monitor import MOST_UNREACHED
from asyncrl.rpc.lifecycle.registry import Registry

UNREACHABLE_S, LOOK_S, WINDOW_S = 60.0, 1.0, 600.0
SINGLE = ("dataloader/0", "learner/0", "learner/1", "parameter_server/0", "reward/0")


class Paths:
    """A run with broken paths, looked at every second. ``broken`` has (reporting actor, unreachable actor)."""

    def __init__(self, rollouters=4, alone=SINGLE):
        self.unreachable = UnreachableActors(UNREACHABLE_S, window_s=WINDOW_S)
        self.registry = Registry()
        self.now = 1000.0
        self.lives = dict.fromkeys((*alone, *(f"rollouter/{i}" for i in range(rollouters))), 1)
        self.away = set()
        self.broken = {}
        self.look()

    def breaks(self, *pairs):
        for pair in pairs:
            self.broken.setdefault(pair, self.now)

    def heals(self, *pairs):
        for pair in pairs:
            self.broken.pop(pair, None)

    def restarts(self, name):
        """The paths of its successor are as its own were."""
        self.lives[name] += 1
        self.broken = {pair: self.now if pair[0] == name else since for pair, since in self.broken.items()}

    def ready(self):
        for name, incarnation in self.lives.items():
            if name not in self.away:
                reported = {of: self.now - since for (by, of), since in self.broken.items() if by == name}
                yield ReadyActor(name=name, incarnation=incarnation, unreached=reported)

    def look(self):
        return self.unreachable.look(self.ready(), self.now, self.registry.listen(self.now, UNREACHABLE_S))

    def passes(self, seconds):
        """Let time pass. Returns the actors that are condemned and restarted meanwhile."""
        found, until = [], self.now + seconds
        while self.now + LOOK_S <= until:
            self.now += LOOK_S
            for cut in self.look():
                found.append(cut)
                self.restarts(cut.name)
        return found


def names(cuts):
    return [cut.name for cut in cuts]


def test_the_only_rollouter_that_cannot_reach_the_learner_is_named_after_the_limit():
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    assert paths.passes(UNREACHABLE_S) == []
    (cut,) = paths.passes(LOOK_S)
    assert (cut.name, cut.incarnation) == ("rollouter/2", 1)
    assert cut.reason == ("it could not reach learner/0 for 60 s (supervision.unreachable_s)")
    # Its successor has the same time.
    assert paths.passes(UNREACHABLE_S) == []
    assert names(paths.passes(LOOK_S)) == ["rollouter/2"]
    paths.heals(("rollouter/2", "learner/0"))
    assert paths.passes(5 * UNREACHABLE_S) == []


@pytest.mark.parametrize("other", ["learner/0", "dataloader/0", "parameter_server/0", "reward/0"])
def test_an_actor_that_no_rollouter_reaches_is_restarted(other):
    """Broken connections are noticed at different times. Those whose time is not over count as well."""
    paths = Paths()
    paths.breaks(("rollouter/0", other))
    paths.passes(20.0)
    paths.breaks(*((f"rollouter/{i}", other) for i in (1, 2, 3)))
    (cut,) = paths.passes(UNREACHABLE_S - 20.0 + LOOK_S)
    assert cut.name == other
    assert cut.reason.startswith("it was not reached by rollouter/0, rollouter/1, rollouter/2, rollouter/3 for 60 s")


def between(rollouters, other):
    return [(f"rollouter/{i}", other) for i in rollouters]


@pytest.mark.parametrize(
    ("rollouters", "broken", "named"),
    [
        # One rollouter reaches the learner, so the others are cut off.
        (4, between(range(3), "learner/0"), ["rollouter/0", "rollouter/1", "rollouter/2"]),
        (4, between(range(4), "learner/0"), ["learner/0"]),
        # If neither end has others of its role, the cheaper one is restarted.
        (1, between(range(1), "learner/0"), ["rollouter/0"]),
        (4, [("learner/0", "dataloader/0")], ["dataloader/0"]),
        (4, [("learner/0", "parameter_server/0")], ["parameter_server/0"]),
        (4, [("dataloader/0", "learner/0")], ["dataloader/0"]),
        (4, [("dataloader/0", "rollouter/3")], ["rollouter/3"]),
        (4, [("dataloader/0", f"rollouter/{i}") for i in range(4)], ["dataloader/0"]),
        # A heartbeat names a limited number of actors, but all of them report that they do not reach the dataloader.
        (
            50,
            [("dataloader/0", f"rollouter/{i}") for i in range(MOST_UNREACHED)] + between(range(50), "dataloader/0"),
            ["dataloader/0"],
        ),
        # Two reward pools: three of the four rollouters do not reach one, and a rollouter reaches neither.
        (4, between(range(3), "reward/0"), ["reward/0"]),
        (4, between(range(1), "reward/0") + between(range(1), "reward/1"), ["rollouter/0"]),
        # One pair of many: the role that ends first in a drain, and of equal ones the reporting actor.
        (2, between(range(1), "reward/0"), ["rollouter/0"]),
        # Paths of other roles and between rollouters are not watched.
        (2, [("rollouter/0", "episodes/0"), ("agent/0", "learner/0"), ("rollouter/0", "rollouter/1")], []),
    ],
)
def test_the_end_with_more_broken_paths_is_restarted(rollouters, broken, named):
    paths = Paths(rollouters=rollouters, alone=(*SINGLE, "reward/1", "episodes/0", "agent/0"))
    paths.breaks(*broken)
    # Its successor is just as unreachable, and the choice stays the same.
    for _ in range(2):
        assert sorted(names(paths.passes(UNREACHABLE_S + 2 * LOOK_S))) == named


def test_a_path_to_an_actor_that_is_not_ready_does_not_count():
    paths = Paths()
    paths.away.add("learner/0")
    paths.breaks(*((f"rollouter/{i}", "learner/0") for i in range(4)))
    assert paths.passes(5 * UNREACHABLE_S) == []
    paths.away.clear()
    # It is back, and paths to it count from now on.
    assert paths.passes(UNREACHABLE_S) == []
    paths.heals(*((f"rollouter/{i}", "learner/0") for i in range(4)))
    assert paths.passes(5 * UNREACHABLE_S) == []


@pytest.mark.parametrize(
    ("condemnations", "can_spare", "max_restarts", "action"),
    [
        (1, True, 3, "restart"),
        (2, True, 3, "let it rest"),
        (5, True, 3, "let it rest"),
        (1, False, 3, "restart"),
        (3, False, 3, "restart"),
        (4, False, 3, "fail the run"),
        (1, False, 0, "fail the run"),
        # Its agent gives it up.
        (1, True, 0, "restart"),
    ],
)
def test_the_second_condemnation_lets_a_replica_rest_and_fails_the_run_for_other_actors(
    condemnations, can_spare, max_restarts, action
):
    assert action_after(condemnations, can_spare=can_spare, max_restarts=max_restarts) == action


def is_condemned_again(paths, name, start_s):
    """Let ``name`` be condemned and start again. Returns the number of its condemnations."""
    found = paths.passes(UNREACHABLE_S + 2 * LOOK_S)
    assert names(found) == [name]
    paths.away.add(name)
    paths.passes(start_s)
    paths.away.clear()
    return paths.unreachable.condemnations(name)


@pytest.mark.parametrize("start_s", [0.0, 150.0, 2 * WINDOW_S])
@pytest.mark.parametrize(
    ("pair", "name"), [(("rollouter/2", "learner/0"), "rollouter/2"), (("learner/0", "dataloader/0"), "dataloader/0")]
)
def test_condemnations_are_counted_even_after_a_long_start(pair, name, start_s):
    paths = Paths()
    paths.breaks(pair)
    assert [is_condemned_again(paths, name, start_s) for _ in range(4)] == [1, 2, 3, 4]


def is_away(paths, pair):
    paths.away.add(pair[0])
    paths.passes(LOOK_S)
    paths.away.clear()


def is_cut_off(paths, pair):
    paths.breaks(pair)
    paths.passes(LOOK_S)
    paths.heals(pair)


def has_no_look(paths, pair):
    paths.now += UNREACHABLE_S
    paths.look()


@pytest.mark.parametrize("between", [is_away, is_cut_off, has_no_look])
def test_condemnations_are_forgotten_after_a_whole_window_of_reachability(between):
    paths, pair = Paths(), ("rollouter/2", "learner/0")
    paths.breaks(pair)
    assert is_condemned_again(paths, "rollouter/2", 0.0) == 1
    paths.heals(pair)
    for event in (between, between):
        paths.passes(WINDOW_S - 10 * LOOK_S)
        event(paths, pair)
        assert paths.unreachable.condemnations("rollouter/2") == 1
    paths.passes(WINDOW_S + LOOK_S)
    assert paths.unreachable.condemnations("rollouter/2") == 0
    paths.breaks(pair)
    assert is_condemned_again(paths, "rollouter/2", 0.0) == 1


def starts_again(whom):
    return lambda paths: paths.restarts(whom)


def is_not_heard_of(paths):
    """Simulate an actor that was stopped while its clock ran on."""
    paths.away.add("rollouter/2")
    paths.passes(2 * UNREACHABLE_S)
    paths.away.clear()


def time_without_a_look(paths):
    paths.now += 10 * UNREACHABLE_S
    assert paths.look() == []


@pytest.mark.parametrize(
    "event", [starts_again("learner/0"), starts_again("rollouter/2"), is_not_heard_of, time_without_a_look]
)
def test_a_path_starts_from_zero_between_new_processes_and_after_silence_or_a_gap(event):
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    paths.passes(UNREACHABLE_S - 5.0)
    event(paths)
    assert paths.passes(UNREACHABLE_S - 5.0) == []


every = (*SINGLE, "rollouter/0", "rollouter/1", "rollouter/2")
changes = st.one_of(
    st.tuples(st.sampled_from(["breaks", "heals"]), st.tuples(st.sampled_from(every), st.sampled_from(every))),
    st.tuples(st.sampled_from(["restarts", "goes", "comes"]), st.sampled_from(every)),
    st.tuples(st.just("passes"), st.integers(1, 80)),
)


@given(st.lists(changes, max_size=40))
def test_an_actor_is_condemned_only_for_paths_that_stayed_broken(history):
    paths = Paths(rollouters=3)
    for kind, what in history:
        match kind:
            case "breaks" | "heals":
                getattr(paths, kind)(what)
            case "restarts":
                paths.restarts(what)
            case "goes":
                paths.away.add(what)
            case "comes":
                paths.away.discard(what)
            case "passes":
                for _ in range(what):
                    paths.now += LOOK_S
                    cuts = paths.look()
                    ready = {s.name: s for s in paths.ready()}
                    found = names(cuts)
                    assert len(set(found)) == len(found)
                    for cut in cuts:
                        assert cut.incarnation == ready[cut.name].incarnation and cut.name.partition("/")[0] in WATCHED
                        mine = [
                            pair
                            for pair, since in paths.broken.items()
                            if cut.name in pair and {*pair} <= ready.keys() and paths.now - since >= UNREACHABLE_S
                        ]
                        assert mine, "it is one end of a path that was broken long enough"
                        paths.restarts(cut.name)
