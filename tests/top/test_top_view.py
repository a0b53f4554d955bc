"""What asyncrl-top shows of snapshots: numbers, panes, plain text, JSON."""

import json
import math
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
from harness import replace
from hypothesis import example, given
from hypothesis import strategies as st
from top.pictures import STATES, WALL, Run, empty

from asyncrl.snapshot import ActorView, Event, Resource
from asyncrl.telemetry import catalogue
from asyncrl.telemetry.metrics_line import number_in
from asyncrl.text.numbers import count, duration, exact, size
from asyncrl.top.detail import detail, help_page
from asyncrl.top.drawing.layout import Choice
from asyncrl.top.drawing.tables import SORTS, sorted_next
from asyncrl.top.drawing.text import (
    ASCII,
    UNICODE,
    columns,
    fit,
    length,
    rich_text,
    sparkline,
    state_bar,
    to_ascii,
    wrapped,
)
from asyncrl.top.figures.document import json_schema, to_json
from asyncrl.top.model import build
from asyncrl.top.panes import PANES, page, pane
from asyncrl.top.pipeline import header, pipeline
from asyncrl.top.source.history import KEPT, History

ROOT = Path(__file__).parents[2]


def lines_of(name, document, width, choice=None):
    """The lines of a pane, without blanks at their ends."""
    drawn = pane(name, document, choice or Choice(), width, UNICODE).lines(width, UNICODE)
    return [line.plain.rstrip() for line in drawn]


def seen(snapshots):
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
    return build(history)


# --- the marked stage ---

FED = {"training": 0.3, "waiting": 0.7}
SLOW = {
    "reward": Run(worker={"scoring": 0.99, "idle": 0.01}, engine={"generating": 0.3, "waiting": 0.7}, rank=FED),
    "learner": Run(rank={"training": 0.95, "waiting": 0.05}, engine={"generating": 0.3, "waiting": 0.7}),
    "rollouters": Run(engine={"generating": 0.97, "paused": 0.03}, rank=FED),
    "gate": Run(engine={"generating": 0.5, "waiting": 0.5}, rank=FED, limit=0.0, outstanding=64.0),
}


@pytest.mark.parametrize("stage", SLOW)
def test_a_planted_slow_stage_is_the_one_that_is_marked(stage):
    document = seen(SLOW[stage].between())
    assert document.bottleneck.stage == stage
    marked = [row.stage for row in document.stages if row.bottleneck]
    assert marked == [stage if stage != "gate" else "dataloader"]
    text = page(document, 80, UNICODE)
    assert f"◆ {stage}: " in text
    assert f"◆{marked[0]}" in text


STEADY = {"engine": {"generating": 0.69, "waiting": 0.31}, "rank": {"training": 0.74, "waiting": 0.26}}
SAWTEETH = {
    "lag": [{"lag": n} for n in (0, 1, 2, 0, 0, 1)],
    "trajectories with the reward": [{"scoring": n} for n in (0.0, 0.0, 40.0, 1.0)],
    "room in the gate": [{"outstanding": n} for n in (20.0, 240.0)],
    "the dataloader's event loop": [{"loop_busy": share} for share in (0.1, 0.9, 0.1, 0.2)],
}


@pytest.mark.parametrize("what", SAWTEETH)
def test_the_mark_of_a_steady_run_stays_where_it_is_while_levels_swing_with_its_steps(what):
    history, stages, swing = History(), [], SAWTEETH[what]
    for n in range(120):
        history.add(Run(step_s=1.7, **STEADY, **swing[n % len(swing)]).at(30.0 + 0.75 * n))
        stages.append(build(history).bottleneck.stage)
    assert set(stages[20:]) == {"gate"}


