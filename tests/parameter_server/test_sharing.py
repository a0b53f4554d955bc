"""One copy a host: who fetches, who waits, who is given what the other has, and what a death costs."""

from collections import Counter

import pytest
from conductor_play import Play

from asyncrl.parameter_server.sharing import STRIPES

HERE = {"same_host": False, "host": "a"}
THERE = {"same_host": False, "host": "b"}
PATHS = ("/proc/7/fd/3", "/proc/7/fd/4")
R = tuple(f"r/{index}" for index in range(8))


def on_hosts(**weights):
    play = Play(**{"transport": "auto", "max_paused_fraction": 1.0, **weights})
    play.publish(0)
    return play


def fetched(play, name, version=0):
    """It has brought the version to its host, and waits for nothing."""
    assert play.pause(name, version, paths=PATHS)


def test_one_of_a_host_fetches_and_the_others_are_given_what_it_has():
    play = on_hosts()
    first = play.next("r/0", -1, **HERE)
    assert (first.version, first.transport, first.share, first.sources) == (0, "stream", True, [])
    assert [play.next(name, -1, **HERE) for name in R[1:]] == [None] * 7
    play.conductor.fleet.take_effects()
    fetched(play, "r/0")
    assert play.conductor.fleet.take_effects().wake >= {*R[1:]}
    for name in R[1:]:
        offer = play.look(name)
        assert (offer.version, offer.transport, offer.share) == (0, "shm", False)
        assert play.conductor.fleet.replicas[name].source_paths == PATHS
    # Nothing more has to be held for them than is held anyway.
    assert play.conductor.publications.needed() == {0}


@pytest.mark.parametrize("why", ["stream", "unknown", "failed"])
def test_who_takes_no_part_fetches_by_itself(why):
    play = on_hosts(transport="stream" if why == "stream" else "auto", max_attempts=1)
    place = {"same_host": False} if why == "unknown" else HERE
    assert play.next("r/0", -1, **place).transport == "stream"
    if why == "failed":
        assert play.next("r/1", -1, **place) is None
        fetched(play, "r/0")
        assert play.look("r/1").transport == "shm"
        play.report("r/1", 0, committed=False)
    offer = play.next("r/1", -1, **place)
    assert (offer.transport, offer.share, offer.sources) == ("stream", False, [])


def dies(play):
    play.left("r/0")


def fails(play):
    play.report("r/0", 0, committed=False)


def takes_too_long(play):
    play.later(60)


@pytest.mark.parametrize("what", [dies, fails, takes_too_long], ids=lambda what: what.__name__)
def test_where_the_one_that_fetches_is_lost_another_takes_its_place(what):
    play = on_hosts(stage_deadline_s=60)
    play.next("r/0", -1, **HERE)
    for name in R[1:]:
        play.next(name, -1, **HERE)
    play.conductor.fleet.take_effects()
    what(play)
    assert play.conductor.fleet.take_effects().wake >= {*R[1:]}
    offers = [play.look(name) for name in R[1:]]
    assert (offers[0].version, offers[0].transport, offers[0].share) == (0, "stream", True)
    assert offers[1:] == [None] * 6
    fetched(play, "r/1")
    assert {play.look(name).transport for name in R[2:]} == {"shm"}


def test_who_waited_is_given_what_it_waited_for_though_a_newer_one_is_there():
    play = on_hosts()
    play.next("r/0", -1, **HERE)
    play.next("r/1", -1, **HERE)
    for version in (1, 2):
        play.publish(version)
        # Still one copy at a time.
        assert play.look("r/1") is None
    assert play.conductor.publications.needed() == {0, 2}
    fetched(play, "r/0")
    assert play.conductor.publications.needed() == {0, 2}
    offer = play.look("r/1")
    assert (offer.version, offer.transport) == (0, "shm")
    # Who has not waited takes the newest.
    assert play.next("r/2", -1, **HERE).version == 2


