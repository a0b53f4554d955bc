"""Decisions of a node agent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.operation import SupervisionConfig
from asyncrl.launcher.common.agent_messages import AT_ONCE, EndedEvent, RestartEvent
from asyncrl.launcher.node.agent_state import NEVER_RAN_GRACE_S, VERDICT_S, AgentState, Kill, KillAll, Spawn
from asyncrl.messages.actors import ActorEnded, ActorStarted, Condemned, RestingReplica, RunState, StopRun
from asyncrl.rpc.lifecycle.registry import FIRST_WORD_S

HEAD = ("controller/0", "dataloader/0", "learner/0", "rollouter/0", "rollouter/1")
FAR = ("learner/1", "rollouter/2")
POLICY = SupervisionConfig(max_restarts=2, backoff_s=1.0, restart_window_s=1000.0, drain_s=10.0, host_grace_s=60.0)
GRACE_S = 30.0
FIRST_S = max(FIRST_WORD_S, POLICY.silence_s)
KILLED = "killed by SIGKILL"


def state(phase="running", **changes):
    return RunState(number=1, phase=phase, **changes)


def state_with_resting(*names):
    return state(resting=[RestingReplica(name, "it cannot be kept alive", 600.0) for name in names])


def condemned(name, incarnation):
    return state(condemned=[Condemned(name, incarnation, "it did not beat for 61 s")])


def host(names=HEAD, *, running=True):
    """A host's actors, of incarnations 1, 2, ..."""
    found = AgentState({name: f"/logs/{name.replace('/', '-')}.log" for name in names}, POLICY, grace_s=GRACE_S)
    others = [Spawn(name) for name in names if name != "controller/0"]
    assert found.begin() == [Spawn("controller/0")] * (len(names) - len(others))
    if running:
        assert found.controller_found(0.0) == others
        found.state(state(), 0.0)
    for incarnation, name in enumerate(names, 1):
        found.spawned(name, incarnation)
    return found


def ended(name, incarnation, exit_code, fatal, reason):
    log = f"/logs/{name.replace('/', '-')}.log"
    return ActorEnded(name=name, incarnation=incarnation, exit_code=exit_code, fatal=fatal, reason=reason, log=log)


def restart(name, reason):
    return RestartEvent(name=name, reason=reason)


def ticked(found, now):
    """The instructions of a tick; restarts have only a name and a reason."""
    reported = found.tick(now)
    return [restart(each.name, each.reason) if isinstance(each, RestartEvent) else each for each in reported]


def dies(found, name, *times, exit_code=-9):
    """Deaths, each followed by a restart; a controller is heard of again."""
    for now in times:
        found.exited(name, exit_code, "", now)
        found.tick(now + 5)
        found.spawned(name, 100 + int(now))
        if name == "controller/0":
            found.controller_found(now + 6)


def end_of(found):
    return found.how_it_ended("agent/0", "log")


# --- deaths ---


def test_a_death_is_followed_by_a_restart_after_a_pause_until_there_are_too_many():
    found = host()
    assert found.exited("dataloader/0", -9, "", 5.0) == [ended("dataloader/0", 2, -9, False, KILLED)]
    assert found.next_deadline() == 6.0 and found.tick(5.9) == []
    assert ticked(found, 6.0) == [restart("dataloader/0", KILLED), Spawn("dataloader/0")]
    found.exited("dataloader/0", 3, "out of memory", 7.0)
    assert found.next_deadline() == 9.0 and not found.ending
    assert ticked(found, 9.0)[0] == restart("dataloader/0", "exit code 3: out of memory")
    (report,) = found.exited("dataloader/0", 3, "out of memory", 20.0)
    assert (report.fatal, report.reason) == (True, "exit code 3, after 2 restarts within 1000 s: out of memory")
    assert found.ending and found.next_deadline() == 30.0
    assert str(found.failure) == f"dataloader/0: {report.reason} (log: /logs/dataloader-0.log)"
    # A reason that an actor gave itself wins.
    found.state(state("draining", failed_actor="learner/0", reason="no signal", exit_code=78), 20.1)
    assert str(found.failure) == "learner/0: no signal (log: /logs/learner-0.log)" and found.failure.exit_code == 78
    assert found.next_deadline() == 30.0


@pytest.mark.parametrize("name", ["learner/0", "rollouter/0"])
def test_an_exit_code_that_no_restart_can_mend_ends_the_run(name):
    found = host()
    reason = "ended with exit code 78, which a restart would not mend"
    assert found.exited(name, 78, "", 5.0) == [ended(name, found.incarnations[name], 78, True, reason)]
    assert found.ending and found.failure.exit_code == 78


