"""Samples in asyncrl-top: printed by --samples, and on a screen of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import driven
import pytest
from driven import known, recording, settled, shown, text_of
from made_group import make_group
from msgspec.structs import replace
from top.pictures import Run

from asyncrl.cli import top as command
from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.top import samples_screen
from asyncrl.top.replay import Replay, SnapshotSource

until = partial(driven.until, within=60.0)
pytestmark = pytest.mark.usefixtures("utc")


def group(uid, text="2", prompt="1+1=", **changes):
    made = make_group(uid)
    for trajectory in made.trajectories:
        trajectory.text = text
        trajectory.components = {"right": 1.0}
        for name, value in changes.items():
            setattr(trajectory, name, value)
    return replace(made, lease=replace(made.lease, prompt=prompt))


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "runs" / "trial"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    records = RecordFiles(run_dir, 1)
    records.samples(0, 0, [group("held@0-0", "of the round")], kind="evaluation", name="held")
    records.samples(0, 0, [group("0-5", "of no use")], kind="filtered", name="all rewards are equal")
    records.samples(1, 1, [group("0-1", "of step one"), group("0-2")])
    records.samples(60, 60, [group("0-3", "é日本\x1b[2J")])
    return run_dir


def printed(capsys, *words):
    assert command.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_the_newest_groups_are_printed_and_flags_select_others(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = printed(capsys, "trial", "--samples")
    assert page == printed(capsys, "--samples"), "without a name it is the newest run"
    titles = [line for line in page.splitlines() if line.startswith("==")]
    assert [title.split("  ")[3] for title in titles] == ["prompt 0-3", "prompt 0-1", "prompt 0-2"]
    assert "response 2 of 2  reward 1 (right 1)  stop  3 tokens\n  é日本\\x1b[2J\n" in page
    assert "of the round" in printed(capsys, run_dir, "--samples", "--kind", "evaluation")
    assert "all rewards are equal" in printed(capsys, run_dir, "--samples", "--kind", "filtered", "--step", "0")
    assert printed(capsys, run_dir, "--samples", "--step", "1", "--count", "1").count("prompt\n  1+1=") == 1
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "asyncrl.cli.top", str(run_dir), "--samples"]
    done = subprocess.run(argv, env=environment, capture_output=True, timeout=120, check=True)
    assert done.stdout.isascii() and b"\\xe9\\u65e5\\u672c\\x1b[2J" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--samples", "--step", "9", "--kind", "filtered"), 1, "samples holds no filtered group of step 9: the run"),
        (("--samples", "--count", "0"), 2, "--count is 1 to 100, got 0"),
        (("--samples", "--once"), 2, "--samples and --once exclude each other"),
        (("--step", "3"), 2, "--step belongs to --samples"),
        (("--samples", "--replay"), 2, "not allowed with"),
        (("--samples", "--kind", "lost"), 2, "invalid choice: 'lost'"),
    ],
)
def test_samples_that_cannot_be_printed_have_a_reason(run_dir, capsys, words, code, said):
    try:
        found = command.main([str(run_dir), *words])
    except SystemExit as ended:
        found = ended.code
    assert (found, said in " ".join(capsys.readouterr().err.split())) == (code, True)


async def test_a_live_run_shows_one_group_until_the_user_selects_another(run_dir, monkeypatch):
    monkeypatch.setattr(samples_screen, "LOOK_S", 0.05)
    async with shown(SnapshotSource(history=known(Run().between()), run_dir=run_dir)) as (app, pilot):
        await pilot.press("c")
        await until(pilot, "samples 1 of 5, all kinds")
        await until(pilot, "prompt 0-3")
        assert "é日本\\x1b[2J" in text_of(app)
        await pilot.press("n")
        await until(pilot, "of step one")
        RecordFiles(run_dir, 1).samples(61, 61, [group("0-4", "the newest")])
        await until(pilot, "samples 3 of 6")
        assert "of step one" in text_of(app)
        await pilot.press("p", "p")
        await until(pilot, "the newest")
        await pilot.press("f", "f")
        await until(pilot, "samples 1 of 1, filtered")
        await until(pilot, "of no use")
        await pilot.press("f")
        await until(pilot, "evaluation held  step 0  version 0")
        await pilot.press("escape")
        await until(pilot, "1 rollouters")


async def test_a_replay_shows_the_groups_up_to_its_step(run_dir):
    replay = Replay(recording(Run(), 90))
    async with shown(SnapshotSource(replay=replay, run_dir=run_dir)) as (app, pilot):
        await pilot.press("c")
        await until(pilot, "of step one")
        assert "prompt 0-3" not in text_of(app)
        assert replay.position < replay.end


async def test_a_long_group_scrolls_and_a_narrow_terminal_wraps_it(run_dir):
    words = " ".join(f"word{number}" for number in range(600))
    RecordFiles(run_dir, 1).samples(61, 61, [group("0-4", words, "short")])
    async with shown(SnapshotSource(history=known(Run().between()), run_dir=run_dir)) as (app, pilot):
        await pilot.resize_terminal(60, 16)
        await pilot.press("c")
        await until(pilot, "word9 ")
        await settled(pilot)
        assert "…" not in text_of(app) and "word599" not in text_of(app)
        await pilot.press("end")
        await until(pilot, "word599")


@pytest.mark.parametrize("place", ["nowhere", None])
async def test_a_run_without_samples_shows_a_message(tmp_path, place):
    source = SnapshotSource(history=known(Run().between()), run_dir=tmp_path / place if place else None)
    async with shown(source) as (_, pilot):
        await pilot.press("c")
        await until(pilot, "no group in" if place else "samples lie in the run's folder on its head")
        await pilot.press("n", "p", "f")
        await settled(pilot)
