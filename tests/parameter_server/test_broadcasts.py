"""Broadcasts: who takes part, the barrier, what calls one off or breaks it, and what becomes of the members."""

import pytest
from conductor_play import Play

R = ("r/0", "r/1", "r/2")


def test_a_broadcast_begins_when_all_members_and_the_learner_are_there():
    play = Play()
    play.serve(*R)
    assert play.announce(1) is None
    assert set(play.phases().values()) == {"announced"}
    assert play.conductor.fleet.take_effects().wake == {*R}
    offers = [play.look(name) for name in R]
    assert {offer.version for offer in offers} == {1}
    assert [offer.collective.first_rank for offer in offers] == [1, 2, 3]
    [group] = {offer.collective.group for offer in offers}
    assert (group.world_size, group.host, group.port, group.backend) == (4, "127.0.0.1", 7000, "gloo")
    for name in R[:2]:
        assert play.join(name, 1, group.epoch) is None
    assert play.look("learner/0") is None
    assert play.join("r/2", 1, group.epoch) is True
    assert play.conductor.fleet.take_effects().wake >= {"r/0", "r/1", "learner/0"}
    assert [play.look(name) for name in R[:2]] == [True, True]
    assert play.look("learner/0").group == group
    assert set(play.phases().values()) == {"receiving"}
    for name in R:
        assert play.report(name, 1)
        assert play.next(name, 1) is None
    play.publish(1)
    play.ended(1, group.epoch)
    assert [play.look(name) for name in R] == [None] * 3
    assert play.conductor.figures()["broadcasts_begun"] == 1
    assert play.conductor.figures()["broadcasts_broken"] == 0


def test_the_learner_is_waited_for_too():
    play = Play()
    play.serve(*R)
    epoch = play.gather(1, *R)
    play.end_of_park("learner/0")
    # Nobody is to be paused for a learner that is not there.
    assert play.join("r/2", 1, epoch) is None
    assert play.announce(1).group.epoch == epoch
    assert [play.look(name) for name in R] == [True] * 3


# --- who takes part ---


def test_nobody_serves_anything_yet():
    play = Play()
    assert play.announce(0).group is None
    play.publish(0)
    play.next("r/0", -1)
    assert play.announce(1).group is None


@pytest.mark.parametrize("phase", ["staging", "waiting", "loading", "behind"])
def test_who_is_busy_or_behind_is_left_out(phase):
    play = Play(max_paused_fraction=0.1)
    play.serve(*R)
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    if phase == "waiting":
        play.next("r/1", 0)
        play.pause("r/1", 1)
    if phase in ("waiting", "loading"):
        play.pause("r/0", 1)
    if phase == "behind":
        play.report("r/0", 1, committed=False)
    assert play.phases()["r/0"] == phase
    assert play.announce(2) is None
    assert play.phases()["r/0"] == phase
    assert play.phases()["r/2"] == "announced"
    # It is served by itself once the version is there.
    play.publish(2)
    if phase != "behind":
        play.report("r/0", 1)
    offer = play.next("r/0", 0 if phase == "behind" else 1)
    assert (offer.version, offer.collective, offer.transport) == (2, None, "stream")


def test_who_has_been_silent_is_not_waited_for():
    play = Play()
    play.serve(*R)
    play.end_of_park("r/0")
    play.later(6)
    play.next("r/1", 0)
    play.cancel("r/1")
    assert play.announce(1) is None
    assert play.phases() == {"r/0": "serving", "r/1": "serving", "r/2": "announced"}


def test_who_is_between_two_questions_is_waited_for():
    play = Play()
    play.serve("r/0")
    play.end_of_park("r/0")
    play.later(1)
    assert play.announce(1) is None
    assert play.next("r/0", 0).collective is not None


def test_who_serves_the_version_or_a_newer_one_is_left_out():
    play = Play()
    for name, serving in (("r/0", 4), ("r/1", 5), ("r/2", 6)):
        play.next(name, serving)
    assert play.announce(5) is None
    assert play.phases() == {"r/0": "announced", "r/1": "serving", "r/2": "serving"}


def test_what_is_published_is_not_broadcast_any_more():
    play = Play()
    play.serve("r/0")
    play.end_of_park("r/0")
    play.publish(1)
    assert play.announce(1).group is None
    assert play.phases() == {"r/0": "serving"}
    assert play.next("r/0", 0).collective is None