def test_a_frozen_process_is_killed_once_and_restarted_as_after_any_death():
    found = host()
    for wrong in (("rollouter/0", 3), ("rollouter/0", 5), ("rollouter/9", 1)):
        assert found.state(condemned(*wrong), 4.9) == []
    assert found.state(condemned("rollouter/0", 4), 5.0) == [Kill("rollouter/0")]
    assert found.state(condemned("rollouter/0", 4), 5.1) == []
    (report,) = found.exited("rollouter/0", -9, "last words", 5.2)
    assert report == ended("rollouter/0", 4, -9, False, f"{KILLED}: it did not beat for 61 s")
    assert found.state(condemned("rollouter/0", 4), 5.3) == []
    assert ticked(found, 6.2) == [restart("rollouter/0", report.reason), Spawn("rollouter/0")]
    found.spawned("rollouter/0", 100)
    assert found.state(condemned("rollouter/0", 100), 70.0) == [Kill("rollouter/0")]
    found.exited("rollouter/0", -9, "", 71.0)
    # Its next death is its own.
    found.tick(80.0)
    assert found.exited("rollouter/0", -9, "", 81.0)[0].reason.startswith(f"{KILLED}, after 2 restarts")
    found.state(state("draining"), 82.0)
    assert found.state(condemned("rollouter/1", 5), 83.0) == []


@pytest.mark.parametrize("word", ["asked", "not asked", "none"])
def test_the_controller_state_decides_whether_exit_code_0_is_a_death(word):
    """The actor may hear of the end of the run before its agent does, and restarts may be over."""
    found = host()
    assert found.exited("rollouter/0", 0, "", 20.0) == [ended("rollouter/0", 4, 0, False, "exit code 0")]
    assert found.next_deadline() == 20.0 + VERDICT_S and not found.ending
    assert found.end_noted("rollouter/0", 3, False, 20.1) == []
    judged = 20.0 + VERDICT_S
    if word == "none":
        assert found.tick(judged) == []
    else:
        judged = 20.1
        assert found.end_noted("rollouter/0", 4, word == "asked", judged) == []
    if word == "asked":
        assert (found.tick(1e6), found.next_deadline(), found.failure) == ([], None, None)
    else:
        assert found.next_deadline() == judged + 1.0
        assert ticked(found, judged + 1.0) == [restart("rollouter/0", "exit code 0"), Spawn("rollouter/0")]
        assert found.end_noted("rollouter/0", 4, False, judged + 2.0) == []


def test_too_many_ends_with_exit_code_0_end_the_run():
    found = host()
    dies(found, "learner/0", 1.0, 10.0)
    found.exited("learner/0", 0, "", 20.0)
    (report,) = found.end_noted("learner/0", 110, False, 20.1)
    assert (report.fatal, report.reason) == (True, "exit code 0, after 2 restarts within 1000 s")
    assert found.ending


# --- replicas that are resting ---


@pytest.mark.parametrize("successor", [False, True])
def test_a_replica_that_was_given_up_restarts_once_it_no_longer_rests(successor):
    """A successor of the controller hears of its end, and does not let it rest before."""
    found = host()
    dies(found, "rollouter/0", 1.0, 10.0)
    assert found.exited("rollouter/0", 3, "out of memory", 20.0)[0].fatal
    assert not found.ending and found.failure is None and found.next_deadline() is None
    # The controller has not heard of its end so far.
    assert found.state(state(), 20.1) == found.state(state_with_resting("rollouter/0"), 20.2) == []
    if successor:
        reported = found.controller_found(30.0)
        assert [end.name for end in reported if isinstance(end, ActorEnded) and end.fatal] == ["rollouter/0"]
        assert found.state(state(), 30.1) == []
    assert found.state(state_with_resting("rollouter/0"), 900.0) == []
    assert found.state(state(), 901.0) == [Spawn("rollouter/0")]
    assert not any(isinstance(reported, ActorEnded) for reported in found.controller_found(902.0))
    found.spawned("rollouter/0", 200)
    # Its earlier deaths are forgotten.
    assert not found.exited("rollouter/0", 3, "", 903.0)[0].fatal


