"""Prompts with their tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from asyncrl.config.training import DataConfig
from asyncrl.core.errors import DataError
from asyncrl.data.rows import RawRow
from asyncrl.dataloader.left_out import Remark, remarks
from asyncrl.dataloader.prompts import PromptSet, collect
from asyncrl.text.tokenizer import ByteTokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "x" * 40}]


def make_set(prompts: list[Any], **fields: Any) -> PromptSet:
    raw = [RawRow("d.jsonl", line, {"prompt": prompt, "n": line}) for line, prompt in enumerate(prompts, 1)]
    dataset = collect("d.jsonl", raw, DataConfig(prompt_key="prompt"))
    return PromptSet(dataset, DataConfig(path="d.jsonl", **fields), ByteTokenizer())


def test_prompts_are_tokenized_in_batches_and_each_row_is_a_copy() -> None:
    prompts = make_set(["one", "twö", "three"])
    assert [prompts.tokenize(2), prompts.tokenize(2), len(prompts)] == [False, True, 3]
    ids, text, row = prompts.prompt(1)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()).decode() == text == "twö"
    row["n"] = "changed"
    assert prompts.prompt(1)[2] == {"prompt": "twö", "n": 2}
    assert remarks(prompts, "data") == []


def test_prompts_over_the_limit_with_their_template_are_kept_apart() -> None:
    prompts = make_set(["hi", CHAT, "ho"], template="chat", system="s", max_prompt_tokens=40)
    assert prompts.tokenize(9)
    assert prompts.prompt(0)[1] == "system: s\nuser: hi\nassistant:"
    assert (prompts.oversize, prompts.admissible) == ({1}, (0, 2))
    reported = "1 of 3 (33 %) prompts have more than eval.a.data.max_prompt_tokens = 40 tokens and are left out"
    fix = "raise eval.a.data.max_prompt_tokens, shorten them, or leave it so"
    assert remarks(prompts, "eval.a.data") == [Remark("too_long", f"{reported}; the longest has 67 (d.jsonl:2)", fix)]


@pytest.mark.parametrize(
    ("prompts", "fields", "share"),
    [
        (["long", "long", "hi"], {"max_prompt_tokens": 3}, r"2 of 3 \(67 %\) rows .* 0\.5 allows: 2 have more than"),
        (
            ["hi", CHAT, CHAT],
            {"on_bad_row": "skip"},
            r"2 of 3 \(67 %\) rows .* 2 cannot be used \(the first: d\.jsonl:2",
        ),
        (["hi", "hi", "long", CHAT], {"on_bad_row": "skip", "max_prompt_tokens": 3}, None),
        (["long", "hi"], {"max_prompt_tokens": 3, "max_left_out_fraction": 0.4}, r"1 of 2 \(50 %\) rows .* 0\.4"),
        (["long", "long", "hi"], {"max_prompt_tokens": 3, "max_left_out_fraction": 0.7}, None),
    ],
)
def test_a_set_with_too_many_left_out_prompts_is_refused_with_their_number(
    prompts: list[Any], fields: dict[str, Any], share: str | None
) -> None:
    with pytest.raises(DataError, match=share) if share else nullcontext():
        assert make_set(prompts, **fields).tokenize(9)


def test_a_row_that_the_template_does_not_show_is_a_bad_row_with_its_place(family: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [RawRow("d.jsonl", 1, {"prompt": "hi"}), RawRow("d.jsonl", 2, {"prompt": "ho", "tools": [tool]})]
    dataset = collect("d.jsonl", rows, DataConfig(prompt_key="prompt", tools_key="tools"))
    tokenizer = load_tokenizer(str(family("plain chatml")))
    with pytest.raises(DataError, match=r"d\.jsonl:2: tools\[0\].function.name: the chat template shows no tools"):
        PromptSet(dataset, DataConfig(template="chat"), tokenizer).tokenize(9)
    prompts = PromptSet(dataset, DataConfig(template="chat", on_bad_row="skip"), tokenizer)
    assert prompts.tokenize(9) and (len(prompts), prompts.skipped) == (1, 1)
    shown = PromptSet(dataset, DataConfig(template="chat"), load_tokenizer(str(family("tools first"))))
    assert shown.tokenize(9) and '"name": "f"' in shown.prompt(1)[1]


class Silent(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("prompts", "fields", "match"),
    [
        (["12", "34"], {"max_prompt_tokens": 1}, "every prompt is over data.max_prompt_tokens = 1; the longest has 2"),
        (["fine", CHAT], {}, r'd\.jsonl:2: chat messages need template = "chat".*data.on_bad_row = "skip"'),
        ([CHAT], {"on_bad_row": "skip"}, r"holds no usable row \(d\.jsonl:1: chat messages need"),
    ],
)
def test_a_set_that_cannot_be_used_is_an_error_with_its_place(
    prompts: list[Any], fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        make_set(prompts, **fields).tokenize(9)


def test_a_prompt_that_cannot_be_tokenized_is_left_out_if_configured() -> None:
    """The set is the same as without that row, however it is read."""
    good = ["one", "two", "three"]
    prompts = make_set([good[0], CHAT, *good[1:], CHAT], on_bad_row="skip")
    while not prompts.tokenize(2):
        pass
    assert [prompts.prompt(index)[1] for index in prompts.admissible] == good
    (remark,) = remarks(prompts, "data")
    assert remark.kind == "bad_rows" and prompts.skipped == 2
    reported = (
        '2 of 5 (40 %) rows cannot be used and are left out (data.on_bad_row = "skip"); the first: d.jsonl:2: chat'
    )
    assert remark.detail.startswith(reported)
    rows = [RawRow("e.jsonl", 1, {"prompt": text, "n": line}) for line, text in zip((1, 3, 4), good, strict=True)]
    dataset = collect("e.jsonl", rows, DataConfig(prompt_key="prompt"))
    assert prompts.fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match=r"e\.jsonl:1: the prompt has no tokens"):
        PromptSet(dataset, DataConfig(path="e.jsonl"), Silent()).tokenize(1)
