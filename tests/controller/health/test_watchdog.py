"""When a run counts as stalled, for how long that is said, and what extends the time (I5)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.operation import WatchdogConfig
from asyncrl.controller.health.blame import SeenActor
from asyncrl.controller.health.watchdog import Watchdog
from asyncrl.messages.monitor import AwaitRecord

STALL_S, LOOK_S = 100.0, 5.0
GROUPS, TOKENS = AwaitRecord("rollouter", "groups", 1.0), AwaitRecord("engine", "tokens", 1.0)


class Watched:
    """A run of a learner that waits for a rollouter's groups, looked at every LOOK_S."""

    def __init__(self, policy="report", max_restarts=3, **patience_s):
        config = WatchdogConfig(stall_s=STALL_S, policy=policy, budgets_s={"starting": 300.0, "checkpointing": 250.0})
        self.dog = Watchdog(config, LOOK_S, patience_s=patience_s, max_restarts=max_restarts)
        self.now = 1000.0
        self.phase = "running"
        self.actors, self.entered = {}, {}
        self.reports = []
        self.has("learner/0", "waiting", GROUPS)
        self.has("rollouter/0", "generating", TOKENS)
        self.look()

    def has(self, name, state, *waits, incarnation=1, figures=(0.0, 0.0, 0.0), **facts):
        known = self.actors.get(name)
        if known is None or (known.state, known.incarnation) != (state, incarnation):
            self.entered[name] = self.now
        self.actors[name] = SeenActor(
            name=name, incarnation=incarnation, state=state, waits=waits, figures=figures, **facts
        )

    def look(self):
        actors = {
            name: dataclasses.replace(actor, state_s=self.now - self.entered[name])
            for name, actor in self.actors.items()
        }
        if self.dog.look(actors, self.phase, self.now) and self.dog.report is not None:
            self.reports.append(self.now)

    def passes(self, seconds):
        until = self.now + seconds
        while self.now + LOOK_S <= until:
            self.now += LOOK_S
            self.look()

    def told(self):
        """The one that is named, and what is done."""
        return self.dog.report.name, self.dog.report.action


def test_a_stall_is_reported_once_and_again_after_twice_the_time():
    run = Watched()
    began = run.now
    run.passes(STALL_S)
    report = run.dog.report
    assert (report.number, report.name, report.incarnation, report.since) == (1, "rollouter/0", 1, began)
    assert report.text.startswith(
        "nothing has moved for 100 s (no trained group, no version, no token), because of rollouter/0: learner/0 waits"
    )
    run.passes(900.0)
    assert [at - began for at in run.reports] == [100.0, 300.0, 700.0]


@pytest.mark.parametrize(
    ("policy", "facts", "action", "words"),
    [
        ("report", {}, "none", "nothing is done about it (watchdog.policy = report)"),
        ("restart", {}, "none", "rollouter/0 is left alone, as its work may take 250 s"),
        ("restart", {"silent_s": STALL_S}, "restart", "rollouter/0 is killed and started again"),
        ("restart", {"ended": True}, "none", "rollouter/0 is to be started again by its agent"),
        ("stop", {}, "stop", "the run ends (watchdog.policy = stop)"),
    ],
)
def test_a_report_tells_what_is_done(policy, facts, action, words):
    run = Watched(policy, rollouter=2.5 * STALL_S)
    run.has("rollouter/0", "generating", TOKENS, **facts)
    run.passes(STALL_S)
    assert run.told() == ("rollouter/0", action)
    assert f"; {words}" in run.dog.report.text
    run.passes(2 * STALL_S)
    # Work that takes longer than it may is no excuse.
    assert run.told()[1] == ("restart" if policy == "restart" and not facts.get("ended") else action)


def test_restarts_that_bring_no_step_end_the_run():
    run = Watched("restart", max_restarts=2)

    def stalls_again(incarnation):
        run.has("rollouter/0", "generating", TOKENS, incarnation=incarnation)
        run.passes(STALL_S + LOOK_S)
        return run.dog.report.action

    assert [stalls_again(n) for n in (2, 3)] == ["restart", "restart"]
    run.has("learner/0", "waiting", GROUPS, figures=(0.0, 1.0, 0.0))
    assert [stalls_again(n) for n in (4, 5, 6)] == ["restart", "restart", "stop"]
    assert run.dog.report.text.endswith("; the run ends, as 2 restarts of whoever held it up have not brought a step")


