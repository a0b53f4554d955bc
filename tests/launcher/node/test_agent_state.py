"""Decisions of a node agent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.operation import SupervisionConfig
from asyncrl.launcher.node.agent_state import NEVER_RAN_GRACE_S, VERDICT_S, AgentState
from asyncrl.launcher.node.instructions import AnnounceRestart, AskStop, Kill, KillAll, ReportEnd, ReportStart, Spawn
from asyncrl.launcher.terms.spec import AT_ONCE, EndedEvent
from asyncrl.messages.actors import Aside, Condemned, RunState
from asyncrl.runtime.lifecycle.registry import FIRST_WORD_S

NAMES = ("controller/0", "dataloader/0", "learner/0", "rollouter/0", "rollouter/1")
POLICY = SupervisionConfig(max_restarts=2, backoff_s=1.0, restart_window_s=1000.0, drain_s=10.0, host_grace_s=60.0)
GRACE_S = 30.0


ROLLOUTER = NAMES.index("rollouter/0") + 1
"""Its incarnation."""
LEARNER = NAMES.index("learner/0") + 1


def state(phase, **changes):
    return RunState(number=1, phase=phase, **changes)


def host(*, running=True):
    found = AgentState({name: f"/logs/{name.replace('/', '-')}.log" for name in NAMES}, POLICY, grace_s=GRACE_S)
    assert found.begin() == [Spawn("controller/0")]
    if running:
        assert found.controller_found(0.0) == [Spawn(name) for name in NAMES[1:]]
        found.state(state("running"), 0.0)
    for incarnation, name in enumerate(NAMES, 1):
        found.spawned(name, incarnation)
    return found


def test_nobody_is_started_before_the_controller_has_said_something():
    """Which may be what numbers the others have to be above."""
    found = host(running=False)
    found.controller_at(1.0)
    assert found.tick(2.0) == []
    assert found.state(state("running"), 3.0) == [Spawn(name) for name in NAMES[1:]]
    assert found.next_deadline() is None
    assert found.state(state("running"), 4.0) == found.tick(1e6) == []
    assert found.living == set(NAMES)


def test_a_controller_that_never_says_a_word_is_killed():
    found = host(running=False)
    found.controller_at(1.0)
    assert found.next_deadline() == 1.0 + max(FIRST_WORD_S, POLICY.silence_s)
    assert found.tick(found.next_deadline()) == [Kill("controller/0")]


def test_a_death_is_followed_by_a_restart_after_a_pause():
    found = host()
    assert found.exited("rollouter/0", -9, "", 5.0) == [
        ReportEnd("rollouter/0", ROLLOUTER, -9, False, "killed by SIGKILL")
    ]
    assert found.next_deadline() == 6.0
    assert found.tick(5.9) == []
    assert found.tick(6.0) == [AnnounceRestart("rollouter/0", "killed by SIGKILL"), Spawn("rollouter/0")]
    assert not found.ending
    found.exited("rollouter/0", 3, "out of memory", 7.0)
    assert found.next_deadline() == 9.0
    assert found.tick(9.0)[0] == AnnounceRestart("rollouter/0", "exit code 3: out of memory")


def condemned(*actors):
    return state(
        "running", condemned=[Condemned(name, incarnation, "it did not beat for 61 s") for name, incarnation in actors]
    )


def test_a_frozen_actor_is_killed_once_and_started_again_as_after_any_death():
    found = host()
    assert found.state(condemned(("rollouter/0", ROLLOUTER)), 5.0) == [Kill("rollouter/0")]
    assert found.state(condemned(("rollouter/0", ROLLOUTER)), 5.1) == []
    (report,) = found.exited("rollouter/0", -9, "last words", 5.2)
    assert report == ReportEnd("rollouter/0", ROLLOUTER, -9, False, "killed by SIGKILL: it did not beat for 61 s")
    assert found.state(condemned(("rollouter/0", ROLLOUTER)), 5.3) == []
    assert found.tick(6.2) == [AnnounceRestart("rollouter/0", report.reason), Spawn("rollouter/0")]
    found.spawned("rollouter/0", 100)
    assert found.state(condemned(("rollouter/0", ROLLOUTER)), 6.3) == []
    assert found.state(condemned(("rollouter/0", 100)), 70.0) == [Kill("rollouter/0")]
    assert found.exited("rollouter/0", -9, "", 70.1)[0].reason == report.reason


@pytest.mark.parametrize("actor", [("rollouter/0", ROLLOUTER - 1), ("rollouter/0", ROLLOUTER + 1), ("rollouter/9", 1)])
def test_only_the_process_that_is_frozen_is_killed_and_none_while_the_run_ends(actor):
    found = host()
    assert found.state(condemned(actor), 5.0) == []
    assert found.exited("rollouter/0", -9, "", 6.0)[0].reason == "killed by SIGKILL"
    found = host()
    found.state(state("draining"), 5.0)
    assert found.state(condemned(("rollouter/0", ROLLOUTER)), 5.1) == []


def test_giving_up_ends_the_run_with_its_reason():
    found = host()
    for now in (1.0, 10.0):
        found.exited("dataloader/0", -9, "", now)
        found.tick(now + 5)
    (report,) = found.exited("dataloader/0", 3, "out of memory", 20.0)
    assert (report.fatal, report.reason) == (True, "exit code 3, after 2 restarts within 1000 s: out of memory")
    assert found.ending
    assert found.next_deadline() == 30.0
    assert str(found.failure) == f"dataloader/0: {report.reason} (log: /logs/dataloader-0.log)"
    # What the controller makes of it counts; it knew of no other failure before.
    found.state(state("draining", failed_actor="dataloader/0", reason=report.reason, exit_code=1), 20.1)
    assert found.failure.actor == "dataloader/0"
    assert found.next_deadline() == 30.0
    # The reason that an actor gave itself wins.
    found = host()
    found.exited("learner/0", 2, "", 5.0)
    found.state(state("draining", failed_actor="learner/0", reason="no signal", exit_code=1), 5.1)
    assert str(found.failure) == "learner/0: no signal (log: /logs/learner-0.log)"


def given_up():
    """A host that has given rollouter/0 up."""
    found = host()
    for now in (1.0, 10.0):
        found.exited("rollouter/0", -9, "", now)
        found.tick(now + 5)
        found.spawned("rollouter/0", 100 + int(now))
    assert found.exited("rollouter/0", 3, "out of memory", 20.0)[0].fatal
    return found


def aside(*names):
    return state("running", aside=[Aside(name, "it cannot be kept alive", 600.0) for name in names])


def test_a_replica_that_is_given_up_is_started_again_once_it_is_set_aside_no_more():
    found = given_up()
    assert not found.ending and found.failure is None and found.next_deadline() is None
    # The controller has not heard of its end so far.
    assert found.state(state("running"), 20.1) == []
    assert found.state(aside("rollouter/0"), 20.2) == []
    assert found.state(aside("rollouter/0"), 900.0) == []
    assert found.state(state("running"), 901.0) == [Spawn("rollouter/0")]
    found.spawned("rollouter/0", 200)
    # Its earlier deaths are forgotten.
    assert not found.exited("rollouter/0", 3, "", 902.0)[0].fatal


def test_the_successor_of_a_controller_is_told_who_is_given_up_and_is_not_misunderstood():
    found = given_up()
    found.state(aside("rollouter/0"), 20.2)
    told = found.controller_found(30.0)
    assert [end.name for end in told if isinstance(end, ReportEnd) and end.fatal] == ["rollouter/0"]
    assert found.state(state("running"), 30.1) == []
    assert found.state(aside("rollouter/0"), 30.2) == []
    assert found.state(state("running"), 30.3) == [Spawn("rollouter/0")]
    assert not any(isinstance(told, ReportEnd) for told in found.controller_found(40.0))


@pytest.mark.parametrize("exit_code", [-9, 0])
def test_a_replica_that_lives_and_is_set_aside_is_killed_and_stays_so(exit_code):
    found = host()
    assert found.state(aside("rollouter/0"), 5.0) == [Kill("rollouter/0")]
    assert found.state(aside("rollouter/0"), 5.1) == []
    (report,) = found.exited("rollouter/0", exit_code, "", 5.2)
    assert report.fatal and report.reason.endswith(": it cannot be kept alive")
    assert (found.tick(1e6), found.next_deadline(), found.ending) == ([], None, False)
    assert found.state(state("running"), 1e6) == [Spawn("rollouter/0")]
    # Nor does a restart that is due come.
    found = host()
    found.exited("rollouter/0", exit_code, "", 5.0)
    assert found.state(aside("rollouter/0"), 5.1) == found.tick(100.0) == []


@pytest.mark.parametrize("exit_code", [2, 78])
def test_no_end_of_the_sinks_ends_the_run(exit_code):
    found = AgentState({"sinks/0": "/logs/sinks-0.log"}, POLICY, grace_s=GRACE_S)
    found.controller_found(0.0)
    found.spawned("sinks/0", 1)
    found.state(state("running"), 0.0)
    (report,) = found.exited("sinks/0", exit_code, "", 5.0)
    assert report.fatal and not found.ending and found.failure is None
    found.state(aside("sinks/0"), 6.0)
    assert found.state(state("running"), 700.0) == [Spawn("sinks/0")]


@pytest.mark.parametrize("name", ["learner/0", "rollouter/0"])
def test_what_a_restart_would_not_mend_ends_the_run(name):
    found = host()
    reason = "ended with exit code 78, which a restart would not mend"
    assert found.exited(name, 78, "", 5.0) == [ReportEnd(name, found.incarnations[name], 78, True, reason)]
    assert found.ending and found.failure.exit_code == 78


def test_an_end_with_exit_code_0_is_judged_by_the_word_of_the_controller():
    """The actor may hear of the end of the run before its agent does, and restarts may be over."""
    found = host()
    for now in (1.0, 10.0):
        found.exited("rollouter/0", -9, "", now)
        found.tick(now + 5)
        found.spawned("rollouter/0", ROLLOUTER)
    (report,) = found.exited("rollouter/0", 0, "", 20.0)
    assert report == ReportEnd("rollouter/0", ROLLOUTER, 0, False, "exit code 0")
    assert not found.ending
    # It was asked to: nothing follows, but the end of the run when that is heard of.
    assert found.told("rollouter/0", ROLLOUTER, True, 20.1) == []
    assert (found.tick(1e6), found.next_deadline(), found.failure) == ([], None, None)
    found.state(state("draining"), 20.2)
    assert found.ending


@pytest.mark.parametrize("told", [True, False])
def test_an_end_with_exit_code_0_that_nobody_asked_for_is_a_death(told):
    found = host()
    found.exited("rollouter/0", 0, "", 20.0)
    if told:
        assert found.told("rollouter/0", ROLLOUTER - 1, False, 20.1) == []
        assert found.told("rollouter/0", ROLLOUTER, False, 20.1) == []
        now = 20.1
    else:
        # Nor does anybody say so.
        assert found.next_deadline() == 20.0 + VERDICT_S
        now = 20.0 + VERDICT_S
        assert found.tick(now) == []
    assert found.next_deadline() == now + 1.0
    assert found.tick(now + 1.0) == [AnnounceRestart("rollouter/0", "exit code 0"), Spawn("rollouter/0")]
    assert found.told("rollouter/0", ROLLOUTER, False, now + 2.0) == []


def test_too_many_ends_with_exit_code_0_end_the_run():
    found = host()
    for now in (1.0, 10.0):
        found.exited("learner/0", -9, "", now)
        found.tick(now + 5)
    found.exited("learner/0", 0, "", 20.0)
    (report,) = found.told("learner/0", LEARNER, False, 20.1)
    assert (report.fatal, report.reason) == (True, "exit code 0, after 2 restarts within 1000 s")
    assert found.ending


FAR = ("learner/1", "rollouter/2")


def far():
    """A host beside the head, with its actors of incarnations 1 and 2."""
    found = AgentState({name: f"/logs/{name.replace('/', '-')}.log" for name in FAR}, POLICY, grace_s=GRACE_S)
    assert found.begin() == []
    assert found.controller_found(0.0) == [Spawn(name) for name in FAR]
    for incarnation, name in enumerate(FAR, 1):
        found.spawned(name, incarnation)
    found.state(state("running"), 0.0)
    return found


def test_a_host_that_leaves_ends_with_its_actors_and_starts_none_again():
    found = far()
    found.exited("rollouter/2", -9, "", 4.5)
    assert found.leave(5.0, 5.0) == []
    assert (found.finished, found.next_deadline()) == (False, 20.0)
    assert found.tick(6.0) == []
    assert found.exited("learner/1", 0, "", 7.0) == [ReportEnd("learner/1", 1, 0, False, "")]
    assert found.finished and not found.ending
    # It has not failed when the controller wants nothing more of it.
    assert found.controller_lost("controller/0 refuses this actor", 7.1) == []
    assert (found.finished, found.ending, found.failure) == (True, False, None)


def test_a_death_on_a_host_that_leaves_is_told_and_nothing_more():
    found = far()
    found.leave(5.0, 5.0)
    assert found.exited("learner/1", -9, "", 7.0) == [ReportEnd("learner/1", 1, -9, False, "")]
    assert found.tick(19.9) == []
    assert found.tick(20.0) == [KillAll()]
    assert found.next_deadline() is None
    found.exited("rollouter/2", -9, "", 20.1)
    assert (found.finished, found.failure) == (True, None)


def test_a_host_that_leaves_before_it_has_started_anything_is_finished():
    found = AgentState({"rollouter/0": "/logs/0"}, POLICY, grace_s=GRACE_S)
    found.leave(5.0, 1.0)
    assert found.controller_found(1.1) == []
    assert found.finished


def test_the_run_may_end_while_a_host_leaves():
    found = far()
    found.leave(100.0, 5.0)
    found.state(state("draining", exit_code=0), 6.0)
    assert (found.ending, found.finished_run, found.next_deadline()) == (True, True, 16.0)


def test_the_head_does_not_leave():
    found = host()
    found.leave(5.0, 5.0)
    assert not found.leaving


def test_nothing_is_started_while_the_run_ends():
    found = host()
    found.exited("rollouter/0", -9, "", 5.0)
    found.state(state("draining"), 5.5)
    assert found.next_deadline() == 15.5
    assert found.tick(7.0) == []
    assert found.exited("rollouter/1", -9, "", 7.0) == [ReportEnd("rollouter/1", ROLLOUTER + 1, -9, False, "")]
    assert found.next_deadline() == 15.5
    assert found.tick(15.5) == [KillAll()]
    assert found.next_deadline() is None
    assert not found.finished
    for name in ("dataloader/0", "learner/0", "controller/0"):
        found.exited(name, -9, "", 16.0)
    assert found.finished
    assert found.finished_run
    assert found.failure is None


def test_the_others_go_on_while_the_controller_is_started_again():
    found = host()
    ends = found.exited("rollouter/0", -9, "", 4.0)
    found.tick(5.0)
    found.spawned("rollouter/0", 50)
    assert found.exited("controller/0", -9, "", 5.0) == []
    assert not found.ending
    assert found.living == set(NAMES[1:])
    # Deaths go on being mended meanwhile.
    ends += found.exited("rollouter/1", 1, "boom", 5.5)
    assert found.tick(6.0) == [AnnounceRestart("controller/0", "killed by SIGKILL"), Spawn("controller/0")]
    assert found.tick(6.5) == [AnnounceRestart("rollouter/1", "exit code 1: boom"), Spawn("rollouter/1")]
    # Its successor hears of every end, and starts nobody a second time.
    told = found.controller_found(7.0)
    living = [ReportStart(name, found.incarnations[name]) for name in sorted(found.living - {"controller/0"})]
    assert told == [*living, *ends]
    assert found.next_deadline() is None
    assert found.living == set(NAMES)


def test_a_controller_that_keeps_dying_ends_the_run_with_its_name():
    found = host()
    for now in (1.0, 10.0):
        assert found.exited("controller/0", -9, "", now) == []
        found.tick(now + 5)
        found.controller_found(now + 6)
    assert found.exited("controller/0", 1, "boom", 20.0) == [KillAll()]
    reason = "exit code 1, after 2 restarts within 1000 s: boom"
    assert str(found.failure) == f"controller/0: {reason} (log: /logs/controller-0.log)"


def test_a_controller_that_says_nothing_after_its_restart_is_killed_and_started_again():
    """As one that is frozen before its first word; again and again, it ends the run."""
    found = host()
    found.exited("controller/0", -9, "", 5.0)
    found.tick(6.0)
    silence = max(FIRST_WORD_S, POLICY.silence_s)
    assert found.next_deadline() == 6.0 + silence
    assert found.tick(6.0 + silence) == [Kill("controller/0")]
    assert found.next_deadline() is None
    now = 7.0 + silence
    assert found.exited("controller/0", -9, "", now) == []
    words = f"killed by SIGKILL: it said nothing for {silence:g} s after its start"
    assert found.tick(now + 5) == [AnnounceRestart("controller/0", words), Spawn("controller/0")]
    assert found.tick(now + 5 + silence) == [Kill("controller/0")]
    assert found.exited("controller/0", -9, "", now + 6 + silence) == [KillAll()]
    assert found.failure.actor == "controller/0"


def test_the_successor_of_a_controller_that_was_never_heard_is_found_by_its_first_word():
    found = host(running=False)
    found.controller_found(1.0)
    found.spawned("rollouter/0", 100)
    found.exited("controller/0", -9, "", 5.0)
    found.tick(6.0)
    assert ReportStart("rollouter/0", 100) in found.state(state("running"), 7.0)
    assert found.next_deadline() is None
    assert found.stop("Ctrl-C", 8.0) == [AskStop("Ctrl-C")]


def test_a_controller_that_dies_at_its_start_or_before_its_first_word_is_started_again():
    found = host(running=False)
    assert found.exited("controller/0", -9, "", 5.0) == []
    again = [AnnounceRestart("controller/0", "killed by SIGKILL"), Spawn("controller/0")]
    assert found.tick(6.0) == again
    assert found.controller_found(7.0) == [Spawn(name) for name in NAMES[1:]]
    found = host()
    found.exited("controller/0", -9, "", 5.0)
    found.tick(6.0)
    found.exited("controller/0", -9, "", 7.0)
    assert found.tick(12.0) == again
    assert found.next_deadline() == 12.0 + max(FIRST_WORD_S, POLICY.silence_s)


def test_a_frozen_controller_is_killed_and_started_again():
    found = host()
    found.state(state("running"), 10.0)
    assert found.controller_silent(40.0) == []
    assert found.controller_silent(69.0) == []
    assert found.controller_silent(99.0) == [Kill("controller/0")]
    assert found.controller_silent(130.0) == []
    assert found.exited("controller/0", -9, "", 131.0) == []
    # Nobody answers while there is none.
    assert found.controller_silent(131.1) == []
    assert found.tick(132.0)[0] == AnnounceRestart("controller/0", "killed by SIGKILL: it did not answer for 89 s")
    found.controller_found(133.0)
    # One call without an answer may be this host's own fault: it was asleep.
    assert found.controller_silent(1000.0) == []
    found.state(state("running"), 1000.1)
    assert found.controller_silent(1100.0) == []


def test_without_its_controller_nobody_ends_in_order():
    found = host()
    found.state(state("done", draining=["controller"]), 5.0)
    assert found.exited("controller/0", 0, "", 5.1) == [KillAll()]
    assert found.failure is None
    found = host()
    found.exited("controller/0", -9, "", 5.0)
    assert found.stop("SIGINT", 5.1) == [KillAll()]
    assert (found.stopped, found.failure) == ("SIGINT", None)


def test_a_run_makes_way():
    found = host()
    assert found.preempt("SIGTERM", 5.0) == [AskStop("SIGTERM", preempt=True)]
    # Asked while the controller is away, the wish waits for its successor.
    away = host()
    away.exited("controller/0", -9, "", 5.0)
    assert away.preempt("SIGTERM", 5.5) == []
    away.tick(6.0)
    assert away.controller_found(7.0)[-1] == AskStop("SIGTERM", preempt=True)
    # Asked by two at once, as when a scheduler signals every process.
    assert found.preempt("SIGUSR2", 5.1) == []
    assert not found.ending
    found.state(state("preempting"), 5.2)
    # Deaths are mended meanwhile.
    found.exited("learner/0", -9, "", 6.0)
    assert found.tick(7.0)[-1] == Spawn("learner/0")
    found.state(state("draining", exit_code=75, reason="preempted by SIGTERM with a checkpoint of version 3"), 8.0)
    assert (found.ending, found.deadline) == (True, 18.0)
    assert (found.preempted, found.finished_run, found.failure) == (True, False, None)
    assert found.stopped == "preempted by SIGTERM with a checkpoint of version 3"
    assert found.how_it_ended("agent/0", "log") == EndedEvent(result="preempted", reason=found.stopped, exit_code=75)


def test_a_wish_that_the_controller_was_told_of_by_another_is_kept_as_ones_own():
    found = host()
    assert found.state(state("preempting", reason="asyncrl-launch --stop"), 5.0) == []
    assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s
    found.exited("controller/0", -9, "", 6.0)
    found.tick(7.0)
    assert found.controller_found(8.0)[-1] == AskStop("asyncrl-launch --stop", preempt=True)
    found.exited("controller/0", -9, "", 8.1)
    found.tick(10.2)
    assert found.controller_found(10.3)[-1] == AskStop("asyncrl-launch --stop", preempt=True)
    # One of several who ask does not hurry the others.
    assert found.preempt("SIGTERM", 8.5) == []
    assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s


@pytest.mark.parametrize(("checkpoint", "result", "code"), [(3, "preempted", 75), (-1, "stopped", 143)])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_ended_at_once_goes_on_from_its_last_checkpoint(checkpoint, result, code, asked):
    found = host()
    found.state(state("running", checkpoint=checkpoint), 1.0)
    if asked:
        found.preempt("Ctrl-C", 5.0)
    assert found.kill(AT_ONCE, 6.0) == [KillAll()]
    assert found.how_it_ended("agent/0", "log") == EndedEvent(result=result, reason=AT_ONCE, exit_code=code)


@pytest.mark.parametrize("wish", ["preempt", "kill"])
def test_what_never_ran_is_no_run_to_go_on_with(wish):
    found = host(running=False)
    found.controller_found(0.0)
    found.state(state("starting", checkpoint=3), 1.0)
    getattr(found, wish)("Ctrl-C", 5.0)
    assert found.how_it_ended("agent/0", "log") == EndedEvent(result="stopped", reason="Ctrl-C", exit_code=143)


def test_an_agent_without_its_guard_has_the_run_make_way_and_fails():
    found = host()
    assert found.guard_lost(5.0) == [AskStop("the death of a guard", preempt=True)]
    reason = "preempted by the death of a guard with a checkpoint of version 3"
    found.state(state("draining", exit_code=75, reason=reason), 8.0)
    why = f"its guard was killed, without which no agent goes on ({reason})"
    assert found.how_it_ended("agent/0", "log") == EndedEvent(
        result="failed", actor="agent/0", reason=why, log="log", exit_code=1
    )
    done = host()
    done.guard_lost(5.0)
    done.state(state("done"), 6.0)
    assert done.how_it_ended("agent/0", "log") == EndedEvent(result="done")


@pytest.mark.parametrize("checkpoint", [-1, 3])
def test_who_does_not_make_way_in_time_is_killed(checkpoint):
    found = host()
    found.state(state("running", checkpoint=checkpoint), 1.0)
    found.preempt("SIGTERM", 5.0)
    assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s
    assert found.tick(5.0 + GRACE_S + POLICY.drain_s) == [KillAll()]
    assert (found.preempted, found.failure) == (checkpoint >= 0, None)


@pytest.mark.parametrize("second", ["stop", "kill"])
def test_a_second_wish_ends_at_once(second):
    found = host()
    found.preempt("SIGTERM", 5.0)
    assert getattr(found, second)("again", 6.0) == [KillAll()]
    assert found.stopped == "again"


def test_stop_asks_the_controller_and_the_second_kills():
    found = host()
    assert found.stop("SIGTERM", 5.0) == [AskStop("SIGTERM")]
    assert found.next_deadline() == 15.0
    found.state(state("draining", reason="SIGTERM", exit_code=130), 5.1)
    assert found.stop("SIGTERM", 6.0) == [KillAll()]
    assert (found.stopped, found.failure, found.finished_run) == ("SIGTERM", None, False)


def test_the_first_stop_does_not_hurry_a_run_that_is_ending():
    found = host()
    found.state(state("draining"), 5.0)
    assert found.stop("SIGINT", 5.1) == []
    assert found.stopped == ""
    assert found.stop("SIGINT", 5.2) == [KillAll()]
    assert found.finished_run


def test_a_run_that_never_ran_is_not_waited_for():
    found = host(running=False)
    assert found.stop("SIGINT", 5.0) == [KillAll()]
    found = host(running=False)
    assert found.preempt("SIGTERM", 5.0) == [KillAll()]
    assert (found.stopped, found.preempted) == ("SIGTERM", False)
    found = host(running=False)
    found.controller_found(1.0)
    found.state(state("starting", waiting_for=["learner/0"]), 1.0)
    assert found.stop("SIGINT", 5.0) == [KillAll()]
    found = host(running=False)
    found.controller_found(1.0)
    found.state(state("draining", failed_actor="learner/0", reason="no model", exit_code=78), 5.0)
    assert found.next_deadline() == 5.0 + NEVER_RAN_GRACE_S
    assert found.failure.exit_code == 78


def test_a_controller_that_is_never_found():
    found = host(running=False)
    assert found.controller_lost("no address after 300 s", 300.0) == [KillAll()]
    assert found.failure.actor == "controller/0"
    found.exited("controller/0", -9, "", 300.0)
    assert found.finished
    assert found.controller_found(301.0) == []


events = st.one_of(
    st.just(("found",)),
    st.tuples(st.just("exited"), st.sampled_from(NAMES), st.sampled_from([0, 1, 78, -9])),
    st.tuples(st.just("state"), st.sampled_from(["starting", "running", "preempting", "draining", "done", "failed"])),
    st.tuples(st.just("aside"), st.sets(st.sampled_from(["rollouter/0", "rollouter/1"]))),
    st.sampled_from([("stop",), ("preempt",), ("kill",), ("unreachable",), ("launcher_gone",), ("silent",), ("tick",)]),
)


@given(st.lists(st.tuples(st.floats(0, 15), events), max_size=80))
def test_invariants(history):
    found = host(running=False)
    now, processes, ending_since, was_found, asked_since = 0.0, {"controller/0"}, None, False, None
    for gap, (kind, *arguments) in history:
        now += gap
        instructions = []
        if kind == "found" and "controller/0" in processes:
            was_found = True
            instructions = found.controller_found(now)
        elif kind == "exited" and arguments[0] in processes:
            processes.discard(arguments[0])
            instructions = found.exited(*arguments, "", now)
        elif kind == "state" and was_found:
            failed = {"failed_actor": "learner/0", "exit_code": 1} if arguments[0] == "failed" else {}
            instructions = found.state(state(arguments[0], **failed), now)
        elif kind == "aside" and was_found:
            instructions = found.state(aside(*arguments[0]), now)
            if not found.ending:
                started = {instruction.name for instruction in instructions if isinstance(instruction, Spawn)}
                assert not started & arguments[0]
        elif kind == "launcher_gone":
            found.launcher_gone()
        elif kind in ("stop", "kill", "preempt"):
            asked_since = now if asked_since is None else asked_since
            instructions = getattr(found, kind)("why", now)
        elif kind == "silent" and was_found:
            instructions = found.controller_silent(now)
        elif kind in ("unreachable", "tick") and (kind == "tick" or found.ending):
            instructions = getattr(found, kind)(now)
        for instruction in instructions:
            if isinstance(instruction, Spawn):
                assert instruction.name not in processes
                assert not found.ending
                processes.add(instruction.name)
            if isinstance(instruction, Kill):
                assert instruction.name in processes
        assert found.living == processes
        if found.ending and ending_since is None:
            ending_since = now
        if found.ending and found.deadline is not None:
            assert found.deadline <= ending_since + POLICY.drain_s
        assert found.finished == (found.ending and not processes)
        if asked_since is not None and not found.ending:
            assert found.next_deadline() <= asked_since + GRACE_S + POLICY.drain_s
        if found.ending:
            assert found.failure or found.stopped or found.finished_run


def test_who_lived_on_a_host_that_was_lost_is_started_again_without_counting():
    found = far()
    for round in range(5):
        back = 100.0 * (round + 1)
        incarnation = found.incarnations["rollouter/2"]
        assert found.controller_silent(back - 20.0) == []
        kills = [i for i in found.state(condemned(("rollouter/2", incarnation)), back) if isinstance(i, Kill)]
        assert kills == [Kill("rollouter/2")]
        (told,) = found.exited("rollouter/2", -9, "", back + 1.0)
        assert isinstance(told, ReportEnd) and not told.fatal
        assert found.tick(back + 2.0)[-1] == Spawn("rollouter/2")
        found.spawned("rollouter/2", incarnation + 10)
        found.state(state("running"), back + 3.0)
    # Its next ends are its own again.
    for now in (510.0, 520.0):
        found.state(state("running"), now)
        (told,) = found.exited("rollouter/2", 3, "", now)
        assert not told.fatal
        found.tick(now + 5.0)
        found.spawned("rollouter/2", int(now))
    found.state(state("running"), 530.0)
    (told,) = found.exited("rollouter/2", 3, "", 530.0)
    assert told.fatal


def test_ends_while_the_host_is_cut_off_count_for_nothing_and_are_told_again():
    found = far()
    for now in (40.0, 50.0, 60.0, 70.0):
        (told,) = found.exited("learner/1", 1, "gloo: connection closed", now)
        assert not told.fatal
        found.tick(now + 2.0)


def test_ends_that_could_not_be_told_are_told_when_the_controller_is_heard_of_again():
    found = far()
    (told,) = found.exited("learner/1", 1, "gloo: connection closed", 5.0)
    found.controller_silent(10.0)
    assert found.state(state("running"), 12.0) == [told]
    assert found.state(state("running"), 13.0) == []


def test_a_host_without_launcher_and_controller_ends_by_itself():
    """I7: a host that stays cut off leaves nothing running."""
    found = far()
    found.launcher_gone()
    # The controller was heard of meanwhile.
    found.state(state("running"), 15.0)
    until = 15.0 + POLICY.host_grace_s
    assert found.next_deadline() == until
    assert found.tick(until - 0.1) == []
    assert found.tick(until) == [KillAll()]
    for name in FAR:
        found.exited(name, -9, "", until)
    assert found.finished and found.failure is not None
