"""Reading datasets: every kind of source, and every way in which one can be wrong."""

from __future__ import annotations

import datetime
import gzip
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from asyncrl.config.training import DataConfig
from asyncrl.core.errors import DataError
from asyncrl.dataloader.prompts import Dataset, load_dataset, unpack

ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2", "level": 3}]


def load(**fields: Any) -> Dataset:
    return load_dataset(DataConfig(**fields))


def columns(dataset: Dataset) -> list[dict[str, Any]]:
    return [unpack(row.packed) for row in dataset.rows]


def prompts(dataset: Dataset) -> list[Any]:
    return [row.prompt for row in dataset.rows]


def write_lines(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return str(path)


def write_rows(path: Path, rows: list[Any]) -> str:
    return write_lines(path, *(json.dumps(row) for row in rows))


def write_table(path: Path, **table: list[Any]) -> str:
    parquet.write_table(pyarrow.table(table), path)
    return str(path)


def fails(match: str, **fields: Any) -> DataError:
    with pytest.raises(DataError, match=match) as caught:
        load(**fields)
    return caught.value


# --- jsonl ---


def test_jsonl_rows_have_their_columns_and_their_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf", json.dumps(ROWS[0]), "", "  ", json.dumps(ROWS[1]))
    dataset = load(path=path)
    assert columns(dataset) == ROWS
    assert [(row.path, row.line) for row in dataset.rows] == [(path, 1), (path, 4)]
    assert dataset.skipped == 0
    # A glob reads files by name.
    write_rows(tmp_path / "0.jsonl", [{"prompt": "first"}])
    assert prompts(load(path=str(tmp_path / "*.jsonl"))) == ["first", "one", "two"]


def test_chat_messages_may_hold_text_parts_from_either_kind_of_file(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rows = [{"chat": [{"role": "user", "content": content}]} for content in (parts[:1], parts)]
    write_table(tmp_path / "a.parquet", chat=[row["chat"] for row in rows])
    for source in ("jsonl", "parquet"):
        path = str(tmp_path / "a.parquet") if source == "parquet" else write_rows(tmp_path / "a.jsonl", rows)
        dataset = load(source=source, path=path, prompt_key="chat")
        assert [prompt[0]["content"] for prompt in prompts(dataset)] == ["one", "one\ntwo"]
        # The reward function sees the row as it stands.
        assert columns(dataset) == rows
    message = {"role": "user", "content": "u", "name": "x"}
    assert prompts(load(path=write_rows(tmp_path / "b.jsonl", [{"prompt": [message]}]))) == [[message]]


BAD_LINES: dict[str | bytes, str] = {
    "{": "not valid JSON",
    b'{"prompt": "\xff"}\n': "not valid JSON",
    "[1, 2]": "a row must be an object, not a list",
    '{"question": "q", "answer": 1}': "has no column 'prompt'; it has 'question', 'answer'",
    "{}": "has no column 'prompt'; it has none",
    '{"prompt": null}': "prompt: must be text or a list of messages, not null",
    '{"prompt": true}': "not a boolean",
    '{"prompt": "  "}': "prompt: is empty",
    '{"prompt": []}': "prompt: holds no message",
    '{"prompt": ["x"]}': r"prompt\[0\]: must be an object, not text",
    '{"prompt": [{"role": "user", "content": "x"}, {"content": "x"}]}': r"prompt\[1\].role: must be text, not null",
    '{"prompt": [{"role": "poet", "content": "x"}]}': r"prompt\[0\].role: is 'poet'; there are system, user",
    '{"prompt": [{"role": "user", "content": []}]}': r"prompt\[0\].content: has no part",
    '{"prompt": [{"role": "user", "content": null}]}': r"prompt\[0\].content: is null or missing",
    '{"prompt": [{"role": "user", "content": ["x"]}]}': r"prompt\[0\].content\[0\]: must be an object, not text",
    '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}': (
        r"prompt\[0\].content\[1\].type: is 'image_url'; the policy reads text"
    ),
    '{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}': (
        r"prompt\[0\].content\[0\].text: must be text, not null"
    ),
    '{"prompt": [{"from": "human", "value": "x"}]}': r"prompt\[0\].from: is not a field of a message; write role",
    '{"prompt": [{"role": "user", "content": "x", "mood": 1}]}': r"prompt\[0\].mood: cannot be shown to the model",
    '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}': (
        r"prompt\[1\]: the last message is the assistant's; .* data.continue_final_message = true"
    ),
    '{"prompt": "x", "tools": ["search"]}': r"tools\[0\]: must be an object, not text .*set data.tools_key",
    '{"prompt": "x", "n": 123456789012345678901234567890}': "cannot be sent",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_an_error_with_its_position_or_is_skipped_and_counted(tmp_path: Path, line: str | bytes) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "good"}', line)
    error = fails(BAD_LINES[line], path=path)
    assert (error.path, error.line, error.exit_code) == (path, 2, 78)
    assert str(error).startswith(f"{path}:2: ")
    assert 'data.on_bad_row = "skip"' in str(error)
    dataset = load(path=path, on_bad_row="skip")
    assert (prompts(dataset), dataset.skipped) == (["good"], 1)


def test_further_bad_lines_are_named_and_a_file_of_only_bad_lines_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *["{"] * 9)
    reported = str(fails("8 more bad rows", path=path))
    assert f"{path}:2, " in reported and f"{path}:8" not in reported
    fails("holds no usable row .*not valid JSON", path=path, on_bad_row="skip")


# --- parquet ---


def test_parquet_of_several_batches_and_files(tmp_path: Path) -> None:
    for name in "ab":
        write_table(tmp_path / f"{name}.parquet", prompt=[f"{name}{i}" for i in range(1500)])
    dataset = load(source="parquet", path=str(tmp_path / "*.parquet"))
    assert prompts(dataset) == [f"{name}{i}" for name in "ab" for i in range(1500)]
    assert dataset.rows[-1].line == 1500


def test_parquet_types_become_json_types(tmp_path: Path) -> None:
    of_types = {"day": [datetime.date(2024, 1, 2)], "price": [Decimal("1.50")], "raw": [b"\x00\xff"], "level": [None]}
    path = write_table(tmp_path / "a.parquet", prompt=["x"], **of_types)
    row = {"prompt": "x", "day": "2024-01-02", "price": "1.50", "raw": "AP8=", "level": None}
    assert columns(load(source="parquet", path=path)) == [row]


def test_calls_and_tools_in_parquet_equal_those_in_json_lines(tmp_path: Path) -> None:
    """A typed column has, in each object, a null for every field that any other row has."""

    def row(key: str, **more: Any) -> dict[str, Any]:
        kind = {"type": "object", "properties": {key: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": kind}}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {key: "x"}}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "content": "y", "tool_call_id": "c"}
        return {"prompt": [{"role": "user", "content": "q"} | more, called, result], "tools": [tool]}

    rows = [row("city"), row("day", name="Ann")]
    write_table(tmp_path / "a.parquet", **{column: [each[column] for each in rows] for column in rows[0]})
    typed = load(source="parquet", path=str(tmp_path / "a.parquet"))
    lines = load(path=write_rows(tmp_path / "a.jsonl", rows))
    assert prompts(typed) == prompts(lines)
    assert prompts(lines)[0][1]["tool_calls"][0]["function"]["arguments"] == {"city": "x"}
    assert (
        [each.tools for each in typed.rows] == [each.tools for each in lines.rows] == [each["tools"] for each in rows]
    )
    # The reward function and the episode see the same.
    assert columns(typed)[1]["tools"] == rows[1]["tools"]


def test_tools_count_for_the_fingerprint_and_may_be_turned_off(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "x", "tools": [tool]}, {"prompt": "y"}])
    shown, hidden = load(path=path), load(path=path, tools_key="")
    assert [len(row.tools) for row in shown.rows] == [1, 0] and not any(row.tools for row in hidden.rows)
    assert shown.fingerprint != hidden.fingerprint
    assert len(load(path=path, tools_key="functions").rows[0].tools) == 0


def test_rows_of_text_and_plain_messages_have_the_fingerprint_that_checkpoints_know(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    messages += [{"role": "assistant", "content": "b"}, {"content": "c", "role": "user"}]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": messages}])
    assert load(path=path).fingerprint == "7a98e703a75e28da156b72ab0f76aadd"


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", question=["q"], answer=["a"])
    fails("has no column 'prompt'; it has 'question', 'answer' .set data.prompt_key", source="parquet", path=path)
    write_table(tmp_path / "a.parquet", prompt=["x", None])
    assert fails("not null", source="parquet", path=path).line == 2
    assert load(source="parquet", path=path, on_bad_row="skip").skipped == 1
    Path(path).write_bytes(b"not parquet at all")
    error = fails("is not a readable Parquet file", source="parquet", path=path)
    assert (error.path, error.line) == (path, None)


# --- Hugging Face ---


def save_to_disk(folder: Path, *shards: list[dict[str, Any]], **state: Any) -> str:
    """The layout of datasets.save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


def test_a_folder_of_hugging_face_holds_one_dataset_of_several_shards_or_splits(tmp_path: Path) -> None:
    path = save_to_disk(tmp_path / "d" / "train", [{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}])
    assert prompts(load(source="hf", path=path)) == ["a", "b", "c"]
    save_to_disk(tmp_path / "d" / "test", [{"prompt": "test"}])
    splits = {"source": "hf", "path": str(tmp_path / "d")}
    assert prompts(load(**splits)) == ["a", "b", "c"]
    assert prompts(load(**splits, split="test")) == ["test"]
    fails("has no split 'dev'; it has test, train", **splits, split="dev")


def test_bad_folders_of_hugging_face(tmp_path: Path) -> None:
    fails('was not written by save_to_disk; .* "parquet"', source="hf", path=str(tmp_path))
    path = save_to_disk(tmp_path / "a", [{"text": "a", "n": 1}])
    fails("has no column 'prompt'; it has 'text', 'n'", source="hf", path=path)
    path = save_to_disk(tmp_path / "b", [{"prompt": "a"}], _indices_data_files=[{"filename": "indices.arrow"}])
    fails("not flattened", source="hf", path=path)
    path = save_to_disk(tmp_path / "c", [{"prompt": "a"}])
    next((tmp_path / "c").glob("*.arrow")).write_bytes(b"nonsense that is no arrow")
    fails("is not a readable Arrow file", source="hf", path=path)
    for text, match in (("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "names no data files")):
        (tmp_path / "c" / "state.json").write_text(text)
        fails(match, source="hf", path=path)


@pytest.mark.parametrize(
    ("source", "path", "match"),
    [
        ("jsonl", "none.jsonl", "no such file"),
        ("jsonl", "*.none", "no such file"),
        ("parquet", "", r"is a folder without a file of rows \(.parquet\). To do: give a file or a glob"),
        ("jsonl", "empty.jsonl", "holds no row"),
        ("parquet", "none.parquet", "no such file"),
        ("hf", "none", "no such folder"),
    ],
)
def test_missing_and_empty_sources_are_errors(tmp_path: Path, source: str, path: str, match: str) -> None:
    write_lines(tmp_path / "empty.jsonl", "")
    fails(match, source=source, path=str(tmp_path / path))


# --- the kind of source follows from the file ---


def test_the_kind_of_source_follows_from_the_file(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    files = {
        "a.jsonl": lines,
        "a.json": json.dumps(ROWS, indent=1).encode(),
        "one_line.json": json.dumps(ROWS).encode(),
        "lines.json": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
        "prompts": lines,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert columns(load(path=str(tmp_path / name))) == ROWS, name
    table = write_table(tmp_path / "a.parquet", prompt=["one"])
    Path(table).with_name("no_suffix").write_bytes(Path(table).read_bytes())
    for name in ("a.parquet", "no_suffix", "*.parquet"):
        assert prompts(load(path=str(tmp_path / name))) == ["one"]
    folder = save_to_disk(tmp_path / "saved", [{"prompt": "of hf"}])
    assert prompts(load(path=folder)) == ["of hf"]
    fails("is a Parquet file, and is read as JSON. To do: for data.path set", source="jsonl", path=table)
    fails(r"holds files of several kinds \(.*a.json.* and .*a.parquet\)", path=str(tmp_path / "a.*"))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", b"prompt\nx\n", "is not a kind of file that is read: .* To do: convert it"),
        ("a.json", b'[{"prompt": "x"},', r"a\.json: is not a valid JSON list: "),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}' * 99, mtime=0)[:20], "is damaged or not whole"),
        ("a.json", b'[{"prompt": "x"}, 3]', r"a\.json:2: a row must be an object, not a number"),
    ],
)
def test_a_file_of_an_unknown_kind_or_a_damaged_one_is_an_error(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    (tmp_path / name).write_bytes(content)
    fails(match, path=str(tmp_path / name))


def test_the_files_of_the_split_are_read_from_a_folder(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for place in ("main", "socratic", ".cache/huggingface"):
        (hub / place).mkdir(parents=True)
        for split in ("train", "test"):
            write_table(hub / place / f"{split}-00000-of-00001.parquet", prompt=[f"{place} {split}"])
    (hub / "dataset_infos.json").write_text("{}")
    reported = f"holds several data sets: main, socratic. To do: give one of them, as {hub}/main"
    fails(reported, path=str(hub))
    assert prompts(load(path=str(hub / "main"))) == ["main train"]
    assert prompts(load(path=str(hub / "main"), split="test")) == ["main test"]
    fails("has no file of the split 'dev'; it has test-00000", path=str(hub / "main"), split="dev")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in "ab":
        write_rows(plain / f"{name}.jsonl", [{"prompt": name}])
    assert prompts(load(path=str(plain))) == ["a", "b"]
    assert prompts(load(path=str(plain), source="jsonl")) == ["a", "b"]


def test_a_parquet_file_without_pyarrow_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", prompt=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails(r"needs pyarrow: pip install 'asyncrl\[train\]'", path=path)


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download --repo-type dataset openai/gsm8k --local-dir gsm8k"
    for path in (
        "openai/gsm8k",
        "https://huggingface.co/datasets/openai/gsm8k/tree/main",
        "hf://datasets/openai/gsm8k",
    ):
        assert f"run `{command}` and set the path to gsm8k" in str(fails("no such file", path=path))
    assert command in str(fails("no such folder", source="hf", path="openai/gsm8k"))
    (tmp_path / "openai").mkdir()
    for path in ("openai/gsm8k", "data/prompts.jsonl", "./openai/gsm8k", "a/b/c", "gsm8k"):
        assert "hf download" not in str(fails("no such file", path=path))


# --- nested columns ---


def test_a_dotted_name_leads_into_objects_and_a_name_that_holds_the_dot_wins(tmp_path: Path) -> None:
    row = {"extra_info": {"question": "q", "more": {"n": 1}}, "a.b": "dotted", "a": {"b": "nested"}}
    for path in (
        write_rows(tmp_path / "a.jsonl", [row]),
        write_table(tmp_path / "a.parquet", **{name: [value] for name, value in row.items()}),
    ):
        assert prompts(load(path=path, prompt_key="extra_info.question")) == ["q"]
        assert prompts(load(path=path, prompt_key="a.b")) == ["dotted"]
        assert columns(load(path=path, prompt_key="a.b")) == [row]
        fails(
            "has no column 'extra_info.x'; it has 'extra_info.question', 'extra", path=path, prompt_key="extra_info.x"
        )
    fails("has no column 'x.y'; it has 'extra_info'", path=path, prompt_key="x.y")


# --- made ---


def test_reasoning_gym_rows_hold_everything_that_their_scorer_needs() -> None:
    from reasoning_gym import create_dataset

    config = {"task": "chain_sum", "size": 5, "seed": 3, "options": {"min_terms": 2, "max_terms": 3}}
    dataset = load(source="reasoning_gym", **config)
    assert len(dataset.rows) == 5
    for index, row in enumerate(columns(dataset)):
        assert {key: row[key] for key in ("task", "size", "seed", "options", "index")} == {**config, "index": index}
        remade = create_dataset(row["task"], size=row["size"], seed=row["seed"], **row["options"])
        assert remade[row["index"]]["question"] == row["question"] == dataset.rows[index].prompt
        assert remade.score_answer(row["answer"], row["item"]) == 1.0
    for task in ("word_sorting", "calendar_arithmetic"):
        # Items of any type survive the wire.
        json.dumps(columns(load(source="reasoning_gym", task=task, size=3)))
    fails("cannot be made .*'nope' not registered", source="reasoning_gym", task="nope")
    fails("unexpected keyword argument 'foo'", source="reasoning_gym", task="chain_sum", options={"foo": 1})
    fails("min_terms must be positive", source="reasoning_gym", task="chain_sum", options={"min_terms": 0})


def test_synthetic_sums_are_the_same_every_time() -> None:
    first, again = (load(source="synthetic", size=50) for _ in range(2))
    assert columns(first) == columns(again)
    assert len(set(prompts(first))) == 50
    row = columns(first)[7]
    left, right = (int(word) for word in row["question"].strip("?").split()[2::2])
    assert row["answer"] == str(left + right)


# --- fingerprint ---


@pytest.mark.parametrize(
    "rows", [ROWS[::-1], ROWS[:1], [*ROWS, ROWS[0]], [ROWS[0], {**ROWS[1], "level": 4}], [ROWS[0], {**ROWS[1], "x": 0}]]
)
def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(tmp_path: Path, rows: list[Any]) -> None:
    one = load(path=write_rows(tmp_path / "a.jsonl", ROWS)).fingerprint
    write_rows(tmp_path / "1.txt", ROWS[:1])
    write_rows(tmp_path / "2.txt", ROWS[1:])
    assert load(path=str(tmp_path / "*.txt")).fingerprint == one
    assert load(path=write_rows(tmp_path / "b.jsonl", rows)).fingerprint != one


def test_the_fingerprint_changes_with_the_prompt_column(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"a": "x", "b": "y"}])
    assert load(path=path, prompt_key="a").fingerprint != load(path=path, prompt_key="b").fingerprint
