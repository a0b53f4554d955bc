"""Snapshots in asyncrl-top: numbers, panes, plain text."""

import itertools
import math
import re
from pathlib import Path

import pytest
from driven import known
from harness import replace
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Group
from top.pictures import STATES, WALL, Run

from asyncrl.messages.monitor import ActorView, Event, Resource
from asyncrl.observe import catalogue
from asyncrl.top.actor_panes import SORTS, sorted_next
from asyncrl.top.detail import detail, help_page
from asyncrl.top.draw import STYLES, Choice, in_columns, level_bar, lines, state_bar, text
from asyncrl.top.panes import PANES, page
from asyncrl.top.pipeline import down as down_in
from asyncrl.top.pipeline import foot, header, marked, pipeline, stages
from asyncrl.top.view import KEPT, History, SnapshotView, is_gone

ROOT = Path(__file__).parents[2]
FED = {"training": 0.3, "waiting": 0.7}
SLOW = {
    "reward": Run(worker={"scoring": 0.99, "idle": 0.01}, engine={"generating": 0.3, "waiting": 0.7}, rank=FED),
    "learner": Run(rank={"training": 0.95, "waiting": 0.05}, engine={"generating": 0.3, "waiting": 0.7}),
    "rollouters": Run(engine={"generating": 0.97, "paused": 0.03}, rank=FED),
    "gate": Run(engine={"generating": 0.5, "waiting": 0.5}, rank=FED, limit=0.0, outstanding=64.0),
}


def plain(renderable, width):
    """Its lines, without blanks at their ends."""
    return [line.plain.rstrip() for line in lines(renderable, width)]


def lines_of(name, view, width, choice=None):
    """The lines of a pane above its table, without blanks at their ends."""
    return plain(Group(*PANES[name](view, choice or Choice()).head), width)


def cells(name, view, title):
    """The cells of a pane's column, by the actor of the row."""
    table = PANES[name](view, Choice(sort="rollouter")).table
    at = [column.title for column in table.columns].index(title)
    return {row.key: row.cells[at].plain.strip() for row in table.rows}


def seen(snapshots):
    return SnapshotView(known(snapshots))


def sampled(view):
    """Tokens sampled per second."""
    return view.rate("rollouter", "rollout/sampled_tokens")


def verdicts(snapshots):
    """The view after each of them."""
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
        yield SnapshotView(history)


def with_actor(snapshot, name, *, metrics=None, **changes):
    """The snapshot with another actor of this name, and with more of its metrics."""
    actors = [
        replace(actor, metrics=actor.metrics | (metrics or {}), **changes) if actor.name == name else actor
        for actor in snapshot.actors
    ]
    return replace(snapshot, actors=actors)


# --- the marked stage ---


@pytest.mark.parametrize("stage", SLOW)
def test_a_planted_slow_stage_is_marked_as_the_bottleneck(stage):
    view = seen(SLOW[stage].between())
    assert view.bottleneck.stage == stage
    assert marked(view) == (stage if stage != "gate" else "dataloader")
    text = page(view, 80)
    assert f"◆ {stage}: " in text and re.search(rf"◆(\d+ )?{marked(view)} ", text)


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
def test_the_mark_of_a_steady_run_does_not_move_while_levels_change_within_steps(swing):
    steady = {"engine": {"generating": 0.69, "waiting": 0.31}, "rank": {"training": 0.74, "waiting": 0.26}}
    shown = [Run(step_s=1.7, **steady, **swing[n % len(swing)]).at(30.0 + 0.75 * n) for n in range(60)]
    assert {view.bottleneck.stage for view in list(verdicts(shown))[20:]} == {"gate"}


