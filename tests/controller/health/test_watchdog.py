"""When a run counts as stalled, for how long that is said, and what extends the time (I5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.operation import WatchdogConfig
from asyncrl.controller.health.blame import SeenActor
from asyncrl.controller.health.watchdog import Watchdog
from asyncrl.messages.monitor import AwaitRecord

STALL_S = 100.0
CONFIG = WatchdogConfig(stall_s=STALL_S, budgets_s={"starting": 300.0, "checkpointing": 250.0})
LOOK_S = 5.0


class Watched:
    """A run of a learner that waits for a rollouter's groups, looked at every LOOK_S."""

    def __init__(self):
        self.dog = Watchdog(CONFIG, LOOK_S)
        self.now = 1000.0
        self.phase = "running"
        self.actors = {}
        self.reports = []
        self.entered = {}
        self.has("learner/0", "waiting", AwaitRecord("rollouter", "groups", 1.0))
        self.has("rollouter/0", "generating", AwaitRecord("engine", "tokens", 1.0))

    def has(self, name, state, *waits, incarnation=1, figures=(0.0, 0.0, 0.0), **facts):
        known = self.actors.get(name)
        if known is None or (known.state, known.incarnation) != (state, incarnation):
            self.entered[name] = self.now
        self.actors[name] = SeenActor(
            name=name, incarnation=incarnation, state=state, waits=waits, figures=figures, **facts
        )

    def look(self):
        actors = {
            name: SeenActor(
                **{slot: getattr(one, slot) for slot in SeenActor.__slots__}
                | {"state_s": self.now - self.entered[name]}
            )
            for name, one in self.actors.items()
        }
        if self.dog.look(actors, self.phase, self.now):
            self.reports.append((self.now, self.dog.report))

    def passes(self, seconds):
        until = self.now + seconds
        while self.now + LOOK_S <= until:
            self.now += LOOK_S
            self.look()

    @property
    def reported_at(self):
        return [at for at, report in self.reports if report is not None]


@pytest.fixture
def run():
    run = Watched()
    run.look()
    return run


def test_a_stall_is_reported_once_and_again_after_twice_the_time(run):
    began = run.now
    run.passes(STALL_S - LOOK_S)
    assert run.reports == []
    run.passes(1000.0)
    assert [at - began for at in run.reported_at] == [100.0, 300.0, 700.0]
    assert [report.number for _, report in run.reports] == [1, 2, 3]
    first = run.reports[0][1]
    assert (first.name, first.incarnation, first.since) == ("rollouter/0", 1, began)
    assert first.text.startswith(
        "nothing has moved for 100 s (no trained group, no version, no token), because of rollouter/0: learner/0 waits"
    )


def restarting(max_restarts=3, **patience_s):
    run = Watched()
    run.dog = Watchdog(
        WatchdogConfig(stall_s=STALL_S, policy="restart"), LOOK_S, patience_s=patience_s, max_restarts=max_restarts
    )
    run.look()
    return run


@pytest.mark.parametrize(
    ("policy", "action", "words"),
    [
        ("report", "none", "nothing is done about it (watchdog.policy = report)"),
        ("restart", "restart", "rollouter/0 is killed and started again (watchdog.policy = restart)"),
        ("stop", "stop", "the run ends (watchdog.policy = stop)"),
    ],
)
def test_a_report_tells_what_is_done(policy, action, words):
    run = Watched()
    run.dog = Watchdog(WatchdogConfig(stall_s=STALL_S, policy=policy), LOOK_S)
    run.look()
    run.passes(STALL_S)
    assert run.dog.report.action == action
    assert run.dog.report.text.endswith(f"; {words}")


def test_who_beats_has_the_time_that_its_work_may_take():
    run = restarting(rollouter=2.5 * STALL_S)
    run.passes(STALL_S)
    assert run.dog.report.action == "none"
    assert run.dog.report.text.endswith("; rollouter/0 is left alone, as its work may take 250 s")
    run.passes(2 * STALL_S)
    assert run.dog.report.action == "restart"


def test_who_is_silent_is_at_no_work():
    run = restarting(rollouter=1000.0)
    run.has("rollouter/0", "generating", silent_s=STALL_S)
    run.passes(STALL_S)
    assert (run.dog.report.name, run.dog.report.action) == ("rollouter/0", "restart")


def test_who_has_ended_is_started_again_by_its_agent():
    run = restarting()
    run.has("rollouter/0", "generating", ended=True)
    run.passes(STALL_S)
    assert (run.dog.report.name, run.dog.report.action) == ("rollouter/0", "none")
    assert "is to be started again by its agent" in run.dog.report.text


def stalls_again(run, incarnation):
    """It was started again, and the run stands as before."""
    run.has("rollouter/0", "generating", AwaitRecord("engine", "tokens", 1.0), incarnation=incarnation)
    run.passes(STALL_S + LOOK_S)
    return run.dog.report.action


def test_restarts_that_bring_no_step_end_the_run():
    run = restarting(max_restarts=2)
    assert [stalls_again(run, n) for n in (2, 3, 4)] == ["restart", "restart", "stop"]
    assert run.dog.report.text.endswith("; the run ends, as 2 restarts of whoever held it up have not brought a step")


