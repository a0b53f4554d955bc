"""Broadcasts: members, begin, and what calls one off or breaks it."""

import pytest
from conductor_play import Play

from asyncrl.parameter_server.replicas import SILENT

R = ("r/0", "r/1", "r/2")


def serving(*names, **weights):
    play = Play(**weights)
    play.serve(*(names or R))
    return play


def commit_all(play, version, *names):
    for name in names or R:
        assert play.report(name, version)
        assert play.next(name, version) is None


def test_a_broadcast_begins_when_all_members_and_the_learner_are_there():
    play = serving()
    assert play.announce(1) is None
    assert set(play.phases().values()) == {"announced"}
    assert play.woken() == {*R}
    updates = [play.look(name) for name in R]
    assert {update.version for update in updates} == {1}
    assert [update.broadcast.first_rank for update in updates] == [1, 2, 3]
    [group] = {update.broadcast.group for update in updates}
    assert (group.world_size, group.host, group.port, group.backend) == (4, "127.0.0.1", 7000, "gloo")
    for name in R[:2]:
        assert play.join(name, 1, group.epoch) is None
    assert play.look("learner/0") is None
    # No replica is paused for a learner that is not there.
    play.end_of_park("learner/0")
    assert play.join("r/2", 1, group.epoch) is None
    assert play.announce(1).group == group
    assert play.woken() >= {*R}
    assert [play.look(name) for name in R] == [True] * 3
    assert set(play.phases().values()) == {"receiving"}
    commit_all(play, 1)
    # A repeated announcement has the same answer.
    assert play.announce(1).group == group
    assert play.watch(1, group.epoch).decided
    play.publish(1)
    assert play.announce(1).group == group
    assert [play.look(name) for name in R] == [None] * 3
    assert play.counts("begun", "broken") == (1, 0)


def test_a_late_notice_of_the_death_of_an_older_learner_changes_nothing():
    play = serving()
    epoch = play.gather(1, *R, learner=("learner/0", 2))
    play.left("learner/0", incarnation=1)
    assert play.join(R[-1], 1, epoch)
    assert play.look("learner/0").group.epoch == epoch
    assert play.counts("begun", "called_off") == (1, 0)


# --- members ---


@pytest.mark.parametrize("phase", ["staging", "waiting", "loading", "behind"])
def test_a_replica_that_is_busy_or_behind_is_left_out(phase):
    play = serving(max_paused_fraction=0.1)
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    if phase == "waiting":
        play.next("r/1", 0)
        play.pause("r/1", 1)
    if phase in ("waiting", "loading"):
        play.pause("r/0", 1)
    if phase == "behind":
        play.report("r/0", 1, committed=False)
    assert play.announce(2) is None
    assert (play.phases()["r/0"], play.phases()["r/2"]) == (phase, "announced")
    # It gets the version by stream once that is published.
    play.publish(2)
    if phase != "behind":
        play.report("r/0", 1)
    update = play.next("r/0", 0 if phase == "behind" else 1)
    assert (update.version, update.broadcast, update.transport) == (2, None, "stream")


def test_a_silent_replica_is_left_out_and_one_between_two_requests_is_not():
    play = Play()
    for name, version in (("r/0", 4), ("r/1", 5), ("r/2", 6), ("r/3", 4), ("r/4", 4), ("r/5", -1)):
        play.next(name, version)
    play.end_of_park("r/0")
    play.later(6)
    play.end_of_park("r/3")
    play.cancel("r/4")
    play.later(1)
    assert play.announce(5) is None
    assert {name for name, phase in play.phases().items() if phase == "announced"} == {"r/3"}
    assert play.next("r/3", 4).broadcast is not None


@pytest.mark.parametrize("why", ["none serves", "published", "one is under way", "called off"])
def test_a_broadcast_is_refused_for_each_reason(why):
    play = serving() if why != "none serves" else Play()
    if why == "none serves":
        play.publish(0)
        play.next("r/0", -1)
    elif why == "published":
        play.publish(1)
    elif why == "one is under way":
        play.gather(2, *R)
    else:
        for version in (1, 2):
            play.gather(version, *R)
            play.cancel("learner/0")
            for name in R:
                play.next(name, 0)
    assert play.announce(1).group is None
    if why == "one is under way":
        # Not even when it asks again after the first one is over.
        play.later(4)
        assert play.announce(1).group is None
        assert play.announce(3) is None


