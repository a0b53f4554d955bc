"""Reading datasets: every kind of source, and every way in which one can be wrong."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from asyncrl.config.training import DataConfig
from asyncrl.dataloader.rows import Dataset, unpack
from asyncrl.dataloader.sources import load_dataset
from asyncrl.errors import DataError

ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2", "level": 3}]


def load(**fields: Any) -> Dataset:
    return load_dataset(DataConfig(**fields))


def columns(dataset: Dataset) -> list[dict[str, Any]]:
    return [unpack(row.packed) for row in dataset.rows]


def write_lines(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return str(path)


def write_rows(path: Path, rows: list[Any]) -> str:
    return write_lines(path, *(json.dumps(row) for row in rows))


def fails(match: str, **fields: Any) -> DataError:
    with pytest.raises(DataError, match=match) as caught:
        load(**fields)
    return caught.value


# --- jsonl ---


def test_jsonl(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", json.dumps(ROWS[0]), "", "  ", json.dumps(ROWS[1]))
    dataset = load(path=path)
    assert [row.prompt for row in dataset.rows] == ["one", "two"]
    assert columns(dataset) == ROWS
    assert [(row.path, row.line) for row in dataset.rows] == [(path, 1), (path, 4)]
    assert dataset.skipped == 0


def test_jsonl_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_lines(
            tmp_path / f"{name}.jsonl", b"\xef\xbb\xbf", json.dumps({"prompt": name}), json.dumps({"prompt": name})
        )
    dataset = load(path=str(tmp_path / "*.jsonl"))
    assert [(row.prompt, row.line) for row in dataset.rows] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_glob_reads_files_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    assert [row.prompt for row in load(path=str(tmp_path / "*.jsonl")).rows] == ["a", "b", "c"]


def test_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "x"}]
    path = write_rows(tmp_path / "a.jsonl", [{"chat": messages}])
    dataset = load(path=path, prompt_key="chat")
    assert dataset.rows[0].prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert columns(dataset) == [{"chat": messages}]


def test_content_may_be_text_parts_from_either_kind_of_file(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rows = [{"prompt": [{"role": "user", "content": parts[:1]}]}, {"prompt": [{"role": "user", "content": parts}]}]
    parquet.write_table(pyarrow.table({"prompt": [row["prompt"] for row in rows]}), tmp_path / "a.parquet")
    for dataset in (
        load(path=write_rows(tmp_path / "a.jsonl", rows)),
        load(source="parquet", path=str(tmp_path / "a.parquet")),
    ):
        assert [row.prompt[0]["content"] for row in dataset.rows] == ["one", "one\ntwo"]
        # The reward function sees the row as it stands.
        assert columns(dataset) == rows


BAD_LINES = {
    "{": "not valid JSON",
    "[1, 2]": "a row must be an object, not a list",
    "null": "a row must be an object, not null",
    '{"question": "q", "answer": 1}': "has no column 'prompt'; it has 'question', 'answer'",
    "{}": "has no column 'prompt'; it has none",
    '{"prompt": null}': "prompt must be text or a list of chat messages, not null",
    '{"prompt": 3}': "not a number",
    '{"prompt": true}': "not a boolean",
    '{"prompt": {"text": "x"}}': "not an object",
    '{"prompt": "  "}': "prompt is empty",
    '{"prompt": []}': "prompt holds no message",
    '{"prompt": ["x"]}': "message 1 must be an object, not text",
    '{"prompt": [{"role": "user", "content": "x"}, {"content": "x"}]}': "message 2 needs a role that is text, not null",
    '{"prompt": [{"role": "user", "content": 3}]}': "message 1 needs a content that is text or a list of text parts",
    '{"prompt": [{"role": "user", "content": []}]}': "message 1 needs a content that is text or a list of text parts",
    '{"prompt": [{"role": "user", "content": ["x"]}]}': "message 1: part 1 of its content must be an object, not text",
    '{"prompt": [{"role": "u", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": 1}]}]}': (
        "message 1: part 2 of its content has the type 'image_url'; only text is trained"
    ),
    '{"prompt": [{"role": "u", "content": [{"type": "text"}]}]}': "part 1 of its content needs a text, not null",
    '{"prompt": "x", "n": NaN}': "not valid JSON",
    '{"prompt": "x", "n": 123456789012345678901234567890}': "cannot be sent",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_an_error_with_file_and_line_or_left_out_and_counted(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "good"}', line)
    error = fails(BAD_LINES[line], path=path)
    assert (error.path, error.line) == (path, 2)
    assert str(error).startswith(f"{path}:2: ")
    assert 'data.on_bad_row = "skip"' in str(error)
    assert error.exit_code == 78
    dataset = load(path=path, on_bad_row="skip")
    assert [(row.prompt, row.line) for row in dataset.rows] == [("good", 1)]
    assert dataset.skipped == 1


def test_bytes_that_are_no_utf8_are_a_bad_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", b'{"prompt": "\xff"}\n')
    assert fails("not valid JSON", path=path).line == 1


def test_the_other_bad_lines_are_named_too(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *["{"] * 9)
    assert "8 more bad rows" in str(error := fails("not valid JSON", path=path))
    assert f"{path}:2, " in str(error)
    assert f"{path}:8" not in str(error)


def test_all_lines_bad_is_an_error_even_where_they_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", "{")
    fails("holds no usable row .*not valid JSON", path=path, on_bad_row="skip")


def test_files_that_are_not_there_or_empty(tmp_path: Path) -> None:
    fails("no such file", path=str(tmp_path / "none.jsonl"))
    fails("no such file", path=str(tmp_path / "*.jsonl"))
    fails("is a folder; give a file or a glob", path=str(tmp_path))
    fails("holds no row", path=write_lines(tmp_path / "a.jsonl", ""))


# --- parquet ---


def test_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["one", "two"], "level": [1, None]}), path)
    dataset = load(source="parquet", path=path)
    assert columns(dataset) == [{"prompt": "one", "level": 1}, {"prompt": "two", "level": None}]
    assert [row.line for row in dataset.rows] == [1, 2]


def test_parquet_of_several_batches_and_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        table = pyarrow.table({"prompt": [f"{name}{i}" for i in range(1500)]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    dataset = load(source="parquet", path=str(tmp_path / "*.parquet"))
    assert [row.prompt for row in dataset.rows] == [f"{name}{i}" for name in "ab" for i in range(1500)]
    assert dataset.rows[-1].line == 1500


def test_parquet_types_become_what_json_can_hold(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table(
        {
            "prompt": [[{"role": "user", "content": "x"}]],
            "day": [datetime.date(2024, 1, 2)],
            "price": [Decimal("1.50")],
            "raw": [b"\x00\xff"],
        }
    )
    parquet.write_table(table, path)
    (row,) = columns(load(source="parquet", path=path))
    assert row == {
        "prompt": [{"role": "user", "content": "x"}],
        "day": "2024-01-02",
        "price": "1.50",
        "raw": "AP8=",
    }
    json.dumps(row)


def test_bad_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"question": ["q"], "answer": ["a"]}), path)
    fails("has no column 'prompt'; it has 'question', 'answer' .set data.prompt_key", source="parquet", path=path)
    parquet.write_table(pyarrow.table({"prompt": ["x", None]}), path)
    assert fails("not null", source="parquet", path=path).line == 2
    assert load(source="parquet", path=path, on_bad_row="skip").skipped == 1
    Path(path).write_bytes(b"not parquet at all")
    error = fails("is not a readable Parquet file", source="parquet", path=path)
    assert (error.path, error.line) == (path, None)
    fails("no such file", source="parquet", path=str(tmp_path / "b.parquet"))


# --- Hugging Face ---


def save_to_disk(folder: Path, *shards: list[dict[str, Any]], **state: Any) -> None:
    """The layout of datasets.save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_hf_single_dataset_of_several_shards(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}])
    dataset = load(source="hf", path=str(tmp_path / "d"))
    assert [row.prompt for row in dataset.rows] == ["a", "b", "c"]


