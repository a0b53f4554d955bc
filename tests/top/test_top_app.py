"""The terminal of asyncrl-top, driven by keys and by what comes in."""

import asyncio
import itertools
import time
from functools import partial

import msgspec
import pytest
from driven import known, recording, settled, shown, text_of, until
from msgspec.structs import replace
from recordings import record
from top.pictures import WALL, Run

from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from asyncrl.messages.monitor import Event, SnapshotTaken
from asyncrl.observe.recording import ending
from asyncrl.top import app as terminal
from asyncrl.top import client as sources
from asyncrl.top.app import Rows
from asyncrl.top.client import Away, NotStarted, WatchedRun, start_of
from asyncrl.top.replay import Replay, SnapshotSource, open_replay, recent_history
from asyncrl.top.view import SHORTEST_S, SnapshotView

pytestmark = pytest.mark.usefixtures("utc")
DRAW_AGAIN = ("space", "space")


FROZEN = object()


class Answering:
    """A viewer's connection to a controller that gives these snapshots, and then no answer in time, or with FROZEN
    none at all."""

    def __init__(self, snapshots):
        self._left = iter(snapshots)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    async def ask(self, request):
        if (snapshot := next(self._left, None)) is FROZEN:
            await asyncio.Event().wait()
        if snapshot is None:
            raise DeadlineExceeded("viewer/0", "controller/0", "WatchSnapshot", 8.0)
        return SnapshotTaken(number=request.seen + 1, snapshot=msgspec.msgpack.encode(snapshot))


def later(history, **changes):
    """A snapshot a moment after the newest."""
    history.add(replace(history.newest, wall=history.newest.wall + 0.001, **changes))


async def test_enter_in_a_pane_opens_the_actor_of_the_row():
    events = [Event(number=1, wall=WALL, level="info", actor="", text="the run is running")]
    run = Run(events=events, ranks=2, gpus=True)
    async with shown(SnapshotSource(history=known(run.between()))) as (app, pilot):
        # An event of the run as a whole is the controller's.
        said = {"controller/0": "the run is running", "learner/0": "GPU 0 90%  61.0 GB of 80.0 GB"}
        for pane, actor in {"4": "learner/0", "5": "reward/0", "6": "dataloader/0", "7": "controller/0"}.items():
            await pilot.press(pane, "enter")
            await until(pilot, f"{actor}   esc back")
            await until(pilot, said.get(actor, ""))
            await pilot.press("escape")
        await pilot.press("7", "enter")
        await settled(pilot)
        await pilot.press("ctrl+c")
    assert app.return_code == 130


async def test_the_newest_events_stay_in_sight():
    """The cursor stays at the top; the newest events may have any actors."""
    actors = ["reward/0", *["dataloader/0", "reward/0"] * 40, "learner/0"]
    events = [Event(number=n, wall=WALL + n, level="info", actor=each, text=f"{n}.") for n, each in enumerate(actors)]
    history = known(Run(events=events[:-1]).between())
    async with shown(SnapshotSource(history=history)) as (app, pilot):
        await pilot.press("7")
        await until(pilot, "80.")
        rows = app.panes["events"].query_one(Rows)
        later(history, events=events)
        await pilot.press(*DRAW_AGAIN)
        await until(pilot, "81.")
        assert (rows.cursor_row, rows.scroll_offset.y) == (0, 0)


async def test_the_help_scrolls_on_a_small_terminal_and_a_tiny_one_shows_a_message():
    async with shown(SnapshotSource(history=known(Run().between()))) as (app, pilot):
        for columns, rows in ((40, 10), (80, 24), (59, 24), (80, 15), (60, 16)):
            await pilot.resize_terminal(columns, rows)
            await settled(pilot)
            text = text_of(app)
            small = columns < 60 or rows < 16
            assert ("needs 60×16" in text) == small and ("step 50/100" in text) != small
        await pilot.press("7")
        await until(pilot, "7 events")
        await pilot.press("question_mark")
        await until(pilot, "the bottleneck")
        seen = text_of(app)
        assert "age of a trajectory" not in seen
        assert not any(line.rstrip(" │").endswith("…") for line in seen.splitlines())
        await pilot.press("end")
        await until(pilot, "age of a trajectory")
        assert "the bottleneck" not in text_of(app)


