"""A run counts as stalled after some time, its report names who waits for whom, and a long stall ends it (I5)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.operation import WatchdogConfig
from asyncrl.controller.health.stalls import MOST_STACKS, ActorStatus, StallDetector, describe_waits
from asyncrl.messages.monitor import Wait
from asyncrl.rpc.lifecycle.registry import Registry

STALL_S, LOOK_S, DEADLINES_S = 100.0, 5.0, 250.0
GROUPS, TOKENS = Wait("rollouter", "groups", 1.0), Wait("engine", "tokens", 1.0)


class Watched:
    """A run of a learner that waits for a rollouter's groups, looked at every LOOK_S."""

    def __init__(self, policy="report"):
        config = WatchdogConfig(stall_s=STALL_S, policy=policy, budgets_s={"starting": 300.0, "checkpointing": 250.0})
        self.detector = StallDetector(config, LOOK_S, DEADLINES_S)
        self.registry, self.now = Registry(), 1000.0
        self.phase = "running"
        self.actors, self.entered = {}, {}
        self.reports = []
        self.has("learner/0", "waiting", GROUPS)
        self.has("rollouter/0", "generating", TOKENS)
        self.look()

    def has(self, name, state, *waits, incarnation=1, progress=(0.0, 0.0, 0.0), **facts):
        known = self.actors.get(name)
        if known is None or (known.state, known.incarnation) != (state, incarnation):
            self.entered[name] = self.now
        self.actors[name] = ActorStatus(
            name=name, incarnation=incarnation, state=state, waits=waits, progress=progress, **facts
        )

    def look(self):
        actors = {
            name: dataclasses.replace(actor, state_s=self.now - self.entered[name])
            for name, actor in self.actors.items()
        }
        listening_since = self.registry.listen(self.now, STALL_S)
        if self.detector.look(actors, self.phase, self.now, listening_since) and self.detector.report is not None:
            self.reports.append(self.now)

    def passes(self, seconds):
        until = self.now + seconds
        while self.now + LOOK_S <= until:
            self.now += LOOK_S
            self.look()


def test_a_stall_is_reported_once_and_again_after_twice_the_time():
    run = Watched()
    began = run.now
    run.passes(STALL_S)
    report = run.detector.report
    assert (report.number, report.since, report.ends_run) == (1, began, False)
    assert report.text == (
        "nothing has moved for 100 s (no trained group, no version, no token): "
        "learner/0 waits 1 s for groups; rollouter/0 waits 1 s on its engine for tokens"
    )
    run.passes(900.0)
    assert [at - began for at in run.reports] == [100.0, 300.0, 700.0]


@pytest.mark.parametrize(
    ("policy", "ends_after", "consequence"),
    [
        ("report", None, "The run stays as it is"),
        ("stop", STALL_S, "If this lasts 100 s, the run ends"),
        (None, STALL_S + DEADLINES_S, "If this lasts 350 s, the run ends"),
    ],
)
def test_a_stall_ends_the_run_according_to_the_policy(policy, ends_after, consequence):
    run = Watched(policy)
    began = run.now
    run.passes(10 * STALL_S)
    assert run.detector.report.ends_run == (ends_after is not None)
    assert ends_after is None or run.reports[-1] - began == ends_after
    assert run.detector.consequence.startswith(consequence)


def test_a_new_version_group_or_token_is_progress_and_a_smaller_count_is_not():
    for which in range(4):
        run = Watched()
        for step in range(1, 4):
            run.passes(0.9 * STALL_S)
            progress = tuple(float(step) if i == which else 0.0 for i in range(3))
            run.has("learner/0", "waiting", progress=progress, version=step if which == 3 else 0)
        assert run.reports == []
    run = Watched()
    for progress in ((1.0, 0.0, 10.0), (1.0, 0.0, 4.0), (1.0, 0.0, 9.0)):
        run.has("rollouter/0", "generating", progress=progress)
        run.passes(0.4 * STALL_S)
    assert run.reports == [1000.0 + LOOK_S + STALL_S]
    # Nor if another one grows.
    run.has("rollouter/0", "generating", progress=(2.0, 0.0, 9.0))
    run.passes(LOOK_S)
    run.has("rollouter/0", "generating", progress=(2.0, 0.0, 10.0))
    moved = run.now
    run.passes(STALL_S)
    assert run.reports[1:] == [moved + STALL_S]