@pytest.mark.parametrize("exit_code", [-9, 0])
def test_a_replica_that_lives_and_rests_is_killed_and_stays_so(exit_code):
    found = host()
    assert found.state(state_with_resting("rollouter/0"), 5.0) == [Kill("rollouter/0")]
    assert found.state(state_with_resting("rollouter/0"), 5.1) == []
    (report,) = found.exited("rollouter/0", exit_code, "", 5.2)
    assert report.fatal and report.reason.endswith(": it cannot be kept alive")
    assert (found.tick(1e6), found.next_deadline(), found.ending) == ([], None, False)
    assert found.state(state(), 1e6) == [Spawn("rollouter/0")]
    # Nor does a restart that is due come.
    found = host()
    found.exited("rollouter/0", exit_code, "", 5.0)
    assert found.state(state_with_resting("rollouter/0"), 5.1) == found.tick(100.0) == []


@pytest.mark.parametrize("exit_code", [2, 78])
def test_no_end_of_the_sinks_ends_the_run(exit_code):
    found = host(["sinks/0"])
    (report,) = found.exited("sinks/0", exit_code, "", 5.0)
    assert report.fatal and not found.ending and found.failure is None
    found.state(state_with_resting("sinks/0"), 6.0)
    assert found.state(state(), 700.0) == [Spawn("sinks/0")]


# --- the controller ---


def test_no_actor_starts_before_the_first_state_of_the_controller():
    """Which may be what numbers the others have to be above; one that never says a word is killed."""
    found = host(running=False)
    found.controller_at(1.0)
    assert found.tick(2.0) == [] and found.next_deadline() == 1.0 + FIRST_S
    assert found.state(state(), 3.0) == [Spawn(name) for name in HEAD[1:]]
    assert found.state(state(), 4.0) == found.tick(1e6) == []
    assert found.next_deadline() is None and found.living == set(HEAD)
    found = host(running=False)
    found.controller_at(1.0)
    assert found.tick(found.next_deadline()) == [Kill("controller/0")]


def test_the_other_actors_continue_while_the_controller_restarts():
    found = host()
    ends = found.exited("rollouter/0", -9, "", 4.0)
    found.tick(5.0)
    found.spawned("rollouter/0", 50)
    assert found.exited("controller/0", -9, "", 5.0) == []
    assert not found.ending and found.living == set(HEAD[1:])
    # Actors that die are still restarted.
    ends += found.exited("rollouter/1", 1, "boom", 5.5)
    assert ticked(found, 6.0) == [restart("controller/0", KILLED), Spawn("controller/0")]
    assert ticked(found, 6.5) == [restart("rollouter/1", "exit code 1: boom"), Spawn("rollouter/1")]
    # Its successor gets every end, and starts no actor a second time.
    living = [
        ActorStarted(name=name, incarnation=found.incarnations[name])
        for name in sorted(found.living - {"controller/0"})
    ]
    assert found.controller_found(7.0) == [*living, *ends]
    assert found.next_deadline() is None and found.living == set(HEAD)


def test_the_first_state_of_a_controllers_successor_starts_the_other_actors():
    found = host(running=False)
    assert found.exited("controller/0", -9, "", 1.0) == []
    assert ticked(found, 2.0) == [restart("controller/0", KILLED), Spawn("controller/0")]
    assert found.controller_found(3.0) == [Spawn(name) for name in HEAD[1:]]
    found.spawned("rollouter/0", 100)
    found.exited("controller/0", -9, "", 5.0)
    found.tick(7.0)
    assert found.next_deadline() == 7.0 + FIRST_S
    assert ActorStarted(name="rollouter/0", incarnation=100) in found.state(state(), 8.0)
    assert found.next_deadline() is None
    assert found.stop("Ctrl-C", 9.0) == [StopRun(reason="Ctrl-C")]


def test_a_controller_that_keeps_dying_ends_the_run_with_its_name():
    found = host()
    dies(found, "controller/0", 1.0, 10.0)
    assert found.exited("controller/0", 1, "boom", 20.0) == [KillAll()]
    reason = "exit code 1, after 2 restarts within 1000 s: boom"
    assert str(found.failure) == f"controller/0: {reason} (log: /logs/controller-0.log)"


