"""The files that the learner writes: whole lines or none, whatever happened to the file before."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import numpy as np
import pytest
from disks import fill, small_disk
from learner.learner_cases import make_sequence
from services import services
from test_messages import make_group

from asyncrl.learner.groups.intake import Quarantined
from asyncrl.learner.metrics.records import RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.messages.groups import Turn
from asyncrl.telemetry.metrics import Figures


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_carry_the_start_and_what_json_cannot_say_is_null(tmp_path):
    records = RecordFiles(tmp_path, 3)
    records.metrics({"kind": "train", "step": 1, "loss/policy": float("nan")}, {"kind": "update"})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss/policy": None, "start": 3},
        {"kind": "update", "start": 3},
    ]
    group = make_group("0-7")
    records.samples(1, 4, [group])
    (sample,) = lines(tmp_path / "samples" / "step_000001.jsonl")
    assert (sample["uid"], sample["start"], len(sample["trajectories"])) == ("0-7", 3, 2)
    records.quarantined(2, [Quarantined("0-7", "it hangs", group), Quarantined("0-8", "too long")])
    first, second = lines(tmp_path / "quarantine.jsonl")
    assert (first["uid"], first["reason"], first["prompt"], first["step"]) == ("0-7", "it hangs", "1+1=", 2)
    assert (second["uid"], second["prompt"]) == ("0-8", None)


def test_there_is_no_file_of_nothing(tmp_path):
    records = RecordFiles(tmp_path, 1)
    records.samples(1, 4, [])
    records.metrics()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["samples"]


def test_a_conversation_is_written_with_its_messages_turns_and_roles(tmp_path):
    group = make_group("0-7")
    second = group.trajectories[1]
    second.turns, second.forks, second.stage_s = 2, {"cut": 1}, {"engine": 0.5}
    second.messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    second.sequences.append(
        make_sequence(
            [7, 8, 9, 5], roles="rcss", versions=6, turns=[Turn(2, 4, 0.5)], prompt_ids=np.array([3], np.int32)
        )
    )
    RecordFiles(tmp_path, 1).samples(1, 4, [group])
    (sample,) = lines(tmp_path / "samples" / "step_000001.jsonl")
    single, conversation = sample["trajectories"]
    scores = [each.logprobs.tolist() for each in second.sequences]
    assert [len(each) for each in scores] == [3, 2]
    own = {
        "tokens": [0, 1, 2],
        "logprobs": scores[0],
        "spans": [[4, 0, 1, "sampled"], [5, 1, 3, "sampled"]],
        "turns": [],
    }
    assert (single["messages"], single["sequences"]) == ([], [own])
    assert conversation["messages"] == second.messages
    assert (conversation["turns"], conversation["forks"], conversation["stage_s"]) == (2, {"cut": 1}, {"engine": 0.5})
    assert "turns" not in single
    assert conversation["sequences"] == [
        own,
        {
            "prompt_ids": [3],
            "tokens": [7, 8, 9, 5],
            "logprobs": scores[1],
            "spans": [[-1, 0, 1, "repeated"], [-1, 1, 2, "context"], [6, 2, 4, "sampled"]],
            "turns": [[2, 4, 0.5]],
        },
    ]


def test_a_torn_line_stands_by_itself_and_one_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch):
    path, room, real = tmp_path / "metrics.jsonl", [5], os.write
    path.write_text('{"step": 1}\n{"st')
    records = RecordFiles(tmp_path, 1)
    records.metrics({"step": 2})
    before = '{"step": 1}\n{"st\n{"step":2,"start":1}\n'
    assert path.read_text() == before

    def write(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            records.metrics({"step": 2})
    assert path.read_text() == before


def test_lines_that_find_no_room_are_counted_and_told(tmp_path):
    counters, told, shown = Figures(), [], []
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        lines = StepLines(
            RecordFiles(disk, 1),
            services(counters=counters),
            samples_per_step=1,
            tell=shown.append,
            notify=lambda lost, error: told.append((lost, error.errno, error.filename)),
        )
        fill(disk)
        asyncio.run(lines.emit({"kind": "eval", "step": 0}))
        asyncio.run(lines.quarantined(1, [Quarantined("0-8", "too long")]))
    assert told == [
        (1, errno.ENOSPC, str(disk / "metrics.jsonl")),
        (2, errno.ENOSPC, str(disk / "quarantine.jsonl")),
    ]
    assert counters == {"records/lost": 2}
    assert shown == [{"kind": "eval", "step": 0, "start": 1}], "whoever watches has it all the same"