def test_what_had_to_make_way_is_not_waited_for():
    play = on_hosts(versions_held=2)
    play.next("r/9", -1, **THERE)
    play.publish(1)
    play.next("r/0", -1, **HERE)
    play.next("r/1", -1, **HERE)
    play.publish(2)
    assert play.conductor.publications.needed() == {0, 2}
    fetched(play, "r/0", 1)
    offer = play.look("r/1")
    assert (offer.version, offer.transport, offer.share) == (2, "stream", True)


def test_a_late_comer_is_given_what_its_host_has_for_as_long_as_it_has_it():
    play = on_hosts()
    play.next("r/0", -1, **HERE)
    fetched(play, "r/0")
    play.report("r/0", 0)
    assert play.next("r/0", 0, **HERE) is None
    assert play.next("r/1", -1, **HERE).transport == "shm"
    play.left("r/0")
    assert play.next("r/2", -1, **HERE).transport == "stream"


def test_who_finds_nothing_where_it_was_sent_fetches_itself_at_once():
    play = on_hosts()
    play.next("r/0", -1, **HERE)
    play.next("r/1", -1, **HERE)
    fetched(play, "r/0")
    assert play.look("r/1").transport == "shm"
    # r/0 is dead, which nobody has heard of so far.
    offer = play.next("r/1", -1, **HERE)
    assert (offer.transport, offer.share) == ("stream", True)
    assert play.next("r/2", -1, **HERE) is None


def test_who_has_it_itself_loads_it_from_there_again():
    play = on_hosts()
    play.next("r/0", -1, **HERE)
    fetched(play, "r/0")
    play.report("r/0", 0, committed=False)
    assert play.next("r/0", -1, **HERE).transport == "shm"
    assert play.conductor.fleet.replicas["r/0"].source_paths == PATHS
    assert play.pause("r/0", 0)
    # It was asked to hold nothing anew, and holds what it held.
    play.report("r/0", 0)
    assert play.replica("r/0").held_version == 0


def test_what_came_another_way_ends_the_holding():
    play = on_hosts(transport="gloo")
    play.next("r/0", -1, **HERE)
    fetched(play, "r/0")
    play.report("r/0", 0)
    play.next("r/0", 0, **HERE)
    play.begin(1, "r/0")
    play.report("r/0", 1)
    assert play.replica("r/0").held_version == -1


# --- the tree ---


def ways(offer):
    """To whom it leads, for each stripe of the chunks."""
    return [offer.sources, *offer.more_sources]


def test_hosts_are_named_those_above_them_and_nobody_serves_much_more_than_a_version():
    play = on_hosts()
    names = [f"r/{index}" for index in range(512)]
    found = {name: ways(play.next(name, -1, same_host=False, host=name)) for name in names}
    for name, above in found.items():
        assert len(above) == STRIPES
        assert all(name not in way and len(set(way)) == len(way) for way in above)
    parents = Counter(way[0] if way else "" for above in found.values() for way in above)
    assert max(parents.values()) == STRIPES + 1
    assert max(len(way) for above in found.values() for way in above) == 9


def test_whoever_asks_for_one_chunk_at_a_time_has_one_way():
    play = on_hosts(chunks_in_flight=1)
    found = [ways(play.next(name, -1, same_host=False, host=name)) for name in R[:3]]
    assert found == [[[]], [[]], [["r/0"]]]


def test_a_relay_that_is_lost_or_lets_the_version_go_is_named_to_nobody_any_more():
    play = on_hosts()

    def join(index):
        return ways(play.next(f"r/{index}", -1, same_host=False, host=f"{index}"))

    for index in range(3):
        join(index)
    assert join(3) == [["r/2", "r/0"], ["r/1"]]
    play.left("r/0")
    play.report("r/1", 0, committed=False)
    # One that has it whole goes on to hand it on.
    fetched(play, "r/2")
    play.report("r/2", 0)
    play.next("r/2", 0, same_host=False, host="2")
    named = {each for index in range(4, 30) for way in join(index) for each in way}
    assert "r/2" in named
    assert not named & {"r/0", "r/1"}


def test_with_deltas_each_host_asks_the_parameter_server():
    play = on_hosts(delta=True)
    assert [ways(play.next(name, -1, same_host=False, host=name)) for name in R] == [[[]]] * 8
