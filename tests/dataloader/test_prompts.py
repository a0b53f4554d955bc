"""Prompts with their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.config.training import DataConfig
from asyncrl.data.jsonl import RawRow
from asyncrl.dataloader.prompts import PromptSet, Remark
from asyncrl.dataloader.rows import collect
from asyncrl.errors import DataError
from asyncrl.tokenizer import ByteTokenizer


def make_set(prompts: list[Any], **fields: Any) -> PromptSet:
    raw = [RawRow("d.jsonl", line, {"prompt": prompt, "n": line}) for line, prompt in enumerate(prompts, 1)]
    dataset = collect("d.jsonl", raw, prompt_key="prompt", on_bad_row="error")
    return PromptSet(dataset, DataConfig(path="d.jsonl", **fields), ByteTokenizer())


def test_tokenized_in_batches() -> None:
    prompts = make_set(["one", "twö", "three"])
    assert not prompts.tokenize(2)
    assert prompts.tokenize(2)
    assert len(prompts) == 3
    ids, text, row = prompts.prompt(1)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()).decode() == text == "twö"
    assert row == {"prompt": "twö", "n": 2}


def test_a_row_is_a_fresh_copy_each_time() -> None:
    prompts = make_set(["one"])
    assert prompts.tokenize(9)
    prompts.prompt(0)[2]["n"] = "changed"
    assert prompts.prompt(0)[2]["n"] == 1


def test_prompts_over_the_limit_are_kept_apart() -> None:
    prompts = make_set(["12345", "123456", "1"], max_prompt_tokens=5)
    assert prompts.tokenize(9)
    assert prompts.oversize == {1}
    assert prompts.admissible == (0, 2)
    told = "1 of 3 prompts have more than eval.a.data.max_prompt_tokens = 5 tokens and are left out; the longest has 6"
    fix = "raise eval.a.data.max_prompt_tokens, or shorten them"
    assert prompts.remarks("eval.a.data") == [Remark("too_long", f"{told} (d.jsonl:2)", fix)]
    (fitting := make_set(["12345"], max_prompt_tokens=5)).tokenize(9)
    assert fitting.remarks("data") == []


def test_the_template_and_the_system_message_are_applied_before_the_length_is_taken() -> None:
    prompts = make_set(
        ["hi", [{"role": "user", "content": "x" * 40}]], template="chat", system="s", max_prompt_tokens=40
    )
    assert prompts.tokenize(9)
    assert prompts.prompt(0)[1] == "system: s\nuser: hi\nassistant:"
    assert prompts.oversize == {1}


def test_every_prompt_over_the_limit_is_an_error() -> None:
    prompts = make_set(["12", "34"], max_prompt_tokens=1)
    with pytest.raises(DataError, match="every prompt is over data.max_prompt_tokens = 1; the longest has 2"):
        prompts.tokenize(9)


def test_a_prompt_that_does_not_fit_its_template_is_named() -> None:
    prompts = make_set(["fine", [{"role": "user", "content": "x"}]])
    with pytest.raises(DataError, match=r'd\.jsonl:2: chat messages need template = "chat".*data.on_bad_row = "skip"'):
        prompts.tokenize(9)


def test_a_prompt_that_cannot_be_tokenized_is_left_out_where_that_is_wanted() -> None:
    """The set is the same as without that row, however it is read."""
    good, bad = ["one", "two", "three"], [{"role": "user", "content": "x"}]
    prompts, same = make_set([good[0], bad, *good[1:], bad], on_bad_row="skip"), make_set(good)
    for each in (prompts, same):
        while not each.tokenize(2):
            pass
    assert len(prompts) == len(same) == 3
    assert [prompts.prompt(index)[1] for index in prompts.admissible] == good
    (remark,) = prompts.remarks("data")
    assert remark.kind == "bad_rows" and prompts.skipped == 2
    assert '): 2; the first: d.jsonl:2: chat messages need template = "chat"' in remark.told
    # The rows have their line as a column, too.
    assert prompts.fingerprint != same.fingerprint
    rows = [RawRow("e.jsonl", 1, {"prompt": text, "n": line}) for line, text in zip((1, 3, 4), good, strict=True)]
    assert prompts.fingerprint == collect("e.jsonl", rows, prompt_key="prompt", on_bad_row="error").fingerprint
    nothing = make_set([bad], on_bad_row="skip")
    with pytest.raises(DataError, match=r"holds no usable row \(d\.jsonl:1: chat messages need"):
        nothing.tokenize(9)


def test_a_prompt_without_tokens_is_named() -> None:
    class Silent(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return []

    raw = [RawRow("d.jsonl", 7, {"prompt": "x"})]
    dataset = collect("d.jsonl", raw, prompt_key="prompt", on_bad_row="error")
    with pytest.raises(DataError, match=r"d\.jsonl:7: the prompt has no tokens"):
        PromptSet(dataset, DataConfig(path="d.jsonl"), Silent()).tokenize(1)