def test_learner_and_engines_that_are_busy_in_turns_do_not_move_the_mark():
    """A step takes 2.4 s: the learner waits at the beginning of it, and works 78 % of its time."""

    def at(t):
        waited = 0.52 * (t // 2.4) + min(0.52, t % 2.4)
        rank = {"waiting": waited / t, "training": (t - waited) / t}
        return Run(engine={"generating": 0.99, "waiting": 0.01}, rank=rank, step_s=2.4).at(t)

    views = list(verdicts(at(100.0 + 0.75 * n) for n in range(120)))
    assert {view.bottleneck.stage for view in views[40:]} == {"rollouters"}


def started(t):
    """A run whose resources were starting for 29 s and waiting for 1 s, and whose learner then trains steps."""
    snapshot = Run(engine={"generating": 0.4, "waiting": 0.6}, rank=FED, limit=3.0).at(max(0.0, t - 30.0))
    for resource in (resource for actor in snapshot.actors for resource in actor.resources):
        for state, seconds in (("starting", 29.0), ("waiting", 1.0)):
            resource.seconds[state] = resource.seconds.get(state, 0.0) + min(1.0, t / 30.0) * seconds
    return replace(snapshot, wall=WALL + t, run=replace(snapshot.run, age_s=t))


def test_the_start_of_a_run_is_not_its_bottleneck_after_the_first_step():
    shown = [started(0.5 * n + 1.0) for n in range(80)]
    *_, last = views = list(verdicts(shown))
    before = [view.bottleneck for view in views if not view.run.step]
    stepping = [view.bottleneck for view in views if view.run.step]
    assert any("starting" in said.why for said in before) and not any("starting" in said.why for said in stepping)
    assert (stepping[0].stage, stepping[0].why) == (None, "measuring")
    assert {said.stage for said in stepping[8:]} == {"gate"}
    assert last.steps.seconds == pytest.approx(8.0, abs=0.6)


# --- numbers ---


def test_the_first_step_of_a_learner_counts_in_no_mean():
    def with_steps(*lines):
        snapshot = Run().at(100.0)
        train = [{"step": 7 + n, "start": start, "time/step_s": seconds} for n, (start, seconds) in enumerate(lines)]
        return seen([replace(snapshot, train=train, run=replace(snapshot.run, step=train[-1]["step"]))])

    view = with_steps((1, 22.0))
    assert view.step_mean("time/step_s") is None and stages(view)[3].rate is None
    assert "ETA –" in (text := page(view, 80)) and "only a first step is trained so far" in text
    later = with_steps((1, 22.0), (1, 2.0))
    assert later.step_mean("time/step_s") == 2.0 and stages(later)[3].rate == 64 / 2.0
    assert with_steps((1, 22.0), (1, 2.0), (2, 40.0), (2, 4.0)).step_mean("time/step_s") == 3.0


def test_the_activity_of_a_silent_or_gone_actor_is_unknown():
    *before, last = SLOW["rollouters"].between()
    for number in range(4):
        last = with_actor(last, f"rollouter/{number}", condition="silent")
    view = seen([*before, last])
    assert view.bottleneck.stage != "rollouters" and sampled(view) is None
    assert set(cells("rollouters", view, "state").values()) == {"silent"}
    assert set(cells("rollouters", view, "tok/s").values()) == {"–"}
    assert set(cells("rollouters", view, "time").values()) == {""}
    *before, last = STATES["agents"]()
    gone = seen([*before, with_actor(last, "episodes/3", condition="dead")])
    shown = [cells("episodes", gone, title)["episodes/3"] for title in ("state", "workers", "open", "played")]
    assert shown == ["dead", "–", "–", "400"]
    left = with_actor(last, "rollouter/3", condition="resting", metrics={"rollout/episodes_oldest_s": 7777.0})
    assert "oldest 1m30s" in lines_of("episodes", seen([*before, left]), 120)[0]


def test_the_last_activity_of_an_ended_run_is_not_shown_as_current():
    last = Run(phase="done", exit_code=130, reason="stopped by the launcher").at(100.0)
    dead = [replace(actor, condition="dead") for actor in last.actors]
    view = seen([*Run().between()[:-1], replace(last, actors=dead)])
    assert (sampled(view), view.rate("rollouter", "rollout/trajectories")) == (None, None)
    assert all(box.rate is None and all(map(is_gone, box.actors)) for box in stages(view))
    assert [box.inside for box in stages(view)] == ["gate –/–", "– in flight", "– in hand", "–/64 groups", "– behind"]
    assert {*cells("rollouters", view, "state").values(), *cells("learner", view, "state").values()} == {"ended"}
    text = page(view, 80)
    assert "stopped" in text.splitlines()[0] and "ETA –" in text.splitlines()[0] and "dead" not in text
    # The counters stay.
    assert re.search(r"timeouts +2\b", text) and re.search(r"trained +3,200\b", text)


def test_the_ledger_pane_shows_prompts_left_out_by_data_rules():
    view = seen(Run().between())
    assert not any("left out" in line for line in lines_of("ledger", view, 80))
    with_some = with_actor(Run().at(100.0), "learner/0", metrics={"ledger/left_out": 12.0})
    assert re.search(r"left out +12\b", "\n".join(lines_of("ledger", seen([with_some]), 80)))


def test_the_number_of_replicas_behind_matches_their_rows():
    view = seen(Run(lag=2).between())
    assert list(cells("rollouters", view, "lag").values()) == ["2"] * 4
    assert view.behind == (4, 4) and stages(view)[-1].inside == "4 behind"
    assert seen(Run().between()).behind == (0, 4)


def test_the_cost_of_a_version_comes_from_the_newest_step_that_has_one():
    snapshots = Run().between()
    view = seen(snapshots)
    first, second, *_ = lines_of("weights", view, 120)
    assert first.startswith("learner idle 100 ms") and second.endswith("prefilled again 12.8k an update")
    assert set(cells("rollouters", view, "stall").values()) == {"200 ms"}
    newest = snapshots[-1]
    unpublished = {"step": 51, "time/publish_s": 0.0, "weights/updates": 0.0}
    view = seen([*snapshots[:-1], replace(newest, train=[*newest.train, newest.train[-1] | unpublished])])
    # A step that publishes nothing has no cost of a version, and a step without updates none of an update.
    first, second, *_ = lines_of("weights", view, 120)
    assert first.startswith("learner idle 100 ms") and second.endswith("prefilled again – an update")


def test_the_box_of_the_learner_and_the_verdict_show_rank_0():
    """However many ranks follow it."""
    snapshots = Run(ranks=8, rank={"training": 0.95, "waiting": 0.05}).between()
    for actor in (actor for snapshot in snapshots for actor in snapshot.actors):
        for resource in actor.resources if re.fullmatch("learner/[1-7]", actor.name) else ():
            whole = sum(resource.seconds.values())
            resource.seconds.clear()
            resource.seconds.update({"training": 0.6 * whole, "following": 0.4 * whole})
    view = seen(snapshots)
    (box,) = [box for box in stages(view) if box.stage == "learner"]
    assert view.learner_shares == pytest.approx({"training": 0.95, "waiting": 0.05})
    assert (box.last.plain, len(box.actors)) == ("95% training", 8)
    assert view.bottleneck.stage == "learner" and view.bottleneck.why.startswith("training 95 % of the time")
    assert view.shares(view.of("learner")[1:2]) == pytest.approx({"training": 0.6, "following": 0.4})


def test_the_learner_pane_highlights_zeros_and_omits_missing_numbers():
    snapshot = Run().at(100.0)
    figures = {"policy/grad_norm": 0.0, "learner/lr": 0.0, "policy/entropy": None, "reward/mean": math.nan}
    view = seen([replace(snapshot, train=[snapshot.train[-1] | figures | {"policy/engine_kl": 0.00012}])])
    _, learning, speed, *_ = lines(Group(*PANES["learner"](view, Choice()).head), 78)
    assert [learning.plain[s.start : s.end] for s in learning.spans if s.style == STYLES["bad"]] == ["0.000", "0.000"]
    assert "grad norm 0.000   entropy –" in learning.plain
    assert speed.plain.rstrip().endswith("   engine KL 0.00012")
    assert "reward – " in page(view, 80)


def test_the_learner_pane_shows_the_wait_for_the_gpu_of_time_slices():
    *_, newest = snapshots = Run().between()
    assert lines_of("learner", seen(snapshots), 79)[0].startswith("step 2.0 s  wait 500 ms 25%  train ")
    for seconds, shown in ((0.0, ""), (0.3, "GPU 300 ms 15%  ")):
        train = [line | {"time/take_gpu_s": seconds} for line in newest.train]
        first = lines_of("learner", seen([replace(newest, train=train)]), 79)[0]
        assert first == f"step 2.0 s  wait 500 ms 25%  {shown}train 1.4 s 70%  publish 100 ms 5%"


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
def test_actors_that_are_down_precede_the_bottleneck(change, down):
    *before, newest = Run().between()
    newest = with_actor(newest, "rollouter/1", **change)
    view = seen([*before, newest])
    named = [f"rollouter/1 ({down})"] if down else []
    assert down_in(view) == named
    *_, before, said = plain(pipeline(view, 160), 160)
    assert said.startswith("◆ learner: ")
    assert not named or before == f"down: {named[0]}"
    assert down_in(seen([replace(newest, run=replace(newest.run, phase="draining"))])) == []


def test_rates_are_unknown_with_one_snapshot():
    metrics = {"rollout/in_flight": 0.0, "rollout/oldest_s": 0.0}
    view = seen([with_actor(Run().at(100.0), "rollouter/0", metrics=metrics)])
    assert cells("rollouters", view, "oldest")["rollouter/0"] == "–", "nothing in flight has no age"
    assert (view.steps.seconds, sampled(view)) == (0, None)
    assert stages(view)[1].last.plain == "86% generating", "shares are of whole lives"


def test_shares_of_episode_stages_cover_the_time_since_the_older_snapshot():
    older, newer = (Run(rollouters=1, episodes={"user": 1.0}).at(t) for t in (60.0, 100.0))
    view = seen([older, with_actor(newer, "rollouter/0", metrics={"rollout/episode_s/engine": 16.0 * 40.0})])
    shown = [line.split()[:3] for line in lines_of("episodes", view, 120) if line.startswith(("user", "engine"))]
    assert shown == [["user", "1", "50%"], ["engine", "–", "50%"]]


def test_every_metric_that_is_shown_is_declared():
    source = "".join(path.read_text() for path in (ROOT / "asyncrl/top").glob("*.py"))
    groups = {metric.name.partition("/")[0] for metric in catalogue.every()}
    found = set(re.findall(r'"([a-z]+)/([a-z_][a-z_0-9]*)"', source))
    names = [f"{group}/{name}" for group, name in found if group in groups]
    assert len(names) > 40
    assert not [name for name in names if catalogue.find(name) is None]


# --- drawing ---


@pytest.mark.parametrize("width", [80, 103, 200])
@pytest.mark.parametrize("state", STATES)
def test_every_line_of_every_pane_fits_the_width_of_the_pane(state, width):
    view = seen(STATES[state]())
    heads = [lines(Group(*PANES[name](view, Choice()).head), width) for name in PANES]
    assert len(plain(header(view), width)) == 2
    for line in itertools.chain(lines(header(view), width), lines(pipeline(view, width), width), *heads):
        assert line.cell_len <= width, line.plain
    assert max(map(cell_len, page(view, width).splitlines())) <= width


@given(
    st.dictionaries(st.text("ab", max_size=20), st.text("01", min_size=1, max_size=9), min_size=1), st.integers(1, 120)
)
def test_columns_of_facts_show_all_of_them_unless_one_is_wider_than_the_width(pairs, width):
    one = max(len(name) for name in pairs) + 2 + max(len(value) for value in pairs.values())
    drawn = plain(in_columns({name: text(value) for name, value in pairs.items()}), max(one, width))
    assert sorted(" ".join(drawn).split()) == sorted(word for pair in pairs.items() for word in pair if word)
    assert len(drawn) <= len(pairs)


def test_the_outcome_of_late_groups_is_shown_if_there_were_any():
    for counted, shown in (
        ({}, ""),
        ({"late_trained": 0.0, "late_masked": 3.0}, "   so far 3 masked"),
        ({"late_trained": 5.0, "late_masked": 3.0}, "   so far 5 trained, 3 masked"),
    ):
        metrics = {f"staleness/{name}_groups": value for name, value in counted.items()}
        reported = lines_of("staleness", seen([with_actor(Run().at(100.0), "learner/0", metrics=metrics)]), 120)
        assert reported[0].partition(" groups")[2] == shown


def test_the_learner_pane_shows_the_components_of_the_reward_and_bounds_them():
    snapshot = Run().at(100.0)
    for count, more in ((2, ""), (15, "and 3 more")):
        components = {f"reward/component/c{n:02}": n / 4 for n in range(count)}
        shown = lines_of("learner", seen([replace(snapshot, train=[snapshot.train[-1] | components])]), 300)
        (line,) = [line for line in shown if line.startswith("components")]
        assert line.startswith("components   c00 0.000   c01 0.250") and line.endswith(more or "c01 0.250")
    assert not any("components" in line for line in lines_of("learner", seen([snapshot]), 300))


@pytest.mark.parametrize(("most", "last"), [(8, "8"), (9, "9–12"), (16, "13–16"), (40, "33+")])
def test_staleness_is_shown_up_to_any_limit(most, last):
    """And what is beyond it is late."""
    view = seen(Run(staleness_max=most).between())
    drawn = lines_of("staleness", view, 80)
    assert drawn[-1].split()[0] == last and not any("late" in line for line in drawn[2:])
    assert f"of {most} " in page(view, 80)
    beyond = lines_of("staleness", seen(Run(staleness_max=2).between()), 80)
    assert [re.split(r"[█▏▎▍▌▋▊▉]|  ", line.strip())[0] for line in beyond[-3:]] == ["2", "late 3", "late 4"]


@pytest.mark.parametrize("width", [40, 100])
def test_the_help_has_the_same_text_at_every_width_and_is_never_cut(width):
    keys = {"tab 1 … 8": "panes", "s": "sort by the next column"}
    drawn = plain(help_page(keys), width)
    assert max(map(len, drawn)) <= width and "…" not in " ".join(drawn).replace("1 … 8", "")
    words = sorted(" ".join(plain(help_page(keys), 72)).split())
    assert sorted(" ".join(drawn).split()) == words


def test_a_small_terminal_keeps_the_names_of_stages():
    for phase, stands_out in (("running", True), ("done", False)):
        dead = tuple(f"rollouter/{n}" for n in range(60))
        view = seen(Run(rollouters=64, hosts=1, dead=dead, phase=phase).between())
        top = lines(pipeline(view, 80), 80)[0]
        assert "4/64 rollout" in top.plain
        assert (STYLES["bad"] in {span.style for span in top.spans}) == stands_out
    view = seen(Run(rollouters=64, hosts=1).between())
    top, rates, *_ = plain(pipeline(view, 80), 80)
    assert "64 rollouters" in top and "56.3k tokens/s" in rates


def test_the_foot_shows_the_filter_the_order_and_the_level_that_were_chosen():
    status = text("live")
    assert plain(foot(status, Choice()), 80) == [f"live{'? help  q quit':>76}"]
    chosen = plain(foot(status, Choice(needle="r/1", sort="tok/s", descending=True, level="error")), 120)[0]
    assert "filter: r/1   events: error   sort: tok/s▾" in chosen


def test_events_are_cut_only_at_the_width_of_the_terminal():
    wide, escaped = "显存不足" * 60 + " the end", "\x1b[31m" * 60 + " the end"
    for words in ("worker 1 was killed: " + "timeout " * 40 + "the end", wide, escaped):
        view = seen(Run(events=[Event(number=1, wall=0.0, level="info", actor="", text=words)]).between())
        assert "the end" in page(view, 80, whole=True)
        assert "the end" not in (cut := page(view, 80)) and "…" in cut


def test_sorting_and_filtering():
    view = seen(Run(rollouters=12, hosts=3, dead=("rollouter/5",)).between())

    def keys(**choice):
        return [row.key for row in PANES["rollouters"](view, Choice(**choice)).table.rows]

    every = [f"rollouter/{n}" for n in range(12)]
    assert keys(sort="rollouter") == every
    assert keys(sort="rollouter", descending=True) == every[::-1]
    assert keys(sort="wait", descending=True)[:3] == [f"rollouter/{n}" for n in (2, 8, 11)]
    for descending in (False, True):
        assert keys(sort="tok/s", descending=descending)[-1] == "rollouter/5", "who is gone comes last"
    by_host = keys()
    assert by_host[:3] == ["rollouter/0", "rollouter/0", "rollouter/1"], "a heading leads to the first below it"
    assert len(by_host) == 12 + 3, "a heading for each host"
    assert keys(needle="node2", sort="rollouter") == [f"rollouter/{n}" for n in range(8, 12)]
    assert keys(needle="ROLLOUTER/11", sort="rollouter") == ["rollouter/11"]
    assert "no rollouter matches xyz" in lines_of("rollouters", view, 80, Choice(needle="xyz"))[0]
    choice, first = Choice(), {}
    for _ in SORTS:
        choice = sorted_next(choice)
        first[choice.sort] = choice.descending
        assert set(keys(sort=choice.sort)) == set(every)
    # Numbers from the largest on.
    assert first == {sort: sort not in ("rollouter", "host", "state") for sort in SORTS}


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
def test_unknown_facts_of_an_actor_are_not_shown_as_0(facts, said):
    snapshot = Run().at(100.0)
    view = seen([replace(snapshot, actors=[*snapshot.actors, ActorView(name="rollouter/9", **facts)])])
    assert plain(detail(view, "rollouter/9", None), 80)[:3] == [
        *said,
        "processors –   memory –   event loop busy –   loop lag –",
    ]


@given(
    st.dictionaries(st.sampled_from(["work", "weights", "upkeep", "start", "wait"]), st.floats(0.0, 1.0)),
    st.floats(0.0, 1e9) | st.none(),
    st.integers(1, 60),
)
def test_bars_have_the_requested_width(kinds, value, width):
    assert state_bar(kinds, width).cell_len == (width if sum(kinds.values()) > 0 else 0)
    (line,) = lines(level_bar(value, 1e9), width)
    assert line.cell_len == width and (not value or value < 1e9 or line.plain == "█" * width)


@pytest.mark.parametrize("rewards", [[], [0.5], [-1.7e308, 1.7e308, 0.0], [None, 0.25]])
def test_the_header_has_a_line_of_any_rewards(rewards):
    snapshot = Run().at(100.0)
    train = [snapshot.train[-1] | {"reward/mean": each} for each in rewards]
    assert "tokens/s" in plain(header(seen([replace(snapshot, train=train)])), 80)[1]


# --- history ---


def test_a_history_is_bounded_and_long_enough_and_restarts_with_a_new_attempt():
    history, run = History(), Run(step_s=30.0, steps=10_000)
    for n in range(1000):
        history.add(run.at(n * 0.5))
    assert len(history.window()) <= 1.1 * KEPT
    assert history.steps().seconds == pytest.approx(4 * 30.0, rel=0.1)
    assert history.recent().seconds == pytest.approx(10.0, abs=0.5)
    history.add(Run().at(3.0))
    assert history.steps().seconds == 0 and sampled(SnapshotView(history)) is None


@pytest.mark.parametrize("every_s", [0.5, 2.0])
def test_rates_cover_the_last_10_s_for_any_step_time(every_s):
    history, run = History(), Run(step_s=150.0, steps=10_000)
    for n in range(600):
        history.add(run.at(n * every_s))
        assert n * every_s < 10.0 or 10.0 <= history.recent().seconds < 10.0 + every_s


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_setting_the_clock_changes_no_rate_and_no_share(by_s):
    run = Run(steps=10_000)
    even = run.between(0.0, 40.0, 0.5)
    for since in (1, 10, 40):
        is_set = [replace(each, wall=each.wall + by_s) if each in even[-since:] else each for each in even]
        one, other = seen(even), seen(is_set)
        assert page(one, 120) == page(other, 120)
