"""The terminal of asyncrl-top, driven by keys: its screens over recorded states are compared as text.

ASYNCRL_UPDATE_SCREENS=1 writes the screens anew, to be read before they are committed.
"""

import asyncio
import functools
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zstandard
from pictures import STATES, WALL, Run

from asyncrl.errors import ActorFailed
from asyncrl.monitor.client import Away
from asyncrl.monitor.top.app import Top
from asyncrl.monitor.top.history import History
from asyncrl.monitor.top.replay import Replay
from asyncrl.monitor.top.source import Source
from asyncrl.snapshot import Event


def within_a_loop(test):
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(test(*args, **kwargs))

    return run


SCREENS = Path(__file__).parent / "screens"
SIZES = {"80x24": (80, 24), "200x50": (200, 50)}


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def known(snapshots):
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
    return history


def text_of(app):
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


@asynccontextmanager
async def shown(source, size="80x24", **options):
    app = Top(source, **options)
    async with app.run_test(size=SIZES[size]) as pilot:
        await settled(pilot)
        yield app, pilot


async def settled(pilot):
    """Until two looks show the same."""
    before = None
    for _ in range(40):
        await pilot.pause(0.05)
        text = text_of(pilot.app)
        if text == before:
            return
        before = text


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", STATES)
@within_a_loop
async def test_screens(state, size):
    async with shown(Source(history=known(STATES[state]())), size) as (app, _):
        text = text_of(app)
    compare(f"{state}-{size}", text)


@within_a_loop
async def test_screen_of_a_terminal_in_between():
    async with shown(Source(history=known(Run(ranks=4, gpus=True).between()))) as (app, pilot):
        await pilot.resize_terminal(150, 40)
        await settled(pilot)
        compare("between-150x40", text_of(app))


@within_a_loop
async def test_tokens_beyond_the_limit_are_shown_as_late():
    async with shown(Source(history=known(Run(staleness_max=2).between()))) as (app, pilot):
        await pilot.press("4")
        await settled(pilot)
        text = text_of(app)
    assert "late 3" in text and "late 4" in text and "late 2" not in text and "late 1 of 64 groups" in text


@pytest.mark.parametrize("key", ["2", "3", "4", "5", "6", "7", "question_mark"])
@within_a_loop
async def test_panes_on_a_small_terminal(key):
    async with shown(Source(history=known(Run(ranks=4, gpus=True).between()))) as (app, pilot):
        await pilot.press(key)
        await settled(pilot)
        text = text_of(app)
    compare(f"pane-{key}-80x24", text)


@within_a_loop
async def test_a_terminal_that_knows_ascii_alone():
    async with shown(Source(history=known(Run().between())), ascii_only=True) as (app, _):
        text = text_of(app)
    assert text.isascii()
    compare("ascii-80x24", text)


