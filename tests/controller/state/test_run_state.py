"""The run's state machine, with replicas that are resting and hosts that are lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.state.reserve import LONGEST_REST, Reserve
from asyncrl.controller.state.run_state import LAST_RANK, RunStateMachine
from asyncrl.core.roles import drain_rank
from asyncrl.messages.actors import Condemned, Dead

SINGLE = ("dataloader/0", "reward/0", "parameter_server/0", "learner/0", "learner/1")
ROLLOUTERS = ("rollouter/0", "rollouter/1", "rollouter/2")
ACTORS = (*SINGLE, *ROLLOUTERS)
EPISODES = ("episodes/0", "episodes/1", "episodes/2", "episodes/3")
SINKS = "sinks/0"
RANKS = [
    {"rollouter", "reward"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes", "learner"},
    {"rollouter", "reward", "parameter_server", "dataloader", "episodes", "learner", "sinks", "controller"},
]
"""Roles that have to end, rank after rank."""
START_S, HOST_S, REST_S = 60.0, 20.0, 100.0
WHY = "exit code 1, after 3 restarts within 600 s"


def machine(*also, running=True, min_replicas=1):
    run = RunStateMachine(
        frozenset((*ACTORS, *also)),
        now=0.0,
        start_timeout_s=START_S,
        drain_s=10.0,
        grace_s=30.0,
        host_grace_s=HOST_S,
        min_replicas=min_replicas,
        rest_s=REST_S,
    )
    if running:
        assert run.ready(run.expected, 1.0)
    return run


def end(run, name, now=5.0, code=0, *, fatal=False):
    return run.ended(name, code, fatal, "", "", now)


def gives_up(run, name, now=10.0, incarnation=1):
    return run.ended(name, 1, True, WHY, f"/logs/{name}", now, incarnation=incarnation)


def lose(run, names, now=10.0, host="b (agent/1)"):
    run.host_lost(host, names, now)


def draining(run):
    return set(run.draining) & RANKS[-1]


def resting_names(run):
    return [actor.name for actor in run.resting]


# --- the end of a run ---


def test_a_drain_rank_ends_when_its_time_is_over():
    run = machine()
    run.stop("Ctrl-C", 10.0)
    seen = []
    while (deadline := run.next_deadline()) is not None:
        assert not run.tick(deadline - 0.01)
        assert run.tick(deadline)
        seen.append((deadline, draining(run)))
    assert [ranks for _, ranks in seen] == RANKS[1:]
    assert seen[-1][0] <= 20.0
    assert (run.phase, run.outcome.reason, run.outcome.exit_code) == ("done", "Ctrl-C", 143)


@given(st.permutations(ACTORS))
def test_a_drain_rank_waits_for_all_lower_ranks_in_any_order(order):
    run = machine()
    run.finish(5.0)
    gone = set()
    for name in order:
        end(run, name)
        gone.add(name)
        if run.drain < LAST_RANK:
            assert any(drain_rank(other) == run.drain for other in set(ACTORS) - gone)
        assert all(drain_rank(other) >= run.drain for other in set(ACTORS) - gone)
    assert run.phase == "done"


def test_sinks_end_after_the_learner_in_the_time_that_is_left():
    for others_end, until in ((10.1, 15.1), (12.0, 17.0), (18.0, 19.5)):
        run = machine(SINKS)
        run.finish(10.0)
        for now in (15.0, 17.0, others_end):
            run.tick(min(now, others_end))
        for name in (*ROLLOUTERS, *SINGLE):
            assert "sinks" not in run.draining
            end(run, name, others_end)
        assert (draining(run), run.next_deadline()) == (RANKS[3] - {"controller"}, until)
        assert run.tick(until) and run.phase == "done"


def test_the_end_of_the_sinks_neither_ends_the_run_nor_prevents_its_start():
    for exit_code in (2, 78, 1, -9):
        run = machine(SINKS)
        assert end(run, SINKS, code=exit_code, fatal=True)
        assert (run.phase, run.outcome, resting_names(run)) == ("running", None, [SINKS])
    run = machine(SINKS, running=False)
    run.ready(ACTORS, 1.0)
    assert (run.phase, run.waiting_for) == ("starting", [SINKS])
    assert run.tick(START_S)
    assert (run.phase, run.outcome, resting_names(run)) == ("running", None, [SINKS])
    run = machine(SINKS)
    lose(run, [SINKS])
    assert (run.phase, run.next_deadline()) == ("running", None)


def test_a_drain_does_not_wait_for_dead_actors_or_lost_hosts():
    run = machine()
    for name in ("rollouter/0", "rollouter/1", "reward/0"):
        end(run, name, code=-9)
    run.started("rollouter/1")
    lose(run, ["rollouter/2"])
    run.stop("Ctrl-C", 16.0)
    assert draining(run) == RANKS[0]
    lose(run, ["rollouter/1"], 16.2, "c (agent/2)")
    assert draining(run) == RANKS[1]


@pytest.mark.parametrize(
    ("name", "exit_code", "expected"),
    [(name, code, code) for name in ("learner/0", "rollouter/0") for code in (78, 2)]
    + [("learner/0", code, 1) for code in (1, -9, 0)],
)
def test_the_first_failure_is_kept(name, exit_code, expected):
    """Replicas are resting, except after errors that a restart would meet again."""
    run = machine()
    assert run.ended(name, exit_code, True, "", "/logs/l.log", 5.0)
    outcome = run.outcome
    assert (outcome.actor, outcome.log, outcome.exit_code) == (name, "/logs/l.log", expected)
    assert outcome.reason
    assert not any([run.fail("learner/1", "lost a peer", "", 1, 5.1), run.stop("Ctrl-C", 5.2), run.finish(5.3)])
    assert run.outcome is outcome


def test_a_late_actor_fails_the_run_at_the_start_and_after_a_restart():
    run = machine(running=False)
    run.ready(ACTORS[4:], 5.0)
    assert (run.next_deadline(), run.tick(START_S - 0.1)) == (START_S, False)
    assert run.tick(START_S)
    assert run.outcome.actor == "dataloader/0"
    assert "60 s" in run.outcome.reason and "parameter_server/0" in run.outcome.reason
    run = machine(running=False)
    run.ready(SINGLE, 5.0)
    assert run.tick(START_S) and run.outcome.actor == "rollouter/0"
    run = machine()
    end(run, "reward/0", 100.0, -9)
    assert (run.next_deadline(), run.tick(159.0), run.tick(160.0)) == (160.0, False, True)
    assert run.outcome.actor == "reward/0"


@pytest.mark.parametrize("running", [True, False])
def test_condemned_and_dead_actors_change_the_state_once_and_not_in_a_drain(running):
    run = machine(running=running)
    frozen, other = Condemned("rollouter/0", 7, "it did not beat for 61 s"), Condemned("learner/0", 3, "learner/1 died")
    phase, number = run.phase, run.number
    assert run.follow_registry([frozen], [], {}) and not run.follow_registry([frozen], [], {})
    assert (run.condemned, run.number, run.phase, run.drain) == ([frozen], number + 1, phase, 0)
    assert run.follow_registry([frozen, other], [], {}) and run.condemned == [other, frozen]
    dead = Dead("rollouter/1", 1)
    assert run.follow_registry([frozen, other], [dead, Dead("agent/1", 1)], {}) and run.dead == [dead]
    assert not run.follow_registry([frozen, other], [dead], {})
    assert run.follow_registry([frozen, other], [dead], {"learner": 2}) and run.generations == {"learner": 2}
    run.finish(101.0)
    number = run.number
    assert not run.follow_registry([frozen], [], {"learner": 2})
    assert (run.condemned, run.dead, run.number) == ([], [], number)


# --- preemption ---


def test_a_preempted_run_lasts_until_a_checkpoint_is_written():
    run = machine()
    end(run, "rollouter/0", code=-9)
    number = run.number
    assert run.preempt("SIGTERM", 10.0) and not run.preempt("Ctrl-C", 11.0)
    assert (run.phase, run.number, run.draining, run.next_deadline()) == ("preempting", number + 1, [], 40.0)
    # In a run that is about to end, no actor is late and no replica is missing.
    for name in ROLLOUTERS:
        gives_up(run, name, 12.0)
    run.ready(ACTORS[:2], 13.0)
    assert not run.bring_back("rollouter/0", 14.0) and run.phase == "preempting"
    assert run.checkpoint_written(12) and not run.checkpoint_written(12)
    assert run.finish(15.0, preempted=True)
    assert (run.phase, run.outcome.exit_code, run.outcome.actor) == ("draining", 75, "")
    assert run.outcome.reason == "preempted by SIGTERM with a checkpoint of version 12"


@pytest.mark.parametrize(("checkpoint", "exit_code"), [(4, 75), (0, 75), (-1, 143)])
def test_after_the_grace_only_a_complete_checkpoint_counts(checkpoint, exit_code):
    run = machine()
    if checkpoint >= 0:
        run.checkpoint_written(checkpoint)
    run.preempt("SIGTERM", 10.0)
    assert not run.tick(39.9)
    assert run.tick(40.0)
    assert (run.phase, run.outcome.exit_code, run.outcome.actor) == ("draining", exit_code, "")


@pytest.mark.parametrize(
    ("event", "exit_code"),
    [
        (lambda run: run.finish(12.0), 0),
        (lambda run: run.finish(12.0, preempted=True, by="learner/0", failure="the disk is full"), 1),
        (lambda run: run.fail("learner/0", "no signal", "", 1, 12.0), 1),
        (lambda run: run.stop("Ctrl-C", 12.0), 143),
        (lambda run: end(run, "learner/0", code=78, fatal=True), 78),
    ],
)
def test_a_preempted_run_may_finish_fail_or_be_stopped(event, exit_code):
    run = machine()
    run.checkpoint_written(3)
    run.preempt("SIGTERM", 10.0)
    assert event(run)
    assert (run.phase, run.outcome.exit_code) == ("draining", exit_code)
    assert not run.preempt("SIGTERM", 13.0)
    while (deadline := run.next_deadline()) is not None:
        run.tick(deadline)
    assert run.phase == ("failed" if run.outcome.actor else "done")


# --- replicas that are resting ---


def test_a_replica_that_is_given_up_restarts_after_its_rest_or_on_request():
    run = machine()
    number = run.number
    assert gives_up(run, "rollouter/1", incarnation=4) and run.number > number
    assert [(actor.name, actor.reason, actor.rest_s) for actor in run.resting] == [("rollouter/1", WHY, REST_S)]
    assert (run.phase, run.next_deadline(), run.tick(109.0), run.tick(110.0)) == ("running", 110.0, False, True)
    # The run waits for it as for any started actor. The end that let it rest counts once, however late.
    assert (resting_names(run), run.next_deadline()) == ([], 110.0 + START_S)
    assert not gives_up(run, "rollouter/1", 111.0, incarnation=4)
    run.ready(run.expected, 120.0)
    assert (run.phase, run.next_deadline()) == ("running", None)
    assert gives_up(run, "rollouter/1", 130.0, incarnation=5)
    assert not run.bring_back("rollouter/0", 131.0)
    assert run.bring_back("rollouter/1", 131.0)
    assert (resting_names(run), run.next_deadline()) == ([], 131.0 + START_S)


@pytest.mark.parametrize(("least", "deaths"), [(1, 3), (2, 2), (3, 1)])
def test_a_run_with_too_few_replicas_fails_and_names_the_resting_ones(least, deaths):
    run = machine(min_replicas=least)
    for at, name in enumerate(ROLLOUTERS[:deaths]):
        assert run.phase == "running"
        gives_up(run, name, 10.0 + at)
    *before, last = ROLLOUTERS[:deaths]
    assert (run.phase, run.outcome.actor, run.outcome.exit_code) == ("draining", last, 1)
    words = f"{WHY}; {3 - deaths} of 3 rollouters are left, and rollout.min_replicas is {least}"
    assert run.outcome.reason.startswith(words) and all(f"{name} ({WHY})" in run.outcome.reason for name in before)
    assert (run.outcome.log, run.resting) == (f"/logs/{last}", [])


def test_the_loss_of_the_last_reward_pool_ends_the_run():
    run = machine("reward/1")
    gives_up(run, "reward/0")
    assert (run.phase, resting_names(run)) == ("running", ["reward/0"])
    gives_up(run, "reward/1")
    assert run.outcome.reason == f"{WHY}; 0 of 2 reward pools are left; resting before: reward/0 ({WHY})"


def test_a_replica_that_is_not_ready_in_time_rests_at_the_start_and_later():
    run = machine(running=False)
    gives_up(run, "rollouter/0", 5.0)
    run.ready(run.expected - {"rollouter/0", "rollouter/2"}, 5.0)
    assert (run.phase, run.waiting_for) == ("starting", ["rollouter/2"])
    assert run.tick(START_S)
    assert (run.phase, resting_names(run), run.waiting_for) == ("running", ["rollouter/0", "rollouter/2"], [])
    assert "not ready 60 s after its start" in run.resting[1].reason
    run = machine()
    end(run, "rollouter/1", 70.0, -9)
    assert run.tick(70.0 + START_S)
    assert (run.phase, resting_names(run)) == ("running", ["rollouter/1"])


@pytest.mark.parametrize("name", ["rollouter/1", "episodes/1"])
def test_only_its_own_episode_host_rests_and_restarts_with_a_rollouter(name):
    run = machine(*EPISODES, "reward/1")
    gives_up(run, "episodes/1")
    assert resting_names(run) == ["episodes/1", "rollouter/1"]
    assert "episodes/1, which plays its episodes, is resting" in run.resting[1].reason
    # One that plays for all rollouters, and one that belongs to no pair.
    gives_up(run, "episodes/3")
    gives_up(run, "reward/0")
    assert run.bring_back(name, 11.0)
    assert resting_names(run) == ["episodes/3", "reward/0"]
    assert run.bring_back("reward/0", 11.0)
    for episodes in EPISODES[:3]:
        gives_up(run, episodes, 12.0, incarnation=2)
    assert (run.phase, run.outcome.actor) == ("draining", "episodes/2")


def test_rests_double_up_to_a_bound_and_are_short_again_after_a_stable_period():
    reserve, now, rests = Reserve(REST_S), 0.0, []
    for life in range(1, 8):
        assert reserve.put("r", life, "why", now)
        rests.append(reserve.resting["r"].rest_s)
        now = reserve.resting["r"].until
        assert reserve.due(now) == ["r"] and reserve.next_deadline() == now
        reserve.take("r", now)
        now += 1.0
    assert rests == [100.0, 200.0, 400.0, 800.0, 800.0, 800.0, 800.0]
    assert reserve.put("r", 9, "why", now + 800.0)
    assert reserve.resting["r"].rest_s == REST_S


# --- lost hosts ---


def test_a_run_starts_and_continues_without_a_replica_of_a_lost_host():
    run = machine(running=False)
    run.ready(ACTORS[:-1], 1.0)
    assert run.phase == "starting"
    lose(run, ["rollouter/2"])
    assert (run.phase, run.waiting_for, run.lost.hosts) == ("running", [], {"b (agent/1)": ["rollouter/2"]})
    assert run.next_deadline() is None and not run.tick(1e6)
    # Once back, it has the time of any start.
    assert run.host_back("b (agent/1)", 1e6)
    assert run.next_deadline() == 1e6 + START_S
    run.ready(ACTORS, 1e6 + 1.0)
    assert run.next_deadline() is None and run.lost.hosts == {}


def test_an_actor_that_rests_is_not_blamed_for_departed_hosts():
    run = machine("reward/1", SINKS, min_replicas=3)
    run.left(["rollouter/2"], 5.0)
    gives_up(run, SINKS)
    end(run, "reward/0", 20.0, -9)
    assert run.tick(20.0 + START_S)
    assert (run.phase, resting_names(run)) == ("running", ["reward/0", SINKS])
    gives_up(run, "rollouter/0", 90.0)
    assert run.outcome.reason.startswith(f"{WHY}; 1 of 2 rollouters are left, and rollout.min_replicas is 3")


@pytest.mark.parametrize("lost", [["learner/1"], ["dataloader/0"], ["reward/0"], ROLLOUTERS])
def test_a_run_waits_for_the_actors_it_needs_and_then_names_the_host(lost):
    run = machine()
    lose(run, lost)
    assert (run.next_deadline(), run.tick(29.9), run.tick(30.0)) == (30.0, False, True)
    assert (run.outcome.actor, run.outcome.exit_code) == (lost[0], 1)
    assert run.outcome.reason == "its host b (agent/1) has been lost for 20 s (supervision.host_grace_s)"


def test_ranks_that_wait_for_a_rank_on_a_lost_host_are_not_late():
    run = machine()
    lose(run, ["learner/1"])
    end(run, "learner/0", 10.5, -9)
    run.started("learner/0")
    run.ready(set(ACTORS) - {"learner/0", "learner/1"}, 11.0)
    assert not run.tick(29.0)
    assert run.host_back("b (agent/1)", 29.0)
    assert run.next_deadline() == 29.0 + START_S


def test_a_run_without_any_replica_of_a_role_waits_from_the_loss_of_the_last_one():
    run = machine("reward/1")
    lose(run, ["reward/0", "rollouter/2"])
    lose(run, ["rollouter/0"], 50.0, "c (agent/2)")
    assert run.next_deadline() is None
    lose(run, ["rollouter/1"], 100.0, "d (agent/3)")
    # A later loss is judged on its own.
    lose(run, ["reward/1"], 110.0, "e (agent/4)")
    assert run.next_deadline() == 120.0
    run.host_back("c (agent/2)", 115.0)
    run.host_back("e (agent/4)", 115.0)
    run.ready(run.expected - {"reward/0", "rollouter/1", "rollouter/2"}, 116.0)
    assert run.next_deadline() is None


@pytest.mark.parametrize(("rests_at", "fails_at", "lost_s"), [(15.0, 30.0, 20), (1000.0, 1000.0, 990)])
def test_lost_and_resting_replicas_are_counted_and_named_together(rests_at, fails_at, lost_s):
    """The lost one may come back within the grace of a host."""
    run = machine(min_replicas=2)
    lose(run, ["rollouter/0"])
    assert (run.phase, run.next_deadline(), run.tick(rests_at)) == ("running", None, False)
    gives_up(run, "rollouter/1", rests_at)
    assert (run.phase, run.next_deadline(), run.tick(fails_at)) == ("running", 30.0, True)
    words = (
        f"its host b (agent/1) has been lost for {lost_s} s (supervision.host_grace_s); resting: rollouter/1 ({WHY})"
    )
    assert (run.outcome.actor, run.outcome.reason) == ("rollouter/0", words)


def test_the_run_does_not_wait_for_resting_replicas_on_a_lost_or_removed_host():
    run = machine()
    gives_up(run, "rollouter/0")
    lose(run, ["rollouter/0"])
    run.host_back("b (agent/1)", 20.0)
    assert (run.next_deadline(), resting_names(run)) == (10.0 + REST_S, ["rollouter/0"])
    run.left(["rollouter/0"], 21.0)
    assert (run.next_deadline(), resting_names(run)) == (None, [])


# --- joined replicas ---

JOINED = ["rollouter/7", "episodes/7"]


def after_a_host_has_left():
    """A run with fewer rollouters than ``min_replicas`` since a host has left. JOINED have joined."""
    run = machine(*EPISODES, min_replicas=3)
    run.left(["rollouter/2"], 5.0)
    assert run.joined(JOINED, 5.0) and not run.joined(JOINED, 6.0)
    return run


@pytest.mark.parametrize("how", ["late", 1, 78])
def test_a_joined_replica_that_was_never_ready_rests_and_never_fails_the_run(how):
    run = after_a_host_has_left()
    if how == "late":
        assert run.next_deadline() == 5.0 + START_S and run.tick(5.0 + START_S)
    else:
        for name in JOINED:
            run.ended(name, how, True, WHY, "", 10.0, incarnation=1)
    assert (run.phase, resting_names(run)) == ("running", sorted(JOINED))
    run.left(JOINED, 80.0)
    assert (run.phase, resting_names(run)) == ("running", [])


def test_a_joined_replica_that_has_been_ready_is_one_like_any_other():
    run = after_a_host_has_left()
    run.ready({*run.expected}, 6.0)
    gives_up(run, "rollouter/7")
    assert (run.outcome.actor, run.outcome.exit_code) == ("rollouter/7", 1)
    run = after_a_host_has_left()
    run.ready({*run.expected}, 6.0)
    end(run, "rollouter/7", 10.0, 78, fatal=True)
    assert run.outcome.exit_code == 78


def test_a_joined_replica_that_was_never_ready_does_not_replace_one_that_fails():
    run = machine(min_replicas=3)
    run.joined(["rollouter/7"], 5.0)
    gives_up(run, "rollouter/0")
    assert run.outcome.actor == "rollouter/0"


def test_a_drain_waits_only_for_recalled_replicas_and_joined_ones_with_a_process():
    run = machine()
    run.joined(["rollouter/7", "rollouter/8"], 5.0)
    run.started("rollouter/8")
    run.joined(["rollouter/9"], 5.0, has_served=True)
    run.finish(10.0)
    for name in (*ROLLOUTERS, "reward/0"):
        end(run, name, 11.0)
    for name in ("rollouter/8", "rollouter/9"):
        assert run.drain == 1
        end(run, name, 11.0)
    assert run.drain == 2


def test_a_joined_replica_that_dies_again_and_again_has_one_deadline_to_be_ready():
    run = machine(min_replicas=3)
    run.joined(["rollouter/7"], 5.0)
    due = run.next_deadline()
    assert due is not None
    end(run, "rollouter/7", due - 1.0, 1)
    assert run.next_deadline() == due
    run.tick(due)
    assert "rollouter/7" in {each.name for each in run.resting} and run.phase == "running"


def test_the_loss_of_a_joined_replica_that_was_never_ready_changes_no_grace():
    run = machine(min_replicas=3)
    run.joined(["rollouter/7"], 5.0)
    lose(run, ["rollouter/7"])
    assert run.next_deadline() is None
    lose(run, ["rollouter/2"], 20.0, host="c (agent/2)")
    run.host_back("b (agent/1)", 21.0)
    lose(run, ["rollouter/7"], 22.0)
    assert run.next_deadline() == 20.0 + HOST_S


def test_a_recalled_replica_counts_before_it_is_ready_again():
    """A successor of the controller hears of the end of the start's rollouters before it hears the joined one."""
    run = machine(running=False)
    run.joined(["rollouter/7"], 0.0, has_served=True)
    # The run does not wait for one that was never ready.
    run.joined(["rollouter/8"], 0.0)
    for name in ROLLOUTERS:
        gives_up(run, name)
    assert (run.phase, run.waiting_for) == ("starting", sorted((*SINGLE, "rollouter/7")))
    run.ready({*SINGLE, "rollouter/7"}, 11.0)
    assert (run.phase, resting_names(run)) == ("running", list(ROLLOUTERS))
    gives_up(run, "rollouter/7")
    assert run.outcome.actor == "rollouter/7"


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_recalled_replica_may_never_have_been_ready(was_ready):
    """Only its host has served. So its exit code fails the run only after it is ready again."""
    run = machine(running=False)
    run.joined(["rollouter/7"], 0.0, has_served=True)
    if was_ready:
        run.ready({"rollouter/7"}, 4.0)
    end(run, "rollouter/7", code=78, fatal=True)
    assert run.phase == ("draining" if was_ready else "starting")


