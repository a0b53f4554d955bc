"""Traces on demand: not as many as anybody asks for."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.observation import traces as traces_module
from asyncrl.controller.observation.traces import KEPT, PAUSE_S, TracePace, Traces
from asyncrl.messages.monitor import TracePart, TraceSpan, TraceWritten

WRITTEN, FAILED = TraceWritten(path="/run/trace/trace-001.json"), TraceWritten(path="", error="No space left on device")


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from([WRITTEN, FAILED])), max_size=30))
def test_two_are_never_closer_than_the_pause_whatever_became_of_the_first(asked):
    pace, now, ended = TracePace(), 0.0, None
    for pause_s, outcome in asked:
        now += pause_s
        refusal = pace.refusal(now)
        assert bool(refusal) == (ended is not None and now - ended < PAUSE_S)
        if not refusal:
            pace.ended(outcome, now)
            ended = now


def test_who_is_refused_is_told_what_was_done_and_when_to_ask_again():
    pace = TracePace()
    pace.ended(WRITTEN, 100.0)
    assert pace.refusal(103.0) == "3 s ago one was written: /run/trace/trace-001.json; ask again in 7 s"
    assert pace.refusal(100.0 + PAUSE_S) == ""
    pace.ended(FAILED, 200.0)
    assert pace.refusal(209.9) == "10 s ago one came to nothing: No space left on device; ask again in 1 s"


class Asked:
    """A controller that is asked for traces of one learner, which hands in at once."""

    def __init__(self, run_dir):
        self.numbers = []
        self.traces = Traces(
            run_dir,
            "demo",
            ["controller/0", "learner/0"],
            name="controller/0",
            trace=SimpleNamespace(on=True, parts=lambda: []),
            ready=lambda: {"learner/0"},
            ask=self.numbers.append,
            number=7,
            log=SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None),
            notify=lambda *_: None,
        )

    async def write(self, tasks):
        writing = tasks.create_task(self.traces.write(tasks, 5.0))
        for _ in range(10):
            await asyncio.sleep(0)
        if self.numbers and self.numbers[-1]:
            spans = [TraceSpan("state", 0, "train", 1.0, 1.0, {})]
            await self.traces.take("learner/0", TracePart(number=self.numbers[-1], spans=spans, last=True))
        return await writing

    @property
    def collections(self):
        return sum(number > 0 for number in self.numbers)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_viewer_that_asks_again_and_again_gets_one_trace(tmp_path, is_full):
    """And on a full disk the actors are not asked again and again either."""
    if is_full:
        (tmp_path / "trace").write_text("in the way")

    async def main():
        asked = Asked(tmp_path)
        async with asyncio.TaskGroup() as tasks:
            first = await asked.write(tasks)
            others = [await asked.write(tasks) for _ in range(50)]
        assert asked.collections == 1
        assert bool(first.path) == (not is_full)
        said = first.path or first.error
        assert all(other.path == "" and said in other.error for other in others)

    asyncio.run(main())


def test_the_newest_are_kept_and_what_others_wrote_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(traces_module, "PAUSE_S", 0.0)

    async def main():
        (tmp_path / "trace").mkdir()
        (tmp_path / "trace" / "trace-001.json").write_text("of the attempt before")
        asked = Asked(tmp_path)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(KEPT + 5):
                assert (await asked.write(tasks)).path
        left = sorted(int(path.name[6:9]) for path in (tmp_path / "trace").iterdir())
        assert left == [1, *range(7, KEPT + 7)]

    asyncio.run(main())