def test_restarts_are_counted_anew_after_a_step():
    run = restarting(max_restarts=2)
    assert [stalls_again(run, n) for n in (2, 3)] == ["restart", "restart"]
    run.has("learner/0", "waiting", AwaitRecord("rollouter", "groups", 1.0), figures=(0.0, 1.0, 0.0))
    assert stalls_again(run, 4) == "restart"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_version_a_group_or_a_token_each_move_the_run(run, which):
    for step in range(1, 8):
        run.passes(0.9 * STALL_S)
        run.has("learner/0", "waiting", figures=tuple(float(step) if i == which else 0.0 for i in range(3)))
    assert run.reports == []


def test_figures_that_shrink_do_not_move_it(run):
    run.has("rollouter/0", "generating", figures=(0.0, 0.0, 10.0))
    run.passes(LOOK_S)
    moved = run.now
    run.passes(0.5 * STALL_S)
    run.has("rollouter/0", "generating", figures=(0.0, 0.0, 4.0))
    run.passes(0.2 * STALL_S)
    run.has("rollouter/0", "generating", figures=(0.0, 0.0, 9.0))
    run.passes(0.4 * STALL_S)
    assert run.reported_at[0] - moved == STALL_S
    # Nor while another one grows.
    run.has("rollouter/0", "generating", figures=(1.0, 0.0, 9.0))
    run.passes(LOOK_S)
    moved = run.now
    run.has("rollouter/0", "generating", figures=(1.0, 0.0, 10.0))
    run.passes(2 * STALL_S)
    assert run.reported_at[1] - moved == STALL_S


def test_a_state_with_a_budget_extends_the_time_and_its_end_in_time_starts_the_clock(run):
    run.has("learner/0", "checkpointing")
    run.passes(200.0)
    assert run.reports == []
    run.has("learner/0", "waiting", AwaitRecord("rollouter", "groups", 1.0))
    run.passes(LOOK_S)
    ended = run.now
    run.passes(2 * STALL_S)
    assert run.reported_at[0] - ended == STALL_S


def test_past_its_budget_a_state_is_a_stall_at_once_and_its_actor_the_culprit(run):
    began = run.now
    run.has("learner/0", "checkpointing")
    run.passes(260.0)
    assert run.reported_at == [began + 250.0]
    assert (run.dog.report.name, run.dog.report.since) == ("learner/0", began)
    assert "learner/0 is checkpointing for 250 s" in run.dog.report.text


def test_a_frozen_actor_is_excused_by_no_budget(run):
    began = run.now
    run.has("rollouter/0", "starting", silent_s=90.0)
    run.passes(STALL_S)
    assert run.reported_at == [began + STALL_S]


@pytest.mark.parametrize("phase", ["starting", "preempting", "draining", "done", "failed"])
def test_only_a_running_run_is_watched(run, phase):
    run.passes(STALL_S)
    run.phase = phase
    run.passes(LOOK_S)
    assert run.dog.report is None
    run.passes(5 * STALL_S)
    assert len(run.reported_at) == 1
    run.phase = "running"
    run.passes(STALL_S - LOOK_S)
    assert len(run.reported_at) == 1


def test_a_run_without_heartbeats_of_its_learner_is_not_judged(run):
    del run.actors["learner/0"]
    run.passes(5 * STALL_S)
    assert run.reports == []


def test_everybody_idle_after_the_last_step_is_no_stall(run):
    run.has("learner/0", "done", AwaitRecord("dataloader/0", "WatchSupply", 500.0, True))
    run.has("rollouter/0", "waiting", AwaitRecord("dataloader/0", "Lease", 500.0, True))
    run.has("dataloader/0", "ready")
    run.passes(10 * STALL_S)
    assert run.reports == []
    # But somebody who still works for nobody is one.
    run.has("rollouter/0", "generating")
    run.passes(2 * STALL_S)
    assert run.reported_at


def test_time_in_which_the_controller_itself_did_not_look_counts_as_nothing(run):
    run.passes(0.9 * STALL_S)
    run.now += 50 * STALL_S
    run.look()
    assert run.reports == []
    woke = run.now
    run.passes(2 * STALL_S)
    assert run.reported_at[0] - woke == STALL_S


@given(st.lists(st.tuples(st.sampled_from(["token", "restart", "state", "nothing"]), st.integers(1, 60)), max_size=30))
def test_never_early_and_never_late(history):
    run = Watched()
    run.look()
    moved, incarnation, tokens, since_report = run.now, 1, 0.0, None
    for event, looks in history:
        if event == "token":
            tokens += 1.0
        elif event == "restart":
            incarnation += 1
        if event in ("token", "restart"):
            moved, since_report = run.now + LOOK_S, None
        state = "waiting" if event == "state" else "generating"
        run.has("rollouter/0", state, incarnation=incarnation, figures=(0.0, 0.0, tokens))
        for _ in range(looks):
            known = len(run.reported_at)
            run.passes(LOOK_S)
            if len(run.reported_at) > known:
                since = since_report if since_report is not None else moved
                assert run.now - since >= STALL_S
                since_report = run.now
            assert (run.dog.report is not None) == (run.now - moved >= STALL_S)
