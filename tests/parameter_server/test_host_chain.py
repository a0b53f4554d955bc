"""One fetch per host: which replica fetches, which wait and open its copy; and the chain of hosts."""

import pytest
from conductor_play import Play
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages.weights import Source
from asyncrl.parameter_server.conductor import MAX_SOURCES

HERE = {"same_host": False, "host": "a"}
THERE = {"same_host": False, "host": "b"}
PATHS = ("/proc/7/fd/3", "/proc/7/fd/4")
R = tuple(f"r/{index}" for index in range(8))


def on_hosts(*asking, **weights):
    """The named replicas, all on one host, ask for version 0."""
    play = Play(**{"transport": "auto", "max_paused_fraction": 1.0, **weights})
    play.publish(0)
    updates = [play.next(name, -1, **HERE) for name in asking]
    assert all(update is None for update in updates[1:])
    if updates:
        assert (updates[0].version, updates[0].transport, updates[0].turn, updates[0].sources) == (0, "stream", 1, [])
    return play


def fetched(play, name, version=0):
    """The replica has fetched the version for its host."""
    assert play.pause(name, version, paths=PATHS)


def source(update):
    return update.version, update.transport, update.turn > 0


def test_one_replica_of_a_host_fetches_and_the_others_open_its_copy():
    play = on_hosts(*R)
    play.woken()
    fetched(play, "r/0")
    assert play.woken() >= {*R[1:]}
    for name in R[1:]:
        update = play.look(name)
        assert source(update) == (0, "shm", False)
        assert tuple(bucket.path for bucket in update.manifest.buckets) == PATHS
    # Nothing more has to be held for them than is held anyway.
    assert play.needed() == {0}


@pytest.mark.parametrize("why", ["stream", "unknown", "failed"])
def test_a_replica_that_does_not_share_fetches_by_itself(why):
    play = on_hosts(transport="stream" if why == "stream" else "auto", max_attempts=1)
    place = {"same_host": False} if why == "unknown" else HERE
    assert play.next("r/0", -1, **place).transport == "stream"
    if why == "failed":
        assert play.next("r/1", -1, **place) is None
        fetched(play, "r/0")
        assert play.look("r/1").transport == "shm"
        play.report("r/1", 0, committed=False)
    update = play.next("r/1", -1, **place)
    assert (source(update), update.sources) == ((0, "stream", False), [])


LOST = {
    "dies": lambda play: play.left("r/0"),
    "fails": lambda play: play.report("r/0", 0, committed=False),
    "takes too long": lambda play: play.later(60),
}


@pytest.mark.parametrize("what", LOST)
def test_when_the_replica_that_fetches_is_lost_another_takes_its_place(what):
    play = on_hosts(*R, stage_deadline_s=60)
    play.woken()
    LOST[what](play)
    assert play.woken() >= {*R[1:]}
    first, *others = [play.look(name) for name in R[1:]]
    assert source(first) == (0, "stream", True) and others == [None] * 6
    fetched(play, "r/1")
    assert {play.look(name).transport for name in R[2:]} == {"shm"}


def test_a_waiting_replica_gets_its_version():
    play = on_hosts("r/0", "r/1")
    for version in (1, 2):
        play.publish(version)
        # Still one copy at a time.
        assert play.look("r/1") is None
    assert play.needed() == {0, 2}
    fetched(play, "r/0")
    # Its copy stays on the host, so it need not be held here.
    assert play.needed() == {2}
    assert source(play.look("r/1"))[:2] == (0, "shm")
    assert play.needed() == {2}
    # A replica that has not waited takes the newest.
    assert play.next("r/2", -1, **HERE).version == 2


@pytest.mark.parametrize("is_found", [True, False])
def test_a_replica_waits_for_a_dropped_version_while_its_host_fetches_it(is_found):
    play = on_hosts(versions_held=2)
    play.next("r/9", -1, **THERE)
    play.publish(1)
    play.next("r/0", -1, **HERE)
    play.next("r/1", -1, **HERE)
    play.publish(2)
    assert play.needed() == {0, 2}
    # Another host may still have the version.
    assert play.look("r/1") is None
    if is_found:
        fetched(play, "r/0", 1)
        assert source(play.look("r/1")) == (1, "shm", False)
    else:
        play.report("r/0", 1, committed=False)
        assert source(play.look("r/1")) == (2, "stream", True)