async def test_sort_filter_and_level_keys():
    async with shown(SnapshotSource(history=known(Run(rollouters=12, hosts=1).between()))) as (app, pilot):
        rows = app.panes["rollouters"].query_one(Rows)
        await pilot.press("down", "down", "r")
        await until(pilot, "sort: host▾")
        assert rows.chosen == "rollouter/2", "the cursor stays with its actor"
        await pilot.press("s", "s")
        await until(pilot, "sort: state▴")
        await pilot.press("s", "s", "enter")
        await until(pilot, "rollouter/2   esc back")
        await pilot.press("escape", "slash", *"r/77")
        await until(pilot, "no rollouter matches r/77")
        await pilot.press("escape", "slash", *"rollouter/11", "enter")
        await until(pilot, "filter: rollouter/11")
        text = text_of(app)
        assert "r/11" in text and "r/10" not in text
        await pilot.press("escape", "7", "l")
        await until(pilot, "events: warning")
        text = text_of(app)
        assert "the run has begun" not in text and "engine died" in text


async def test_a_key_before_the_first_snapshot_does_nothing():
    coming = asyncio.Event()

    async def feed():
        await coming.wait()
        yield Run().at(100.0)

    async with shown(SnapshotSource(feed=feed)) as (app, pilot):
        await pilot.press("up", "down", "k", "j", "pageup", "pagedown", "home", "end")
        coming.set()
        await until(pilot, "step 50/100")
        await pilot.press("end", "home")
        assert app.panes["rollouters"].query_one(Rows).chosen == "rollouter/0"


async def test_a_feed_is_shown_live_frozen_lost_and_ended():
    run, gate = Run(steps=1000), asyncio.Queue()

    async def feed():
        while True:
            seen = await gate.get()
            if isinstance(seen, Exception):
                raise seen
            yield seen
            gate.task_done()

    async with shown(SnapshotSource(feed=feed)) as (app, pilot):
        assert "waiting for the run" in text_of(app) and "attaching" in text_of(app)
        await gate.put(run.at(100.0))
        await until(pilot, "step 50/1000")
        assert "live" in text_of(app)
        await pilot.press("space")
        await until(pilot, "frozen")
        await gate.put(run.at(200.0))
        async with asyncio.timeout(10.0):
            await gate.join()
        await pilot.press("s", "s")
        await until(pilot, "sort: state▴")
        assert "step 50/1000" in text_of(app) and "frozen" in text_of(app), "a frozen screen shows the frozen view"
        await pilot.press("space")
        await until(pilot, "step 100/1000")
        await gate.put(Away("no answer", 12.0))
        await until(pilot, "no answer for 12 s, still asking")
        assert "step 100/1000" in text_of(app) and "? help  q quit" in text_of(app).splitlines()[-1]
        await gate.put(ActorFailed("controller/0", "the keys are of another run"))
        await until(pilot, "of another run")
        assert "step 100/1000" in text_of(app)
    # Where nothing was seen the command says why, on a terminal that is as it was.
    await gate.put(ActorFailed("controller/0", "the keys are of another run"))
    async with shown(SnapshotSource(feed=feed)) as (app, _):
        pass
    assert app.return_code == 1 and "of another run" in str(app.failure)


@pytest.fixture
def drawn_at(monkeypatch):
    """The times at which drawing began; each drawing takes a while."""
    began = []

    def slow(history):
        began.append(time.monotonic())
        time.sleep(terminal.DRAW_S / 2)
        return SnapshotView(history)

    monkeypatch.setattr(terminal, "SnapshotView", slow)
    return began


async def test_the_viewer_requests_the_next_snapshot_before_it_draws(drawn_at):
    """A controller is soon gone after it."""
    run, coming, drawn_when_asked = Run(steps=1000), asyncio.Event(), []

    async def feed():
        await coming.wait()
        yield run.at(100.0)
        drawn_when_asked.append(len(drawn_at))
        yield Run(steps=1000, phase="done").at(100.1)

    async with shown(SnapshotSource(feed=feed)) as (app, pilot):
        coming.set()
        await until(pilot, "the run has ended")
        assert drawn_when_asked == [0]
        await until(pilot, "done")
        assert app.view.run.phase == "done"