def test_a_state_with_a_budget_extends_the_time_and_the_clock_starts_when_it_ends():
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
    # Past its budget it counts as a stall at once.
    assert run.reports == [began + 250.0]
    assert run.detector.report.since == began
    assert "learner/0 is checkpointing for 250 s" in run.detector.report.text
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
    assert run.detector.report is None
    run.passes(5 * STALL_S)
    run.phase = "running"
    run.passes(STALL_S - LOOK_S)
    assert len(run.reports) == 1


def test_a_finished_run_and_a_learner_without_heartbeats_do_not_count_as_stalls():
    run = Watched()
    learner = run.actors.pop("learner/0")
    run.passes(5 * STALL_S)
    run.actors["learner/0"] = learner
    run.has("learner/0", "done", Wait("dataloader/0", "WatchDataloader", 500.0, True))
    run.has("rollouter/0", "waiting", Wait("dataloader/0", "Lease", 500.0, True))
    run.passes(10 * STALL_S)
    assert run.reports == []
    # An actor that still works makes it a stall.
    run.has("rollouter/0", "generating")
    run.passes(2 * STALL_S)
    assert run.reports


def test_time_without_a_check_of_the_controller_does_not_count():
    run = Watched()
    run.passes(0.9 * STALL_S)
    run.now += 50 * STALL_S
    run.look()
    woke = run.now
    run.passes(2 * STALL_S)
    assert run.reports == [woke + STALL_S]


def restarts(run, name, incarnation, start_s):
    """An actor restarts, starts for ``start_s``, loads the version that it had, and works for as long as it can."""
    run.actors.pop(name)
    run.passes(2 * LOOK_S)
    if start_s:
        run.has(name, "starting", incarnation=incarnation)
        run.passes(start_s)
    run.has(name, "waiting", incarnation=incarnation, version=3)
    run.passes(0.6 * STALL_S)


@pytest.mark.parametrize(
    ("name", "start_s", "reported_after"),
    [
        ("rollouter/0", 0.0, STALL_S),
        ("learner/0", 0.0, STALL_S),
        # The clock starts again after the first start, and not after others.
        ("rollouter/0", 150.0, 2 * LOOK_S + 150.0 + LOOK_S + STALL_S),
        ("learner/0", 150.0, 2 * LOOK_S + 150.0 + LOOK_S + STALL_S),
        # No start ends within its budget.
        ("rollouter/0", 310.0, 2 * LOOK_S + 300.0),
    ],
)
def test_an_actor_that_restarts_again_and_again_hides_no_stall(name, start_s, reported_after):
    run = Watched()
    run.has("rollouter/0", "generating", version=3)
    run.has("learner/0", "waiting", version=3)
    run.passes(LOOK_S)
    began = run.now
    for incarnation in range(2, 8):
        restarts(run, name, incarnation, start_s)
    assert run.reports[0] - began == reported_after
    # A token is movement, and the next restart has a budget again.
    run.has("rollouter/0", "generating", incarnation=9, version=3)
    run.passes(LOOK_S)
    run.has("rollouter/0", "generating", incarnation=9, version=3, progress=(0.0, 0.0, 1.0))
    run.passes(LOOK_S)
    assert run.detector.report is None
    run.has("rollouter/0", "starting", incarnation=10)
    run.passes(2 * STALL_S)
    assert run.detector.report is None


@given(st.lists(st.tuples(st.sampled_from(["token", "restart", "state", "nothing"]), st.integers(1, 60)), max_size=30))
def test_a_stall_is_reported_neither_early_nor_late(history):
    run = Watched()
    moved, incarnation, tokens = run.now, 1, 0.0
    for event, looks in history:
        tokens += event == "token"
        incarnation += event == "restart"
        if event == "token":
            moved = run.now + LOOK_S
        state = "waiting" if event == "state" else "generating"
        run.has("rollouter/0", state, incarnation=incarnation, progress=(0.0, 0.0, tokens))
        for _ in range(looks):
            run.passes(LOOK_S)
            assert (run.detector.report is not None) == (run.now - moved >= STALL_S)