def test_what_was_called_off_once_is_not_announced_again():
    play = Play()
    play.serve("r/0")
    for version in (1, 2):
        assert play.announce(version) is None
        play.next("r/0", 0)
        play.cancel("learner/0")
        play.next("r/0", 0)
    for version in (1, 2):
        assert play.announce(version).group is None
        assert play.phases() == {"r/0": "serving"}


def test_one_broadcast_at_a_time():
    play = Play()
    play.serve(*R)
    play.gather(1, *R)
    assert play.announce(2).group is None
    play.later(4)
    assert play.phases()["r/0"] == "serving"
    # Not even when it is asked again, and the first one is over.
    assert play.announce(2).group is None
    assert play.announce(3) is None


def test_a_repeated_announcement_has_the_same_answer():
    play = Play()
    play.serve(*R)
    epoch = play.gather(1, *R)
    assert play.announce(1) is None
    assert play.join("r/2", 1, epoch)
    for _ in range(2):
        assert play.announce(1).group.epoch == epoch
    for name in R:
        play.report(name, 1)
    assert play.announce(1).group.epoch == epoch
    play.publish(1)
    assert play.announce(1).group.epoch == epoch
    assert play.phases()["r/0"] == "serving"


# --- epochs ---


def test_an_epoch_lasts_for_as_long_as_nobody_joins_leaves_or_fails():
    play = Play(first_epoch=5)
    play.serve(*R)
    for version in (1, 2, 3):
        assert play.begin(version, *R) == 5
        play.publish(version)
        for name in R:
            play.report(name, version)
            play.next(name, version)


def comes_again(play):
    play.left("r/1")
    assert play.next("r/1", -1, incarnation=2).version == 1
    assert play.pause("r/1", 1, incarnation=2)
    assert play.report("r/1", 1, incarnation=2)
    assert play.next("r/1", 1, incarnation=2) is None


def has_another_engine(play):
    play.next("r/1", -1)
    play.report("r/1", 1, committed=False)
    play.commit("r/1", 1, serving=-1)


ANOTHER_SET = [
    lambda play: play.commit("r/3", 1),
    lambda play: play.left("r/1"),
    comes_again,
    has_another_engine,
    lambda play: play.next("r/1", 1, workers=2),
    lambda play: play.ended(1, 1, "connection reset"),
]


@pytest.mark.parametrize("what", ANOTHER_SET)
def test_another_set_of_engines_has_another_epoch(what):
    play = Play()
    play.serve(*R)
    assert play.begin(1, *R) == 1
    play.publish(1)
    for name in R:
        play.report(name, 1)
        play.next(name, 1)
    what(play)
    assert play.announce(2) is None
    offers = [play.look(name) for name in play.conductor.fleet.replicas]
    assert {offer.collective.group.epoch for offer in offers} == {2}


@pytest.mark.parametrize("changes", [{"port": 7001}, {"learner": ("learner/0", 2)}])
def test_another_learner_has_another_epoch(changes):
    play = Play()
    play.serve(*R)
    play.begin(1, *R)
    for name in R:
        play.report(name, 1)
        play.next(name, 1)
    if "learner" in changes:
        play.left("learner/0", 1)
    assert play.announce(2, **changes) is None
    assert play.look("r/0").collective.group.epoch == 2


def test_a_broadcast_that_was_called_off_spends_no_epoch():
    play = Play()
    play.serve(*R)
    epoch = play.gather(1, *R)
    play.cancel("learner/0")
    for name in R:
        play.next(name, 0)
    assert play.begin(2, *R) == epoch


# --- what calls it off ---


BLAMELESS = {
    "dies announced": (lambda play, epoch: play.left("r/2"), R[:2]),
    "dies paused": (lambda play, epoch: play.left("r/0"), R[1:]),
    "comes back announced": (lambda play, epoch: play.next("r/2", -1, incarnation=2), R[:2]),
    "loses its engine announced": (lambda play, epoch: play.next("r/2", -1), R[:2]),
    "cancels its pause": (lambda play, epoch: play.cancel("r/0"), R[1:]),
    "asks for the next instead": (lambda play, epoch: play.next("r/0", 0), R[1:]),
    "fails announced": (lambda play, epoch: play.report("r/2", 1, committed=False), R[:2]),
    "fails paused": (lambda play, epoch: play.report("r/0", 1, committed=False), R[1:]),
    "does not come": (lambda play, epoch: play.later(4), R[:2]),
    "the learner dies": (lambda play, epoch: play.left("learner/0"), R),
    "the learner gives up": (lambda play, epoch: play.cancel("learner/0"), R),
    "the learner cannot send": (lambda play, epoch: play.ended(1, epoch, "no memory"), R),
}


