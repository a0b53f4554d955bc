"""The run's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.state.run_state import LAST_RANK, RunStateMachine
from asyncrl.messages.actors import Condemned
from asyncrl.roles import drain_rank

ACTORS = ("dataloader/0", "reward/0", "parameter_server/0", "learner/0", "learner/1", "rollouter/0", "rollouter/1")
RANKS = [
    {"rollouter", "reward"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes", "learner"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes", "learner", "sinks", "controller"},
]
SINKS = "sinks/0"


def machine(*also, running=True):
    actors = (*ACTORS, *also)
    run = RunStateMachine(
        frozenset(actors), now=0.0, start_timeout_s=60.0, drain_s=10.0, grace_s=30.0, host_grace_s=20.0
    )
    if running:
        assert run.ready(actors, 1.0)
    return run


def end(run, name, now):
    return run.ended(name, 0, False, "", "", now)


def test_a_rank_whose_time_is_over_makes_way():
    run = machine()
    run.stop("Ctrl-C", 10.0)
    seen = []
    while (deadline := run.next_deadline()) is not None:
        assert not run.tick(deadline - 0.01)
        assert run.tick(deadline)
        seen.append((deadline, set(run.draining)))
    assert [ranks for _, ranks in seen] == RANKS[1:]
    assert seen[-1][0] <= 20.0
    assert (run.phase, run.outcome.reason, run.outcome.exit_code) == ("done", "Ctrl-C", 143)


def test_the_sinks_end_after_the_learner_and_before_the_controller():
    run = machine(SINKS)
    run.finish(10.0)
    for name in ACTORS:
        assert "sinks" not in run.draining
        end(run, name, 10.1)
    assert set(run.draining) == RANKS[3] - {"controller"} and not run.final
    assert run.next_deadline() == 15.1
    assert end(run, SINKS, 10.2)
    assert set(run.draining) == RANKS[3] and run.phase == "done"


def test_sinks_that_do_not_end_have_only_the_time_that_others_have_left():
    for others_end, until in ((12.0, 17.0), (18.0, 19.5)):
        run = machine(SINKS)
        run.finish(10.0)
        for now in (15.0, 17.0, others_end):
            run.tick(now)
        for name in ACTORS:
            end(run, name, others_end)
        assert run.next_deadline() == until
        assert run.tick(until) and run.phase == "done"


@pytest.mark.parametrize("exit_code", [2, 78, 1, -9])
def test_no_end_of_the_sinks_ends_the_run(exit_code):
    run = machine(SINKS)
    assert run.ended(SINKS, exit_code, True, "why", "", 5.0, incarnation=1)
    assert (run.phase, run.outcome, [actor.name for actor in run.aside]) == ("running", None, [SINKS])


def test_a_run_starts_and_goes_on_without_sinks():
    run = machine(SINKS, running=False)
    run.ready(ACTORS, 1.0)
    assert (run.phase, run.waiting_for) == ("starting", [SINKS])
    assert run.tick(60.0)
    assert (run.phase, run.outcome, [actor.name for actor in run.aside]) == ("running", None, [SINKS])
    run = machine(SINKS)
    run.host_lost("head", [SINKS], 5.0)
    assert (run.phase, run.next_deadline()) == ("running", None)


def test_an_actor_that_is_dead_already_is_not_waited_for():
    run = machine()
    for name in ("rollouter/0", "rollouter/1", "reward/0"):
        run.ended(name, -9, False, "", "", 5.0)
    run.stop("Ctrl-C", 6.0)
    assert set(run.draining) == RANKS[1]
    run = machine()
    run.ended("rollouter/0", -9, False, "", "", 5.0)
    run.started("rollouter/0")
    run.stop("Ctrl-C", 6.0)
    end(run, "rollouter/1", 6.1)
    end(run, "reward/0", 6.1)
    assert set(run.draining) == RANKS[0]


def test_the_first_failure_is_kept():
    run = machine()
    assert run.ended("reward/0", -11, True, "killed by SIGSEGV, after 3 restarts", "/logs/r.log", 5.0)
    outcome = run.outcome
    assert (outcome.actor, outcome.log, outcome.exit_code) == ("reward/0", "/logs/r.log", 1)
    assert not run.fail("learner/0", "lost a peer", "", 1, 5.1)
    assert not run.stop("Ctrl-C", 5.2)
    assert not run.finish(5.3)
    assert run.outcome is outcome
    while (deadline := run.next_deadline()) is not None:
        run.tick(deadline)
    assert run.phase == "failed"


@pytest.mark.parametrize(("exit_code", "expected"), [(78, 78), (2, 2), (1, 1), (-9, 1), (0, 1)])
def test_the_exit_code_of_a_failed_run(exit_code, expected):
    run = machine()
    run.ended("learner/0", exit_code, True, "", "", 5.0)
    assert run.outcome.exit_code == expected
    assert run.outcome.reason


def test_who_is_not_ready_in_time_fails_the_run():
    run = machine(running=False)
    run.ready(ACTORS[:-2], 5.0)
    assert run.next_deadline() == 60.0
    assert not run.tick(59.9)
    assert run.tick(60.0)
    assert run.outcome.actor == "rollouter/0"
    assert "60 s" in run.outcome.reason
    assert "rollouter/1" in run.outcome.reason


def test_a_restart_has_its_own_time_to_get_ready():
    run = machine()
    run.ended("reward/0", -9, False, "", "", 100.0)
    assert run.next_deadline() == 160.0
    assert not run.tick(159.0)
    assert run.tick(160.0)
    assert run.outcome.actor == "reward/0"


FROZEN = Condemned("rollouter/0", 7, "it did not beat for 61 s")


@pytest.mark.parametrize("running", [True, False])
def test_the_condemned_are_shown_until_they_are_so_no_more(running):
    run = machine(running=running)
    phase, number = run.phase, run.number
    assert run.condemn([FROZEN])
    assert (run.condemned, run.number, run.phase, run.drain) == ([FROZEN], number + 1, phase, 0)
    assert not run.condemn([FROZEN])
    other = Condemned("learner/0", 3, "learner/1 died")
    assert run.condemn([FROZEN, other])
    assert run.condemned == [other, FROZEN]
    assert run.condemn([])
    assert run.condemned == []


def test_draining_has_deadlines_of_its_own():
    run = machine()
    run.condemn([FROZEN])
    run.finish(101.0)
    assert run.condemned == []
    number = run.number
    assert not run.condemn([FROZEN, Condemned("learner/0", 6, "")])
    assert (run.condemned, run.number, run.outcome.exit_code) == ([], number, 0)


def test_a_run_makes_way_until_a_checkpoint_is_written():
    run = machine()
    number = run.number
    assert run.preempt("SIGTERM", 10.0)
    assert (run.phase, run.number, run.draining, run.next_deadline()) == ("preempting", number + 1, [], 40.0)
    assert not run.preempt("Ctrl-C", 11.0)
    assert run.next_deadline() == 40.0
    assert run.checkpoint_written(12)
    assert not run.checkpoint_written(12)
    assert run.finish(12.0, preempted=True)
    assert (run.phase, run.outcome.exit_code, run.outcome.actor) == ("draining", 75, "")
    assert run.outcome.reason == "preempted by SIGTERM with a checkpoint of version 12"


@pytest.mark.parametrize(("checkpoint", "exit_code"), [(4, 75), (0, 75), (-1, 143)])
def test_past_the_grace_only_a_complete_checkpoint_counts(checkpoint, exit_code):
    run = machine()
    if checkpoint >= 0:
        run.checkpoint_written(checkpoint)
    run.preempt("SIGTERM", 10.0)
    assert not run.tick(39.9)
    assert run.tick(40.0)
    assert (run.phase, run.outcome.exit_code, run.outcome.actor) == ("draining", exit_code, "")


@pytest.mark.parametrize("preempted", [False, True])
def test_a_run_whose_last_writes_failed_ends_as_failed(preempted):
    run = machine()
    run.checkpoint_written(4)
    if preempted:
        run.preempt("SIGTERM", 10.0)
    assert run.finish(12.0, preempted=preempted, by="learner/0", failure="the disk is full")
    assert (run.phase, run.outcome.actor, run.outcome.reason) == ("draining", "learner/0", "the disk is full")
    assert run.outcome.exit_code == 1
    run.tick(1000.0)
    run.tick(2000.0)
    run.tick(3000.0)
    assert run.phase == "failed"


def test_who_makes_way_may_just_finish_fail_or_be_stopped():
    for event, exit_code in (
        (lambda run: run.finish(12.0), 0),
        (lambda run: run.fail("learner/0", "no signal", "", 1, 12.0), 1),
        (lambda run: run.stop("Ctrl-C", 12.0), 143),
        (lambda run: run.ended("learner/0", 78, True, "", "", 12.0), 78),
    ):
        run = machine()
        run.checkpoint_written(3)
        run.preempt("SIGTERM", 10.0)
        assert event(run)
        assert (run.phase, run.outcome.exit_code) == ("draining", exit_code)
        assert not run.preempt("SIGTERM", 13.0)


def test_deaths_and_late_starts_do_not_keep_a_run_from_making_way():
    run = machine()
    run.ended("rollouter/0", -9, False, "", "", 5.0)
    run.preempt("SIGTERM", 60.0)
    run.ended("learner/1", -9, False, "", "", 61.0)
    assert not run.tick(70.0)
    assert (run.phase, run.next_deadline()) == ("preempting", 90.0)
    run.started("learner/1")
    run.ready(ACTORS, 80.0)
    assert run.phase == "preempting"


events = st.one_of(
    st.tuples(st.just("ready"), st.sets(st.sampled_from(ACTORS))),
    st.tuples(st.just("ended"), st.sampled_from(ACTORS), st.booleans()),
    st.tuples(st.just("started"), st.sampled_from(ACTORS)),
    st.tuples(st.just("condemn"), st.sets(st.tuples(st.sampled_from(ACTORS), st.integers(1, 3)), max_size=3)),
    st.tuples(st.just("checkpoint"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["stop", "finish", "fail", "tick", "preempt", "made way"])),
)


@given(st.lists(st.tuples(st.floats(0, 20), events), max_size=60))
def test_invariants(history):
    run = machine(running=False)
    now, drain_began, outcome = 0.0, None, None
    for gap, (kind, *arguments) in history:
        now += gap
        before = (run.number, run.phase, run.drain, run.waiting_for, run.outcome, run.condemned, run.checkpoint)
        match kind:
            case "ready":
                changed = run.ready(arguments[0], now)
            case "ended":
                changed = run.ended(arguments[0], 1, arguments[1], "why", "", now)
            case "started":
                changed = run.started(arguments[0]) or False
            case "condemn":
                changed = run.condemn([Condemned(*actor, "why") for actor in arguments[0]])
            case "checkpoint":
                changed = run.checkpoint_written(arguments[0])
            case "preempt":
                changed = run.preempt("SIGTERM", now)
            case "made way":
                changed = run.finish(now, preempted=True)
            case "stop":
                changed = run.stop("why", now)
            case "finish":
                changed = run.finish(now)
            case "fail":
                changed = run.fail("learner/0", "why", "", 1, now)
            case _:
                changed = run.tick(now)
        after = (run.number, run.phase, run.drain, run.waiting_for, run.outcome, run.condemned, run.checkpoint)
        assert changed == (after[0] > before[0])
        if not changed:
            assert after == before
        assert run.drain >= before[2]
        assert (run.phase in ("starting", "running", "preempting")) == (run.drain == 0) == (run.outcome is None)
        # A run that makes way has something to go on from.
        assert outcome is not None or run.outcome is None or run.outcome.exit_code != 75 or run.checkpoint >= 0
        assert run.final == (run.drain == LAST_RANK)
        outcome = outcome or run.outcome
        assert run.outcome is outcome
        if run.drain and drain_began is None:
            drain_began = now
        if run.final:
            assert run.phase == ("failed" if outcome.actor else "done")
            assert run.next_deadline() is None
    if not run.final:
        run.stop("enough", now)
        drain_began = now if drain_began is None else drain_began
    while (deadline := run.next_deadline()) is not None:
        now = max(now, deadline)
        assert run.tick(now)
    assert run.final


@given(st.permutations(ACTORS))
def test_in_whatever_order_actors_end_a_rank_waits_for_the_lower_ones(order):
    run = machine()
    run.finish(5.0)
    gone = set()
    for name in order:
        end(run, name, 5.0)
        gone.add(name)
        if run.drain < LAST_RANK:
            assert any(drain_rank(other) == run.drain for other in set(ACTORS) - gone)
        assert all(drain_rank(other) >= run.drain for other in set(ACTORS) - gone)
    assert run.phase == "done"