# --- epochs ---


def comes_again(play):
    play.left("r/1")
    play.commit("r/1", 1, incarnation=2)


def has_another_engine(play):
    play.next("r/1", -1)
    play.report("r/1", 1, committed=False)
    play.commit("r/1", 1)


ANOTHER_SET = {
    "the same": lambda play: None,
    "one more": lambda play: play.commit("r/3", 1),
    "one less": lambda play: play.left("r/1"),
    "comes again": comes_again,
    "another engine": has_another_engine,
    "more workers": lambda play: play.next("r/1", 1, workers=2),
    "broken late": lambda play: play.watch(1, 5, "connection reset"),
    "another learner": lambda play: play.left("learner/0"),
    "another place": lambda play: None,
    "called off": lambda play: (play.gather(2, *R), play.cancel("learner/0"), [play.next(name, 1) for name in R]),
}


@pytest.mark.parametrize("change", ANOTHER_SET)
def test_an_epoch_lasts_as_long_as_its_set_of_engines(change):
    play = serving(first_epoch=5)
    assert play.begin(1, *R) == 5
    play.publish(1)
    commit_all(play, 1)
    ANOTHER_SET[change](play)
    of = {"another place": {"port": 7001}, "another learner": {"learner": ("learner/0", 2)}}.get(change, {})
    assert play.announce(3, **of) is None
    epochs = {play.look(name).broadcast.group.epoch for name in play.conductor.replicas.by_name}
    assert epochs == {5 if change in ("the same", "called off") else 6}


# --- called off ---


BLAMELESS = {
    "dies announced": (lambda play, epoch: play.left("r/2"), R[:2]),
    "dies paused": (lambda play, epoch: play.left("r/0"), R[1:]),
    "comes back announced": (lambda play, epoch: play.next("r/2", -1, incarnation=2), R[:2]),
    "loses its engine announced": (lambda play, epoch: play.next("r/2", -1), R[:2]),
    "cancels its pause": (lambda play, epoch: play.cancel("r/0"), R[1:]),
    "asks for the next instead": (lambda play, epoch: play.next("r/0", 0), R[1:]),
    "fails announced": (lambda play, epoch: play.report("r/2", 1, committed=False), R[:2]),
    "fails paused": (lambda play, epoch: play.report("r/0", 1, committed=False), R[1:]),
    "sleeps announced": (lambda play, epoch: play.sleep("r/2"), R),
    "does not come": (lambda play, epoch: play.later(4), R[:2]),
    "the learner dies": (lambda play, epoch: play.left("learner/0"), R),
    "the learner gives up": (lambda play, epoch: play.cancel("learner/0"), R),
    "the learner cannot send": (lambda play, epoch: play.watch(1, epoch, "no memory"), R),
}


@pytest.mark.parametrize("what", BLAMELESS)
def test_a_missing_member_cancels_the_broadcast_for_all(what):
    happens, blameless = BLAMELESS[what]
    play = serving()
    epoch = play.gather(1, *R)
    play.woken()
    happens(play, epoch)
    wake, [note] = play.effects("broadcast called off")
    assert {name for name in blameless if name != "r/2"} <= wake
    assert note.level == "warning" and note.facts["reason"] and note.facts["version"] == 1
    # Members that wait get the answer, and resume; they are members of the next one.
    for name in blameless:
        assert play.phases()[name] == "serving"
        if name != "r/2":
            assert play.look(name) is False
        # A member that comes late, or again, gets the same answer.
        assert play.join(name, 1, epoch) is False
        assert play.next(name, 0) is None
    for name in set(R) - set(blameless):
        # A replica that is silent is a member of no broadcast until it asks again.
        assert play.phases().get(name) != "serving" or play.replica(name).heard == SILENT
    if not what.startswith("the learner"):
        assert play.look("learner/0").group is None
    # The version goes to each by stream, once it is published.
    play.publish(1)
    for name in blameless:
        update = play.look(name)
        assert (update.version, update.transport, update.broadcast) == (1, "stream", None)
    assert play.counts("called_off", "begun") == (1, 0)
    if what == "sleeps announced":
        assert play.figure("updates_failed") == 0


