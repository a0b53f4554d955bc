"""The controller's traces: which actors they wait for, what they refuse, and that the files load."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from disks import fill, room_for, small_disk
from harness import until
from played import played
from trace_files import WALL, load, make_trace

from asyncrl.controller.observation import traces as traces_module
from asyncrl.controller.observation.traces import (
    KEPT,
    MOST_SPANS,
    PAUSE_S,
    TraceFile,
    Traces,
    remove_unfinished,
)
from asyncrl.core.errors import InvalidRequest
from asyncrl.messages.monitor import RequestTrace, TracePart, TraceSpan
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.actor import Caller
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above


def caller(name, park_s):
    return Caller(name, 1, -1, asyncio.get_running_loop().time() + park_s / 0.45)


def span(name, began=WALL, seconds=1.0, track="state", order=0, **facts):
    return TraceSpan(track, order, name, began, seconds, facts)


def test_a_trace_has_a_track_for_each_actor_with_its_activity(tmp_path):
    file = TraceFile(tmp_path / "trace", "demo")
    file.add(1, "learner/0", [span("train", version=3), span("wait", WALL + 1, -1.0)])
    file.add(2, "rollouter/0", [span("generate v3", track="slot 2", order=102, uid="0-1")])
    file.add(1, "learner/0", [span("gather", WALL - 1, 0.5, track="steps", order=1)])
    assert not list(tmp_path.rglob("*.json"))
    path = file.finish()
    assert path == tmp_path / "trace" / "trace-001.json"
    trace = load(path)
    assert {actor: list(tracks) for actor, tracks in trace.items()} == {
        "learner/0": ["state", "steps"],
        "rollouter/0": ["slot 2"],
    }
    (train, wait) = trace["learner/0"]["state"]
    assert (train.end - train.began, train.facts, wait.end) == (1_000_000, {"version": 3}, None)
    assert TraceFile(tmp_path / "trace", "demo").path.name == "trace-002.json"
    names = [e["name"] for e in json.loads(path.read_text())["traceEvents"]]
    assert names.count("process_name") == 2 and names.count("thread_name") == 3


class Scene:
    """A controller's traces, without the controller."""

    def __init__(self, run_dir, actors=("controller/0", "learner/0", "rollouter/0"), tasks=None):
        self.time, trace = make_trace()
        trace.track("state", 0).enter("ready")
        self.asked, self.sent, self.reported, self.living = [], [], [], set(actors)
        self.now = None
        self.actor = SimpleNamespace(
            name="controller/0",
            tasks=tasks,
            config=SimpleNamespace(run=SimpleNamespace(name="demo"), actors=actors),
            context=SimpleNamespace(run_dir=run_dir, incarnation=1),
            trace=trace,
            log=get_logger("controller/0"),
            clock=SimpleNamespace(now=lambda: time.monotonic() if self.now is None else self.now),
            notify=lambda key, text: self.reported.append((key, text)),
            registry=SimpleNamespace(ready=lambda: self.living),
            machine=SimpleNamespace(want_trace=lambda number: self.asked.append(number) or True),
            state_changed=lambda: self.sent.append(self.asked[-1]),
        )
        self.traces = Traces(self.actor)

    async def take(self, actor, part):
        await self.traces.take(part, caller(actor, 5.0))

    async def hand_in(self, actor, number, *names):
        for name in names:
            await self.take(actor, TracePart(number=number, spans=[span(name)]))
        await self.take(actor, TracePart(number=number, spans=[], last=True))

    async def write(self):
        """A learner that hands in at once when it is asked."""
        writing = asyncio.create_task(self.traces.write(RequestTrace(), caller("viewer/0", 5.0)))
        for _ in range(10):
            await asyncio.sleep(0)
        if self.asked and self.asked[-1]:
            await self.hand_in("learner/0", self.asked[-1], "train")
        assert self.sent == self.asked, "each wish is sent at once"
        return await writing


def run(tmp_path, main):
    async def live():
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            await main(tasks)

    asyncio.run(live())


with_tasks = played(run)


@with_tasks()
async def test_a_trace_on_demand_waits_for_all_ready_actors_and_is_shared_by_its_viewers(tasks, tmp_path):
    scene = Scene(tmp_path, tasks=tasks)
    writing = [tasks.create_task(scene.traces.write(RequestTrace(), caller("viewer/0", 10.0))) for _ in range(2)]
    await until(lambda: scene.asked)
    number = scene.asked[0]
    assert number > numbers_begin_above(1)
    await scene.hand_in("learner/0", number, "train")
    await scene.hand_in("rollouter/0", 3, "of another trace")
    assert not any(task.done() for task in writing)
    await scene.hand_in("rollouter/0", number, "generating")
    first, second = [await task for task in writing]
    assert first == second and scene.asked == [number, 0] and not first.missing
    assert first.actors == ["controller/0", "learner/0", "rollouter/0"]
    trace = load(tmp_path / "trace" / "trace-001.json")
    assert [s.name for s in trace["rollouter/0"]["state"]] == ["generating"]
    assert trace["controller/0"]["state"][0].name == "ready"
    await scene.traces.finish()
    assert len(list((tmp_path / "trace").iterdir())) == 1