# --- any order of events ---

someone = st.sampled_from((*ACTORS, *EPISODES))
everybody = frozenset((*ACTORS, *EPISODES))
events = st.one_of(
    st.tuples(st.sampled_from(["given up", "dies", "back", "started"]), someone),
    st.tuples(st.just("ready"), st.one_of(st.just(everybody), st.sets(someone))),
    st.tuples(st.sampled_from(["lost", "found"]), st.sampled_from(ROLLOUTERS)),
    st.tuples(st.just("condemn"), st.sets(st.tuples(someone, st.integers(1, 3)), max_size=3)),
    st.tuples(st.just("checkpoint"), st.integers(0, 3)),
    st.sampled_from([("tick",), ("preempt",), ("stop",), ("finish",), ("made way",), ("fail",)]),
)


def happens(run, now, life, kind, what=None):
    match kind:
        case "given up":
            return gives_up(run, what, now, life)
        case "dies":
            return end(run, what, now, 1)
        case "back":
            return run.bring_back(what, now)
        case "started":
            return run.started(what) or False
        case "ready":
            return run.ready(what - set(resting_names(run)), now)
        case "lost":
            return run.host_lost(f"host of {what}", [what], now)
        case "found":
            return run.host_back(f"host of {what}", now)
        case "condemn":
            return run.follow_registry([Condemned(*actor, "why") for actor in what], [], {})
        case "checkpoint":
            return run.checkpoint_written(what)
        case "preempt" | "stop":
            return getattr(run, kind)("why", now)
        case "finish" | "made way":
            return run.finish(now, preempted=kind == "made way")
        case "fail":
            return run.fail("learner/0", "why", "", 1, now)
    return run.tick(now)


