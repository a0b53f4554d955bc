"""Which hosts may come and go, by tables; and that nothing of it is forgotten."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.joining.membership import ABOVE_ALL, KnownHost, Membership, NobodyServes
from asyncrl.errors import InvalidRequest
from asyncrl.messages.actors import Dead
from asyncrl.messages.hosts import Join, Leave, NewHost

HEAD = KnownHost("agent/0", "head", ["controller/0", "dataloader/0", "learner/0", "rollouter/0"], ["10.0.0.1"])
FAR = KnownHost("agent/1", "far", ["rollouter/1"], ["10.0.0.2", "box-17"])
KNOWN = [HEAD, FAR]
TAKEN = [name for host in KNOWN for name in (host.agent, *host.actors)]
SERVING = ["rollouter/0", "rollouter/1", "dataloader/0"]
ASK = "a" * 16


def key(number):
    return f"{number:040d}"


def new(host="c", replicas=1, first=0, **changes):
    keys = [[key(first + 10 * (replica + 1) + attempt) for attempt in range(2)] for replica in range(replicas)]
    made = {"host": host, "replicas": replicas, "agent_keys": [key(first), key(first + 1)], "keys": keys}
    return NewHost(**(made | changes))


def join(membership, *hosts, ask=ASK, now=0.0):
    return membership.join(Join(ask=ask, hosts=list(hosts)), KNOWN, TAKEN, now)


def leave(membership, host, within_s=5.0, ask="", known=KNOWN, serving=SERVING, awaited=()):
    return membership.leave(Leave(host=host, within_s=within_s, ask=ask), known, serving, awaited)


def test_new_hosts_get_the_next_names_and_a_repeat_the_same():
    membership = Membership(curve=True)
    keys = [[key(10 * actor), key(10 * actor + 1)] for actor in range(1, 5)]
    asked = new("c", 2, episodes=True, keys=keys), new("d", first=500)
    guest, other = found = join(membership, *asked)
    # An episode host beside each rollouter.
    assert (guest.agent, guest.joined.rollouters) == ("agent/2", ["rollouter/2", "rollouter/3"])
    assert guest.joined.episodes == ["episodes/2", "episodes/3"]
    assert (other.agent, other.actors) == ("agent/3", ["rollouter/4"])
    assert membership.members.keys["episodes/2"] == keys[2]
    number = membership.number
    assert (join(membership, *asked), membership.number, membership.members.serving) == (found, number, [])
    # One on a host with CPUs alone goes on counting after those beside rollouters.
    taken = ["rollouter/0", "episodes/0", "episodes/1", "episodes/3"]
    alone = new("c", episodes=True)
    (guest,) = Membership(curve=False).join(Join(ask=ASK, hosts=[alone]), [], taken, 0.0)
    assert guest.actors == ["rollouter/4", "episodes/4"]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([new("FAR")], r"FAR takes part in this run already, as far \(agent/1\)$"),
        ([new("box-17")], r"box-17 takes part in this run already, as far \(agent/1\)"),
        ([new("alias", address="10.0.0.2")], r"alias takes part in this run already, as far \(agent/1\), at 10.0.0.2"),
        ([new("c"), new("c", first=500)], "c is named twice"),
        ([new("c", keys=[])], "c: keys are missing, and this run admits nobody without"),
        ([new("c", agent_keys=[])], "c: keys are missing"),
        ([new("c", 2, episodes=True)], "c: keys are missing"),
        ([new("c"), new("d")], "a public key is there twice"),
    ],
)
def test_who_may_not_join(hosts, said):
    membership = Membership(curve=True)
    with pytest.raises(InvalidRequest, match=said):
        join(membership, *hosts)
    assert membership.number == 0


@pytest.mark.parametrize(
    ("host", "serving", "awaited", "said"),
    [
        (
            "nowhere",
            SERVING,
            [],
            r"no host nowhere takes part in this run; there are head \(agent/0\), far \(agent/1\)",
        ),
        ("head", SERVING, [], "head cannot leave: it has controller/0, dataloader/0, learner/0, without which no run"),
        ("far", ["rollouter/1", "dataloader/0", "episodes/0"], [], "no other host has a rollouter that serves$"),
        # Told apart, for whoever asks may wait.
        (
            "far",
            ["rollouter/1"],
            ["rollouter/4", "rollouter/1", "rollouter/0", "x/0"],
            "ready so far: rollouter/0, roll",
        ),
    ],
)
def test_who_may_not_leave(host, serving, awaited, said):
    membership = Membership(curve=False)
    with pytest.raises(InvalidRequest, match=said) as caught:
        leave(membership, host, serving=serving, awaited=awaited)
    assert getattr(caught.value, "awaited", []) == sorted(set(awaited) - {"rollouter/1", "x/0"})
    assert isinstance(caught.value, NobodyServes) == (host == "far")
    assert membership.leaving == []


@pytest.mark.parametrize("name", ["far", "agent/1", "10.0.0.2", "Box-17"])
def test_a_host_of_the_start_leaves_and_is_dead_for_good(name):
    membership = Membership(curve=True)
    departure = leave(membership, name)
    assert (departure.agent, departure.actors) == ("agent/1", ["rollouter/1"])
    assert leave(membership, "far") is leave(membership, "agent/1") is departure
    assert [(told.name, told.within_s) for told in membership.leaving] == [("agent/1", 5.0), ("rollouter/1", 5.0)]
    assert membership.gone == {}
    assert membership.left("agent/1", {"agent/1": 7, "rollouter/1": 8})
    assert not membership.left("agent/1", {})
    assert membership.members.gone == [Dead("agent/1", 7), Dead("rollouter/1", 8)]
    assert (membership.leaving, membership.members.hosts[0].stage) == ([], "left")
    # The same machine may come back, under names of its own, though a new controller knows only who has left.
    (guest,) = membership.join(Join(ask=ASK, hosts=[new("far")]), [HEAD], ["agent/0", "rollouter/0"], 0.0)
    assert (guest.agent, guest.actors) == ("agent/2", ["rollouter/2"])


def test_a_guest_counts_from_when_it_is_ready_and_is_let_go_if_it_is_not():
    membership = Membership(curve=False)
    (guest,) = join(membership, new(replicas=2), now=10.0)
    assert membership.host_on_trial("rollouter/2") == guest.agent
    assert (membership.next_deadline(39.9, 30.0), membership.next_deadline(40.0, 30.0)) == (40.0, None)
    assert membership.ready({"rollouter/0", "rollouter/2"}) == ["rollouter/2"]
    assert membership.ready({"rollouter/0", "rollouter/2"}) == []
    assert membership.host_on_trial("rollouter/2") == ""
    assert (membership.overdue(39.9, 30.0), membership.overdue(40.0, 30.0)) == ([], [guest])
    # As long as nobody else serves it stays, though others were asked to leave after it had joined.
    for serving in (["rollouter/2"], [], ["rollouter/2", "dataloader/0"]):
        assert membership.dismiss(guest.agent, "late", serving) is None
    departure = membership.dismiss(guest.agent, "late", ["rollouter/0", "rollouter/2"])
    assert (departure.within_s, membership.on_trial, membership.next_deadline(39.0, 30.0)) == (0.0, [], None)
    # Who withdraws what it has brought itself brings nobody else down.
    with pytest.raises(InvalidRequest, match="no host far"):
        leave(membership, "far", ask=ASK)


def test_a_guest_that_never_served_may_go_and_a_repeat_does_not_bring_it_back():
    membership = Membership(curve=False)
    guest, other = join(membership, new("c"), new("d", first=500))
    known = [*KNOWN, KnownHost(guest.agent, guest.host, guest.actors)]
    departure = leave(membership, "c", ask=ASK, known=known, serving=[])
    membership.left(departure.agent, {})
    # Not even if another host of the same request still joins.
    with pytest.raises(InvalidRequest, match="let go before it could begin: c: "):
        join(membership, new("c"), new("d", first=500))
    assert list(membership.guests) == [other.agent]
    assert join(membership, new("c"), ask="b" * 16)[0].agent == "agent/4"


@pytest.mark.parametrize(("known", "dead"), [({"rollouter/1": 9}, 9), ({}, ABOVE_ALL)])
def test_a_host_lost_while_it_leaves_is_dead_and_hears_of_it_when_it_is_back(known, dead):
    """Under any incarnation if it was never heard of, as of a controller that was started again."""
    membership = Membership(curve=True)
    leave(membership, "far")
    assert membership.lost("agent/1", known)
    assert not membership.lost("agent/1", known)
    assert membership.members.gone == [Dead("rollouter/1", dead)]
    assert membership.members.hosts[0].stage == "left"
    assert [told.name for told in membership.leaving] == ["agent/1", "rollouter/1"]
    assert membership.left("agent/1", {"agent/1": 7, "rollouter/1": 9})


@given(st.lists(st.sampled_from(["join", "ready", "leave", "left", "dismiss", "lost"]), max_size=12))
def test_a_successor_of_the_controller_forgets_nothing(steps):
    membership = Membership(curve=True)
    numbers = [0]
    for at, step in enumerate(steps):
        guest = next((g for g in membership.guests.values() if g.agent not in membership.departures), None)
        departing = next((d for d in membership.departures.values() if not d.left), None)
        if step == "join":
            join(membership, new(f"h{at}", first=1000 * at), ask=f"{at:016d}")
        elif step == "ready" and guest is not None:
            membership.ready(set(guest.actors))
        elif step == "leave" and guest is not None:
            leave(membership, guest.host, known=[*KNOWN, KnownHost(guest.agent, guest.host, guest.actors)])
        elif step == "dismiss" and guest is not None:
            membership.dismiss(guest.agent, "late", SERVING)
        elif step in ("left", "lost") and departing is not None:
            getattr(membership, step)(departing.agent, dict.fromkeys([departing.agent, *departing.actors], at))
        numbers.append(membership.number)
        successor = Membership(curve=True)
        successor.recall(json.loads(json.dumps(membership.describe())), now=0.0)
        assert successor.members == membership.members
        assert successor.leaving == membership.leaving
        assert successor.on_trial == membership.on_trial
        actors = [name for host in membership.members.hosts for name in (host.agent, *host.actors)]
        assert len(actors) == len(set(actors))
    assert numbers == sorted(numbers)
