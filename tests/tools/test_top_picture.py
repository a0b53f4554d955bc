"""The picture of asyncrl-top."""

import re

from recordings import record

from asyncrl.messages.monitor import ActorView, Event, Resource, RunView, Snapshot
from tools import top_picture
from tools.top_picture import main, without_hosts

HOSTS = ("secret", "secret-2.example")


def snapshot(second):
    run = RunView(name="trial", run_id="a1", phase="running", attempt=1, age_s=second, step=3, steps=9, version=3)
    actors = [
        ActorView(
            name=f"rollouter/{at}",
            host=host,
            condition="ready",
            state="ready",
            resources=[Resource(name="engine", state="generating", seconds={"generating": second})],
        )
        for at, host in enumerate(HOSTS)
    ]
    said = [Event(number=1, wall=second, level="warning", actor="controller/0", text=f"{HOSTS[1]} beats {HOSTS[0]}")]
    return Snapshot(wall=second, run=run, actors=actors, events=said)


def drawn(run_dir, monkeypatch):
    picture = run_dir / "top.svg"
    monkeypatch.setattr(top_picture, "PICTURE", picture)
    monkeypatch.setenv("TZ", "UTC")
    assert main([str(run_dir)]) == 0
    return picture.read_text()


def test_a_recording_gives_one_picture_without_a_host_name_that_loads_nothing(tmp_path, monkeypatch, capsys):
    assert main([str(tmp_path)]) == 2
    assert "nothing readable is recorded" in capsys.readouterr().err
    record(tmp_path, *(snapshot(float(second)) for second in range(1, 11)))
    svg = drawn(tmp_path, monkeypatch)
    assert "trial" in svg and "node0" in svg and "node1" in svg
    assert "secret" not in svg
    assert "monospace" in svg
    assert not re.search(r"@font-face|url\(\s*[\"']?http|<script|<image", svg)
    assert drawn(tmp_path, monkeypatch) == svg


def test_hosts_are_renamed_everywhere():
    found = without_hosts(snapshot(1.0))
    assert [actor.host for actor in found.actors] == ["node0", "node1"]
    assert found.events[0].text == "node1 beats node0"