# --- the text of a report ---


def actor(name, state="ready", *waits, **facts):
    return ActorStatus(name=name, incarnation=1, state=state, waits=[Wait(*wait) for wait in waits], **facts)


GROUPS_WAIT = ("rollouter", "groups", 312.0)
SCORE = ("reward/0", "Score", 310.0)
LEASE = ("dataloader/0", "Lease", 305.0, True)
WATCH = ("controller/0", "WatchRun", 9.0, True)
IDLE = (
    actor("dataloader/0", "ready", WATCH, state_s=400.0),
    actor("reward/0", "ready", WATCH, state_s=400.0),
    actor("learner/0", "waiting", GROUPS_WAIT, WATCH),
    actor("rollouter/0", "waiting", LEASE, WATCH),
    actor("rollouter/1", "waiting", LEASE, WATCH),
)
TABLE = {
    "no lease is given out": (
        [],
        "learner/0 waits 312 s for groups; dataloader/0 is ready for 400 s and waits for nothing; "
        "reward/0 is ready for 400 s and waits for nothing; "
        "rollouter/0, rollouter/1 is idle and waits 305 s on dataloader/0 for Lease",
        ["dataloader/0", "reward/0", "rollouter/0", "rollouter/1"],
    ),
    "a reward function that hangs": (
        [
            actor("rollouter/1", "waiting", SCORE, LEASE),
            actor("reward/0", "ready", ("worker", "mine:score of 0-17", 304.0)),
        ],
        "learner/0 waits 312 s for groups; rollouter/1 waits 310 s on reward/0 for Score; "
        "reward/0 waits 304 s on its worker for mine:score of 0-17; "
        "dataloader/0 is ready for 400 s and waits for nothing; "
        "rollouter/0 is idle and waits 305 s on dataloader/0 for Lease",
        ["reward/0", "dataloader/0", "rollouter/0"],
    ),
    "a frozen rollouter, and a dead pool": (
        [actor("rollouter/1", "generating", SCORE, silent_s=290.0), actor("reward/0", "ready", ended=True)],
        "learner/0 waits 312 s for groups; rollouter/1 has not been heard of for 290 s (it was generating); "
        "reward/0 has ended or is to be killed, and is not back; "
        "dataloader/0 is ready for 400 s and waits for nothing; "
        "rollouter/0 is idle and waits 305 s on dataloader/0 for Lease",
        ["rollouter/1", "dataloader/0", "rollouter/0"],
    ),
    "a learner that trains for too long": (
        [actor("learner/0", "training", WATCH, state_s=301.0)],
        "learner/0 is training for 301 s; dataloader/0 is ready for 400 s and waits for nothing; "
        "reward/0 is ready for 400 s and waits for nothing; "
        "rollouter/0, rollouter/1 is idle and waits 305 s on dataloader/0 for Lease",
        ["learner/0", "dataloader/0", "reward/0", "rollouter/0"],
    ),
}


@pytest.mark.parametrize("situation", TABLE)
def test_a_report_has_the_situation_of_each_actor(situation):
    changed, text, stacks = TABLE[situation]
    found = describe_waits({each.name: each for each in (*IDLE, *changed)}, 150.0)
    assert (found[0], [each.name for each in found[1]]) == (text, stacks)


@given(
    st.dictionaries(
        st.sampled_from([f"{role}/{i}" for role in ("learner", "rollouter", "reward") for i in range(12)]),
        st.tuples(
            st.sampled_from(["ready", "training", "N s {}"]),
            st.lists(st.builds(Wait, st.sampled_from(["reward/0", "engine"]), st.text(), st.floats(0, 99))),
            st.floats(0, 1000),
            st.booleans(),
        ),
        min_size=1,
    )
)
def test_a_report_is_bounded_and_has_an_actor(world):
    actors = {
        name: ActorStatus(name=name, incarnation=1, state=state, waits=waits, silent_s=silent_s, ended=ended)
        for name, (state, waits, silent_s, ended) in world.items()
    }
    text, stacks = describe_waits(actors, 150.0)
    assert any(name in text for name in actors)
    assert len(stacks) <= MOST_STACKS and not any(each.ended for each in stacks)