@with_tasks()
async def test_a_joined_actor_is_in_the_traces_and_one_that_does_not_answer_is_missing(tasks, tmp_path):
    scene = Scene(tmp_path, tasks=tasks)
    scene.living |= {"rollouter/7", "agent/3"}
    writing = tasks.create_task(scene.traces.write(RequestTrace(), caller("viewer/0", 1.0)))
    await until(lambda: scene.asked)
    number = scene.asked[0]
    await scene.hand_in("learner/0", number, "x")
    await scene.hand_in("rollouter/7", number, "generating")
    written = await writing
    assert (written.actors, written.missing) == (["controller/0", "learner/0", "rollouter/7"], ["rollouter/0"])
    await scene.hand_in("rollouter/0", number, "too late")
    await scene.hand_in("rollouter/7", 0, "its end")
    await scene.traces.finish()
    for number, name in enumerate(["generating", "its end"], 1):
        trace = load(tmp_path / "trace" / f"trace-00{number}.json")
        assert [s.name for s in trace["rollouter/7"]["state"]] == [name] and "rollouter/0" not in trace


def test_a_trace_on_a_disk_full_from_the_first_byte_leaves_no_file(tmp_path):
    with room_for(10), pytest.raises(OSError, match="too large"):
        TraceFile(tmp_path / "trace", "demo")
    assert list((tmp_path / "trace").iterdir()) == []


@with_tasks()
async def test_a_trace_without_room_on_disk_is_reported_to_the_user(tasks, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        fill(disk)
        scene = Scene(disk, tasks=tasks)
        await scene.hand_in("learner/0", 0, "train")
        await scene.traces.finish()
    assert scene.reported == [("trace", f"no trace is written to {disk / 'trace'}: No space left on device")]


@with_tasks()
async def test_trace_parts_of_ended_actors_become_one_file_at_the_end_of_the_run(tasks, tmp_path):
    scene = Scene(tmp_path)
    await scene.hand_in("rollouter/0", 0, "the first life")
    await scene.take("rollouter/0", TracePart(number=0, spans=[span("the second", WALL + 5)], last=True))
    await scene.hand_in("learner/0", 0, "train")
    await scene.traces.finish()
    # Parts that come after the end start no file.
    await scene.hand_in("rollouter/0", 0, "late")
    trace = load(tmp_path / "trace" / "trace-001.json")
    assert [s.name for s in trace["rollouter/0"]["state"]] == ["the first life", "the second"]
    assert [p.name for p in (tmp_path / "trace").iterdir()] == ["trace-001.json"]


@with_tasks()
async def test_unknown_senders_and_floods_are_refused(tasks, tmp_path):
    scene = Scene(tmp_path)
    for stranger in ("viewer/0", "agent/0", "launcher/0"):
        with pytest.raises(InvalidRequest):
            await scene.take(stranger, TracePart(number=0, spans=[]))
    many = SimpleNamespace(number=0, spans=[span("x")] * (MOST_SPANS // 2), last=False)
    for _ in range(2):
        await scene.take("learner/0", many)
    with pytest.raises(InvalidRequest):
        await scene.take("learner/0", many)


def test_unfinished_files_of_a_dead_controller_are_removed(tmp_path):
    TraceFile(tmp_path / "trace", "demo")
    whole = TraceFile(tmp_path / "trace", "demo").finish()
    remove_unfinished(tmp_path)
    assert list((tmp_path / "trace").iterdir()) == [whole]
    remove_unfinished(tmp_path / "nowhere")


# --- a limit on requests ---

LEARNER_ALONE = ("controller/0", "learner/0")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_viewer_that_asks_repeatedly_gets_one_trace_and_a_retry_time(tmp_path, is_full):
    """On a full disk the actors are not asked repeatedly either."""
    if is_full:
        (tmp_path / "trace").write_text("in the way")

    async def main(tasks):
        scene = Scene(tmp_path, LEARNER_ALONE, tasks=tasks)
        scene.now = 100.0
        first = await scene.write()
        assert bool(first.path) == (not is_full)
        said = f"failed: {first.error}" if is_full else f"was written: {first.path}"
        scene.now = 103.0
        others = [await scene.write() for _ in range(50)]
        assert sum(number > 0 for number in scene.asked) == 1
        assert {(other.path, other.error) for other in others} == {("", f"a trace 3 s ago {said}; ask again in 7 s")}
        scene.now = 99.9 + PAUSE_S
        assert (await scene.write()).error == f"a trace 10 s ago {said}; ask again in 1 s"
        scene.now = 100.0 + PAUSE_S
        await scene.write()
        assert sum(number > 0 for number in scene.asked) == 2

    run(tmp_path, main)


def test_the_newest_traces_are_kept_and_other_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(traces_module, "PAUSE_S", 0.0)

    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "trace-001.json").write_text("of the attempt before")

    async def main(tasks):
        scene = Scene(tmp_path, LEARNER_ALONE, tasks=tasks)
        for _ in range(KEPT + 5):
            assert (await scene.write()).path
        left = sorted(int(path.name[6:9]) for path in (tmp_path / "trace").iterdir())
        assert left == [1, *range(7, KEPT + 7)]

    run(tmp_path, main)