def seen(run):
    return run.phase, run.drain, run.waiting_for, run.outcome, run.condemned, run.checkpoint, run.resting


@given(st.integers(1, 3), st.lists(st.tuples(st.floats(0, 50), events), max_size=60))
def test_invariants(least, history):
    run, now = machine(*EPISODES, running=False, min_replicas=least), 0.0
    for life, (gap, event) in enumerate(history, 1):
        now += gap
        number, before, outcome = run.number, seen(run), run.outcome
        changed = happens(run, now, life, *event)
        assert changed == (run.number > number)
        assert changed or seen(run) == before
        assert run.drain >= before[1]
        assert (run.phase in ("starting", "running", "preempting")) == (run.drain == 0) == (run.outcome is None)
        assert outcome is None or run.outcome is outcome
        # A preempted run has a checkpoint to resume from.
        assert outcome is not None or run.outcome is None or run.outcome.exit_code != 75 or run.checkpoint >= 0
        assert run.final == (run.drain == LAST_RANK)
        assert not run.final or run.phase == ("failed" if run.outcome.actor else "done")
        names = set(resting_names(run))
        assert not names & {*run.awaited, *run.waiting_for}
        assert run.phase not in ("starting", "running") or len(set(ROLLOUTERS) - names) >= least
        assert all(REST_S <= actor.rest_s <= LONGEST_REST * REST_S for actor in run.resting)
    # Without further events each one is started again within the longest rest.
    resting, tried, until = set(resting_names(run)), set(), now + LONGEST_REST * REST_S
    while run.phase == "running" and (deadline := run.next_deadline()) is not None and deadline <= until:
        held = set(resting_names(run))
        run.tick(now := max(now, deadline))
        tried |= held - set(resting_names(run))
        run.ready(run.expected - set(resting_names(run)), now)
    assert run.phase != "running" or resting <= tried
    run.stop("enough", now)
    while (deadline := run.next_deadline()) is not None:
        now = max(now, deadline)
        assert run.tick(now)
    assert run.final