def test_a_controller_that_is_silent_after_its_restart_is_killed_as_frozen():
    """Before its first word; again and again, it ends the run."""
    found = host()
    found.exited("controller/0", -9, "", 5.0)
    found.tick(6.0)
    assert found.tick(6.0 + FIRST_S) == [Kill("controller/0")] and found.next_deadline() is None
    now = 7.0 + FIRST_S
    assert found.exited("controller/0", -9, "", now) == []
    words = f"{KILLED}: it said nothing for {FIRST_S:g} s after its start"
    assert ticked(found, now + 5) == [restart("controller/0", words), Spawn("controller/0")]
    assert found.tick(now + 5 + FIRST_S) == [Kill("controller/0")]
    assert found.exited("controller/0", -9, "", now + 6 + FIRST_S) == [KillAll()]
    assert found.failure.actor == "controller/0"


def test_a_frozen_controller_is_killed_and_started_again():
    found = host()
    found.state(state(), 10.0)
    assert found.controller_silent(40.0) == found.controller_silent(69.0) == []
    assert found.controller_silent(99.0) == [Kill("controller/0")]
    assert found.controller_silent(130.0) == found.exited("controller/0", -9, "", 131.0) == []
    # There is no answer without a controller.
    assert found.controller_silent(131.1) == []
    assert ticked(found, 132.0)[0] == restart("controller/0", f"{KILLED}: it did not answer for 89 s")
    found.controller_found(133.0)
    # One call without an answer may be this host's own fault: it was asleep.
    assert found.controller_silent(1000.0) == []
    found.state(state(), 1000.1)
    assert found.controller_silent(1100.0) == []


def test_without_a_controller_all_actors_are_killed():
    found = host()
    found.state(state("done", draining=["controller"]), 5.0)
    assert found.exited("controller/0", 0, "", 5.1) == [KillAll()] and found.failure is None
    found = host()
    found.exited("controller/0", -9, "", 5.0)
    assert found.stop("SIGINT", 5.1) == [KillAll()]
    assert (found.stopped, found.failure) == ("SIGINT", None)
    found = host(running=False)
    assert found.controller_lost("no address after 300 s", 300.0) == [KillAll()]
    assert found.failure.actor == "controller/0"
    found.exited("controller/0", -9, "", 300.0)
    assert found.finished and found.controller_found(301.0) == []


# --- the end ---


def test_nothing_is_started_while_the_run_ends_and_what_is_left_is_killed():
    found = host()
    found.exited("rollouter/0", -9, "", 5.0)
    found.state(state("draining"), 5.5)
    assert found.next_deadline() == 15.5 and found.tick(7.0) == []
    assert found.exited("rollouter/1", -9, "", 7.0) == [ended("rollouter/1", 5, -9, False, "")]
    # The first stop does not hurry a run that is ending.
    assert found.stop("SIGINT", 7.1) == [] and found.stopped == ""
    assert found.tick(15.5) == [KillAll()]
    assert found.next_deadline() is None and not found.finished
    for name in ("dataloader/0", "learner/0", "controller/0"):
        found.exited(name, -9, "", 16.0)
    assert found.finished and end_of(found) == EndedEvent(result="done")


def test_a_run_is_preempted_once_and_actors_that_die_are_still_restarted():
    found = host()
    assert found.preempt("SIGTERM", 5.0) == [StopRun(reason="SIGTERM", preempt=True)]
    # Asked by two at once, as when a scheduler signals every process.
    assert found.preempt("SIGUSR2", 5.1) == [] and not found.ending
    found.state(state("preempting"), 5.2)
    found.exited("learner/0", -9, "", 6.0)
    assert found.tick(7.0)[-1] == Spawn("learner/0")
    reason = "preempted by SIGTERM with a checkpoint of version 3"
    found.state(state("draining", exit_code=75, reason=reason), 8.0)
    assert (found.ending, found.deadline, found.finished_run) == (True, 18.0, False)
    assert end_of(found) == EndedEvent(result="preempted", reason=reason, exit_code=75)


def test_a_stop_request_is_repeated_to_the_successor_of_the_controller():
    for word in ("asked by another", "away"):
        found = host()
        if word == "away":
            found.exited("controller/0", -9, "", 5.0)
            assert found.preempt("a wish", 5.0) == []
            found.tick(6.0)
            assert found.controller_found(7.0)[-1] == StopRun(reason="a wish", preempt=True)
        else:
            assert found.state(state("preempting", reason="a wish"), 5.0) == []
        assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s
        found.exited("controller/0", -9, "", 7.1)
        found.tick(9.2)
        assert found.controller_found(9.3)[-1] == StopRun(reason="a wish", preempt=True)
        # One of several who ask does not hurry the others.
        assert found.preempt("SIGTERM", 9.5) == []
        assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s