# --- broken ---


BREAKS = {
    "dies": lambda play, epoch: play.left("r/0"),
    "fails": lambda play, epoch: play.report("r/0", 1, committed=False),
    "asks for the next": lambda play, epoch: play.next("r/0", 0),
    "has another engine": lambda play, epoch: play.next("r/0", -1),
    "takes too long": lambda play, epoch: play.later(10),
    "the learner fails": lambda play, epoch: play.watch(1, epoch, "reset"),
    "the learner dies": lambda play, epoch: play.left("learner/0"),
}


@pytest.mark.parametrize("published", [False, True], ids=["unpublished", "published"])
@pytest.mark.parametrize("what", BREAKS)
def test_a_version_goes_by_stream_after_a_broken_broadcast(what, published):
    play = serving()
    epoch = play.begin(1, *R)
    commit_all(play, 1, "r/2")
    if published:
        play.publish(1)
    assert play.watch(1, epoch) is None
    play.woken()
    reported = BREAKS[what](play, epoch)
    wake, [note] = play.effects("broadcast broken")
    assert note.level == "warning" and note.facts["reason"]
    if what != "the learner dies":
        # The learner stops at once.
        state = reported if what == "the learner fails" else play.look("learner/0")
        assert "learner/0" in wake and state.error == note.facts["reason"]
        assert play.announce(1).group is None
    if not published:
        play.publish(1)
    assert play.phases()["r/1"] == "behind"
    for name in R[:2]:
        if name in play.phases():
            assert play.join(name, 1, epoch) is False
            update = play.next(name, 0)
            assert (update.version, update.transport, update.broadcast) == (1, "stream", None)
    assert play.counts("broken", "begun") == (1, 1)


def test_broadcasts_become_rarer_after_failures():
    play = serving("r/0")
    announced = []
    for version in range(1, 14):
        if play.announce(version) is None:
            announced.append(version)
            epoch = play.look("r/0").broadcast.group.epoch
            assert play.join("r/0", version, epoch)
            assert play.look("learner/0").group.epoch == epoch
            play.watch(version, epoch, "no connection")
        play.publish(version)
        play.commit("r/0", version, serving=version - 1)
    assert announced == [1, 2, 4, 8]
    # A successful one ends that; r/0 serves 13.
    for version in (14, 15):
        assert play.announce(version).group is None
        play.publish(version)
        play.commit("r/0", version, serving=version - 1)
    for version in (16, 17):
        play.begin(version, "r/0")
        commit_all(play, version, "r/0")


def test_a_successor_of_the_parameter_server_does_not_stop_the_learner():
    state = Play().watch(1, 5)
    assert (state.decided, state.error) == (True, "")


def test_a_commit_counts_before_and_after_the_break():
    play = serving()
    epoch = play.begin(1, *R)
    play.report("r/0", 1)
    play.left("r/0")
    assert play.phases() == {"r/1": "receiving", "r/2": "receiving"}
    play.left("r/1")
    assert play.phases() == {"r/2": "behind"}
    commit_all(play, 1, "r/2")
    assert play.phases() == {"r/2": "serving"}
    assert play.begin(2, "r/2") == epoch + 1
    # The members do not count against the pauses of others.
    assert play.next("r/3", -1).version == 0
    assert play.pause("r/3", 0)


def test_a_learner_that_fails_after_all_have_committed_breaks_nothing():
    play = serving()
    epoch = play.begin(1, *R)
    commit_all(play, 1)
    play.watch(1, epoch, "connection reset")
    assert play.counts("begun", "broken") == (1, 0)
    play.publish(1)
    # Its group is not used again, and the next version is broadcast.
    assert play.begin(2, *R) == epoch + 1


def test_messages_on_other_broadcasts_change_nothing():
    play = serving()
    epoch = play.gather(3, *R)
    before = play.phases()
    play.watch(2, epoch - 1, "late")
    play.watch(3, epoch + 1, "unknown")
    # The learner's questions close one another.
    assert play.announce(3) is None
    assert play.join("r/2", 2, epoch) is False
    assert play.join("r/2", 3, epoch + 1) is False
    assert not play.report("r/0", 2, committed=False)
    assert play.phases() == before
    assert play.join("r/2", 3, epoch) is True