async def test_the_interval_between_drawings_includes_the_drawing_time(drawn_at):
    run, coming, asked = Run(steps=1000), asyncio.Event(), []

    async def feed():
        await coming.wait()
        for second in itertools.count():
            asked.append(second)
            yield run.at(100.0 + second)
            await asyncio.sleep(terminal.DRAW_S / 8)

    async with shown(SnapshotSource(feed=feed)) as (_, pilot):
        coming.set()
        async with asyncio.timeout(20.0):
            while len(drawn_at) < 4:
                await pilot.pause(0.05)
    assert len(asked) > len(drawn_at)
    pauses = [later - earlier for earlier, later in itertools.pairwise(drawn_at)]
    assert min(pauses) >= terminal.DRAW_S - terminal.TICK_S / 2 - 0.01
    assert min(pauses) < 1.5 * terminal.DRAW_S


async def test_a_viewer_of_a_folder_waits_for_the_start_and_follows_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "AGAIN_S", 0.02)
    monkeypatch.setattr(sources, "find_target", lambda run, keys, lives: find())
    address = tmp_path / "private" / "controller.json"
    attempts = iter(([Run().at(98.0), Run(phase="done").at(100.0)], [Run(steps=777).at(20.0), FROZEN]))

    def find():
        if not address.exists():
            raise NotStarted("no controller")
        return WatchedRun(address="tcp://127.0.0.1:9", credentials=None, run_dir=tmp_path, start=start_of(tmp_path))

    monkeypatch.setattr(WatchedRun, "connect", lambda target: Answering(next(attempts)))
    feed = partial(sources.follow_folder, tmp_path, None, lambda run_dir: True)
    async with shown(SnapshotSource(feed=feed)) as (app, pilot):
        await until(pilot, "the run has not started")
        address.parent.mkdir()
        address.write_text("{}")
        await until(pilot, "the run has ended; a resumed run is shown here")
        assert "done" in text_of(app).splitlines()[0]
        # Another file, as a new controller writes it.
        (tmp_path / "new").write_text("{}")
        (tmp_path / "new").replace(address)
        await until(pilot, "step 10/777")
        assert "running" in text_of(app).splitlines()[0]


async def test_a_run_whose_processes_were_all_killed_is_shown_as_killed(tmp_path, monkeypatch):
    """As it was recorded last, which is later than what was seen."""
    run = Run(steps=1000)
    record(tmp_path, run.at(103.0))

    monkeypatch.setattr(WatchedRun, "connect", lambda target: Answering([run.at(99.0), run.at(100.0)]))
    (tmp_path / "private").mkdir()
    # It does not answer, and only then its folder shows its end.
    looks = iter((True, False))
    target = WatchedRun(
        address="tcp://127.0.0.1:9", credentials=None, run_dir=tmp_path, lives=lambda _run_dir: next(looks)
    )
    async with shown(SnapshotSource(feed=lambda: sources.follow(target))) as (app, pilot):
        await until(pilot, "the run has ended")
        await until(pilot, "failed: nothing is known after this, when it was running")
        head = text_of(app).splitlines()[0]
        assert "failed" in head and "running" not in head and "ETA –" in head
        assert "step 51/1000" in head


async def test_the_end_of_a_run_with_an_unreadable_recording_comes_from_the_last_snapshot(tmp_path, monkeypatch):
    # A folder that leads to itself: root, too, cannot read it.
    (tmp_path / "monitor").symlink_to("monitor")
    first = [Run(steps=1000).at(100.0)]

    monkeypatch.setattr(WatchedRun, "connect", lambda target: Answering(first))
    target = WatchedRun(address="tcp://127.0.0.1:9", credentials=None, run_dir=tmp_path)
    async with shown(SnapshotSource(feed=lambda: sources.follow(target))) as (app, pilot):
        await until(pilot, "the run has ended")
        await until(pilot, "failed: nothing is known after this, when it was running")
        assert "step 50/1000" in text_of(app).splitlines()[0]
    first.clear()
    async with shown(SnapshotSource(feed=lambda: sources.follow(target))) as (_, pilot):
        await until(pilot, "the run has ended")


async def test_a_requested_trace_is_reported_with_its_result():
    written = asyncio.Queue()
    async with shown(SnapshotSource(history=known(Run().between()), trace=written.get)) as (app, pilot):
        await pilot.press("t")
        await until(pilot, "the trace is being written")
        await written.put("trace: runs/[x]/trace/1.json\x1b")
        await until(pilot, "trace: runs/[x]/trace/1.json\\x1b")
        assert "is being written" not in text_of(app)


