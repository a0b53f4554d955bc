"""The conductor: versions only grow, few pause at once, nobody waits for a replica that is gone."""

import pytest
from conductor_play import Play


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("most", [4, 6])
def test_of_64_slow_replicas_no_more_versions_are_held_than_may_be_and_each_comes_to_a_newer_one(most, delta):
    play = Play(transport="stream", versions_held=most, delta=delta, stage_deadline_s=1e9)
    play.publish(1)
    names = [f"r/{index:02d}" for index in range(64)]
    stages, committed, outrun = {}, set(), 0
    for version in range(2, 3000):
        # One begins with each publication, and takes as long as ten of them.
        for name in names[: version - 1]:
            if name not in stages and name not in committed:
                stages[name] = play.next(name, -1).version, version
        play.conductor.publications.accept(version)
        assert len(play.conductor.publications.needed()) <= most
        play.conductor.publications.publish(version)
        assert len(play.conductor.publications.needed()) <= most
        assert play.conductor.publications.newest in play.conductor.publications.needed()
        for name, (target, since) in list(stages.items()):
            if target not in play.conductor.publications.needed():
                # Its next chunk is refused, and it asks again.
                del stages[name]
                outrun += 1
            elif version - since >= 10:
                play.pause(name, target)
                assert play.report(name, target)
                committed.add(name)
                del stages[name]
        if committed == {*names}:
            break
    assert committed == {*names}
    assert outrun


def test_who_was_outrun_once_goes_before_who_began_after_it():
    play = Play(transport="stream", versions_held=2)
    play.publish(1)
    assert play.next("r/0", -1).version == 1
    play.publish(2)
    assert play.next("r/1", -1).version == 2
    play.publish(3)
    assert play.conductor.publications.needed() == {1, 3}
    assert play.replica("r/1").outrun
    assert play.next("r/2", -1).version == 3
    play.left("r/0")
    play.publish(4)
    assert play.conductor.publications.needed() == {3, 4}
    # It has tried for longer than r/2, though with what is newer.
    assert play.next("r/1", -1).version == 4
    play.publish(5)
    assert play.conductor.publications.needed() == {4, 5}
    assert play.replica("r/2").outrun
    # After a commit it is at the end of the line again.
    assert play.pause("r/1", 4)
    assert play.report("r/1", 4)
    assert play.next("r/2", -1).version == 5
    assert play.next("r/1", 4).version == 5
    assert play.replica("r/2").seniority < play.replica("r/1").seniority


def test_a_staging_past_its_deadline_is_given_up_and_said_who_it_was():
    play = Play(transport="stream", stage_deadline_s=60)
    play.publish(0)
    play.next("r/0", -1)
    play.publish(1)
    play.conductor.fleet.take_effects()
    play.later(59)
    assert play.conductor.publications.needed() == {0, 1}
    play.later(1)
    assert play.conductor.publications.needed() == {1}
    assert play.phases() == {"r/0": "behind"}
    [note] = [note for note in play.conductor.fleet.take_effects().notes if note.level == "warning"]
    assert (note.event, note.facts) == ("staging overdue", {"replica": "r/0", "version": 0, "waited_s": 60.0})
    # It was about to be done: it goes on.
    assert play.pause("r/0", 0)
    assert play.report("r/0", 0)


def test_with_deltas_the_base_of_the_newest_stays_held():
    play = Play(delta=True)
    for version in (0, 3, 7):
        play.publish(version)
    assert play.conductor.publications.needed() == {3, 7}


def test_what_waits_for_its_deltas_is_held_and_not_offered():
    play = Play(delta=True)
    play.serve("r/0")
    play.conductor.publications.accept(1)
    assert play.conductor.publications.needed() == {0, 1}
    assert play.look("r/0") is None
    play.conductor.publications.accept(2)
    assert play.conductor.publications.needed() == {0, 2}
    play.conductor.publications.publish(2)
    assert play.conductor.publications.needed() == {0, 2}
    assert play.look("r/0").version == 2


@pytest.mark.parametrize(("replicas", "fraction", "at_once"), [(1, 0.1, 1), (4, 0.5, 2), (5, 0.5, 2), (4, 1.0, 4)])
def test_only_a_fraction_pauses_at_once_first_come_first_served(replicas, fraction, at_once):
    play = Play(max_paused_fraction=fraction)
    play.publish(0)
    names = [f"r/{i}" for i in range(replicas)]
    for name in names:
        play.next(name, -1)
    names.reverse()
    granted = [name for name in names if play.pause(name, 0)]
    assert granted == names[:at_once]
    assert play.conductor.figures()["replicas_paused"] == at_once
    for i in range(at_once, replicas):
        # Asking again keeps the place.
        play.pause(names[i], 0)
        play.conductor.fleet.take_effects()
        play.report(names[i - at_once], 0)
        assert play.conductor.fleet.take_effects().wake == {names[i]}
        assert [name for name in names[i:] if play.look(name)] == [names[i]]


def test_a_replica_between_two_questions_keeps_its_place_and_blocks_nobody():
    play = Play(max_paused_fraction=0.1)
    play.publish(0)
    for name in ("r/0", "r/1", "r/2", "r/3"):
        play.next(name, -1)
        play.pause(name, 0)
    play.end_of_park("r/1")
    play.report("r/0", 0)
    assert not play.look("r/3")
    assert play.look("r/2")
    play.pause("r/1", 0)
    play.report("r/2", 0)
    assert play.look("r/1")
    assert not play.look("r/3")


