"""The screens of asyncrl-top over recorded states, compared as text.

ASYNCRL_UPDATE_SCREENS=1 updates the screens; read them before you commit.
"""

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from driven import known, recording, settled, shown, text_of, until
from top.pictures import STATES, WALL, Run

from asyncrl.top.replay import Replay, SnapshotSource

pytestmark = pytest.mark.usefixtures("utc")
SCREENS = Path(__file__).parent / "screens"


async def compare(name, pilot):
    path = SCREENS / f"{name}.txt"
    if os.environ.get("ASYNCRL_UPDATE_SCREENS"):
        await settled(pilot)
        path.write_text(text_of(pilot.app))
    with contextlib.suppress(TimeoutError):
        await until(pilot, path.read_text())
    await settled(pilot)
    assert text_of(pilot.app) == path.read_text(), f"{path} differs; ASYNCRL_UPDATE_SCREENS=1 updates it"


@pytest.mark.parametrize(
    ("state", "size"),
    [
        *((state, "80x24") for state in ("empty", "starting", "stalled", "dead_host", "finished")),
        *((state, "200x50") for state in ("starting", "healthy")),
    ],
)
async def test_screens(state, size):
    async with shown(SnapshotSource(history=known(STATES[state]())), size) as (_, pilot):
        await compare(f"{state}-{size}", pilot)


async def test_a_small_terminal_shows_some_panes_and_a_larger_one_all():
    async with shown(SnapshotSource(history=known(Run(ranks=4, gpus=True).between()))) as (app, pilot):
        before = text_of(app)
        await pilot.press("8")
        await settled(pilot)
        assert text_of(app) == before, "where a prompt has one response there are no episodes"
        for key in ("2", "3", "4", "5", "6", "7", "question_mark"):
            await pilot.press(key)
            await compare(f"pane-{key}-80x24", pilot)
        await pilot.press("escape", "1")
        await pilot.resize_terminal(150, 40)
        await compare("between-150x40", pilot)


async def test_the_pane_of_episodes():
    history = known(STATES["agents"]())
    async with shown(SnapshotSource(history=history), "200x50") as (app, pilot):
        await compare("agents-200x50", pilot)
        await pilot.resize_terminal(80, 24)
        await pilot.press("8")
        await compare("pane-8-80x24", pilot)
        await pilot.press("down", "enter")
        await until(pilot, "playing 90%")
        text = text_of(app)
        assert "episodes/1" in text and "worker/1" in text
        await pilot.press("escape", "tab")
        await until(pilot, "1 rollouters")


async def test_an_actor_in_detail_with_its_awaits_and_its_log(tmp_path):
    log = tmp_path / "logs" / "attempt_1" / "rollouter-2.log"
    log.parent.mkdir(parents=True)
    log.write_text('{"event": "engine is up", "level": "info", "timestamp": "2026-01-02T03:04:05Z", "gpu": 3}\nplain\n')
    async with shown(SnapshotSource(history=known(Run().between()), run_dir=tmp_path)) as (app, pilot):
        # The rows are node0, 0, 1, node1, 2.
        await pilot.press("down", "down", "down", "down", "enter")
        await until(pilot, "engine is up")
        await compare("detail-80x24", pilot)
        page = app.screen.query_one("#page")
        await pilot.press("j", "j", "k")
        await settled(pilot)
        assert page.scroll_offset.y == 1
        await pilot.press("n")
        await until(pilot, "rollouter/3")
        await settled(pilot)
        assert "engine is up" not in text_of(app), "the log of another actor"
        await pilot.press("n", "n", "n")
        await until(pilot, "learner/0")
        await pilot.press("p")
        await until(pilot, "dataloader/0   esc")


async def test_a_replay_with_its_time_bar_and_the_log_of_the_moment(tmp_path):
    log = tmp_path / "logs" / "attempt_1" / "rollouter-0.log"
    log.parent.mkdir(parents=True)
    stamps = [datetime.fromtimestamp(WALL + 10 + second, UTC).isoformat() for second in (20, 60)]
    log.write_text("".join(json.dumps({"event": f"event of {at}", "timestamp": at}) + "\n" for at in stamps))
    replay = Replay(recording(Run(steps=1000), 120))
    replay.playing = False
    async with shown(SnapshotSource(replay=replay, run_dir=tmp_path)) as (app, pilot):
        text = text_of(app)
        assert "step 5/1000" in text and "0 s of 1m59s" in text and "paused" in text
        await pilot.press("right", "right")
        await until(pilot, "2.0 s of 1m59s")
        assert "step 6/1000" in text_of(app)
        await pilot.press(*[">"] * 10)
        await settled(pilot)
        text = text_of(app)
        assert "1m02s of 1m59s" in text and "step 35/1000" in text
        assert "86% generating" in text, "shares are there right after a jump"
        await compare("replay-80x24", pilot)
        await pilot.press("left")
        await until(pilot, "1m00s of 1m59s")
        await pilot.press(*["<"] * 6, "enter")
        await until(pilot, f"event of {stamps[0][:19]}")
        assert stamps[1][:19] not in text_of(app)
        await pilot.press(*["<"] * 5)
        await until(pilot, "none up to here")
        await pilot.press("escape", "plus", "plus", "plus", "space")
        await until(pilot, "1m59s of 1m59s")
        await until(pilot, "paused")
        await pilot.press("enter")
        await until(pilot, f"event of {stamps[1][:19]}")
