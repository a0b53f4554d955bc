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


def known_with(guest):
    return [*KNOWN, KnownHost(guest.agent, guest.host, guest.actors)]


def test_new_hosts_get_the_next_names_and_a_repeat_the_same():
    membership = Membership(curve=True)
    found = join(membership, new("c", 2), new("d", first=500))
    assert [(guest.agent, guest.actors) for guest in found] == [
        ("agent/2", ["rollouter/2", "rollouter/3"]),
        ("agent/3", ["rollouter/4"]),
    ]
    assert membership.members.keys["rollouter/3"] == [key(20), key(21)]
    assert membership.members.serving == []
    number = membership.number
    assert join(membership, new("c", 2), new("d", first=500)) == found
    assert membership.number == number


def test_a_host_of_a_run_with_episodes_has_a_host_for_them_beside_each_rollouter():
    membership = Membership(curve=True)
    keys = [[key(10 * actor), key(10 * actor + 1)] for actor in range(1, 5)]
    (guest,) = join(membership, new("c", 2, episodes=True, keys=keys))
    assert guest.actors == ["rollouter/2", "rollouter/3", "episodes/2", "episodes/3"]
    assert (guest.joined.rollouters, guest.joined.episodes) == (guest.actors[:2], guest.actors[2:])
    assert membership.members.keys["episodes/2"] == keys[2]
    with pytest.raises(InvalidRequest, match="keys are missing"):
        join(Membership(curve=True), new("c", 2, episodes=True))


def test_a_rollouter_that_joins_has_no_number_of_an_episode_host_that_is_there():
    """One on a host with CPUs alone goes on counting after those beside rollouters."""
    membership = Membership(curve=False)
    (guest,) = membership.join(
        Join(ask="x" * 16, hosts=[new("c", 1, episodes=True)]),
        [],
        ["rollouter/0", "rollouter/1", "episodes/0", "episodes/1", "episodes/2", "episodes/3"],
        0.0,
    )
    assert guest.actors == ["rollouter/4", "episodes/4"]


def test_an_episode_host_that_serves_lets_no_rollouter_go():
    with pytest.raises(NobodyServes):
        leave(Membership(curve=True), "far", serving=["rollouter/1", "episodes/0", "episodes/1"])


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([new("far")], r"far takes part in this run already, as far \(agent/1\)$"),
        ([new("FAR")], "FAR takes part in this run already"),
        ([new("box-17")], r"box-17 takes part in this run already, as far \(agent/1\)"),
        ([new("alias", address="10.0.0.2")], r"alias takes part in this run already, as far \(agent/1\), at 10.0.0.2"),
        ([new("c"), new("c", first=500)], "c is named twice"),
        ([new("c", keys=[])], "c: keys are missing, and this run admits nobody without"),
        ([new("c", agent_keys=[])], "c: keys are missing"),
        ([new("c"), new("d")], "a public key is there twice"),
    ],
)
def test_who_may_not_join(hosts, said):
    membership = Membership(curve=True)
    with pytest.raises(InvalidRequest, match=said):
        join(membership, *hosts)
    assert membership.number == 0


@pytest.mark.parametrize(
    ("host", "serving", "said"),
    [
        ("nowhere", SERVING, r"no host nowhere takes part in this run; there are head \(agent/0\), far \(agent/1\)"),
        ("head", SERVING, "head cannot leave: it has controller/0, dataloader/0, learner/0, without which no run"),
        ("far", ["rollouter/1", "dataloader/0"], "far cannot leave: no other host has a rollouter that serves$"),
    ],
)
def test_who_may_not_leave(host, serving, said):
    membership = Membership(curve=False)
    with pytest.raises(InvalidRequest, match=said):
        leave(membership, host, serving=serving)
    assert membership.leaving == []


def test_who_may_leave_once_another_serves_is_told_apart():
    membership = Membership(curve=False)
    with pytest.raises(NobodyServes, match="expected to, and not ready so far: rollouter/0, rollouter/4$") as caught:
        leave(membership, "far", serving=["rollouter/1"], awaited=["rollouter/4", "rollouter/1", "rollouter/0", "x/0"])
    assert caught.value.awaited == ["rollouter/0", "rollouter/4"]
    assert membership.leaving == []