def test_learner_and_engines_that_are_busy_in_turns_do_not_take_the_mark_from_one_another():
    """A step takes 2.4 s: the learner waits at the beginning of it, and works 78 % of its time."""

    def at(t):
        waited = 0.52 * (t // 2.4) + min(0.52, t % 2.4)
        rank = {"waiting": waited / t, "training": (t - waited) / t}
        return Run(engine={"generating": 0.99, "waiting": 0.01}, rank=rank, step_s=2.4).at(t)

    history, stages = History(), []
    for n in range(120):
        history.add(at(100.0 + 0.75 * n))
        stages.append(build(history).bottleneck.stage)
    assert set(stages[40:]) == {"rollouters"}


START = {"starting": 29.0, "waiting": 1.0}
"""Seconds before the first step."""


def started(t, start=START, step_s=2.0):
    """A run whose resources were starting and waiting for 30 s, and whose learner then trains steps."""
    snapshot = Run(step_s=step_s, engine={"generating": 0.4, "waiting": 0.6}, rank=FED, limit=3.0).at(
        max(0.0, t - 30.0)
    )
    actors = []
    for actor in snapshot.actors:
        resources = [
            msgspec.structs.replace(
                each,
                seconds={
                    state: each.seconds.get(state, 0.0) + min(1.0, t / 30.0) * start.get(state, 0.0)
                    for state in {*each.seconds, *start}
                },
            )
            for each in actor.resources
        ]
        actors.append(msgspec.structs.replace(actor, resources=resources))
    return msgspec.structs.replace(snapshot, wall=WALL + t, actors=actors)


def test_once_a_run_steps_its_start_is_not_what_sets_the_pace():
    history, said = History(), []
    for n in range(80):
        history.add(started(0.5 * n + 1.0))
        found = build(history).bottleneck
        said.append((history.newest.run.step, found.stage, found.why))
    assert any("starting" in why for step, _, why in said if step == 0), "until then it does"
    assert not [why for step, _, why in said if step and "starting" in why]
    stepping = [(stage, why) for step, stage, why in said if step]
    assert stepping[0] == (None, "measuring") and {stage for stage, _ in stepping[8:]} == {"gate"}
    assert build(history).window_s == pytest.approx(8.0, abs=0.6)


# --- numbers ---


def test_a_healthy_run_in_numbers():
    document = seen(Run().between())
    run = document.run
    assert (run.step, run.steps, run.version) == (50, 100, 50)
    assert run.eta_s == pytest.approx(100.0)
    assert run.tokens_per_s == pytest.approx(850 + 860 + 870 + 880)
    assert run.samples_per_s == pytest.approx(256)
    assert document.reward.rate == pytest.approx(255)
    assert document.ledger.outstanding == 200 and document.ledger.gate == 256
    for row in document.rollouters:
        assert sum(row.states.values()) == pytest.approx(1.0)
        assert row.lag == 0
    assert [row.seconds for row in document.phases] == pytest.approx([0.5, 1.4, 0.1, 2.0])


@pytest.mark.parametrize("step", [1, 7])
def test_the_first_step_of_a_learner_foretells_nothing(step):
    def told(*lines):
        snapshot = Run().at(100.0)
        train = [{"step": step + n, "start": start, "time/step_s": seconds} for n, (start, seconds) in enumerate(lines)]
        run = msgspec.structs.replace(snapshot.run, step=train[-1]["step"])
        return seen([msgspec.structs.replace(snapshot, train=train, run=run)])

    document = told((1, 22.0))
    assert document.run.step_s is None and document.run.eta_s is None and document.phases == []
    assert next(stage for stage in document.stages if stage.stage == "learner").rate is None
    assert "ETA –" in (text := page(document, 80, UNICODE)) and "only a first step is trained so far" in text
    assert told((1, 22.0), (1, 2.0)).run.step_s == 2.0
    assert told((1, 22.0), (1, 2.0), (2, 40.0), (2, 4.0)).run.step_s == 3.0


def test_what_is_absent_is_null_and_shown_as_such():
    document = seen([empty()])
    assert document.run.tokens_per_s is None and document.run.eta_s is None
    assert document.ledger.outstanding is None and document.reward.rate is None
    assert all(row.rate is None and row.depth is None for row in document.stages)
    text = page(document, 80, UNICODE)
    assert "tokens/s –" in text
    assert not re.search(r"\b0\.?0* (tokens|groups|samples)/s", text)


def test_a_replica_that_is_set_aside_is_shown_with_its_reason_and_without_old_figures():
    why = "exit code 1, after 3 restarts within 600 s"
    snapshots = [
        msgspec.structs.replace(
            snapshot,
            run=msgspec.structs.replace(snapshot.run, aside={"rollouter/1": why}),
            actors=[
                msgspec.structs.replace(actor, condition="aside") if actor.name == "rollouter/1" else actor
                for actor in snapshot.actors
            ],
        )
        for snapshot in STATES["healthy"]()
    ]
    document = seen(snapshots)
    shown = page(document, 120, UNICODE)
    assert f"set aside: rollouter/1 ({why})" in shown
    assert document.run.aside == {"rollouter/1": why} and document.run.down == []
    row = next(row for row in document.rollouters if row.name == "rollouter/1")
    assert (row.in_flight, row.version) == (None, None)


def test_a_dead_host_shows_what_is_left_and_keeps_no_old_figures():
    document = seen(STATES["dead_host"]())
    by_name = {row.name: row for row in document.rollouters}
    assert by_name["rollouter/0"].in_flight is not None
    assert by_name["rollouter/1"].condition == "dead" and by_name["rollouter/1"].in_flight is None
    assert by_name["rollouter/3"].condition == "lost" and by_name["rollouter/3"].state == ""
    assert next(row for row in document.stages if row.stage == "rollouters").actors == 1
    assert "lost hosts: node1" in page(document, 80, UNICODE)


def test_of_rollouters_that_stand_still_nothing_is_told_of_what_they_do():
    *before, last = SLOW["rollouters"].between()
    frozen = [
        msgspec.structs.replace(actor, condition="silent") if actor.name.startswith("rollouter") else actor
        for actor in last.actors
    ]
    document = seen([*before, msgspec.structs.replace(last, actors=frozen)])
    assert document.bottleneck.stage != "rollouters" and document.run.tokens_per_s is None
    for row in document.rollouters:
        assert (row.condition, row.states, row.tokens_per_s) == ("silent", {}, None)


def test_what_a_run_that_is_over_did_last_is_not_shown_as_what_it_does():
    last = Run(phase="done", exit_code=130, reason="stopped by the launcher").at(100.0)
    dead = [msgspec.structs.replace(actor, condition="dead") for actor in last.actors]
    document = seen([*Run().between()[:-1], msgspec.structs.replace(last, actors=dead)])
    assert (document.run.tokens_per_s, document.run.samples_per_s, document.run.eta_s) == (None, None, None)
    assert all(row.rate is None and row.actors == 0 for row in document.stages)
    assert all(row.depth is None for row in document.stages)
    assert {row.condition for row in (*document.rollouters, *document.ranks)} == {"ended"}
    text = page(document, 80, UNICODE)
    assert "stopped" in text.splitlines()[0] and "dead" not in text
    # What it has counted stays.
    assert document.reward.timeouts == 2 and document.ledger.trained == 3200


def test_replicas_are_behind_as_their_rows_say():
    document = seen(Run(lag=2).between())
    assert [row.lag for row in document.rollouters] == [2] * 4
    assert document.weights.behind == 4 and document.stages[-1].depth == 4
    assert seen(Run().between()).weights.behind == 0


def test_the_cost_of_a_version_is_told_of_the_newest_step_that_has_one():
    snapshots = Run().between()
    assert (seen(snapshots).weights.idle_s, seen(snapshots).weights.reprefill_tokens) == (0.1, 51200 / 4)
    assert {row.stall_s for row in seen(snapshots).rollouters} == {0.2003}
    newest = snapshots[-1]
    unpublished = {"time/publish_s": 0.0, "weights/updates": 0.0}
    snapshots[-1] = replace(newest, train=[*newest.train, {**newest.train[-1], "step": 51, **unpublished}])
    document = seen(snapshots)
    # A step without a version says nothing of what one costs, and one without updates nothing of an update.
    assert (document.weights.idle_s, document.weights.reprefill_tokens) == (0.1, None)


def test_a_step_in_the_mean_leaves_out_the_first_of_each_learner():
    snapshot = Run(step_s=2.0).at(20.0)
    lines = [line | {"start": 1 + (line["step"] > 7)} for line in snapshot.train]
    for line in lines:
        if line["step"] in (1, 8):
            line["time/step_s"] = 500.0
    document = seen([msgspec.structs.replace(snapshot, train=lines)])
    assert document.run.step_s == pytest.approx(2.0)
    assert document.stages[3].rate == pytest.approx(64 / 2.0)
    assert next(phase.seconds for phase in document.phases if phase.name == "step") == document.run.step_s
    alone = seen([msgspec.structs.replace(snapshot, train=lines[:1])])
    assert alone.run.step_s is None, "there is no other"


def test_the_reward_pool_counts_tasks_and_the_run_samples():
    document = seen(Run().between())
    (stage,) = [row for row in document.stages if row.stage == "reward"]
    assert (stage.unit, stage.depth_unit) == ("tasks", "tasks")
    text = page(document, 80, UNICODE)
    assert "samples/s 256 " in text and "255 tasks/s" in text and "tasks/s   255" in text


def test_the_box_of_the_learner_and_the_verdict_are_both_of_rank_0():
    """However many ranks follow it."""
    snapshots = Run(ranks=8, rank={"training": 0.95, "waiting": 0.05}).between()
    for snapshot in snapshots:
        for actor in snapshot.actors:
            for resource in actor.resources:
                if actor.name.startswith("learner/") and actor.name != "learner/0":
                    whole = sum(resource.seconds.values())
                    resource.seconds.clear()
                    resource.seconds.update({"training": 0.6 * whole, "following": 0.4 * whole})
    document = seen(snapshots)
    (box,) = [row for row in document.stages if row.stage == "learner"]
    assert box.states == pytest.approx({"training": 0.95, "waiting": 0.05}) and box.resources == 8
    assert document.bottleneck.stage == "learner" and document.bottleneck.why.startswith("training 95 % of the time")
    assert document.ranks[1].states == pytest.approx({"training": 0.6, "following": 0.4})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None])