async def test_a_replay_of_a_live_run_says_that_the_recording_ended_where_it_was_read():
    replay = Replay(recording(Run(steps=1000), 20), lives=True)
    replay.jump(replay.end)
    async with shown(SnapshotSource(replay=replay)) as (app, pilot):
        await until(pilot, "the recording ended here when it was read")
        assert "running" in text_of(app)


def test_a_replay_shows_the_same_after_a_jump_as_after_playing():
    entries = recording(Run(), 100)
    jumped, played = Replay(entries), Replay(entries)
    jumped.jump(WALL + 100.0)
    while played.position < WALL + 100.0:
        played.speed = 1.0
        played.advance(0.5)
        played.history()
    for each in (jumped, played):
        newest, steps = each.history().newest, each.history().steps()
        assert newest is not None and newest.wall == WALL + 100.0
        assert steps.seconds == pytest.approx(SHORTEST_S, abs=1.0)


def test_a_run_whose_clock_was_set_back_is_shown_to_its_end(tmp_path):
    run = Run(steps=100)
    seen = [run.at(float(second)) for second in range(0, 40, 2)]
    set_back = [replace(each, wall=each.wall - 30.5) for each in seen[10:]]
    end = replace(set_back[-1], run=replace(set_back[-1].run, phase="done"))
    record(tmp_path, *seen[:10], *set_back[:-1], end)
    assert ending(tmp_path, seen[9]).run.phase == "done"
    whole = open_replay(tmp_path, lives=False)
    whole.jump(whole.end)
    assert whole.history().newest == end
    # One after the other, back and forth.
    for direction, order in ((-1, set_back[-2::-1] + seen[9::-1]), (1, seen[1:10] + set_back[:-1])):
        for expected in order:
            whole.step(direction)
            assert whole.history().newest == expected


def test_rates_after_a_jump_are_those_of_the_last_10_s():
    replay = Replay(recording(Run(step_s=150.0), 300))
    replay.jump(replay.end)
    assert replay.history().recent().seconds == 10.0


def test_a_new_viewer_shows_the_last_minutes(tmp_path):
    run = Run(steps=100_000)
    record(tmp_path, *(run.at(float(second)) for second in range(0, 1800, 10)))
    whole = open_replay(tmp_path, lives=True)
    whole.jump(whole.end)
    (recent, known) = (SnapshotView(history) for history in (recent_history(tmp_path), whole.history()))
    assert (recent.snapshot, recent.steps.seconds, recent.bottleneck) == (
        known.snapshot,
        known.steps.seconds,
        known.bottleneck,
    )
    assert recent_history(tmp_path / "nowhere").newest is None


async def test_a_wide_table_scrolls_sideways_and_stays_there_when_values_get_shorter():
    history = known(Run(hosts=1).between())
    async with shown(SnapshotSource(history=history)) as (app, pilot):
        assert " host" not in text_of(app)
        await pilot.press(*["shift+right"] * 40)
        await until(pilot, "most host")
        assert "r/3" in text_of(app), "the names stay"
        rows = app.panes["rollouters"].query_one(Rows)
        await settled(pilot)
        at = rows.scroll_offset.x
        later(history, actors=[replace(actor, resources=[], state="up") for actor in history.newest.actors])
        await pilot.press(*DRAW_AGAIN)
        await settled(pilot)
        assert rows.scroll_offset.x == at > 0
        await pilot.press(*["left"] * 40)
        await until(pilot, "up ")


async def test_only_changed_cells_are_redrawn():
    history = known(Run(rollouters=12, hosts=1, steps=100_000).between())
    async with shown(SnapshotSource(history=history), "200x50") as (app, pilot):
        rows, drawn = app.panes["rollouters"].query_one(Rows), []
        update = rows.update_cell_at
        rows.update_cell_at = lambda at, cell: (drawn.append((at[0], cell.plain.strip())), update(at, cell))
        await pilot.press(*DRAW_AGAIN)
        assert drawn == []
        actors = [
            replace(actor, metrics=actor.metrics | {"rollout/in_flight": 999.0})
            if actor.name == "rollouter/7"
            else actor
            for actor in history.newest.actors
        ]
        later(history, actors=actors)
        await pilot.press(*DRAW_AGAIN)
        await until(pilot, "999")
        assert drawn == [(7, "999")]