def compare(name, text):
    path = SCREENS / f"{name}.txt"
    if os.environ.get("ASYNCRL_UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; ASYNCRL_UPDATE_SCREENS=1 writes it anew"


@within_a_loop
async def test_an_actor_in_detail_with_its_awaits_and_its_log(tmp_path):
    log = tmp_path / "logs" / "attempt_1" / "rollouter-2.log"
    log.parent.mkdir(parents=True)
    log.write_text('{"event": "engine is up", "level": "info", "timestamp": "2026-01-02T03:04:05Z", "gpu": 3}\nplain\n')
    async with shown(Source(history=known(Run().between()), run_dir=tmp_path)) as (app, pilot):
        # The headings of hosts are passed over: the entries are node0, 0, 1, node1, 2.
        await pilot.press("down", "down", "enter")
        await until(pilot, "engine is up")
        text = text_of(app)
        assert "rollouter/2" in text and "dataloader/0  Lease" in text and "(idle)" in text
        assert "03:04:05  info      engine is up gpu=3" in text and "plain" in text
        compare("detail-80x24", text)
        await pilot.press("n")
        await until(pilot, "rollouter/3")
        await settled(pilot)
        assert "engine is up" not in text_of(app), "the log of another actor"
        for _ in range(3):
            await pilot.press("n")
        await until(pilot, "learner/0")
        await pilot.press("p")
        await until(pilot, "dataloader/0   esc")
        await pilot.press("escape")
        await settled(pilot)
        assert "1 rollouters" in text_of(app)


@pytest.mark.parametrize(
    ("pane", "actor"), [("4", "learner/0"), ("5", "reward/0"), ("6", "dataloader/0"), ("7", "rollouter/1")]
)
@within_a_loop
async def test_a_pane_leads_to_the_actor_that_it_is_about(pane, actor):
    async with shown(Source(history=known(Run().between()))) as (_, pilot):
        await pilot.press(pane, "enter")
        await until(pilot, f"{actor}   esc back")


@within_a_loop
async def test_what_happened_to_the_run_as_a_whole_is_told_in_detail_by_the_controller():
    events = [Event(number=1, wall=WALL, level="info", actor="", text="the run is running")]
    async with shown(Source(history=known(Run(events=events).between()))) as (app, pilot):
        await pilot.press("7", "enter")
        await until(pilot, "controller/0   esc back")
        await settled(pilot)
        assert "the run is running" in text_of(app)


@within_a_loop
async def test_a_terminal_that_is_too_small_says_so_and_recovers():
    async with shown(Source(history=known(Run().between()))) as (app, pilot):
        for columns, rows in ((40, 10), (80, 24), (200, 50), (59, 24), (80, 15)):
            await pilot.resize_terminal(columns, rows)
            await settled(pilot)
            text = text_of(app)
            small = columns < 60 or rows < 16
            assert ("wants 80×24" in text) == small and ("step 50/100" in text) != small
            assert not small or f"{columns}×{rows}" in text


@within_a_loop
async def test_sort_filter_and_level_keys():
    async with shown(Source(history=known(Run(rollouters=12, hosts=1).between()))) as (app, pilot):
        await pilot.press("s")
        await settled(pilot)
        assert "state▴" in text_of(app)
        await pilot.press("r")
        await settled(pilot)
        assert "state▾" in text_of(app)
        await pilot.press("slash", *"r/77")
        await settled(pilot)
        assert "no rollouter matches r/77" in text_of(app)
        await pilot.press("escape", "slash", *"rollouter/11", "enter")
        await settled(pilot)
        text = text_of(app)
        assert "r/11" in text and "r/10" not in text and "filter: rollouter/11" in text
        await pilot.press("escape", "7", "l")
        await settled(pilot)
        text = text_of(app)
        assert "the run has begun" not in text and "engine died" in text and "events: warning" in text


@within_a_loop
async def test_it_follows_freezes_and_goes_on():
    run = Run(steps=1000)
    gate = asyncio.Queue()

    async def feed():
        while True:
            yield run.at(await gate.get())

    async with shown(Source(feed=feed)) as (app, pilot):
        assert "waiting for the run" in text_of(app) and "attaching" in text_of(app)
        await gate.put(100.0)
        await until(pilot, "step 50/1000")
        assert "live" in text_of(app)
        await pilot.press("space")
        await gate.put(200.0)
        await pilot.pause(1.2)
        assert "step 50/1000" in text_of(app) and "frozen" in text_of(app)
        await pilot.press("space")
        await until(pilot, "step 100/1000")


@within_a_loop
async def test_a_controller_that_is_away_is_shown_and_what_was_seen_stays():
    async def feed():
        yield Run().at(100.0)
        yield Away("no answer", 12.0)
        await asyncio.sleep(60)

    async with shown(Source(feed=feed)) as (app, pilot):
        await until(pilot, "no answer for 12 s")
        assert "step 50/100" in text_of(app)


@within_a_loop
async def test_the_end_of_a_run_and_a_refusal_are_told():
    async def ends():
        yield Run(phase="done").at(100.0)

    async with shown(Source(feed=ends)) as (_, pilot):
        await until(pilot, "the run has ended")

    async def refuses():
        raise ActorFailed("controller/0", "the keys are of another run")
        yield

    # Nothing was seen: the command says why, on a terminal that is as it was.
    async with shown(Source(feed=refuses)) as (app, _):
        pass
    assert app.return_code == 1 and "of another run" in str(app.failure)

    async def ends_so():
        yield Run().at(100.0)
        raise ActorFailed("controller/0", "the keys are of another run")

    async with shown(Source(feed=ends_so)) as (app, pilot):
        await until(pilot, "of another run")
        assert "step 50/100" in text_of(app)


async def until(pilot, text, within=10.0):
    async with asyncio.timeout(within):
        while text not in text_of(pilot.app):
            await pilot.pause(0.05)


@within_a_loop
async def test_a_trace_is_asked_for_and_what_came_of_it_is_said():
    asked = []

    async def trace():
        asked.append(1)
        return "trace: runs/x/trace/1.json"

    async with shown(Source(history=known(Run().between()), trace=trace)) as (_, pilot):
        await pilot.press("t")
        await until(pilot, "trace: runs/x/trace/1.json")
    assert asked == [1]


def recording(run, seconds):
    compress = zstandard.ZstdCompressor().compress
    return [
        (snapshot.wall, compress(msgspec.msgpack.encode(snapshot)))
        for snapshot in (run.at(10.0 + second) for second in range(seconds))
    ]


@within_a_loop
async def test_replay_with_a_time_bar():
    replay = Replay(recording(Run(steps=1000), 120))
    replay.playing = False
    async with shown(Source(replay=replay)) as (app, pilot):
        text = text_of(app)
        assert "step 5/1000" in text and "0 s of 1m59s" in text and "paused" in text
        await pilot.press("right", "right")
        await settled(pilot)
        assert "2.0 s of 1m59s" in text_of(app) and "step 6/1000" in text_of(app)
        await pilot.press(*[">"] * 10)
        await settled(pilot)
        text = text_of(app)
        assert "1m02s of 1m59s" in text and "step 35/1000" in text
        assert "86% generating" in text, "shares are there right after a jump"
        compare("replay-80x24", text)
        await pilot.press("left")
        await settled(pilot)
        assert "1m00s of 1m59s" in text_of(app)
        await pilot.press("plus", "plus", "plus", "space")
        await until(pilot, "1m59s of 1m59s")
        await until(pilot, "paused")


def test_a_replay_shows_the_same_however_one_comes_to_a_moment():
    entries = recording(Run(), 100)
    jumped, played = Replay(entries), Replay(entries)
    jumped.jump(WALL + 100.0)
    while played.position < WALL + 100.0:
        played.speed = 1.0
        played.advance(0.5)
        played.history()
    for each in (jumped, played):
        newest = each.history().newest
        assert newest is not None and newest.wall == WALL + 100.0
        steps = each.history().steps()
        assert steps is not None and steps.seconds == pytest.approx(10.0, abs=1.0)


@within_a_loop
async def test_only_lines_that_changed_are_drawn_again():
    history = known(Run(rollouters=40, hosts=1, steps=100_000).between())
    async with shown(Source(history=history), "200x50") as (app, pilot):
        view = app._panes["rollouters"]
        drawn = []
        refresh = view.refresh
        view.refresh = lambda *regions, **options: (drawn.extend(regions), refresh(*regions, **options))[1]
        app._draw()
        await settled(pilot)
        assert not drawn