@pytest.mark.parametrize(
    ("checkpoint", "ends", "result", "code"),
    [
        (3, "kill", "preempted", 75),
        (-1, "kill", "stopped", 143),
        (3, "asked, kill", "preempted", 75),
        (-1, "asked, kill", "stopped", 143),
        (3, "late", "preempted", 75),
        (-1, "late", "stopped", 143),
        (3, "never ran", "stopped", 143),
    ],
)
def test_a_run_that_is_killed_or_preempted_late_ends_with_its_last_checkpoint(checkpoint, ends, result, code):
    found = host(running=ends != "never ran")
    found.controller_found(0.0)
    found.state(state("starting" if ends == "never ran" else "running", checkpoint=checkpoint), 1.0)
    if ends in ("asked, kill", "late"):
        found.preempt("Ctrl-C", 5.0)
    if ends == "late":
        assert found.next_deadline() == 5.0 + GRACE_S + POLICY.drain_s
        assert found.tick(found.next_deadline()) == [KillAll()]
    else:
        assert found.kill(AT_ONCE, 6.0) == [KillAll()] and found.stopped == AT_ONCE
    assert (end_of(found).result, end_of(found).exit_code) == (result, code)


@pytest.mark.parametrize("first", ["stop", "preempt"])
@pytest.mark.parametrize("second", ["stop", "kill"])
def test_the_first_stop_request_asks_the_controller_and_the_second_kills(first, second):
    found = host()
    assert getattr(found, first)("SIGTERM", 5.0) == [StopRun(reason="SIGTERM", preempt=first == "preempt")]
    assert found.next_deadline() == (15.0 if first == "stop" else 5.0 + GRACE_S + POLICY.drain_s)
    assert getattr(found, second)("again", 6.0) == [KillAll()]
    assert found.stopped == ("SIGTERM" if first == "stop" else "again")
    assert (found.failure, found.finished_run) == (None, False)


def test_a_run_that_never_ran_is_not_waited_for():
    for wish in ("stop", "preempt"):
        for reported in (False, True):
            found = host(running=False)
            if reported:
                found.controller_found(1.0)
                found.state(state("starting", waiting_for=["learner/0"]), 1.0)
            assert getattr(found, wish)("SIGTERM", 5.0) == [KillAll()]
            assert (found.stopped, found.preempted) == ("SIGTERM", False)
    found = host(running=False)
    found.controller_found(1.0)
    found.state(state("draining", failed_actor="learner/0", reason="no model", exit_code=78), 5.0)
    assert found.next_deadline() == 5.0 + NEVER_RAN_GRACE_S and found.failure.exit_code == 78


def test_an_agent_without_its_guard_preempts_the_run_and_fails_unless_it_is_done():
    found = host()
    assert found.guard_lost(5.0) == [StopRun(reason="the death of a guard", preempt=True)]
    reason = "preempted by the death of a guard with a checkpoint of version 3"
    found.state(state("draining", exit_code=75, reason=reason), 8.0)
    why = f"its guard was killed, and an agent cannot continue without it ({reason})"
    assert end_of(found) == EndedEvent(result="failed", actor="agent/0", reason=why, log="log", exit_code=1)
    found.state(state("done"), 9.0)
    assert end_of(found) == EndedEvent(result="done")


# --- hosts other than the head ---


@pytest.mark.parametrize("names", [FAR[1:], ("rollouter/2", "episodes/2"), FAR, HEAD])
def test_a_host_that_never_reached_the_controller_leaves_if_the_run_can_spare_it(names):
    found = host(names, running=False)
    reported = found.controller_lost("no answer for 12 s", 12.0)
    if "learner/1" in names or "learner/0" in names:
        assert reported == [KillAll()] and found.failure.actor == "controller/0"
    else:
        assert reported == [] and found.finished and not found.ending
        assert end_of(found) == EndedEvent(result="left", reason="no answer for 12 s")
    # Once it has, it takes part, and its end is a failure.
    reached = host(names)
    assert reached.controller_lost("it refuses this agent", 12.0) == [KillAll()]
    assert reached.failure.reason == "it refuses this agent"