def test_a_pause_past_its_deadline_is_free_again():
    play = Play(max_paused_fraction=0.1)
    play.publish(0)
    for name in ("r/0", "r/1"):
        play.next(name, -1)
    assert play.pause("r/0", 0)
    assert play.conductor.next_deadline() == play.now + 10
    play.pause("r/1", 0)
    play.later(9.9)
    assert not play.look("r/1")
    play.later(0.1)
    assert play.look("r/1")
    assert play.phases() == {"r/0": "behind", "r/1": "loading"}
    # It has to ask for its turn like everybody else.
    assert not play.pause("r/0", 0)
    assert play.phases()["r/0"] == "waiting"
    assert play.conductor.figures()["pauses_taken_back"] == 1


def test_asking_again_keeps_a_pause_and_a_late_report_changes_nothing():
    play = Play(max_paused_fraction=0.1)
    play.publish(0)
    for name in ("r/0", "r/1"):
        play.next(name, -1)
    assert play.pause("r/0", 0)
    play.pause("r/1", 0)
    for _ in range(4):
        play.later(8)
        assert play.pause("r/0", 0)
        assert not play.look("r/1")
    assert play.report("r/0", 0)
    for committed in (True, False):
        assert not play.report("r/0", 0, committed=committed)
        assert play.phases()["r/0"] == "serving"
    assert play.conductor.figures()["updates_committed"] == 1
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    assert not play.report("r/0", 0)
    assert not play.report("r/0", 0, committed=False)
    assert play.phases()["r/0"] == "staging"
    # Nor does a late question for the pause.
    assert not play.pause("r/0", 0)
    assert play.phases()["r/0"] == "staging"


@pytest.mark.parametrize("phase", ["staging", "waiting", "loading"])
def test_a_failure_leaves_a_replica_behind_until_it_commits(phase):
    play = Play(max_paused_fraction=0.1)
    play.serve("r/0", "r/1")
    play.publish(1)
    if phase == "waiting":
        play.next("r/1", 0)
        assert play.pause("r/1", 1)
    for attempt in (1, 2):
        assert play.next("r/0", 0).version == 1
        if phase != "staging":
            play.pause("r/0", 1)
        assert play.phases()["r/0"] == phase
        for _ in range(2):
            # Repeated, it is still one failure.
            play.report("r/0", 1, committed=False)
            assert play.phases()["r/0"] == "behind"
            assert play.conductor.figures()["failed_attempts"] == attempt
            assert play.conductor.figures()["updates_failed"] == attempt
            assert play.conductor.figures()["replicas_behind"] == 1
    if phase == "waiting":
        play.report("r/1", 1)
    play.commit("r/0", 1, serving=0)
    assert play.phases()["r/0"] == "serving"
    assert play.conductor.figures()["failed_attempts"] == 0


def test_a_lost_report_is_made_good_by_the_next_question():
    play = Play(max_paused_fraction=0.1)
    play.publish(0)
    for name in ("r/0", "r/1"):
        play.next(name, -1)
    assert play.pause("r/0", 0)
    assert not play.pause("r/1", 0)
    assert play.next("r/0", 0) is None
    assert play.phases()["r/0"] == "serving"
    assert play.look("r/1")
    # That of a failure is, too.
    assert play.next("r/1", -1).version == 0
    assert play.conductor.figures()["updates_failed"] == 1


def test_a_replica_that_cancels_its_question_gives_back_its_pause():
    play = Play(max_paused_fraction=0.1)
    play.publish(0)
    for name in ("r/0", "r/1", "r/2"):
        play.next(name, -1)
    assert play.pause("r/0", 0)
    for name in ("r/1", "r/2"):
        assert not play.pause(name, 0)
    # Granted, and cancelled before it heard of it.
    play.report("r/0", 0)
    assert play.phases()["r/1"] == "loading"
    play.cancel("r/1")
    assert play.phases()["r/1"] == "behind"
    assert play.look("r/2")


def test_a_new_incarnation_starts_over_and_the_old_one_is_not_heard_any_more():
    play = Play(max_paused_fraction=0.1)
    play.serve("r/0", "r/1")
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    assert play.pause("r/0", 1)
    # Its first word is enough, should the news of its predecessor's death be late.
    assert play.next("r/0", -1, incarnation=2).version == 1
    assert play.phases()["r/0"] == "staging"
    assert play.next("r/1", 0).version == 1
    assert play.pause("r/1", 1)
    assert not play.report("r/0", 1, incarnation=1)
    assert play.pause("r/0", 1, incarnation=1) is None
    assert play.next("r/0", 0, incarnation=1) is None
    assert play.join("r/0", 1, 1, incarnation=1) is None
    play.left("r/0", incarnation=1)
    assert play.phases()["r/0"] == "staging"
    assert play.replica("r/0").serving == -1


def test_a_new_parameter_server_takes_up_what_is_under_way():
    play = Play(max_paused_fraction=0.1)
    # Staged with its predecessor; the version is not published here yet.
    assert play.pause("r/0", 7)
    assert play.phases() == {"r/0": "loading"}
    assert play.report("r/0", 7)
    assert play.report("r/1", 7)
    assert play.report("r/2", 7, committed=False)
    assert play.next("r/3", 7) is None
    assert play.next("r/4", 6) is None
    assert play.join("r/5", 7, 3) is False
    assert play.phases() == {
        "r/0": "serving", "r/1": "serving", "r/2": "behind", "r/3": "serving", "r/4": "serving", "r/5": "serving",
    }  # fmt: skip
    play.publish(7)
    for name in ("r/0", "r/1", "r/3"):
        assert play.next(name, 7) is None
    assert play.next("r/2", 6).version == 7
    assert play.look("r/4").version == 7