def test_a_figure_that_is_no_number_is_absent(value):
    assert number_in({"x": value}, "x") is None and number_in({}, "x") is None
    snapshot = Run().at(100.0)
    lines = [line | {"reward/mean": value, "time/step_s": value, "time/train_s": value} for line in snapshot.train]
    evals = [{"kind": "eval", "step": 0, "eval/heldout/mean": value}]
    document = seen([msgspec.structs.replace(snapshot, train=lines, evals=evals)])
    assert document.run.rewards == [] and document.run.evals == {} and document.run.step_s is None
    text = page(document, 80, UNICODE)
    assert "reward – " in text and "step – " in text
    assert number_in({"x": 2}, "x") == 2.0


def test_the_learner_pane_tells_whether_the_policy_learns():
    snapshot = Run().at(100.0)
    document = seen([snapshot])
    assert lines_of("learner", document, 78)[1].split("   ") == [
        *("loss 0.007", "grad norm 1.234", "entropy 2.100", "KL 0.00042", "lr 1e-06")
    ]
    assert document.learning.step == 50 and document.learning.reward_std == 0.25
    # Absent is not 0, which stands out.
    still = snapshot.train[-1] | {"policy/grad_norm": 0.0, "learner/lr": 0.0, "policy/entropy": None}
    line = pane("learner", seen([msgspec.structs.replace(snapshot, train=[still])]), Choice(), 78, UNICODE).head[1]
    assert "grad norm 0.000   entropy –" in rich_text(line, UNICODE).plain
    assert [text for text, style in line if style == "bad"] == ["0.000", "0.000"]
    assert lines_of("learner", document, 40)[1] == "loss 0.007   grad norm 1.234"