def test_a_host_that_leaves_ends_with_its_actors_and_starts_none_again():
    found = host(FAR)
    found.exited("rollouter/2", -9, "", 4.5)
    assert found.leave(5.0, 5.0) == found.tick(6.0) == []
    assert (found.finished, found.next_deadline()) == (False, 20.0)
    assert found.exited("learner/1", 0, "", 7.0) == [ended("learner/1", 1, 0, False, "")]
    assert found.finished and not found.ending
    # It has not failed when the controller wants nothing more of it.
    assert found.controller_lost("controller/0 refuses this actor", 7.1) == []
    assert found.finished and end_of(found) == EndedEvent(result="left")
    late = host(FAR)
    late.leave(5.0, 5.0)
    assert late.exited("learner/1", -9, "", 7.0) == [ended("learner/1", 1, -9, False, "")]
    assert late.tick(19.9) == [] and late.tick(20.0) == [KillAll()] and late.next_deadline() is None
    idle = AgentState({"rollouter/0": "/logs/0"}, POLICY, grace_s=GRACE_S)
    idle.leave(5.0, 1.0)
    assert idle.controller_found(1.1) == [] and idle.finished


def test_the_run_may_end_while_a_host_leaves_and_the_head_does_not_leave():
    found = host(FAR)
    found.leave(100.0, 5.0)
    found.state(state("draining", exit_code=0), 6.0)
    assert (found.ending, found.finished_run, found.next_deadline()) == (True, True, 16.0)
    found = host()
    found.leave(5.0, 5.0)
    assert not found.leaving


def test_a_restart_after_the_loss_of_a_host_does_not_count():
    found = host(FAR)
    for back in (100.0, 200.0, 300.0, 400.0):
        incarnation = found.incarnations["rollouter/2"]
        assert found.controller_silent(back - 20.0) == []
        assert found.state(condemned("rollouter/2", incarnation), back)[-1] == Kill("rollouter/2")
        (reported,) = found.exited("rollouter/2", -9, "", back + 1.0)
        assert not reported.fatal and found.tick(back + 2.0)[-1] == Spawn("rollouter/2")
        found.spawned("rollouter/2", incarnation + 10)
        found.state(state(), back + 3.0)
    # Its next ends are its own again.
    for now, fatal in ((410.0, False), (420.0, False), (430.0, True)):
        found.state(state(), now)
        (reported,) = found.exited("rollouter/2", 3, "", now)
        assert reported.fatal == fatal
        found.tick(now + 5.0)
        found.spawned("rollouter/2", int(now))


def test_deaths_on_a_cut_off_host_do_not_count_and_are_reported_after_contact_returns():
    found = host(FAR)
    for now in (40.0, 50.0, 60.0, 70.0):
        (reported,) = found.exited("learner/1", 1, "gloo: connection closed", now)
        assert not reported.fatal
        found.tick(now + 2.0)
    found.controller_silent(73.0)
    assert found.state(state(), 74.0) == [reported] and found.state(state(), 75.0) == []


def test_i7_a_host_without_launcher_and_controller_leaves_nothing_running():
    found = host(FAR)
    found.launcher_gone()
    # The controller was heard of meanwhile.
    found.state(state(), 15.0)
    until = 15.0 + POLICY.host_grace_s
    assert found.next_deadline() == until
    assert found.tick(until - 0.1) == [] and found.tick(until) == [KillAll()]
    for name in FAR:
        found.exited(name, -9, "", until)
    assert found.finished and found.failure is not None


events = st.one_of(
    st.just(("found",)),
    st.tuples(st.just("exited"), st.sampled_from(HEAD), st.sampled_from([0, 1, 78, -9])),
    st.tuples(st.just("state"), st.sampled_from(["starting", "running", "preempting", "draining", "done", "failed"])),
    st.tuples(st.just("resting"), st.sets(st.sampled_from(["rollouter/0", "rollouter/1"]))),
    st.sampled_from([("stop",), ("preempt",), ("kill",), ("launcher_gone",), ("silent",), ("tick",)]),
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
        elif kind == "resting" and was_found:
            instructions = found.state(state_with_resting(*arguments[0]), now)
            started = {instruction.name for instruction in instructions if isinstance(instruction, Spawn)}
            assert found.ending or not started & arguments[0]
        elif kind == "launcher_gone":
            found.launcher_gone()
        elif kind in ("stop", "kill", "preempt"):
            asked_since = now if asked_since is None else asked_since
            instructions = getattr(found, kind)("why", now)
        elif kind == "silent" and was_found:
            instructions = found.controller_silent(now)
        elif kind == "tick":
            instructions = found.tick(now)
        for instruction in instructions:
            if isinstance(instruction, Spawn):
                assert instruction.name not in processes and not found.ending
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
