"""Replicas are capacity: who is set aside, for how long, and when the run cannot go on without."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.state.reserve import LONGEST_REST, Reserve
from asyncrl.controller.state.run_state import RunStateMachine

REST_S = 100.0
START_S = 60.0
ROLLOUTERS = ("rollouter/0", "rollouter/1", "rollouter/2")
OTHERS = ("dataloader/0", "learner/0", "reward/0")
EPISODES = ("episodes/0", "episodes/1", "episodes/2", "episodes/3")
WHY = "exit code 1, after 3 restarts within 600 s"


def machine(*, min_replicas=1, running=True, also=()):
    run = RunStateMachine(
        frozenset((*OTHERS, *ROLLOUTERS, *also)),
        now=0.0,
        start_timeout_s=START_S,
        drain_s=10.0,
        grace_s=30.0,
        host_grace_s=20.0,
        min_replicas=min_replicas,
        rest_s=REST_S,
    )
    if running:
        assert run.ready(run.expected, 1.0)
    return run


def dies(run, name, now, incarnation=1):
    return run.ended(name, 1, True, WHY, f"/logs/{name}", now, incarnation=incarnation)


def aside(run):
    return [actor.name for actor in run.aside]


def test_a_replica_that_is_given_up_is_set_aside_and_tried_again_after_its_rest():
    run = machine()
    number = run.number
    assert dies(run, "rollouter/1", 10.0)
    assert run.number > number
    assert [(actor.name, actor.reason, actor.rest_s) for actor in run.aside] == [("rollouter/1", WHY, REST_S)]
    assert (run.phase, run.next_deadline()) == ("running", 110.0)
    assert not run.tick(109.0)
    assert run.tick(110.0)
    assert aside(run) == []
    # It is awaited like any that was started.
    assert run.next_deadline() == 110.0 + START_S
    run.ready(run.expected, 120.0)
    assert (run.phase, run.next_deadline()) == ("running", None)


def test_it_is_tried_at_once_by_hand_and_only_if_it_is_set_aside():
    run = machine()
    dies(run, "rollouter/1", 10.0)
    assert not run.bring_back("rollouter/0", 11.0)
    assert run.bring_back("rollouter/1", 11.0)
    assert (aside(run), run.next_deadline()) == ([], 11.0 + START_S)


def test_the_end_by_which_it_was_set_aside_does_so_once():
    """However late it is told again, as to a call whose answer was lost."""
    run = machine()
    dies(run, "rollouter/1", 10.0, incarnation=4)
    assert not dies(run, "rollouter/1", 10.5, incarnation=4)
    run.bring_back("rollouter/1", 11.0)
    assert not dies(run, "rollouter/1", 11.5, incarnation=4)
    assert aside(run) == []
    assert dies(run, "rollouter/1", 12.0, incarnation=5)
    assert aside(run) == ["rollouter/1"]


@pytest.mark.parametrize(("least", "deaths"), [(1, 3), (2, 2), (3, 1)])
def test_with_too_few_left_the_run_fails_and_says_who_was_set_aside(least, deaths):
    run = machine(min_replicas=least)
    for at, name in enumerate(ROLLOUTERS[:deaths]):
        assert run.phase == "running"
        dies(run, name, 10.0 + at)
    assert (run.phase, run.outcome.actor, run.outcome.exit_code) == ("draining", ROLLOUTERS[deaths - 1], 1)
    left = 3 - deaths
    assert run.outcome.reason.startswith(f"{WHY}; {left} of 3 rollouters are left, and rollout.min_replicas is {least}")
    assert all(f"{name} ({WHY})" in run.outcome.reason for name in ROLLOUTERS[: deaths - 1])
    assert run.outcome.log == f"/logs/{ROLLOUTERS[deaths - 1]}"
    assert run.aside == []


def test_one_that_is_not_ready_in_time_is_set_aside_at_the_start_and_later():
    run = machine(running=False)
    run.ready(run.expected - {"rollouter/2"}, 5.0)
    assert run.waiting_for == ["rollouter/2"]
    assert run.tick(START_S)
    assert (run.phase, aside(run), run.waiting_for) == ("running", ["rollouter/2"], [])
    assert "not ready 60 s after its start" in run.aside[0].reason
    run.ended("rollouter/1", -9, False, "", "", 70.0)
    assert run.tick(70.0 + START_S)
    assert (run.phase, aside(run)) == ("running", ["rollouter/1", "rollouter/2"])


@pytest.mark.parametrize("ready", [set(OTHERS), {*ROLLOUTERS, "learner/0", "reward/0"}])
def test_a_start_fails_without_replicas_and_without_anybody_else(ready):
    run = machine(running=False)
    run.ready(ready, 5.0)
    assert run.tick(START_S)
    assert run.phase == "draining" and "not ready 60 s" in run.outcome.reason


def test_a_replica_that_is_set_aside_does_not_hold_up_the_start():
    run = machine(running=False)
    dies(run, "rollouter/0", 5.0)
    assert run.phase == "starting"
    run.ready(run.expected - {"rollouter/0"}, 6.0)
    assert (run.phase, run.next_deadline()) == ("running", 5.0 + REST_S)


def test_errors_that_a_restart_would_meet_again_fail_the_run():
    run = machine()
    run.ended("rollouter/0", 78, True, "no such model", "", 5.0)
    assert (run.outcome.actor, run.outcome.exit_code) == ("rollouter/0", 78)


def test_a_rollouter_goes_with_the_episode_host_beside_it_and_no_other():
    run = machine(also=EPISODES)
    dies(run, "episodes/1", 5.0)
    assert aside(run) == ["episodes/1", "rollouter/1"]
    assert "episodes/1, which plays its episodes, is set aside" in run.aside[1].reason
    # One that plays for all.
    dies(run, "episodes/3", 6.0)
    assert aside(run) == ["episodes/1", "episodes/3", "rollouter/1"]
    dies(run, "episodes/0", 7.0)
    dies(run, "episodes/2", 8.0)
    assert (run.phase, run.outcome.actor) == ("draining", "episodes/2")


def test_both_come_back_together_whoever_is_asked_for():
    for name in ("rollouter/1", "episodes/1"):
        run = machine(also=EPISODES)
        dies(run, "rollouter/1", 2.0)
        dies(run, "episodes/1", 5.0)
        assert aside(run) == ["episodes/1", "rollouter/1"]
        assert run.bring_back(name, 6.0)
        assert aside(run) == []


@pytest.mark.parametrize("name", ["reward/0", "sinks/0"])
def test_one_that_is_no_half_of_a_pair_comes_back_alone(name):
    run = machine(also=("reward/1", "sinks/0"))
    dies(run, "rollouter/0", 2.0)
    dies(run, name, 5.0)
    assert aside(run) == sorted(["rollouter/0", name])
    assert run.bring_back(name, 6.0)
    assert aside(run) == ["rollouter/0"]


def test_the_lost_and_those_that_are_set_aside_are_counted_together():
    run = machine(min_replicas=2)
    run.host_lost("b (agent/1)", ["rollouter/0"], 10.0)
    assert (run.phase, run.next_deadline()) == ("running", None)
    dies(run, "rollouter/1", 15.0)
    # The lost one may come back, for as long as a host has.
    assert (run.phase, run.next_deadline()) == ("running", 30.0)
    assert run.tick(30.0)
    assert run.outcome.reason == "its host b (agent/1) has been lost for 20 s (supervision.host_grace_s)"


def test_who_is_set_aside_on_a_lost_host_is_not_waited_for():
    run = machine()
    dies(run, "rollouter/0", 5.0)
    run.host_lost("b (agent/1)", ["rollouter/0"], 10.0)
    assert run.next_deadline() == 5.0 + REST_S
    run.host_back("b (agent/1)", 20.0)
    assert (run.next_deadline(), aside(run)) == (5.0 + REST_S, ["rollouter/0"])


def test_a_run_that_makes_way_goes_on_with_none():
    run = machine()
    run.preempt("SIGTERM", 5.0)
    for name in ROLLOUTERS:
        dies(run, name, 6.0)
    assert run.phase == "preempting"
    assert not run.bring_back("rollouter/0", 7.0)
    assert not run.tick(7.0)


def test_who_has_left_the_run_is_not_set_aside_any_more():
    run = machine()
    dies(run, "rollouter/0", 5.0)
    run.left(["rollouter/0"], 6.0)
    assert (aside(run), run.next_deadline()) == ([], None)


def test_rests_double_up_to_a_bound_and_begin_anew_after_a_good_time():
    reserve, now, rests = Reserve(REST_S), 0.0, []
    for life in range(1, 8):
        assert reserve.put("r", life, "why", now)
        rests.append(reserve.resting["r"].rest_s)
        now = reserve.resting["r"].until
        assert reserve.due(now) == ["r"] and reserve.next_deadline() == now
        reserve.take("r", now)
        now += 1.0
    assert rests == [100.0, 200.0, 400.0, 800.0, 800.0, 800.0, 800.0]
    assert max(rests) == LONGEST_REST * REST_S
    assert reserve.put("r", 9, "why", now + 800.0)
    assert reserve.resting["r"].rest_s == REST_S


events = st.one_of(
    st.tuples(st.sampled_from(["given up", "dies", "back"]), st.sampled_from((*OTHERS[:1], *ROLLOUTERS, *EPISODES))),
    st.tuples(st.just("ready"), st.sets(st.sampled_from((*OTHERS, *ROLLOUTERS, *EPISODES)))),
    st.tuples(st.sampled_from(["lost", "found"]), st.sampled_from(ROLLOUTERS)),
    st.sampled_from([("tick",), ("preempt",)]),
)


@given(st.integers(1, 3), st.lists(st.tuples(st.floats(0, 50), events), max_size=60))
def test_invariants(least, history):
    run = machine(min_replicas=least, also=EPISODES)
    now = 0.0
    for lives, (gap, (kind, *of)) in enumerate(history, 1):
        now += gap
        before = (run.number, aside(run), run.phase)
        match kind:
            case "given up":
                dies(run, of[0], now, incarnation=lives)
            case "dies":
                run.ended(of[0], 1, False, "", "", now, incarnation=lives)
            case "back":
                run.bring_back(of[0], now)
            case "ready":
                run.ready(of[0] - set(aside(run)), now)
            case "lost":
                run.host_lost(f"host of {of[0]}", [of[0]], now)
            case "found":
                run.host_back(f"host of {of[0]}", now)
            case "tick":
                run.tick(now)
            case "preempt":
                run.preempt("SIGTERM", now)
        if (aside(run), run.phase) != before[1:]:
            assert run.number > before[0]
        names = aside(run)
        assert not run.awaited & set(names)
        assert not set(names) & set(run.waiting_for)
        assert all(not name.startswith(OTHERS) for name in names)
        assert run.phase in ("preempting", "draining", "done", "failed") or len(set(ROLLOUTERS) - set(names)) >= least
        assert all(REST_S <= actor.rest_s <= LONGEST_REST * REST_S for actor in run.aside)
    # Left alone, each is tried again within the longest rest.
    if run.phase == "running":
        resting = {actor.name for actor in run.aside}
        until = now + LONGEST_REST * REST_S
        tried = set()
        while (deadline := run.next_deadline()) is not None and deadline <= until and run.phase == "running":
            held = set(aside(run))
            run.tick(deadline)
            tried |= held - set(aside(run))
            run.ready(run.expected - set(aside(run)), deadline)
        assert run.phase != "running" or resting <= tried