@pytest.mark.parametrize("name", ["far", "agent/1", "10.0.0.2", "Box-17"])
def test_a_host_of_the_start_leaves_and_is_dead_for_good(name):
    membership = Membership(curve=True)
    departure = leave(membership, name)
    assert (departure.agent, departure.actors) == ("agent/1", ["rollouter/1"])
    assert leave(membership, name if name in ("far", "agent/1") else "far") is departure
    assert [(told.name, told.within_s) for told in membership.leaving] == [("agent/1", 5.0), ("rollouter/1", 5.0)]
    assert not membership.has_left("rollouter/1")
    assert membership.left("agent/1", {"agent/1": 7, "rollouter/1": 8})
    assert not membership.left("agent/1", {})
    assert membership.members.gone == [Dead("agent/1", 7), Dead("rollouter/1", 8)]
    assert membership.leaving == []
    assert membership.members.hosts[0].stage == "left"
    # The same machine may come back, under names of its own.
    (guest,) = membership.join(Join(ask="b" * 16, hosts=[new("far")]), [HEAD], TAKEN, 0.0)
    assert (guest.agent, guest.actors) == ("agent/2", ["rollouter/2"])


def test_a_guest_counts_from_when_it_is_ready_and_is_let_go_if_it_is_not():
    membership = Membership(curve=False)
    (guest,) = join(membership, new(replicas=2), now=10.0)
    assert membership.host_on_trial("rollouter/2") == guest.agent
    assert membership.next_deadline(39.9, 30.0) == 40.0
    assert membership.next_deadline(40.0, 30.0) is None
    assert membership.ready({"rollouter/0", "rollouter/2"}) == ["rollouter/2"]
    assert membership.ready({"rollouter/0", "rollouter/2"}) == []
    assert membership.host_on_trial("rollouter/2") == ""
    assert membership.overdue(39.9, 30.0) == []
    assert membership.overdue(40.0, 30.0) == [guest]
    departure = membership.dismiss(guest.agent, "late", ["rollouter/0", "rollouter/2"])
    assert (departure.within_s, membership.on_trial, membership.next_deadline(39.0, 30.0)) == (0.0, [], None)
    # Who withdraws what it has brought itself brings nobody else down.
    with pytest.raises(InvalidRequest, match="no host far"):
        leave(membership, "far", ask=ASK)


def test_a_guest_that_serves_in_part_stays_while_nobody_else_serves():
    """Though all other hosts were asked to leave after it had joined."""
    membership = Membership(curve=False)
    (guest,) = join(membership, new(replicas=2))
    membership.ready({"rollouter/2"})
    for serving in (["rollouter/2"], [], ["rollouter/2", "dataloader/0"]):
        assert membership.dismiss(guest.agent, "late", serving) is None
    assert membership.overdue(40.0, 30.0) == [guest]
    assert membership.dismiss(guest.agent, "late", ["rollouter/1"]).actors == guest.actors


def test_a_guest_that_never_served_may_go_though_nobody_else_serves():
    membership = Membership(curve=False)
    (guest,) = join(membership, new())
    assert leave(membership, "c", ask=ASK, known=known_with(guest), serving=[]).agent == guest.agent


def test_a_host_lost_while_it_leaves_is_dead_and_hears_of_it_when_it_is_back():
    membership = Membership(curve=True)
    leave(membership, "far")
    assert membership.lost("agent/1", {"rollouter/1": 9})
    assert not membership.lost("agent/1", {"rollouter/1": 9})
    assert membership.members.gone == [Dead("rollouter/1", 9)]
    assert membership.members.hosts[0].stage == "left"
    assert [told.name for told in membership.leaving] == ["agent/1", "rollouter/1"]
    assert membership.left("agent/1", {"agent/1": 7, "rollouter/1": 9})


def test_a_repeat_does_not_bring_back_who_was_let_go_meanwhile():
    """Not even if another host of the same request still joins."""
    membership = Membership(curve=False)
    guest, other = join(membership, new("c"), new("d", first=500))
    departure = membership.dismiss(guest.agent, "late", SERVING)
    membership.left(departure.agent, {})
    with pytest.raises(InvalidRequest, match="let go before it could begin: c: late"):
        join(membership, new("c"), new("d", first=500))
    assert list(membership.guests) == [other.agent]
    assert join(membership, new("c"), ask="b" * 16)[0].agent == "agent/4"


def test_who_was_never_heard_of_is_dead_under_any_incarnation():
    """A controller that was started again may not have heard of one that died before."""
    membership = Membership(curve=False)
    leave(membership, "far")
    membership.lost("agent/1", {})
    assert membership.members.gone == [Dead("rollouter/1", ABOVE_ALL)]


def test_names_of_hosts_that_are_leaving_are_not_given_again():
    """A controller that was started again knows them by nothing but their leaving."""
    membership = Membership(curve=False)
    leave(membership, "far")
    (guest,) = membership.join(Join(ask=ASK, hosts=[new("c")]), [HEAD], ["agent/0", "rollouter/0"], 0.0)
    assert (guest.agent, guest.actors) == ("agent/2", ["rollouter/2"])


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
            leave(membership, guest.host, known=known_with(guest))
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
