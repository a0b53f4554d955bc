"""Snapshots in asyncrl-top: numbers, panes, plain text, JSON."""

import json
import math
import re
from pathlib import Path

import jsonschema
import pytest
from driven import known
from harness import replace
from hypothesis import example, given
from hypothesis import strategies as st
from top.pictures import STATES, WALL, Run

from asyncrl.snapshot import ActorView, Event, Resource
from asyncrl.telemetry import catalogue
from asyncrl.top.detail import detail, help_page
from asyncrl.top.drawing.layout import Choice
from asyncrl.top.drawing.text import ASCII, STYLES, UNICODE, columns, length, rich_text, sparkline, state_bar
from asyncrl.top.figures.document import json_schema, to_json
from asyncrl.top.model import build
from asyncrl.top.panes import PANES, SORTS, page, pane, sorted_next
from asyncrl.top.pipeline import header, pipeline
from asyncrl.top.source.history import KEPT, History

ROOT = Path(__file__).parents[2]
FED = {"training": 0.3, "waiting": 0.7}
SLOW = {
    "reward": Run(worker={"scoring": 0.99, "idle": 0.01}, engine={"generating": 0.3, "waiting": 0.7}, rank=FED),
    "learner": Run(rank={"training": 0.95, "waiting": 0.05}, engine={"generating": 0.3, "waiting": 0.7}),
    "rollouters": Run(engine={"generating": 0.97, "paused": 0.03}, rank=FED),
    "gate": Run(engine={"generating": 0.5, "waiting": 0.5}, rank=FED, limit=0.0, outstanding=64.0),
}


def lines_of(name, document, width, choice=None):
    """The lines of a pane, without blanks at their ends."""
    drawn = pane(name, document, choice or Choice(), width, UNICODE).lines(width, UNICODE)
    return [line.plain.rstrip() for line in drawn]


def seen(snapshots):
    return build(known(snapshots))


def verdicts(snapshots):
    """The document after each of them."""
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
        yield build(history)


def with_actor(snapshot, name, *, figures=None, **changes):
    """The snapshot with another actor of this name, and with more of its figures."""
    actors = [
        replace(actor, figures=actor.figures | (figures or {}), **changes) if actor.name == name else actor
        for actor in snapshot.actors
    ]
    return replace(snapshot, actors=actors)


# --- the marked stage ---


@pytest.mark.parametrize("stage", SLOW)
def test_a_planted_slow_stage_is_the_one_that_is_marked(stage):
    document = seen(SLOW[stage].between())
    assert document.bottleneck.stage == stage
    marked = [row.stage for row in document.stages if row.bottleneck]
    assert marked == [stage if stage != "gate" else "dataloader"]
    text = page(document, 80, UNICODE)
    assert f"◆ {stage}: " in text and f"◆{marked[0]}" in text


@pytest.mark.parametrize(
    "swing",
    [
        [{"lag": n} for n in (0, 1, 2, 0, 0, 1)],
        [{"scoring": n} for n in (0.0, 0.0, 40.0, 1.0)],
        [{"outstanding": n} for n in (20.0, 240.0)],
        [{"loop_busy": share} for share in (0.1, 0.9, 0.1, 0.2)],
    ],
    ids=str,
)
def test_the_mark_of_a_steady_run_stays_where_it_is_while_levels_swing_with_its_steps(swing):
    steady = {"engine": {"generating": 0.69, "waiting": 0.31}, "rank": {"training": 0.74, "waiting": 0.26}}
    shown = [Run(step_s=1.7, **steady, **swing[n % len(swing)]).at(30.0 + 0.75 * n) for n in range(60)]
    assert {document.bottleneck.stage for document in list(verdicts(shown))[20:]} == {"gate"}