@pytest.mark.parametrize(
    ("change", "down"),
    [
        ({}, []),
        ({"condition": "dead"}, ["rollouter/1 (dead)"]),
        ({"condition": "silent"}, ["rollouter/1 (silent)"]),
        ({"condition": "condemned"}, ["rollouter/1 (condemned)"]),
        ({"condition": "starting", "restarts": 1}, ["rollouter/1 (starting again)"]),
        # It has just joined.
        ({"condition": "starting"}, []),
        # Its host is named instead.
        ({"condition": "lost"}, []),
        (
            {"resources": [Resource(name="engine", state="restarting", state_s=2.0, seconds={})]},
            ["rollouter/1 (engine restarting)"],
        ),
    ],
)
def test_who_is_down_is_named_before_any_bottleneck(change, down):
    snapshots = Run().between()
    newest = snapshots[-1]
    actors = [
        msgspec.structs.replace(actor, **change) if actor.name == "rollouter/1" else actor for actor in newest.actors
    ]
    newest = msgspec.structs.replace(newest, actors=actors)
    document = seen([*snapshots[:-1], newest])
    assert document.run.down == down
    said = [line.plain.strip() for line in pipeline(document, 160, UNICODE)[-2:]]
    assert said[len(down)].startswith("◆ learner: ")
    assert not down or said[0] == f"down: {down[0]}"
    over = msgspec.structs.replace(newest, run=msgspec.structs.replace(newest.run, phase="draining"))
    assert seen([over]).run.down == []


