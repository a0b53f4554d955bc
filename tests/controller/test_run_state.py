"""The run's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.run_state import LAST_RANK, RunStateMachine
from asyncrl.messages import Stalled
from asyncrl.runtime.supervision import drain_rank

ACTORS = ("dataloader/0", "reward/0", "parameter_server/0", "learner/0", "learner/1", "rollouter/0", "rollouter/1")
RANKS = [
    {"rollouter", "reward"},
    {"rollouter", "reward", "parameter_server", "dataloader"},
    {"rollouter", "reward", "parameter_server", "dataloader", "learner"},
    {"rollouter", "reward", "parameter_server", "dataloader", "learner", "controller"},
]


def machine(*, running=True):
    run = RunStateMachine(frozenset(ACTORS), now=0.0, start_timeout_s=60.0, drain_s=10.0)
    if running:
        assert run.ready(ACTORS, 1.0)
    return run


def end(run, name, now):
    return run.ended(name, 0, False, "", "", now)


def test_it_runs_once_everybody_is_ready():
    run = machine(running=False)
    assert run.waiting_for == sorted(ACTORS)
    for i in range(len(ACTORS)):
        assert run.phase == "starting"
        number = run.number
        assert run.ready(ACTORS[: i + 1], 1.0)
        assert run.number == number + 1
    assert (run.phase, run.waiting_for, run.draining) == ("running", [], [])
    assert not run.ready(ACTORS, 2.0)


def test_a_death_that_is_followed_by_a_restart_does_not_stop_the_run():
    run = machine()
    assert not run.ended("rollouter/0", -9, False, "", "", 5.0)
    assert run.phase == "running"
    run.started("rollouter/0")
    run.ready(ACTORS, 6.0)
    assert run.phase == "running"
    assert run.next_deadline() is None


def test_ranks_drain_in_order_each_when_the_one_before_has_ended():
    run = machine()
    assert run.finish(10.0)
    assert run.phase == "draining"
    assert set(run.draining) == RANKS[0]
    assert not end(run, "rollouter/0", 10.1)
    assert not end(run, "reward/0", 10.1)
    assert end(run, "rollouter/1", 10.2)
    assert set(run.draining) == RANKS[1]
    end(run, "dataloader/0", 10.3)
    end(run, "parameter_server/0", 10.3)
    assert set(run.draining) == RANKS[2]
    end(run, "learner/1", 10.4)
    assert not run.final
    assert end(run, "learner/0", 10.5)
    assert set(run.draining) == RANKS[3]
    assert (run.phase, run.outcome.exit_code, run.final, run.next_deadline()) == ("done", 0, True, None)


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
    assert (run.phase, run.outcome.reason, run.outcome.exit_code) == ("done", "Ctrl-C", 130)


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
    assert run.ended("rollouter/1", -11, True, "killed by SIGSEGV, after 3 restarts", "/logs/r.log", 5.0)
    outcome = run.outcome
    assert (outcome.actor, outcome.log, outcome.exit_code) == ("rollouter/1", "/logs/r.log", 1)
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


def test_a_failure_after_the_last_step_changes_nothing():
    run = machine()
    run.finish(5.0)
    run.ended("rollouter/0", -11, True, "killed by SIGSEGV", "", 5.1)
    run.fail("reward/0", "broken", "", 1, 5.2)
    assert (run.outcome.actor, run.outcome.exit_code) == ("", 0)


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
    run.ended("rollouter/0", -9, False, "", "", 100.0)
    assert run.next_deadline() == 160.0
    assert not run.tick(159.0)
    assert run.tick(160.0)
    assert run.outcome.actor == "rollouter/0"


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("name", ["rollouter/1", "reward/0", "parameter_server/0"])
def test_a_frozen_actor_is_to_be_killed_until_its_end_is_known(name, running):
    run = machine(running=running)
    number, stall = run.number, Stalled(name, 7, 61.0)
    assert run.silent([stall], 100.0 if running else 50.0)
    assert (run.stalled, run.number, run.drain) == ([stall], number + 1, 0)
    # It stays so, whether it is silent for longer or heard of again.
    assert not run.silent([Stalled(name, 7, 62.0)], 101.0)
    assert not run.silent([], 102.0)
    assert run.stalled == [stall]
    assert run.ended(name, -9, False, "", "", 103.0)
    assert run.stalled == []


def test_a_successor_may_freeze_too():
    run = machine()
    run.silent([Stalled("rollouter/0", 7, 61.0)], 100.0)
    assert run.silent([Stalled("rollouter/0", 8, 61.0)], 200.0)
    assert run.stalled == [Stalled("rollouter/0", 8, 61.0)]


@pytest.mark.parametrize("name", ["learner/1", "dataloader/0"])
def test_the_run_does_not_outlive_a_frozen_actor_that_is_not_restarted(name):
    run = machine()
    assert run.silent([Stalled("rollouter/0", 6, 70.0), Stalled(name, 7, 61.4)], 100.0)
    assert (run.phase, run.outcome.actor, run.outcome.exit_code) == ("draining", name, 1)
    assert run.outcome.reason == "frozen: it did not beat for 61 s (supervision.silence_s)"
    assert run.stalled == []


def test_draining_has_deadlines_of_its_own():
    run = machine()
    run.silent([Stalled("rollouter/0", 6, 70.0)], 100.0)
    run.finish(101.0)
    assert run.stalled == []
    assert not run.silent([Stalled("rollouter/1", 6, 70.0), Stalled("learner/0", 6, 70.0)], 102.0)
    assert (run.stalled, run.outcome.exit_code) == ([], 0)


def test_strangers_are_not_looked_after():
    run = machine()
    assert not run.silent([Stalled("rollouter/9", 6, 70.0)], 100.0)
    assert run.stalled == []


def test_a_run_can_be_stopped_before_it_runs():
    run = machine(running=False)
    assert run.stop("Ctrl-C", 1.0)
    assert run.phase == "draining"
    assert run.waiting_for == []
    run.ready(ACTORS, 1.5)
    assert run.phase == "draining"


events = st.one_of(
    st.tuples(st.just("ready"), st.sets(st.sampled_from(ACTORS))),
    st.tuples(st.just("ended"), st.sampled_from(ACTORS), st.booleans()),
    st.tuples(st.just("started"), st.sampled_from(ACTORS)),
    st.tuples(st.just("silent"), st.sampled_from(ACTORS), st.integers(1, 3)),
    st.tuples(st.sampled_from(["stop", "finish", "fail", "tick"])),
)


@given(st.lists(st.tuples(st.floats(0, 20), events), max_size=60))
def test_invariants(history):
    run = machine(running=False)
    now, drain_began, outcome = 0.0, None, None
    for gap, (kind, *arguments) in history:
        now += gap
        before = (run.number, run.phase, run.drain, run.waiting_for, run.outcome, run.stalled)
        match kind:
            case "ready":
                changed = run.ready(arguments[0], now)
            case "ended":
                changed = run.ended(arguments[0], 1, arguments[1], "why", "", now)
            case "started":
                changed = run.started(arguments[0]) or False
            case "silent":
                changed = run.silent([Stalled(*arguments, 61.0)], now)
            case "stop":
                changed = run.stop("why", now)
            case "finish":
                changed = run.finish(now)
            case "fail":
                changed = run.fail("learner/0", "why", "", 1, now)
            case _:
                changed = run.tick(now)
        after = (run.number, run.phase, run.drain, run.waiting_for, run.outcome, run.stalled)
        assert changed == (after[0] > before[0])
        if not changed:
            assert after == before
        assert run.drain >= before[2]
        assert (run.phase in ("starting", "running")) == (run.drain == 0) == (run.outcome is None)
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
