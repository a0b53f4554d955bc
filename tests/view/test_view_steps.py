"""The steps of metrics.jsonl by their offsets: live, restarted, torn, and read once."""

import json

import pytest
from view.viewed_run import train_line, write_steps

from asyncrl.observe.metrics_line import read_metrics
from asyncrl.view import steps
from asyncrl.view.steps import StepIndex, trained_version


def numbers(index):
    index.refresh()
    return [line["step"] for line in index.lines(0, index.count())]


def test_a_live_run_grows_and_a_torn_line_waits_for_its_end(tmp_path):
    index = StepIndex(tmp_path)
    assert numbers(index) == [] and index.line(1) is None
    write_steps(tmp_path, train_line(1), {"kind": "update", "step": 1, "weights/version": 2}, train_line(2))
    assert numbers(index) == [1, 2]
    text = json.dumps(train_line(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(text[:20])
        file.flush()
        assert numbers(index) == [1, 2]
        file.write(text[20:] + '\n\x00 "train"\n{"kind": "train", "step": "4"}\n')
    assert numbers(index) == [1, 2, 3]
    assert index.line(3)["reward/mean"] == 0.3 and index.line(4) is None
    assert [line["step"] for line in index.lines(-1, 2)] == [1, 2]


def test_a_restarted_learner_voids_the_steps_that_it_trains_again(tmp_path):
    write_steps(tmp_path, *(train_line(step) for step in range(1, 6)), train_line(4, 2, **{"reward/mean": 9.0}))
    index = StepIndex(tmp_path)
    assert numbers(index) == [1, 2, 3, 4] and index.line(4)["reward/mean"] == 9.0
    write_steps(tmp_path, train_line(5, 2), train_line(5, 2, **{"reward/mean": 8.0}))
    assert numbers(index) == [1, 2, 3, 4, 5] and index.line(5)["reward/mean"] == 8.0


def test_the_steps_are_those_of_the_reader_of_whole_files(tmp_path):
    for start, first in ((1, 1), (2, 7), (3, 3), (4, 20)):
        write_steps(tmp_path, *(train_line(step, start) for step in range(first, first + 10)))
    assert numbers(StepIndex(tmp_path)) == [
        line["step"] for line in read_metrics(tmp_path / "metrics.jsonl", ["train"])
    ]


@pytest.mark.parametrize("more", ['"x": NaN', '"x": Infinity', '"x": 1e999', '"x": null', '"start": 1'])
def test_numbers_that_json_lacks_keep_their_step(tmp_path, more):
    odd = ("[1]", '{"kind": "train"}', '{"kind": ["train"], "step": 3}', '{"kind": "train", "step": 1e30}', "\udcff")
    lines = (f'{{"kind": "train", "step": 1, {more}}}', *odd, '{"kind": "train", "step": 99999999999999999999}')
    (tmp_path / "metrics.jsonl").write_bytes("\n".join((*lines, "")).encode("utf-8", "surrogateescape"))
    assert numbers(StepIndex(tmp_path)) == [1]


def test_ten_thousand_steps_are_read_once_and_a_page_reads_its_own_lines(tmp_path, monkeypatch):
    write_steps(tmp_path, *(train_line(step) for step in range(1, 10_001)))
    parsed = []
    parse = steps.parse_line
    monkeypatch.setattr(steps, "parse_line", lambda text: parsed.append(text) or parse(text))
    index = StepIndex(tmp_path)
    index.refresh()
    at = index.place(5000)
    assert [line["step"] for line in index.lines(at, at + 3)] == [5000, 5001, 5002] and len(parsed) == 3
    write_steps(tmp_path, train_line(10_001))
    index.refresh()
    assert index.count() == 10_001 and len(parsed) == 3


def test_a_file_that_is_replaced_is_read_again(tmp_path):
    write_steps(tmp_path, *(train_line(step) for step in range(1, 4)))
    index = StepIndex(tmp_path)
    assert numbers(index) == [1, 2, 3]
    (tmp_path / "metrics.jsonl").unlink()
    write_steps(tmp_path, *(train_line(step) for step in range(11, 19)))
    assert numbers(index) == list(range(11, 19))


def test_a_file_that_is_cut_is_read_again(tmp_path):
    write_steps(tmp_path, *(train_line(step) for step in range(1, 4)))
    index = StepIndex(tmp_path)
    assert numbers(index) == [1, 2, 3]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert numbers(index) == [1]


def test_the_version_that_a_step_trained_is_the_one_before_its_publication():
    assert trained_version({"weights/version": 5, "time/publish_s": 0.2}) == 4
    assert trained_version({"weights/version": 5, "time/publish_s": 0.0}) == 5
    assert trained_version({}) is None and trained_version({"weights/version": 5}) is None