def test_learner_and_engines_that_are_busy_in_turns_do_not_take_the_mark_from_one_another():
    """A step takes 2.4 s: the learner waits at the beginning of it, and works 78 % of its time."""

    def at(t):
        waited = 0.52 * (t // 2.4) + min(0.52, t % 2.4)
        rank = {"waiting": waited / t, "training": (t - waited) / t}
        return Run(engine={"generating": 0.99, "waiting": 0.01}, rank=rank, step_s=2.4).at(t)

    documents = list(verdicts(at(100.0 + 0.75 * n) for n in range(120)))
    assert {document.bottleneck.stage for document in documents[40:]} == {"rollouters"}


def started(t):
    """A run whose resources were starting for 29 s and waiting for 1 s, and whose learner then trains steps."""
    snapshot = Run(engine={"generating": 0.4, "waiting": 0.6}, rank=FED, limit=3.0).at(max(0.0, t - 30.0))
    for resource in (resource for actor in snapshot.actors for resource in actor.resources):
        for state, seconds in (("starting", 29.0), ("waiting", 1.0)):
            resource.seconds[state] = resource.seconds.get(state, 0.0) + min(1.0, t / 30.0) * seconds
    return replace(snapshot, wall=WALL + t, run=replace(snapshot.run, age_s=t))


def test_once_a_run_steps_its_start_is_not_what_sets_the_pace():
    shown = [started(0.5 * n + 1.0) for n in range(80)]
    *_, last = documents = list(verdicts(shown))
    before = [document.bottleneck for document in documents if not document.run.step]
    stepping = [document.bottleneck for document in documents if document.run.step]
    assert any("starting" in said.why for said in before) and not any("starting" in said.why for said in stepping)
    assert (stepping[0].stage, stepping[0].why) == (None, "measuring")
    assert {said.stage for said in stepping[8:]} == {"gate"}
    assert last.window_s == pytest.approx(8.0, abs=0.6)


# --- numbers ---


def test_the_first_step_of_a_learner_foretells_nothing():
    def told(*lines):
        snapshot = Run().at(100.0)
        train = [{"step": 7 + n, "start": start, "time/step_s": seconds} for n, (start, seconds) in enumerate(lines)]
        return seen([replace(snapshot, train=train, run=replace(snapshot.run, step=train[-1]["step"]))])

    document = told((1, 22.0))
    assert document.run.step_s is None and document.run.eta_s is None and document.phases == []
    assert next(stage for stage in document.stages if stage.stage == "learner").rate is None
    assert "ETA –" in (text := page(document, 80, UNICODE)) and "only a first step is trained so far" in text
    later = told((1, 22.0), (1, 2.0))
    assert later.run.step_s == 2.0 and later.stages[3].rate == 64 / 2.0
    assert told((1, 22.0), (1, 2.0), (2, 40.0), (2, 4.0)).run.step_s == 3.0


def test_of_who_stands_still_or_is_gone_nothing_is_told_of_what_he_does():
    *before, last = SLOW["rollouters"].between()
    for number in range(4):
        last = with_actor(last, f"rollouter/{number}", condition="silent")
    document = seen([*before, last])
    assert document.bottleneck.stage != "rollouters" and document.run.tokens_per_s is None
    for row in document.rollouters:
        assert (row.condition, row.states, row.tokens_per_s) == ("silent", {}, None)
    *before, last = STATES["agents"]()
    row = seen([*before, with_actor(last, "episodes/3", condition="dead")]).episodes.hosts[-1]
    assert (row.condition, row.workers, row.open, row.played) == ("dead", 0, None, 400.0)
    left = with_actor(last, "rollouter/3", condition="aside", figures={"rollout/episodes_oldest_s": 7777.0})
    assert seen([*before, left]).episodes.oldest_s == 90.0


def test_what_a_run_that_is_over_did_last_is_not_shown_as_what_it_does():
    last = Run(phase="done", exit_code=130, reason="stopped by the launcher").at(100.0)
    dead = [replace(actor, condition="dead") for actor in last.actors]
    document = seen([*Run().between()[:-1], replace(last, actors=dead)])
    assert (document.run.tokens_per_s, document.run.samples_per_s, document.run.eta_s) == (None, None, None)
    assert all((row.rate, row.actors, row.depth) == (None, 0, None) for row in document.stages)
    assert {row.condition for row in (*document.rollouters, *document.ranks)} == {"ended"}
    text = page(document, 80, UNICODE)
    assert "stopped" in text.splitlines()[0] and "dead" not in text
    # What it has counted stays.
    assert document.reward.timeouts == 2 and document.ledger.trained == 3200


def test_prompts_that_the_data_rules_left_out_are_in_the_ledger_pane_if_there_are_any():
    document = seen(Run().between())
    assert not any("left out" in line for line in lines_of("ledger", document, 80))
    with_some = replace(document, ledger=replace(document.ledger, left_out=12.0))
    assert re.search(r"left out +12\b", "\n".join(lines_of("ledger", with_some, 80)))


def test_replicas_are_behind_as_their_rows_say():
    document = seen(Run(lag=2).between())
    assert [row.lag for row in document.rollouters] == [2] * 4
    assert document.weights.behind == 4 and document.stages[-1].depth == 4
    assert seen(Run().between()).weights.behind == 0


def test_the_cost_of_a_version_is_told_of_the_newest_step_that_has_one():
    snapshots = Run().between()
    document = seen(snapshots)
    assert (document.weights.idle_s, document.weights.reprefill_tokens) == (0.1, 51200 / 4)
    assert {row.stall_s for row in document.rollouters} == {0.2003}
    newest = snapshots[-1]
    unpublished = {"step": 51, "time/publish_s": 0.0, "weights/updates": 0.0}
    document = seen([*snapshots[:-1], replace(newest, train=[*newest.train, newest.train[-1] | unpublished])])
    # A step without a version says nothing of what one costs, and one without updates nothing of an update.
    assert (document.weights.idle_s, document.weights.reprefill_tokens) == (0.1, None)


def test_the_box_of_the_learner_and_the_verdict_are_both_of_rank_0():
    """However many ranks follow it."""
    snapshots = Run(ranks=8, rank={"training": 0.95, "waiting": 0.05}).between()
    for actor in (actor for snapshot in snapshots for actor in snapshot.actors):
        for resource in actor.resources if re.fullmatch("learner/[1-7]", actor.name) else ():
            whole = sum(resource.seconds.values())
            resource.seconds.clear()
            resource.seconds.update({"training": 0.6 * whole, "following": 0.4 * whole})
    document = seen(snapshots)
    (box,) = [row for row in document.stages if row.stage == "learner"]
    assert box.states == pytest.approx({"training": 0.95, "waiting": 0.05}) and box.resources == 8
    assert document.bottleneck.stage == "learner" and document.bottleneck.why.startswith("training 95 % of the time")
    assert document.ranks[1].states == pytest.approx({"training": 0.6, "following": 0.4})


def test_in_the_learner_pane_a_0_stands_out_and_what_is_no_number_is_absent():
    snapshot = Run().at(100.0)
    figures = {"policy/grad_norm": 0.0, "learner/lr": 0.0, "policy/entropy": None, "reward/mean": math.nan}
    document = seen([replace(snapshot, train=[snapshot.train[-1] | figures | {"policy/engine_kl": 0.00012}])])
    drawn = pane("learner", document, Choice(), 78, UNICODE)
    assert [text for text, style in drawn.head[1] if style == "bad"] == ["0.000", "0.000"]
    assert "grad norm 0.000   entropy –" in rich_text(drawn.head[1], UNICODE).plain
    assert rich_text(drawn.head[2], UNICODE).plain.endswith("   engine KL 0.00012")
    assert document.run.rewards == [] and "reward – " in page(document, 80, UNICODE)


@pytest.mark.parametrize(
    ("change", "down"),
    [
        ({}, ""),
        ({"condition": "dead"}, "dead"),
        ({"condition": "silent"}, "silent"),
        ({"condition": "starting", "restarts": 1}, "starting again"),
        # It has just joined.
        ({"condition": "starting"}, ""),
        # Its host is named instead.
        ({"condition": "lost"}, ""),
        ({"resources": [Resource(name="engine", state="restarting", state_s=2.0, seconds={})]}, "engine restarting"),
    ],
)
def test_who_is_down_is_named_before_any_bottleneck(change, down):
    *before, newest = Run().between()
    newest = with_actor(newest, "rollouter/1", **change)
    document = seen([*before, newest])
    named = [f"rollouter/1 ({down})"] if down else []
    assert document.run.down == named
    said = [line.plain.strip() for line in pipeline(document, 160, UNICODE)[-2:]]
    assert said[len(named)].startswith("◆ learner: ")
    assert not named or said[0] == f"down: {named[0]}"
    assert seen([replace(newest, run=replace(newest.run, phase="draining"))]).run.down == []


def test_what_one_snapshot_does_not_tell_is_not_told():
    figures = {"rollout/in_flight": 0.0, "rollout/oldest_s": 0.0}
    document = seen([with_actor(Run().at(100.0), "rollouter/0", figures=figures)])
    assert document.rollouters[0].oldest_s is None, "nothing in flight has no age"
    assert (document.window_s, document.run.tokens_per_s) == (0, None)
    assert document.stages[1].states["generating"] == pytest.approx(0.86), "shares are of whole lives"


def test_shares_of_the_stages_of_episodes_are_of_the_time_since_the_older_snapshot():
    older, newer = (Run(rollouters=1, episodes={"user": 1.0}).at(t) for t in (60.0, 100.0))
    view = seen([older, with_actor(newer, "rollouter/0", figures={"rollout/episode_s/engine": 16.0 * 40.0})]).episodes
    assert {row.name: row.share for row in view.stages} == pytest.approx({"user": 0.5, "engine": 0.5})


def test_every_figure_that_is_shown_is_declared():
    source = "".join(
        (ROOT / f"asyncrl/top/{name}.py").read_text() for name in ("facts", "model", "episodes", "source/history")
    )
    names = set(re.findall(r'"([a-z]+/[a-z_0-9]+)"', source))
    assert len(names) > 20
    assert not [name for name in names if catalogue.find(name) is None]


# --- JSON ---


@pytest.mark.parametrize("free", [None, 0, 10**11])
def test_a_full_disk_has_0_bytes_and_one_that_nobody_knows_of_none(free):
    last = Run().at(100.0)
    document = seen([replace(last, run=replace(last.run, disk_free_bytes=free))])
    assert json.loads(to_json(document))["run"]["disk_free_bytes"] == free


def test_json_follows_its_schema_which_is_the_one_that_is_documented():
    documented = json.loads((ROOT / "docs/top.schema.json").read_text())
    assert documented == json_schema(), "python -m asyncrl.top.figures.document > docs/top.schema.json"
    stages = {"dataloader", "rollouters", "reward", "learner", "weights"}
    for made in STATES.values():
        document = json.loads(to_json(seen(made())))
        jsonschema.Draft202012Validator(documented).validate(document)
        assert document["schema"] == 1 and {row["stage"] for row in document["stages"]} == stages


# --- drawing ---


@pytest.mark.parametrize("width", [80, 103, 200])
@pytest.mark.parametrize("state", STATES)
def test_every_line_of_every_pane_fits_the_width_that_it_is_drawn_for(state, width):
    document = seen(STATES[state]())
    for glyphs in (UNICODE, ASCII):
        top = pipeline(document, width, glyphs)
        panes = [pane(name, document, Choice(), width, glyphs).lines(width, glyphs) for name in PANES]
        assert len(top) == 7
        for line in (line for lines in (header(document, width, glyphs), top, *panes) for line in lines):
            assert line.cell_len <= width, line.plain


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
        ({"late_trained": 0.0, "late_masked": 3.0}, "   so far 3 masked"),
    ):
        told = lines_of("staleness", replace(document, staleness=replace(document.staleness, **changes)), 120)
        assert told[0].partition(" groups")[2] == shown