@pytest.mark.parametrize("what", BLAMELESS)
def test_who_is_missing_calls_it_off_for_all(what):
    happens, blameless = BLAMELESS[what]
    play = Play()
    play.serve(*R)
    epoch = play.gather(1, *R)
    play.conductor.fleet.take_effects()
    happens(play, epoch)
    effects = play.conductor.fleet.take_effects()
    assert {name for name in blameless if name != "r/2"} <= effects.wake
    [note] = [note for note in effects.notes if note.event == "broadcast called off"]
    assert note.level == "warning" and note.facts["reason"] and note.facts["version"] == 1
    # Members that wait are told so, and go on; they are members of the next one.
    for name in blameless:
        assert play.phases()[name] == "serving"
        if name != "r/2":
            assert play.look(name) is False
        # Whoever comes late, or again, is told the same.
        assert play.join(name, 1, epoch) is False
        assert play.next(name, 0) is None
    for name in set(R) - set(blameless):
        if name in play.conductor.fleet.replicas:
            assert play.phases()[name] != "serving"
    if not what.startswith("the learner"):
        assert play.look("learner/0").group is None
        assert play.announce(1).group is None
    # The version goes to all by itself, once it is published.
    play.publish(1)
    for name in blameless:
        offer = play.look(name)
        assert (offer.version, offer.transport, offer.collective) == (1, "stream", None)
    assert play.conductor.figures()["broadcasts_called_off"] == 1
    assert play.conductor.figures()["broadcasts_begun"] == 0


# --- what breaks it ---


BREAKS = {
    "dies": (lambda play, epoch: play.left("r/0"), ["r/1"]),
    "fails": (lambda play, epoch: play.report("r/0", 1, committed=False), ["r/1"]),
    "asks for the next": (lambda play, epoch: play.next("r/0", 0), ["r/1"]),
    "has another engine": (lambda play, epoch: play.next("r/0", -1), ["r/1"]),
    "takes too long": (lambda play, epoch: play.later(10), ["r/0", "r/1"]),
    "the learner says so": (lambda play, epoch: play.ended(1, epoch, "reset", again=True), ["r/0", "r/1"]),
}
"""How it breaks, and who is not to blame and has not committed."""


@pytest.mark.parametrize("published", [False, True], ids=["unpublished", "published"])
@pytest.mark.parametrize("what", BREAKS)
def test_who_survives_a_broken_broadcast_is_in_the_next_one(what, published):
    breaks, survivors = BREAKS[what]
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    assert play.report("r/2", 1)
    assert play.next("r/2", 1) is None
    if published:
        play.publish(1)
    play.conductor.fleet.take_effects()
    breaks(play, epoch)
    [note] = [note for note in play.conductor.fleet.take_effects().notes if note.event == "broadcast broken"]
    assert note.level == "warning" and note.facts["reason"]
    assert {name for name, phase in play.phases().items() if phase == "regrouping"} == {*survivors}
    assert play.phases()["r/2"] == "serving"
    # Whoever asks first is not sent the version by itself, published or not, and nobody is paused for it so far.
    for name in survivors[:-1]:
        assert play.join(name, 1, epoch) is False
        assert play.next(name, 0) is None
    play.ended(1, epoch, "connection reset", again=True)
    assert play.announce(1) is None
    assert play.next(survivors[-1], 0).collective.group.epoch > epoch
    offers = [play.look(name) if name != survivors[-1] else play.next(name, 0) for name in survivors]
    assert {offer.version for offer in offers} == {1}
    [group] = {offer.collective.group for offer in offers}
    assert group.world_size == 1 + len(survivors)
    # Whoever is to blame is served by itself.
    if "r/0" in play.conductor.fleet.replicas and "r/0" not in survivors:
        assert play.phases()["r/0"] in ("behind", "staging")
        if published and play.phases()["r/0"] == "behind":
            assert play.next("r/0", 0).transport == "stream"
    begins = [play.join(name, 1, group.epoch) for name in survivors]
    assert begins == [None] * (len(survivors) - 1) + [True]
    assert play.look("learner/0").group == group
    for name in survivors:
        assert play.report(name, 1)
        assert play.next(name, 1) is None
        assert play.phases()[name] == "serving"
    assert play.conductor.figures()["broadcasts_broken"] == 1
    assert play.conductor.figures()["broadcasts_begun"] == 2