def test_the_learner_pane_tells_how_far_the_engine_is_from_the_learner_where_that_is_known():
    snapshot = Run().at(100.0)
    lines = {
        said: lines_of("learner", seen([msgspec.structs.replace(snapshot, train=[line])]), 78)[2]
        for line, said in (
            (snapshot.train[-1], ""),
            (snapshot.train[-1] | {"policy/engine_kl": 0.00012}, "engine KL 0.00012"),
        )
    }
    assert lines["engine KL 0.00012"].endswith("   engine KL 0.00012") and "engine KL" not in lines[""]


def test_an_evaluation_is_shown_with_the_versions_that_it_sampled():
    document = seen([Run().at(100.0)])
    assert document.run.eval_versions == {"heldout": (2, 3)}
    assert "heldout 0.250 v2–3" in header(document, 200, UNICODE)[1].plain


def test_a_gate_of_which_nothing_is_told_is_not_known():
    snapshot = Run().at(100.0)
    for actor in snapshot.actors:
        actor.figures.pop("tickets/gate", None)
    assert seen([snapshot]).ledger.gate is None


def test_nothing_in_flight_has_no_age():
    snapshot = Run(rollouters=1).at(50.0)
    actors = [
        msgspec.structs.replace(actor, figures=actor.figures | {"rollout/in_flight": 0.0, "rollout/oldest_s": 0.0})
        if actor.name == "rollouter/0"
        else actor
        for actor in snapshot.actors
    ]
    assert seen([msgspec.structs.replace(snapshot, actors=actors)]).rollouters[0].oldest_s is None


def test_columns_of_which_nothing_is_known_are_left_out():
    def titles(run):
        return lines_of("learner", seen(run.between()), 120)[3]

    assert "GPU memory" in titles(Run(gpus=True)) and "GPU" not in titles(Run())


def test_a_stalled_run_says_why_and_blames_no_stage():
    document = seen(STATES["stalled"]())
    assert document.bottleneck.stage is None
    text = page(document, 80, UNICODE)
    assert "stalled" in text.splitlines()[0] and "ETA –" in text.splitlines()[0]
    assert "learner/0 waits for groups of rollouter/2" in " ".join(text.split())


def test_a_single_snapshot_has_shares_of_whole_lives_and_no_rates():
    document = seen([Run().at(100.0)])
    assert document.window_s == 0
    assert document.run.tokens_per_s is None
    assert document.stages[1].states["generating"] == pytest.approx(0.86)


def test_every_figure_that_is_shown_is_declared():
    source = "".join((ROOT / f"asyncrl/top/{name}.py").read_text() for name in ("facts", "model", "source/history"))
    names = set(re.findall(r'"([a-z]+/[a-z_0-9]+)"', source))
    assert len(names) > 20
    assert not [name for name in names if catalogue.find(name) is None]


# --- JSON ---


@pytest.mark.parametrize("state", STATES)
def test_json_follows_its_schema(state):
    document = json.loads(to_json(seen(STATES[state]())))
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert document["schema"] == 1
    assert {row["stage"] for row in document["stages"]} == {"dataloader", "rollouters", "reward", "learner", "weights"}


def test_the_schema_that_is_documented_is_the_one_that_is_used():
    documented = json.loads((ROOT / "docs/top.schema.json").read_text())
    assert documented == json_schema(), "python -m asyncrl.top.figures.document > docs/top.schema.json"


def test_episodes_by_stage_with_all_of_their_time():
    view = seen(STATES["agents"]()).episodes
    assert (view.open, view.oldest_s) == (240.0, 90.0)
    assert [(row.name, row.open) for row in view.stages] == [
        ("tool search", 164.0),
        ("engine", 36.0),
        ("tool look_up_in_the_archive", 24.0),
        ("judge", 16.0),
    ]
    assert sum(row.share for row in view.stages) == pytest.approx(1.0)
    assert view.stages[0].share == pytest.approx(41 / 60)
    assert (view.turns_mean, view.turns_p95, view.prompt_tokens_mean) == (3.5, 4.0, 700.0)
    assert view.ended == {"stop": 1600.0, "length": 4.0}
    assert view.failed == {"turn": 8.0, "user": 4.0}
    assert view.forks == {"edited": 48.0}
    assert [(row.name, row.workers, row.tool_errors) for row in view.hosts] == [
        (f"episodes/{number}", 2, 3.0) for number in range(4)
    ]