@pytest.mark.parametrize(("most", "last"), [(8, "8"), (9, "9–12"), (16, "13–16"), (40, "33+")])
def test_staleness_is_shown_up_to_the_limit_however_large_that_is(most, last):
    """And what is beyond it is late."""
    document = seen(Run(staleness_max=most).between())
    lines = lines_of("staleness", document, 80)
    assert lines[-1].split()[0] == last and not any("late" in line for line in lines[2:])
    assert f"of {most} " in page(document, 80, UNICODE)
    beyond = lines_of("staleness", seen(Run(staleness_max=2).between()), 80)
    assert [line.split("█")[0].split("·")[0].strip() for line in beyond[-3:]] == ["2", "late 3", "late 4"]


@pytest.mark.parametrize("width", [40, 100])
def test_the_help_tells_the_same_at_every_width_and_is_cut_nowhere(width):
    lines = [line.plain for line in help_page(width, UNICODE)]
    assert max(map(len, lines)) <= width and "…" not in " ".join(lines).replace("1 … 8", "")
    words = sorted(" ".join(line.plain for line in help_page(72, UNICODE)).split())
    assert sorted(" ".join(lines).split()) == words


def test_on_a_small_terminal_a_stage_keeps_its_name_and_a_table_says_by_what_it_is_sorted():
    for phase, stands_out in (("running", True), ("done", False)):
        dead = tuple(f"rollouter/{n}" for n in range(60))
        top = pipeline(seen(Run(rollouters=64, hosts=1, dead=dead, phase=phase).between()), 80, UNICODE)[0]
        assert "roll. ─── 4/64" in top.plain
        assert (STYLES["bad"] in {span.style for span in top.spans}) == stands_out
    document = seen(Run(rollouters=64, hosts=1).between())
    top, rates, *_ = (line.plain for line in pipeline(document, 80, UNICODE))
    assert "rollouters  64" in top and "56.3k tok/s   →" in rates
    assert "56.3k tokens/s" in pipeline(document, 120, UNICODE)[1].plain
    assert lines_of("rollouters", document, 78)[0].startswith("by host▴ ")
    assert lines_of("rollouters", document, 120)[0].startswith("rollouter  host▴")