def broken_for(play, *names, version=1):
    """A broadcast that breaks by the learner's word; all of them ask afterwards. Returns its epoch."""
    epoch = play.begin(version, *names)
    play.ended(version, epoch, "connection reset", again=True)
    for name in names:
        assert play.next(name, version - 1) is None
    return epoch


def begin_anew(play, *names, version=1):
    """Another broadcast of the same version, to these. Returns its epoch."""
    assert play.announce(version) is None
    epoch = play.look(names[0]).collective.group.epoch
    for name in names:
        play.join(name, version, epoch)
    assert set(play.phases().values()) == {"receiving"}
    return epoch


def test_a_version_that_breaks_twice_is_left_to_the_rolling_transports():
    play = Play()
    play.serve(*R)
    broken_for(play, *R)
    epoch = begin_anew(play, *R)
    play.publish(1)
    play.ended(1, epoch, "connection reset", again=True)
    assert play.announce(1).group is None
    for name in R:
        offer = play.next(name, 0)
        assert (offer.version, offer.transport, offer.collective) == (1, "stream", None)


SILENT = {
    "goes silent": lambda play, epoch: play.later(4),
    "will not": lambda play, epoch: play.ended(1, epoch, "no memory left"),
    "dies": lambda play, epoch: play.left("learner/0"),
}


@pytest.mark.parametrize("what", SILENT)
def test_nobody_waits_for_a_learner_that_does_not_announce_it_anew(what):
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    play.left("r/0")
    play.publish(1)
    for name in R[1:]:
        assert play.next(name, 0) is None
    play.conductor.fleet.take_effects()
    SILENT[what](play, epoch)
    assert play.conductor.fleet.take_effects().wake >= {"r/1", "r/2"}
    for name in R[1:]:
        assert play.look(name).transport == "stream"
    if what != "dies":
        assert play.announce(1).group is None


def test_who_does_not_come_back_after_the_break_is_not_waited_for():
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    play.ended(1, epoch, "connection reset", again=True)
    assert play.next("r/0", 0) is None
    assert play.next("r/1", 0) is None
    assert play.announce(1) is None
    assert set(play.phases().values()) == {"regrouping"}
    play.later(4)
    assert play.phases() == {"r/0": "announced", "r/1": "announced", "r/2": "regrouping"}
    assert {play.look(name).collective.group.world_size for name in R[:2]} == {3}


def test_who_only_tells_of_the_break_is_not_to_blame():
    play = Play()
    play.serve(*R)
    play.begin(1, *R)
    # Its word comes before the news that r/0 is dead.
    assert play.report("r/1", 1, committed=False, broke_off=True)
    assert set(play.phases().values()) == {"regrouping"}
    assert play.report("r/2", 1, committed=False, broke_off=True)
    for name in R[1:]:
        assert play.next(name, 0) is None
    assert play.announce(1) is None
    play.left("r/0")
    assert {play.look(name).collective.group.world_size for name in R[1:]} == {3}


def test_a_learner_that_has_not_heard_of_the_begin_need_not_ask_anew():
    play = Play()
    play.serve(*R)
    epoch = play.gather(1, *R)
    assert play.join("r/2", 1, epoch)
    play.left("r/0")
    assert play.look("learner/0") is None
    assert play.next("r/1", 0) is None
    assert play.next("r/2", 0).collective.group.epoch == epoch + 1
    assert play.look("learner/0") is None
    play.join("r/1", 1, epoch + 1)
    play.join("r/2", 1, epoch + 1)
    assert play.look("learner/0").group.epoch == epoch + 1


def test_a_survivor_with_another_engine_is_served_by_itself():
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    play.publish(1)
    play.ended(1, epoch, "connection reset", again=True)
    assert play.next("r/0", -1).transport == "stream"
    assert play.phases() == {"r/0": "staging", "r/1": "regrouping", "r/2": "regrouping"}


MANY = [f"r/{index:03d}" for index in range(512)]


