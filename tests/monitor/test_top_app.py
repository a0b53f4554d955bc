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
from asyncrl.monitor.top.app import Source, Top
from asyncrl.monitor.top.history import History
from asyncrl.monitor.top.replay import Replay


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
        # Two headings of hosts are skipped by nothing: the entries are node0, 0, 1, node1, 2.
        await pilot.press("down", "down", "down", "down", "enter")
        await pilot.pause(0.3)
        await settled(pilot)
        text = text_of(app)
        assert "rollouter/2" in text and "dataloader/0  Lease" in text and "(idle)" in text
        await pilot.press("end")
        for _ in range(30):
            await pilot.press("down")
        await settled(pilot)
        text = text_of(app)
        assert "03:04:05  info      engine is up gpu=3" in text and "plain" in text
        await pilot.press("escape")
        await settled(pilot)
        assert "1 rollouters" in text_of(app)


@within_a_loop
async def test_sort_filter_and_level_keys():
    async with shown(Source(history=known(Run(rollouters=12, hosts=1).between()))) as (app, pilot):
        await pilot.press("s")
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

    async with shown(Source(feed=refuses)) as (_, pilot):
        await until(pilot, "of another run")


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