def test_events_are_cut_where_a_terminal_ends_and_nowhere_else():
    wide, escaped = "显存不足" * 60 + " the end", "\x1b[31m" * 60 + " the end"
    for text in ("worker 1 was killed: " + "timeout " * 40 + "the end", wide, escaped):
        document = seen(Run(events=[Event(number=1, wall=0.0, level="info", actor="", text=text)]).between())
        assert "the end" in page(document, 80, UNICODE, whole=True)
        assert "the end" not in (cut := page(document, 80, UNICODE)) and "…" in cut


def test_sorting_and_filtering():
    document = seen(Run(rollouters=12, hosts=3, dead=("rollouter/5",)).between())

    def keys(**choice):
        return [row.key for row in pane("rollouters", document, Choice(**choice), 120, UNICODE).table.rows]

    everybody = [f"rollouter/{n}" for n in range(12)]
    assert keys(sort="name") == everybody
    assert keys(sort="name", descending=True) == everybody[::-1]
    assert keys(sort="waiting", descending=True)[:3] == [f"rollouter/{n}" for n in (2, 8, 11)]
    for descending in (False, True):
        assert keys(sort="tokens_per_s", descending=descending)[-1] == "rollouter/5", "who is gone comes last"
    by_host = keys()
    assert by_host[:3] == ["rollouter/0", "rollouter/0", "rollouter/1"], "a heading leads to the first below it"
    assert len(by_host) == 12 + 3, "a heading for each host"
    assert keys(needle="node2", sort="name") == [f"rollouter/{n}" for n in range(8, 12)]
    assert keys(needle="ROLLOUTER/11", sort="name") == ["rollouter/11"]
    assert "no rollouter matches xyz" in lines_of("rollouters", document, 80, Choice(needle="xyz"))[0]
    choice, first = Choice(), {}
    for _ in SORTS:
        choice = sorted_next(choice)
        first[choice.sort] = choice.descending
        assert set(keys(sort=choice.sort)) == set(everybody)
    # Numbers from the largest on.
    assert first == {sort: sort not in ("name", "host", "state") for sort in SORTS}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"host": "", "condition": "absent"},
            ["condition absent   state –   for –   heard –", "host –   pid –   restarts –   version –"],
        ),
        (
            {
                "host": "b",
                "condition": "dead",
                "pid": 9,
                "incarnation": 1,
                "state": "ready",
                "cpu": 0.5,
                "state_s": 3.0,
            },
            ["condition dead   state ready   for 3.0 s   heard 0 s ago", "host b   pid 9   restarts 0   version –"],
        ),
    ],
    ids=["absent", "dead"],
)
def test_what_an_actor_has_not_told_is_not_shown_as_0(facts, said):
    snapshot = Run().at(100.0)
    document = seen([replace(snapshot, actors=[*snapshot.actors, ActorView(name="rollouter/9", **facts)])])
    lines = [line.plain.rstrip() for line in detail(document, "rollouter/9", None, 80, UNICODE)]
    assert lines[:3] == [*said, "processors –   memory –   event loop busy –   most late –"]


