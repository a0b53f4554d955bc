"""The lines of steps: their reports to the controller, and the order of these."""

import asyncio
import errno
import json
import os
import threading
import time

import pytest
from services import services
from virtual import LoopClock, run_virtual

from asyncrl.learner.metrics import record_files
from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines, TrainedStep
from asyncrl.messages.learner import RolloutStats, UpdateTimes

TOLD = ("train", "update", "eval")


def made(run_dir, reported, step=0, samples_per_step=1):
    return StepLines(
        RecordFiles(run_dir, 2),
        services(clock=LoopClock()),
        samples_per_step=samples_per_step,
        report=reported.append,
        notify=lambda lost, error: pytest.fail(str(error)),
        step=step,
    )


def trained(step):
    line = {"kind": "train", "step": step, "weights/version": step, "time/wait_for_groups_s": 0.0}
    now = asyncio.get_running_loop().time()
    return TrainedStep(line=line, train_began=now, train_ended=now, groups=[])


def updated(lines, *replicas):
    """Each replica takes up a version."""
    for replica in replicas:
        lines.stats(replica, 1, RolloutStats(sampled_tokens=0, sampling=[], updates=[UpdateTimes(version=3)]))


def test_a_step_is_reported_only_after_its_line_is_written(tmp_path):
    """With it the sinks forget the lines of an earlier learner about that step and later ones."""
    reported = []

    async def live():
        lines = made(tmp_path, reported, step=3)
        await lines.emit({"kind": "eval", "step": 3})
        updated(lines, "rollouter/0")
        await lines.put(trained(4))
        await lines.put(trained(5))
        # Complete once the step is trained, before its line is written.
        for step in (4, 5):
            await lines.emit({"kind": "eval", "step": step})
        writing = asyncio.create_task(lines.run())
        await lines.written(5)
        updated(lines, "rollouter/1")
        await lines.finish()
        writing.cancel()

    run_virtual(live())
    kinds = [(line["kind"], line["step"]) for line in reported]
    of_4, of_5 = ([(kind, step) for kind in order] for step, order in ((4, TOLD), (5, ("train", "eval", "update"))))
    assert kinds == [("eval", 3), *of_4, *of_5]
    assert {line["start"] for line in reported} == {2}
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(map(str, written)) == sorted(map(str, reported))


def test_all_updates_of_a_step_are_reported(tmp_path):
    reported, replicas = [], [f"rollouter/{number}" for number in range(200)]

    async def live():
        lines = made(tmp_path, reported)
        updated(lines, *replicas)
        await lines.put(trained(1))
        writing = asyncio.create_task(lines.run())
        await lines.written(1)
        updated(lines, *replicas)
        await lines.finish()
        writing.cancel()

    run_virtual(live())
    assert [line["replica"] for line in reported if line["kind"] == "update"] == 2 * replicas


def test_a_line_without_disk_space_does_not_lose_other_lines(tmp_path, monkeypatch):
    """An evaluation is complete while the line of a step is written."""
    write, other_came, lost = os.write, threading.Event(), []

    def written(descriptor, data):
        if b"train" in bytes(data) and not lost:
            # Until the other one is written, or waits.
            other_came.wait(0.2)
            lost.append("once")
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data)
        other_came.set()
        return count

    async def live():
        lines = StepLines(
            RecordFiles(tmp_path, 2),
            services(clock=LoopClock()),
            samples_per_step=1,
            report=lambda line: None,
            notify=lambda count, error: None,
        )
        await asyncio.gather(lines.emit({"kind": "train", "step": 1}), lines.emit({"kind": "eval", "step": 0}))
        assert lines.pending == 0

    monkeypatch.setattr(os, "write", written)
    run_virtual(live())
    assert lost == ["once"]
    train, ended = '{"kind":"train","step":1,"start":2}\n', '{"kind":"eval","step":0,"start":2}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == train + ended


def test_a_line_during_its_write_is_not_reported_as_waiting(tmp_path, monkeypatch):
    """Several tasks write lines. ``made`` fails the test at any report."""
    append = record_files._append_data

    def slowly(*arguments):
        time.sleep(0.01)
        append(*arguments)

    monkeypatch.setattr(record_files, "_append_data", slowly)

    async def live():
        lines = made(tmp_path, [])
        await asyncio.gather(*(lines.emit({"kind": "eval", "step": 0}) for _ in range(8)))

    asyncio.run(live())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