def test_shares_of_stages_are_of_the_time_since_the_older_snapshot():
    older, newer = (Run(rollouters=1, episodes={"user": 1.0}).at(t) for t in (60.0, 100.0))
    actors = [
        replace(actor, figures=actor.figures | {"rollout/episode_s/engine": 16.0 * 40.0})
        if actor.name == "rollouter/0"
        else actor
        for actor in newer.actors
    ]
    view = seen([older, replace(newer, actors=actors)]).episodes
    assert {row.name: row.share for row in view.stages} == pytest.approx({"user": 0.5, "engine": 0.5})


def test_of_a_host_that_is_gone_nothing_is_said_to_be_open():
    picture = STATES["agents"]()
    lost = replace(picture[-1].actors[-1], condition="dead")
    document = seen([*picture[:-1], replace(picture[-1], actors=[*picture[-1].actors[:-1], lost])])
    row = document.episodes.hosts[-1]
    assert (row.condition, row.workers, row.open, row.played) == ("dead", 0, None, 400.0)


def test_where_a_prompt_has_one_response_there_are_no_episodes():
    assert seen(STATES["healthy"]()).episodes is None


# --- drawing ---


@pytest.mark.parametrize("width", [80, 81, 96, 103, 150, 200])
@pytest.mark.parametrize("state", STATES)
def test_every_line_of_every_pane_fits_the_width_that_it_is_drawn_for(state, width):
    document = seen(STATES[state]())
    for glyphs in (UNICODE, ASCII):
        for line in (*header(document, width, glyphs), *pipeline(document, width, glyphs)):
            assert line.cell_len <= width
        for name in PANES:
            for line in pane(name, document, Choice(), width, glyphs).lines(width, glyphs):
                assert line.cell_len <= width, (name, line.plain)


@given(st.text(max_size=300), st.integers(0, 50))
def test_a_line_is_cut_or_padded_to_a_width(text, width):
    for glyphs in (UNICODE, ASCII):
        assert fit([(text[:9], "bold"), (text[9:], "")], width, glyphs).cell_len == width


@given(st.lists(st.tuples(st.text("ab", max_size=20), st.text("01", max_size=9)), min_size=1), st.integers(1, 120))
def test_columns_fit_unless_one_alone_does_not(pairs, width):
    items = [(name, value, "") for name, value in pairs]
    one = max(len(name) for name, _ in pairs) + 2 + max(len(value) for _, value in pairs)
    for right in (False, True):
        lines = columns(items, width, most=3, right=right)
        assert all(length(line) <= max(one, width) for line in lines)
        assert len(lines) >= len(items) / 3
        shown = [line[i : i + 2] for line in lines for i in range(0, len(line), 3)]
        assert sorted((a.rstrip(), b.strip()) for (a, _), (b, _) in shown) == sorted(pairs)


def test_what_became_of_late_groups_is_shown_where_there_were_any():
    document = seen(Run().between())
    for changes, shown in (
        ({}, ""),
        ({"late_trained": 0.0, "late_masked": 3.0, "waited": 12.0}, "   so far 3 masked, 12 waited for"),
        ({"requeued": 2.0}, "   so far 2 requeued"),
    ):
        staleness = msgspec.structs.replace(document.staleness, **changes)
        told = lines_of("staleness", msgspec.structs.replace(document, staleness=staleness), 120)
        assert told[0].partition(" groups")[2] == shown


@pytest.mark.parametrize(
    ("most", "last"), [(8, "8"), (9, "9–12"), (12, "9–12"), (16, "13–16"), (32, "17–32"), (40, "33+")]
)
def test_staleness_is_shown_up_to_the_limit_however_large_that_is(most, last):
    document = seen(Run(staleness_max=most).between())
    lines = lines_of("staleness", document, 80)
    assert lines[-1].split()[0] == last and not any("late" in line for line in lines[2:])
    assert f"of {most} " in page(document, 80, UNICODE)