@given(
    st.dictionaries(st.sampled_from(["work", "weights", "upkeep", "start", "wait"]), st.floats(0.0, 1.0)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
    st.integers(1, 60),
)
@example({}, [-1.7e308, 1.7e308, 0.0], 3)
def test_bars_and_sparklines_are_as_wide_as_they_are_asked_to_be(kinds, values, width):
    assert length(state_bar(kinds, width, UNICODE)) == width
    assert len(sparkline(values, width, UNICODE)) == min(len(values), width)


# --- history ---


def test_a_history_stays_bounded_and_long_enough_and_another_attempt_begins_anew():
    history, run = History(), Run(step_s=30.0, steps=10_000)
    for n in range(1000):
        history.add(run.at(n * 0.5))
    assert len(history.window()) <= 1.1 * KEPT
    assert history.steps().seconds == pytest.approx(4 * 30.0, rel=0.1)
    assert history.recent().seconds == pytest.approx(10.0, abs=0.5)
    history.add(Run().at(3.0))
    assert history.steps() is None and build(history).run.tokens_per_s is None


@pytest.mark.parametrize("every_s", [0.5, 2.0])
def test_rates_are_those_of_the_last_10_s_however_long_a_step_takes(every_s):
    history, run = History(), Run(step_s=150.0, steps=10_000)
    for n in range(600):
        history.add(run.at(n * every_s))
        assert n * every_s < 10.0 or 10.0 <= history.recent().seconds < 10.0 + every_s


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_no_rate_and_no_share(by_s):
    run = Run(steps=10_000)
    even = run.between(0.0, 40.0, 0.5)
    for since in (1, 10, 40):
        is_set = [replace(each, wall=each.wall + by_s) if each in even[-since:] else each for each in even]
        one, other = seen(even), seen(is_set)
        assert (one.run, one.stages, one.bottleneck) == (other.run, other.stages, other.bottleneck)