def test_a_late_replica_opens_the_copy_of_its_host_while_that_exists():
    play = on_hosts("r/0")
    fetched(play, "r/0")
    play.report("r/0", 0)
    assert play.next("r/0", 0, **HERE) is None
    assert play.next("r/1", -1, **HERE).transport == "shm"
    # It finds nothing and fetches at once: r/0 is dead, which is not known here yet.
    assert source(play.next("r/1", -1, **HERE)) == (0, "stream", True)
    assert play.next("r/2", -1, **HERE) is None


def test_a_replica_reloads_its_own_copy_until_it_has_a_newer_version():
    play = on_hosts("r/0", transport="gloo")
    fetched(play, "r/0")
    play.report("r/0", 0, committed=False)
    update = play.next("r/0", -1, **HERE)
    assert source(update) == (0, "shm", False)
    assert tuple(bucket.path for bucket in update.manifest.buckets) == PATHS
    assert play.pause("r/0", 0)
    # It still holds its copy.
    play.report("r/0", 0)
    assert play.next("r/1", -1, **HERE).transport == "shm"
    play.next("r/0", 0, **HERE)
    play.begin(1, "r/0")
    play.report("r/0", 1)
    assert source(play.next("r/2", -1, **HERE)) == (0, "stream", True)
    # A new engine serves nothing, and the copy is not there again.
    assert play.next("r/0", -1, **HERE) is None


# --- the chain ---


def sources(play, name, host, serving=-1):
    return [source.name for source in play.next(name, serving, same_host=False, host=host).sources]


def test_each_host_asks_the_hosts_before_it_nearest_first():
    play = on_hosts()
    assert [sources(play, name, name) for name in R[:3]] == [[], ["r/0"], ["r/1", "r/0"]]
    named = [sources(play, f"h/{index:02d}", f"{index}") for index in range(20)]
    assert max(map(len, named)) == MAX_SOURCES
    # A new version has a new chain.
    play.publish(1)
    play.report("r/2", 0, committed=False)
    assert sources(play, "r/2", "r/2") == []


def test_a_relay_that_is_lost_or_drops_the_version_is_not_named():
    play = on_hosts()
    for index in range(4):
        sources(play, f"r/{index}", f"{index}")
    play.left("r/0")
    play.report("r/1", 0, committed=False)
    # A replica that has the version whole stays a source.
    fetched(play, "r/2")
    play.report("r/2", 0)
    play.next("r/2", 0, same_host=False, host="2")
    assert sources(play, "r/4", "4") == ["r/3", "r/2"]
    # One that failed joins at the end.
    assert sources(play, "r/1", "1") == ["r/4", "r/3", "r/2"]


def test_a_replica_that_begins_again_has_a_later_turn():
    """Hosts earlier in the chain would wait for it, and it for them."""
    play = on_hosts()
    first, second = (play.next(name, -1, same_host=False, host=name) for name in ("r/0", "r/1"))
    assert second.sources == [Source("r/0", first.turn)]
    play.report("r/0", 0, committed=False)
    again = play.next("r/0", -1, same_host=False, host="r/0")
    assert again.turn > second.turn and again.sources == [Source("r/1", second.turn)]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["joins", "fails", "dies", "serves"]), st.sampled_from(R)), max_size=60))
def test_no_host_is_its_own_source_in_any_order_of_events(steps):
    play, place = on_hosts(), {}
    for number, (what, name) in enumerate(steps):
        phase = play.phases().get(name)
        if what == "joins" and phase not in ("staging", "loading"):
            serving = play.replica(name).serving if phase else -1
            update = play.next(name, serving, same_host=False, host=name)
            if update is not None and update.turn:
                place[name] = number
                earlier = [place[each.name] for each in update.sources]
                assert earlier == sorted(earlier, reverse=True) and number not in earlier
                assert all(source.turn < update.turn for source in update.sources)
        elif what == "fails" and phase == "staging":
            play.report(name, 0, committed=False)
        elif what == "serves" and phase == "staging":
            fetched(play, name)
            play.report(name, 0)
        elif what == "dies":
            play.left(name)
