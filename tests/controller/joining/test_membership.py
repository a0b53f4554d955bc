"""Hosts that may join and leave, by tables; a successor of the controller knows them all."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.joining.membership import Membership
from asyncrl.core.errors import InvalidRequest
from asyncrl.messages.hosts import Join, Leave, MemberHost, Members

HEAD = MemberHost(
    agent="agent/0",
    host="head",
    also=["10.0.0.1"],
    actors=["controller/0", "dataloader/0", "learner/0", "rollouter/0"],
)
FAR = MemberHost(agent="agent/1", host="far", also=["10.0.0.2", "box-17"], actors=["rollouter/1"])
SERVING = ["rollouter/0", "rollouter/1", "dataloader/0"]
ASK = "a" * 16


def key(number):
    return f"{number:040d}"


def new(host="c", replicas=1, first=0, **changes):
    keys = [[key(first + 10 * actor + attempt) for attempt in range(2)] for actor in range(1 + replicas)]
    return Join(**({"ask": f"{ASK}{host}{first}", "host": host, "replicas": replicas, "keys": keys} | changes))


def begin(**how):
    """A run whose agents on two hosts have registered."""
    return Membership({host.agent: host for host in (HEAD, FAR)}, Members(number=0), **how)


def register(membership, joined):
    """The agent of a joined host registers."""
    membership._known[joined.agent] = MemberHost(agent=joined.agent, host=joined.host, actors=joined.actors)


def join(membership, *requests, taken=()):
    return [membership.join(request, taken) for request in requests]


def leave(membership, host, within_s=5.0, serving=SERVING, awaited=()):
    request = Leave(host=host, within_s=within_s)
    return membership.leave(membership.named(host), request, serving, awaited)


def test_new_hosts_get_the_next_names_and_a_repeat_gets_the_same():
    membership = begin(episodes=True)
    keys = [[key(10 * actor), key(10 * actor + 1)] for actor in range(8)]
    asked = new("c", 2, keys=keys[:5]), new("d", keys=keys[5:])
    first, second = found = join(membership, *asked)
    # An episode host for each rollouter.
    assert (first.agent, first.actors) == ("agent/2", ["rollouter/2", "rollouter/3", "episodes/2", "episodes/3"])
    assert (second.agent, second.actors) == ("agent/3", ["rollouter/4", "episodes/4"])
    assert membership.members.keys["episodes/2"] == keys[3]
    number = membership.members.number
    assert (join(membership, *asked), membership.members.number, membership.members.added) == (found, number, [])
    # Numbers continue after those of episode hosts on CPU-only hosts.
    taken = ["rollouter/0", "episodes/0", "episodes/1", "episodes/3"]
    (member,) = join(Membership({}, Members(number=0), episodes=True), new("c"), taken=taken)
    assert member.actors == ["rollouter/4", "episodes/4"]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([new("FAR")], r"FAR takes part in this run already, as far \(agent/1\)$"),
        ([new("box-17")], r"box-17 takes part in this run already, as far \(agent/1\)"),
        ([new("alias", address="10.0.0.2")], r"alias takes part in this run already, as far \(agent/1\), at 10.0.0.2"),
    ],
)
def test_a_host_that_cannot_join(hosts, said):
    membership = begin()
    with pytest.raises(InvalidRequest, match=said):
        join(membership, *hosts)
    assert membership.members.number == 0


@pytest.mark.parametrize(
    ("host", "serving", "awaited", "said"),
    [
        (
            "nowhere",
            SERVING,
            [],
            r"no host nowhere takes part in this run; there are head \(agent/0\), far \(agent/1\)",
        ),
        (
            "head",
            SERVING,
            [],
            "head cannot leave: the run cannot continue without controller/0, dataloader/0, learner/0$",
        ),
        ("far", ["rollouter/1", "dataloader/0", "episodes/0"], [], "no other host has a rollouter that serves$"),
        (
            "far",
            ["rollouter/1"],
            ["rollouter/4", "rollouter/1", "rollouter/0", "x/0"],
            "ready so far: rollouter/0, roll",
        ),
    ],
)
def test_a_host_that_cannot_leave(host, serving, awaited, said):
    membership = begin()
    with pytest.raises(InvalidRequest, match=said) as caught:
        leave(membership, host, serving=serving, awaited=awaited)
    assert getattr(caught.value, "retryable", False) == bool(awaited)
    assert membership.members.leaving == []


@pytest.mark.parametrize("name", ["far", "agent/1", "10.0.0.2", "Box-17"])
def test_a_host_present_from_the_start_leaves_and_stays_dead(name):
    membership = begin()
    member = leave(membership, name)
    assert (member.agent, member.actors) == ("agent/1", ["rollouter/1"])
    assert membership.members.find("agent/1") is member
    assert all(membership.named(each) is member for each in ("far", "agent/1", name))
    assert [(leaving.name, leaving.within_s) for leaving in membership.members.leaving] == [
        ("agent/1", 5.0),
        ("rollouter/1", 5),
    ]
    assert membership.members.gone == set()
    assert membership.left("agent/1")
    assert not membership.left("agent/1")
    assert membership.members.gone == {"agent/1", "rollouter/1"}
    assert (membership.members.leaving, membership.members.hosts[0].stage) == ([], "left")
    # The same machine may join again under new names, even if a new controller knows only that it has left.
    del membership._known["agent/1"]
    assert membership.named("far") is membership.members.find("agent/1")
    (again,) = join(membership, new("far"))
    assert (again.agent, again.actors) == ("agent/2", ["rollouter/2"])
    assert membership.named("far") is again
    assert membership.named("agent/1") is membership.members.find("agent/1")


def test_a_joined_host_serves_once_one_of_its_rollouters_is_ready():
    membership = begin()
    (member,) = join(membership, new(replicas=2))
    assert membership.judge({"rollouter/0"}, {}) == [] and membership.members.at("joining") == [member]
    assert membership.members.added == []
    assert membership.judge({"rollouter/0", "rollouter/2"}, {"rollouter/3": "dead"}) == []
    number, (member,) = membership.members.number, membership.members.hosts
    assert (member.stage, membership.members.added) == ("serving", ["rollouter/2", "rollouter/3"])
    # Then it is a host like any other.
    assert membership.judge((), {"rollouter/2": "dead", "rollouter/3": "dead"}) == []
    assert membership.members.number == number
    register(membership, member)
    leave(membership, "c")
    assert membership.members.added == member.actors
    membership.left(member.agent)
    assert membership.members.gone == set(member.names)


def test_a_joined_host_with_only_an_episode_host_does_not_serve():
    membership = begin(episodes=True)
    (member,) = join(membership, new())
    assert membership.judge({"episodes/2"}, {}) == [] and membership.members.at("joining") == [member]
    assert membership.judge({"rollouter/2", "episodes/2"}, {}) == []
    assert membership.members.added == ["rollouter/2", "episodes/2"]


@pytest.mark.parametrize(
    ("resting", "stays"),
    [
        ([], True),
        (["rollouter/2"], True),
        (["rollouter/2", "episodes/2"], True),
        (["rollouter/2", "episodes/3"], False),
        (["rollouter/2", "rollouter/3"], False),
    ],
)
def test_a_joined_host_leaves_if_each_of_its_rollouters_or_its_episode_host_rests(resting, stays):
    membership = begin(episodes=True)
    (member,) = join(membership, new(replicas=2))
    register(membership, member)
    dismissed = membership.judge({"episodes/3"}, dict.fromkeys(["rollouter/0", *resting], "dead"))
    assert [host.agent for host in dismissed] == [member.agent][stays:]
    (member,) = membership.members.hosts
    assert member.stage == ("joining" if stays else "leaving")
    assert stays or member.reason == f"{resting[0]}: dead; {resting[1]}: dead"


def test_a_joined_host_that_is_lost_leaves_unless_it_serves():
    membership = begin()
    first, second = join(membership, new("c"), new("d", first=500))
    for host in (first, second):
        register(membership, host)
    membership.judge(first.actors, {})
    (dismissed,) = membership.judge((), {}, [first.agent, second.agent])
    assert (dismissed.agent, dismissed.reason) == (second.agent, "it was lost before it served")
    assert [host.stage for host in membership.members.hosts] == ["serving", "lost"]


def test_a_host_that_never_served_may_leave_and_cannot_join_again():
    membership = begin()
    first, second = join(membership, new("c"), new("d", first=500))
    register(membership, first)
    leave(membership, "c", serving=[])
    membership.left(first.agent)
    with pytest.raises(InvalidRequest, match="let go before it could begin: c: "):
        join(membership, new("c"))
    assert membership.members.at("joining") == [second]
    assert join(membership, new("c", first=900))[0].agent == "agent/4"


def test_a_host_that_never_registered_has_left_at_once():
    membership = begin()
    (member,) = join(membership, new())
    assert leave(membership, "c").stage == "left"
    assert membership.members.gone == set(member.names)


def test_a_host_lost_while_it_leaves_is_dead_and_learns_so_when_it_is_back():
    membership = begin()
    leave(membership, "far")
    for _ in range(2):
        membership.judge((), {}, ["agent/1"])
        assert membership.members.number == 2
    assert membership.members.gone == {"rollouter/1"}
    assert membership.members.hosts[0].stage == "lost"
    assert [leaving.name for leaving in membership.members.leaving] == ["agent/1", "rollouter/1"]
    assert membership.left("agent/1")


@given(st.lists(st.sampled_from(["join", "ready", "leave", "left", "dismiss", "lost"]), max_size=12))
def test_a_successor_of_the_controller_forgets_nothing(steps):
    membership = begin()
    numbers = [0]
    for at, step in enumerate(steps):
        joined = next((host for host in membership.members.hosts if host.takes_part), None)
        leaving = next((host for host in membership.members.at("leaving", "lost")), None)
        if step == "join":
            join(membership, new(f"h{at}", first=1000 * at))
        elif step == "ready" and joined is not None:
            register(membership, joined)
            membership.judge(set(joined.actors), {})
        elif step == "leave" and joined is not None:
            leave(membership, joined.host)
        elif step == "dismiss" and joined is not None:
            membership.judge((), dict.fromkeys(joined.actors, "late"))
        elif step == "left" and leaving is not None:
            membership.left(leaving.agent)
        elif step == "lost" and leaving is not None:
            membership.judge((), {}, [leaving.agent])
        numbers.append(membership.members.number)
        assert msgspec.json.decode(msgspec.json.encode(membership.members), type=Members) == membership.members
        actors = [name for host in membership.members.hosts for name in (host.agent, *host.actors)]
        assert len(actors) == len(set(actors))
    assert numbers == sorted(numbers)
