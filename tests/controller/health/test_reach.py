"""Who is at fault where actors that live do not reach each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.health.reach import COST, Reach, ReadyActor
from asyncrl.messages.monitor import MOST_UNREACHED

UNREACHABLE_S, LOOK_S, MEMORY_S = 60.0, 1.0, 600.0
SINGLE = ("dataloader/0", "learner/0", "learner/1", "parameter_server/0", "reward/0")


class Paths:
    """A run in which paths are broken, looked at every second. ``broken`` are pairs of who tells and whom."""

    def __init__(self, rollouters=4, alone=SINGLE):
        self.reach = Reach(UNREACHABLE_S, look_s=LOOK_S, memory_s=MEMORY_S)
        self.now = 1000.0
        self.lives = dict.fromkeys((*alone, *(f"rollouter/{i}" for i in range(rollouters))), 1)
        self.away = set()
        self.broken = {}
        self.found = []
        self.look()

    def breaks(self, *pairs):
        for pair in pairs:
            self.broken.setdefault(pair, self.now)

    def heals(self, *pairs):
        for pair in pairs:
            self.broken.pop(pair, None)

    def restarts(self, name):
        """Its paths are as they were, for its successor."""
        self.lives[name] += 1
        self.broken = {pair: self.now if pair[0] == name else since for pair, since in self.broken.items()}

    def standings(self):
        for name, incarnation in self.lives.items():
            if name not in self.away:
                told = {of: self.now - since for (by, of), since in self.broken.items() if by == name}
                yield ReadyActor(name=name, incarnation=incarnation, unreached=told)

    def look(self):
        cuts = self.reach.look(self.standings(), self.now)
        self.found += [(self.now, cut) for cut in cuts]
        return cuts

    def passes(self, seconds, *, restart=True):
        """Who is found meanwhile."""
        found, until = [], self.now + seconds
        while self.now + LOOK_S <= until:
            self.now += LOOK_S
            for cut in self.look():
                found.append(cut)
                if restart:
                    self.restarts(cut.name)
        return found


def names(cuts):
    return [cut.name for cut in cuts]


def test_a_rollouter_that_alone_does_not_reach_the_learner_is_named_when_the_time_is_over():
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    assert paths.passes(UNREACHABLE_S) == []
    (cut,) = paths.passes(LOOK_S)
    assert (cut.name, cut.incarnation) == ("rollouter/2", 1)
    assert cut.reason == (
        "it could not reach learner/0, as 3 other rollouters did, for 60 s (supervision.unreachable_s)"
    )
    # Its successor has as long, and is named again; after a good time that counts as the first.
    (again,) = paths.passes(2 * UNREACHABLE_S)
    assert (cut.times, again.name, again.times) == (1, "rollouter/2", 2)
    paths.heals(("rollouter/2", "learner/0"))
    paths.passes(MEMORY_S)
    paths.breaks(("rollouter/2", "learner/0"))
    assert [cut.times for cut in paths.passes(UNREACHABLE_S + LOOK_S)] == [1]


@pytest.mark.parametrize("other", ["learner/0", "dataloader/0", "parameter_server/0", "reward/0"])
def test_whom_no_rollouter_reaches_is_at_fault_itself(other):
    paths = Paths()
    paths.breaks(*((f"rollouter/{i}", other) for i in range(4)))
    (cut,) = paths.passes(UNREACHABLE_S + LOOK_S)
    assert cut.name == other
    assert cut.reason.startswith("it was not reached by rollouter/0, rollouter/1, rollouter/2, rollouter/3 for 60 s")


def test_of_whom_most_do_not_reach_it_is_tried_first_and_then_those_that_do_not():
    paths = Paths()
    paths.breaks(*((f"rollouter/{i}", "learner/0") for i in range(3)))
    assert names(paths.passes(UNREACHABLE_S + LOOK_S)) == ["learner/0"]
    # The new learner is not reached either, but by one: so it is not the learner.
    assert sorted(names(paths.passes(UNREACHABLE_S + 2 * LOOK_S))) == ["rollouter/0", "rollouter/1", "rollouter/2"]


def test_half_of_them_are_no_majority():
    paths = Paths()
    paths.breaks(("rollouter/0", "learner/0"), ("rollouter/1", "learner/0"))
    assert sorted(names(paths.passes(UNREACHABLE_S + LOOK_S))) == ["rollouter/0", "rollouter/1"]


def test_those_whose_time_is_not_over_count_where_they_are_many():
    """Broken connections are noticed at different times."""
    paths = Paths()
    paths.breaks(("rollouter/0", "learner/0"))
    paths.passes(20.0)
    paths.breaks(*((f"rollouter/{i}", "learner/0") for i in (1, 2, 3)))
    assert names(paths.passes(UNREACHABLE_S - 20.0 + LOOK_S)) == ["learner/0"]


def test_of_two_alone_the_cheaper_one_is_tried_first():
    paths = Paths(rollouters=1)
    paths.breaks(("rollouter/0", "learner/0"))
    assert names(paths.passes(UNREACHABLE_S + LOOK_S)) == ["rollouter/0"]
    (cut,) = paths.passes(UNREACHABLE_S + 2 * LOOK_S)
    assert (cut.name, cut.reason) == (
        "learner/0",
        "it was not reached by rollouter/0 for 60 s (supervision.unreachable_s)",
    )
    assert names(paths.passes(UNREACHABLE_S + 2 * LOOK_S)) == ["rollouter/0"]


@pytest.mark.parametrize(
    ("by", "of", "first"),
    [
        ("learner/0", "dataloader/0", "dataloader/0"),
        ("learner/0", "parameter_server/0", "parameter_server/0"),
        ("dataloader/0", "learner/0", "dataloader/0"),
    ],
)
def test_the_learner_is_the_last_to_be_blamed(by, of, first):
    paths = Paths()
    paths.breaks((by, of))
    assert names(paths.passes(UNREACHABLE_S + LOOK_S)) == [first]


def test_who_reaches_the_other_rollouters_names_the_one_that_it_does_not():
    paths = Paths()
    paths.breaks(("dataloader/0", "rollouter/3"))
    assert names(paths.passes(UNREACHABLE_S + LOOK_S)) == ["rollouter/3"]


@pytest.mark.parametrize(("rollouters", "missed"), [(4, 4), (4, 3), (50, MOST_UNREACHED)])
def test_who_reaches_hardly_any_rollouter_is_at_fault_itself(rollouters, missed):
    """However many there are, a heartbeat names no more than so many."""
    paths = Paths(rollouters=rollouters)
    paths.breaks(*(("dataloader/0", f"rollouter/{i}") for i in range(missed)))
    assert names(paths.passes(UNREACHABLE_S + LOOK_S)) == ["dataloader/0"]


def test_a_path_to_who_is_not_ready_is_nobodys_fault():
    paths = Paths()
    paths.away.add("learner/0")
    paths.breaks(*((f"rollouter/{i}", "learner/0") for i in range(4)))
    assert paths.passes(5 * UNREACHABLE_S) == []
    paths.away.clear()
    # It is just there: whoever tells has not met this one.
    assert paths.passes(UNREACHABLE_S) == []
    paths.heals(*((f"rollouter/{i}", "learner/0") for i in range(4)))
    assert paths.passes(5 * UNREACHABLE_S) == []


@pytest.mark.parametrize("whom", ["learner/0", "rollouter/2"])
def test_a_new_process_at_either_end_is_a_new_path(whom):
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    paths.passes(UNREACHABLE_S - 5.0)
    paths.restarts(whom)
    assert paths.passes(UNREACHABLE_S - 5.0) == []


def test_who_was_not_heard_of_meanwhile_has_told_nothing():
    """As one that was stopped, and whose clock has gone on."""
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    paths.passes(5.0)
    paths.away.add("rollouter/2")
    paths.passes(2 * UNREACHABLE_S)
    paths.away.clear()
    assert paths.passes(UNREACHABLE_S - 5.0) == []


def test_time_in_which_nobody_looked_counts_as_nothing():
    paths = Paths()
    paths.breaks(("rollouter/2", "learner/0"))
    paths.passes(5.0)
    paths.now += 10 * UNREACHABLE_S
    assert paths.look() == []
    assert paths.passes(UNREACHABLE_S - 5.0) == []


def test_paths_between_others_are_not_judged():
    paths = Paths(alone=(*SINGLE, "episodes/0", "agent/0"))
    paths.breaks(("rollouter/0", "episodes/0"), ("agent/0", "learner/0"), ("rollouter/0", "nobody/7"))
    # Who does not get weights of another rollouter asks the parameter server for them.
    paths.breaks(("rollouter/0", "rollouter/1"))
    assert paths.passes(5 * UNREACHABLE_S) == []


every = (*SINGLE, "rollouter/0", "rollouter/1", "rollouter/2")
changes = st.one_of(
    st.tuples(st.sampled_from(["breaks", "heals"]), st.tuples(st.sampled_from(every), st.sampled_from(every))),
    st.tuples(st.sampled_from(["restarts", "goes", "comes"]), st.sampled_from(every)),
    st.tuples(st.just("passes"), st.integers(1, 80)),
)


@given(st.lists(changes, max_size=40))
def test_invariants(history):
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
                    ready = {s.name: s for s in paths.standings()}
                    found = names(cuts)
                    assert len(set(found)) == len(found)
                    for cut in cuts:
                        assert cut.incarnation == ready[cut.name].incarnation and cut.name.partition("/")[0] in COST
                        mine = [
                            pair
                            for pair, since in paths.broken.items()
                            if cut.name in pair and {*pair} <= ready.keys() and paths.now - since >= UNREACHABLE_S
                        ]
                        assert mine, "it is one end of a path that was broken for long enough"
                        paths.restarts(cut.name)
                    # Nothing that stands for long is left without a verdict.
                    for (by, of), since in paths.broken.items():
                        between_rollouters = by.startswith("rollouter/") and of.startswith("rollouter/")
                        if by != of and {by, of} <= ready.keys() and not between_rollouters:
                            known = paths.reach._since.get((by, ready[by].incarnation, of, ready[of].incarnation))
                            assert known is not None
                            assert min(paths.now - since, paths.now - known) < UNREACHABLE_S or {by, of} & set(found)