def test_a_version_a_group_or_a_token_each_move_the_run_and_figures_that_shrink_do_not():
    for which in range(3):
        run = Watched()
        for step in range(1, 4):
            run.passes(0.9 * STALL_S)
            run.has("learner/0", "waiting", figures=tuple(float(step) if i == which else 0.0 for i in range(3)))
        assert run.reports == []
    run = Watched()
    for figures in ((1.0, 0.0, 10.0), (1.0, 0.0, 4.0), (1.0, 0.0, 9.0)):
        run.has("rollouter/0", "generating", figures=figures)
        run.passes(0.4 * STALL_S)
    assert run.reports == [1000.0 + LOOK_S + STALL_S]
    # Nor while another one grows.
    run.has("rollouter/0", "generating", figures=(2.0, 0.0, 9.0))
    run.passes(LOOK_S)
    run.has("rollouter/0", "generating", figures=(2.0, 0.0, 10.0))
    moved = run.now
    run.passes(STALL_S)
    assert run.reports[1:] == [moved + STALL_S]


def test_a_state_with_a_budget_extends_the_time_and_its_end_in_time_starts_the_clock():
    run = Watched()
    began = run.now
    run.has("learner/0", "checkpointing")
    run.passes(200.0)
    assert run.reports == []
    run.has("learner/0", "waiting", GROUPS)
    run.passes(LOOK_S + STALL_S)
    assert run.reports == [began + 200.0 + LOOK_S + STALL_S]
    run = Watched()
    run.has("learner/0", "checkpointing")
    run.passes(260.0)
    # Past its budget it is a stall at once, and its actor the culprit.
    assert run.reports == [began + 250.0]
    assert (run.dog.report.name, run.dog.report.since) == ("learner/0", began)
    assert "learner/0 is checkpointing for 250 s" in run.dog.report.text
    run = Watched()
    run.has("rollouter/0", "starting", silent_s=90.0)
    run.passes(STALL_S)
    assert run.reports == [began + STALL_S], "a frozen actor is excused by no budget"


@pytest.mark.parametrize("phase", ["starting", "preempting", "draining", "done", "failed"])
def test_only_a_running_run_is_watched(phase):
    run = Watched()
    run.passes(STALL_S)
    run.phase = phase
    run.passes(LOOK_S)
    assert run.dog.report is None
    run.passes(5 * STALL_S)
    run.phase = "running"
    run.passes(STALL_S - LOOK_S)
    assert len(run.reports) == 1


def test_everybody_idle_after_the_last_step_is_no_stall_nor_a_learner_that_never_beat():
    run = Watched()
    learner = run.actors.pop("learner/0")
    run.passes(5 * STALL_S)
    run.actors["learner/0"] = learner
    run.has("learner/0", "done", AwaitRecord("dataloader/0", "WatchSupply", 500.0, True))
    run.has("rollouter/0", "waiting", AwaitRecord("dataloader/0", "Lease", 500.0, True))
    run.passes(10 * STALL_S)
    assert run.reports == []
    # But somebody who still works for nobody is one.
    run.has("rollouter/0", "generating")
    run.passes(2 * STALL_S)
    assert run.reports


def test_time_in_which_the_controller_itself_did_not_look_counts_as_nothing():
    run = Watched()
    run.passes(0.9 * STALL_S)
    run.now += 50 * STALL_S
    run.look()
    woke = run.now
    run.passes(2 * STALL_S)
    assert run.reports == [woke + STALL_S]


@given(st.lists(st.tuples(st.sampled_from(["token", "restart", "state", "nothing"]), st.integers(1, 60)), max_size=30))
def test_never_early_and_never_late(history):
    run = Watched()
    moved, incarnation, tokens = run.now, 1, 0.0
    for event, looks in history:
        tokens += event == "token"
        incarnation += event == "restart"
        if event in ("token", "restart"):
            moved = run.now + LOOK_S
        state = "waiting" if event == "state" else "generating"
        run.has("rollouter/0", state, incarnation=incarnation, figures=(0.0, 0.0, tokens))
        for _ in range(looks):
            run.passes(LOOK_S)
            assert (run.dog.report is not None) == (run.now - moved >= STALL_S)