@pytest.mark.parametrize("dead", [1, 2, 511], ids=lambda dead: f"{dead} of 512 die")
def test_of_512_replicas_all_that_survive_are_in_the_next_broadcast(dead):
    play = Play()
    play.publish(0)
    for name in MANY:
        play.next(name, 0)
    epoch = play.begin(1, *MANY)
    play.publish(1)
    living = MANY[dead:]
    assert play.report(living[0], 1, committed=False, broke_off=True)
    for name in MANY[:dead]:
        play.left(name)
    play.ended(1, epoch, "connection reset", again=True)
    assert play.announce(1) is None
    # None of them is served by itself.
    offers = [play.next(name, 0) for name in living]
    assert offers[:-1] == [None] * (len(living) - 1)
    group = offers[-1].collective.group
    assert {play.look(name).collective.group.epoch for name in living[:-1]} <= {group.epoch}
    assert group.world_size == 1 + len(living)
    for name in living:
        play.join(name, 1, group.epoch)
    assert play.look("learner/0").group == group
    for name in living:
        assert play.report(name, 1)
        play.next(name, 1)
    assert play.begin(2, *living) == group.epoch


def test_versions_are_left_out_where_no_group_comes_about_and_nobody_is_to_blame():
    play = Play()
    play.serve("r/0")
    announced = []
    for version in range(1, 14):
        if play.announce(version) is None:
            announced.append(version)
            for _ in range(2):
                epoch = play.look("r/0").collective.group.epoch
                assert play.join("r/0", version, epoch)
                assert play.look("learner/0").group.epoch == epoch
                play.ended(version, epoch, "nobody can connect", again=True)
                play.next("r/0", version - 1)
                play.announce(version)
        play.publish(version)
        play.commit("r/0", version, serving=version - 1)
    assert announced == [1, 2, 4, 8]
    # One that comes about ends that; r/0 serves 13.
    for version in (14, 15):
        assert play.announce(version).group is None
        play.publish(version)
        play.commit("r/0", version, serving=version - 1)
    for version in (16, 17):
        play.begin(version, "r/0")
        play.report("r/0", version)
        play.next("r/0", version)


def test_no_version_is_left_out_where_a_member_is_to_blame():
    play = Play()
    play.serve(*R)
    for version in range(1, 6):
        play.begin(version, *R)
        play.report("r/0", version, committed=False)
        for name in R[1:]:
            play.next(name, version - 1)
        assert play.announce(version) is None
        epoch = play.look("r/1").collective.group.epoch
        for name in R[1:]:
            play.join(name, version, epoch)
        play.report("r/1", version, committed=False)
        play.ended(version, epoch, "r/1 has failed", again=True)
        play.publish(version)
        for name in R:
            play.commit(name, version, serving=version - 1)


def test_what_was_received_whole_before_the_break_counts():
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    play.left("r/0")
    assert play.phases() == {"r/1": "regrouping", "r/2": "regrouping"}
    assert play.report("r/1", 1)
    assert play.next("r/1", 1) is None
    assert play.phases()["r/1"] == "serving"
    assert play.replica("r/1").serving == 1
    assert epoch == 1


def test_a_committed_member_that_dies_breaks_nothing():
    play = Play()
    play.serve(*R)
    epoch = play.begin(1, *R)
    play.report("r/0", 1)
    play.left("r/0")
    assert play.phases() == {"r/1": "receiving", "r/2": "receiving"}
    for name in R[1:]:
        play.report(name, 1)
        play.next(name, 1)
    assert play.begin(2, *R[1:]) == epoch + 1


def test_a_broadcast_does_not_count_against_the_pauses_of_others():
    play = Play(max_paused_fraction=0.1)
    play.serve(*R)
    play.begin(1, *R)
    assert play.next("r/3", -1).version == 0
    assert play.pause("r/3", 0)


def test_words_on_other_broadcasts_change_nothing():
    play = Play()
    play.serve(*R)
    epoch = play.gather(3, *R)
    before = play.phases()
    play.ended(2, epoch - 1, "late")
    play.ended(3, epoch + 1, "of whom?")
    assert play.join("r/2", 2, epoch) is False
    assert play.join("r/2", 3, epoch + 1) is False
    assert not play.report("r/0", 2, committed=False)
    assert play.phases() == before
    assert play.join("r/2", 3, epoch) is True