def test_hf_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [{"prompt": split}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load(source="hf", path=str(tmp_path)).rows[0].prompt == "train"
    assert load(source="hf", path=str(tmp_path), split="test").rows[0].prompt == "test"
    fails("has no split 'dev'; it has test, train", source="hf", path=str(tmp_path), split="dev")


def test_bad_hf_folders(tmp_path: Path) -> None:
    fails("no such folder", source="hf", path=str(tmp_path / "none"))
    fails('was not written by save_to_disk; .* source = "parquet"', source="hf", path=str(tmp_path))
    save_to_disk(tmp_path / "a", [{"text": "a", "n": 1}])
    fails("has no column 'prompt'; it has 'text', 'n'", source="hf", path=str(tmp_path / "a"))
    save_to_disk(tmp_path / "b", [{"prompt": "a"}], _indices_data_files=[{"filename": "indices.arrow"}])
    fails("not flattened", source="hf", path=str(tmp_path / "b"))
    save_to_disk(tmp_path / "c", [{"prompt": "a"}])
    next((tmp_path / "c").glob("*.arrow")).write_bytes(b"nonsense that is no arrow")
    fails("is not a readable Arrow file", source="hf", path=str(tmp_path / "c"))
    next((tmp_path / "c").glob("*.arrow")).unlink()
    fails("is not a readable Arrow file", source="hf", path=str(tmp_path / "c"))
    for text, match in (("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "names no data files")):
        (tmp_path / "c" / "state.json").write_text(text)
        fails(match, source="hf", path=str(tmp_path / "c"))


# --- made ---


def test_reasoning_gym_rows_hold_what_their_scorer_needs() -> None:
    from reasoning_gym import create_dataset

    config = {"task": "chain_sum", "size": 5, "seed": 3, "options": {"min_terms": 2, "max_terms": 3}}
    dataset = load(source="reasoning_gym", **config)
    assert len(dataset.rows) == 5
    for index, row in enumerate(columns(dataset)):
        assert {key: row[key] for key in ("task", "size", "seed", "options", "index")} == {**config, "index": index}
        remade = create_dataset(row["task"], size=row["size"], seed=row["seed"], **row["options"])
        assert remade[row["index"]]["question"] == row["question"] == dataset.rows[index].prompt
        assert remade.score_answer(row["answer"], row["item"]) == 1.0


@pytest.mark.parametrize("task", ["graph_color", "word_sorting", "calendar_arithmetic", "string_insertion"])
def test_reasoning_gym_items_survive_the_wire(task: str) -> None:
    for row in columns(load(source="reasoning_gym", task=task, size=3)):
        json.dumps(row)


def test_bad_reasoning_gym() -> None:
    fails("cannot be made .*'nope' not registered", source="reasoning_gym", task="nope")
    fails("unexpected keyword argument 'foo'", source="reasoning_gym", task="chain_sum", options={"foo": 1})
    fails("min_terms must be positive", source="reasoning_gym", task="chain_sum", options={"min_terms": 0})


def test_synthetic_is_the_same_every_time() -> None:
    first, again = (load(source="synthetic", size=50) for _ in range(2))
    assert columns(first) == columns(again)
    assert first.fingerprint == again.fingerprint
    assert len({row.prompt for row in first.rows}) == 50
    row = columns(first)[7]
    left, right = (int(word) for word in row["question"].strip("?").split()[2::2])
    assert row["answer"] == str(left + right)


# --- fingerprint ---


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = load(path=write_rows(tmp_path / "a.jsonl", ROWS))
    write_rows(tmp_path / "other" / "1.jsonl", ROWS[:1])
    write_rows(tmp_path / "other" / "2.jsonl", ROWS[1:])
    assert load(path=str(tmp_path / "other" / "*.jsonl")).fingerprint == one.fingerprint


@pytest.mark.parametrize(
    "rows", [ROWS[::-1], ROWS[:1], [*ROWS, ROWS[0]], [ROWS[0], {**ROWS[1], "level": 4}], [ROWS[0], {**ROWS[1], "x": 0}]]
)
def test_the_fingerprint_changes_with_the_content(tmp_path: Path, rows: list[Any]) -> None:
    one = load(path=write_rows(tmp_path / "a.jsonl", ROWS))
    assert load(path=write_rows(tmp_path / "b.jsonl", rows)).fingerprint != one.fingerprint


def test_the_fingerprint_changes_with_the_prompt_column(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"a": "x", "b": "y"}])
    assert load(path=path, prompt_key="a").fingerprint != load(path=path, prompt_key="b").fingerprint
