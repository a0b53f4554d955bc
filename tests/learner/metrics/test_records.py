"""The files that the learner writes hold whole lines only, even after a crash in the middle of a line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from disks import fill, small_disk
from learner.learner_cases import make_sequence
from made_group import make_group
from services import services

from asyncrl.learner.algorithm.batch import SequenceId
from asyncrl.learner.algorithm.token_scores import TokenScores
from asyncrl.learner.groups.intake import Quarantined
from asyncrl.learner.metrics import step_lines
from asyncrl.learner.metrics.record_files import MOST_BYTES, RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.learner.rank_0 import Rank0
from asyncrl.messages.groups import Turn
from asyncrl.observe.catalogue import Counters


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_the_start_and_null_for_non_json_numbers(tmp_path):
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


def test_empty_records_make_no_file(tmp_path):
    records = RecordFiles(tmp_path, 1)
    records.samples(1, 4, [])
    records.metrics()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["samples"]


def test_a_conversation_is_written_with_its_messages_turns_and_roles(tmp_path):
    group = make_group("0-7")
    second = group.trajectories[1]
    second.judgement = "Too long."
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
    assert "turns" not in single and "judgement" not in single and conversation["judgement"] == "Too long."
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


def test_the_learner_s_scores_of_tokens_are_written_with_few_digits(tmp_path):
    scores = TokenScores(np.array([-0.123456789, np.nan, -2.0], np.float32), np.array([0.5, np.nan, 1e-9], np.float32))
    RecordFiles(tmp_path, 1).samples(1, 4, [make_group("0-7")], scores={SequenceId("0-7", 1, 0): scores})
    (sample,) = lines(tmp_path / "samples" / "step_000001.jsonl")
    (without,), (scored,) = (each["sequences"] for each in sample["trajectories"])
    assert "trainer_logprobs" not in without and "entropies" not in without
    assert scored["trainer_logprobs"] == [-0.12346, None, -2.0] and scored["entropies"] == [0.5, None, 0.0]


def test_a_torn_line_stays_separate_and_a_line_without_disk_space_leaves_nothing(tmp_path, monkeypatch):
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
        records.metrics({"step": 3})
        records.metrics({"step": 4}, {"step": 5})
        assert (records.waiting, records.lost, records.error.errno) == (3, 0, errno.ENOSPC)
    assert path.read_text() == before
    records.metrics({"step": 6})
    assert (records.waiting, records.lost, records.error) == (0, 0, None)
    assert path.read_text() == before + "".join(f'{{"step":{step},"start":1}}\n' for step in (3, 4, 5, 6))


@pytest.mark.parametrize("ends", ["there is room again", "the disk stays full to the end"])
def test_lines_without_disk_space_wait_for_it(tmp_path, monkeypatch, ends):
    counters, reported, shown = Counters(), [], []
    monkeypatch.setattr(step_lines, "RETRY_S", 0.01)
    monkeypatch.setattr(step_lines, "LAST_TRY_S", 0.05)

    async def live(disk):
        lines = StepLines(
            RecordFiles(disk, 1),
            services(counters=counters),
            samples_per_step=1,
            report=shown.append,
            notify=lambda lost, error: reported.append((lost, error and (error.errno, error.filename))),
        )
        ballast = fill(disk)
        for step in range(3):
            await lines.emit({"kind": "eval", "step": step})
        await lines.quarantined(1, [Quarantined("0-8", "too long")])
        assert lines.pending == 4
        if ends == "there is room again":
            ballast.unlink()
            retrying = asyncio.create_task(lines.retry())
            while lines.pending:
                await asyncio.sleep(0.01)
            retrying.cancel()
        await lines.finish()
        assert lines.pending == 0

    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        asyncio.run(live(disk))
        full = 0, (errno.ENOSPC, str(disk / "metrics.jsonl"))
        if ends == "there is room again":
            assert [line["step"] for line in lines(disk / "metrics.jsonl")] == [0, 1, 2]
            assert len(lines(disk / "quarantine.jsonl")) == 1
            assert (reported, counters) == ([full, (0, None)], {"records/lost": 0})
        else:
            assert (reported, counters) == ([full, (4, full[1])], {"records/lost": 4})
    assert shown == [{"kind": "eval", "step": 0, "start": 1}], "viewers have it all the same"


def test_lines_that_wait_are_bounded_and_the_oldest_are_lost(tmp_path, monkeypatch):
    monkeypatch.setitem(MOST_BYTES, "metrics", 100)
    records, path = RecordFiles(tmp_path, 1), tmp_path / "metrics.jsonl"
    path.mkdir()
    for step in range(10):
        records.metrics({"step": step})
    assert records.waiting + records.lost == 10 and 0 < records.waiting <= 100 / len('{"step":2,"start":1}\n')
    # Another kind of file has room of its own.
    records.quarantined(1, [Quarantined("0-8", "too long")])
    path.rmdir()
    waiting = records.waiting
    records.retry()
    assert [line["step"] for line in lines(path)] == list(range(10))[-waiting:]
    assert records.waiting == 0 and len(lines(tmp_path / "quarantine.jsonl")) == 1


def test_samples_are_written_after_their_folder_was_deleted(tmp_path):
    records, path = RecordFiles(tmp_path, 1), tmp_path / "samples" / "step_000002.jsonl"
    records.samples(1, 4, [make_group("0-6")])
    shutil.rmtree(tmp_path / "samples")
    records.samples(2, 5, [make_group("0-7")])
    assert (records.waiting, records.error) == (0, None)
    assert [line["uid"] for line in lines(path)] == ["0-7"]


def test_a_deleted_run_folder_is_not_created_again(tmp_path):
    (tmp_path / "run").mkdir()
    records = RecordFiles(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    records.samples(1, 4, [make_group("0-6")])
    records.metrics({"step": 1})
    assert (records.waiting, records.error.errno) == (2, errno.ENOENT)
    assert list(tmp_path.iterdir()) == []


def test_lines_that_wait_after_a_loss_are_no_loss(tmp_path):
    said = []
    heard = SimpleNamespace(notify=lambda key, text, count=1, meanwhile="": said.append((text.split(":")[0], count)))
    rank_0 = SimpleNamespace(_lost_lines=0, _run_dir=tmp_path, _services=heard)
    full = OSError(errno.ENOSPC, "No space left on device")
    for lost, error in ((0, full), (2, full), (2, full), (3, full), (3, None)):
        Rank0._lines_waiting(rank_0, lost, error)
    kinds = [next(word for word in ("cannot be written", "are lost", "late") if word in text) for text, _ in said]
    assert kinds == ["cannot be written", "are lost", "cannot be written", "are lost", "late"]
    assert [count for _, count in said] == [1, 2, 1, 3, 1]