@pytest.mark.parametrize("width", [40, 56, 72, 100])
def test_the_help_tells_the_same_at_every_width_and_is_cut_nowhere(width):
    lines = [line.plain for line in help_page(width, UNICODE)]
    assert max(map(len, lines)) <= width and "…" not in " ".join(lines).replace("1 … 8", "")
    words = sorted(" ".join(line.plain for line in help_page(72, UNICODE)).split())
    assert sorted(" ".join(lines).split()) == words


def test_a_stage_keeps_its_name_and_a_blank_before_the_arrow_on_a_small_terminal():
    document = seen(Run(rollouters=64, hosts=1, dead=tuple(f"rollouter/{n}" for n in range(60))).between())
    top, rates, *_ = (line.plain for line in pipeline(document, 80, UNICODE))
    assert "roll. ─── 4/64" in top
    document = seen(Run(rollouters=64, hosts=1).between())
    top, rates, *_ = (line.plain for line in pipeline(document, 80, UNICODE))
    assert "rollouters  64" in top and "56.3k tok/s   →" in rates
    assert "56.3k tokens/s" in pipeline(document, 120, UNICODE)[1].plain


def test_by_what_is_sorted_is_seen_where_that_column_is_not():
    document = seen(Run(engine={"waiting": 1.0}).between())
    head = lines_of("rollouters", document, 78)[0]
    assert head.startswith("by host▴ ") and head.count("host") == 1
    head = lines_of("rollouters", document, 120)[0]
    assert head.startswith("rollouter  host▴")


def test_events_are_cut_where_a_terminal_ends_and_nowhere_else():
    text = "worker 1 was killed: " + "timeout " * 40
    document = seen(Run(events=[Event(number=1, wall=0.0, level="info", actor="", text=text)]).between())
    assert text.strip() in page(document, 80, UNICODE, whole=True)
    assert text.strip() not in (cut := page(document, 80, UNICODE)) and "…" in cut


def test_the_pipeline_always_takes_seven_lines():
    for make in STATES.values():
        for width in (80, 200):
            assert len(pipeline(seen(make()), width, UNICODE)) == 7


def test_without_colour_and_unicode_everything_can_still_be_read():
    text = page(seen(Run(rank={"training": 0.95, "waiting": 0.05}).between()), 80, ASCII)
    assert text.isascii()
    assert "* learner: training 95 % of the time" in text
    assert re.search(r"#+%\.", text), "states differ by their glyphs"


def test_sorting_and_filtering():
    document = seen(Run(rollouters=12, hosts=3).between())

    def keys(**choice):
        return list(pane("rollouters", document, Choice(**choice), 120, UNICODE).keys)

    assert keys(sort="name") == [f"rollouter/{n}" for n in range(12)]
    assert keys(sort="name", descending=True)[0] == "rollouter/11"
    assert keys(sort="waiting", descending=True)[:4] == [f"rollouter/{n}" for n in (2, 5, 8, 11)]
    by_host = keys()
    assert by_host[:3] == ["rollouter/0", "rollouter/0", "rollouter/1"], "a heading leads to the first below it"
    assert len(by_host) == 12 + 3, "a heading for each host"
    assert keys(needle="node2", sort="name") == [f"rollouter/{n}" for n in range(8, 12)]
    assert keys(needle="ROLLOUTER/11", sort="name") == ["rollouter/11"]
    assert "no rollouter matches xyz" in lines_of("rollouters", document, 80, Choice(needle="xyz"))[0]
    for sort in SORTS:
        assert sorted(set(keys(sort=sort))) == sorted(f"rollouter/{n}" for n in range(12))


def test_every_number_is_sorted_from_the_largest_on_at_first():
    choice, first = Choice(), {}
    for _ in SORTS:
        choice = sorted_next(choice)
        first[choice.sort] = choice.descending
    assert first == {sort: sort not in ("name", "host", "state") for sort in SORTS}


def test_who_is_gone_comes_last_however_it_is_sorted():
    document = seen(Run(rollouters=4, hosts=1, dead=("rollouter/0",)).between())
    for descending in (False, True):
        choice = Choice(sort="tokens_per_s", descending=descending)
        assert pane("rollouters", document, choice, 80, UNICODE).keys[-1] == "rollouter/0"


@pytest.mark.parametrize(
    ("condition", "facts", "said"),
    [
        (
            "absent",
            {},
            [
                "condition absent   state –   for –   heard –",
                "host –   pid –   restarts –   version –",
                "processors –   memory –   event loop busy –   most late –",
            ],
        ),
        (
            "starting",
            {"host": "node1", "pid": 9, "incarnation": 1, "heard_s": 1.0},
            [
                "condition starting   state –   for –   heard 1.0 s ago",
                "host node1   pid 9   restarts 0   version –",
                "processors –   memory –   event loop busy –   most late –",
            ],
        ),
        (
            "dead",
            {"host": "node1", "pid": 9, "incarnation": 1, "state": "ready", "cpu": 0.5, "state_s": 3.0},
            [
                "condition dead   state ready   for 3.0 s   heard 0 s ago",
                "host node1   pid 9   restarts 0   version –",
                "processors –   memory –   event loop busy –   most late –",
            ],
        ),
    ],
)
def test_what_an_actor_has_not_told_is_not_shown_as_0(condition, facts, said):
    snapshot = Run().at(100.0)
    actor = ActorView(**{"name": "rollouter/9", "host": "", "condition": condition} | facts)
    document = seen([msgspec.structs.replace(snapshot, actors=[*snapshot.actors, actor])])
    lines = [line.plain.rstrip() for line in detail(document, "rollouter/9", None, 80, UNICODE)]
    assert lines[:3] == said


def test_events_by_level():
    document = seen(Run().between())
    shown = {
        level: len(pane("events", document, Choice(level=level), 80, UNICODE).keys)
        for level in ("info", "warning", "error")
    }
    assert shown == {"info": 3, "warning": 2, "error": 1}


@given(
    st.dictionaries(st.sampled_from(["work", "weights", "upkeep", "start", "wait"]), st.floats(0.0, 1.0)),
    st.integers(1, 60),
)
def test_a_bar_is_as_wide_as_it_is_asked_to_be(kinds, width):
    assert length(state_bar(kinds, width, UNICODE)) == width


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.integers(1, 50))
@example([-1.7e308, 1.7e308, 0.0], 3)
def test_a_sparkline_has_a_mark_for_each_of_the_newest_values(values, width):
    assert len(sparkline(values, width, UNICODE)) == min(len(values), width)


@given(st.text(max_size=300), st.integers(2, 50))
def test_wrapping_ends_and_fits(text, width):
    assert all(line.cell_len <= width for line in wrapped([(text, "")], width, 400, UNICODE))


def test_numbers_for_people():
    assert [count(n) for n in (None, 0, 999, 1000, 12_345, 999_999, 2.5e6)] == [
        "–", "0", "999", "1.0k", "12.3k", "1.0M", "2.5M",
    ]  # fmt: skip
    assert [duration(s) for s in (None, 0.0, 0.00085, 0.012, 1.234, 45.2, 200, 7500, 200_000)] == [
        "–", "0 s", "850 µs", "12 ms", "1.2 s", "45 s", "3m20s", "2h05m", "2d07h",
    ]  # fmt: skip
    assert [size(n) for n in (None, 12, 50331648, 8e10)] == ["–", "12 B", "50.3 MB", "80.0 GB"]
    assert [exact(n) for n in (None, 7, 15936)] == ["–", "7", "15,936"]
    for text in ("– … → µ", "≤ 3 ms", "×10", "↑↓←", "▾▴"):
        assert to_ascii(text).isascii() and len(to_ascii(text)) == len(text)


# --- history ---


def test_a_history_stays_bounded_and_long_enough():
    history, run = History(), Run(step_s=30.0, steps=10_000)
    for n in range(4000):
        history.add(run.at(n * 0.5))
    assert len(history._kept) <= 1.1 * KEPT
    interval = history.steps()
    assert interval is not None and interval.seconds == pytest.approx(4 * 30.0, rel=0.1)
    assert 10.0 <= history.recent().seconds <= 13.0


def test_another_attempt_begins_anew():
    history = History()
    for snapshot in Run().between():
        history.add(snapshot)
    history.add(Run().at(3.0))
    assert history.steps() is None
    assert build(history).run.tokens_per_s is None


def test_a_document_keeps_every_actor_for_the_detail_view():
    snapshot = Run().at(50.0)
    document = seen([snapshot])
    assert document.actors == snapshot.actors
