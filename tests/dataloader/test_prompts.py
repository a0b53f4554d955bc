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

CHAT = [{"role": "user", "content": "x" * 40}]


def make_set(prompts: list[Any], **fields: Any) -> PromptSet:
    raw = [RawRow("d.jsonl", line, {"prompt": prompt, "n": line}) for line, prompt in enumerate(prompts, 1)]
    dataset = collect("d.jsonl", raw, prompt_key="prompt", on_bad_row="error")
    return PromptSet(dataset, DataConfig(path="d.jsonl", **fields), ByteTokenizer())


def test_tokenized_in_batches_and_a_row_is_a_fresh_copy_each_time() -> None:
    prompts = make_set(["one", "twö", "three"])
    assert [prompts.tokenize(2), prompts.tokenize(2), len(prompts)] == [False, True, 3]
    ids, text, row = prompts.prompt(1)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()).decode() == text == "twö"
    row["n"] = "changed"
    assert prompts.prompt(1)[2] == {"prompt": "twö", "n": 2}
    assert prompts.remarks("data") == []


def test_prompts_over_the_limit_with_their_template_are_kept_apart() -> None:
    prompts = make_set(["hi", CHAT, "ho"], template="chat", system="s", max_prompt_tokens=40)
    assert prompts.tokenize(9)
    assert prompts.prompt(0)[1] == "system: s\nuser: hi\nassistant:"
    assert (prompts.oversize, prompts.admissible) == ({1}, (0, 2))
    told = (
        "1 of 3 prompts have more than eval.a.data.max_prompt_tokens = 40 tokens and are left out; the longest has 67"
    )
    fix = "raise eval.a.data.max_prompt_tokens, or shorten them"
    assert prompts.remarks("eval.a.data") == [Remark("too_long", f"{told} (d.jsonl:2)", fix)]
    (remark,) = prompts.remarks("data")
    assert remark.fix.endswith("shorten them; they count as quarantined, for learner.max_quarantined_fraction")


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


def test_a_prompt_that_cannot_be_tokenized_is_left_out_where_that_is_wanted() -> None:
    """The set is the same as without that row, however it is read."""
    good = ["one", "two", "three"]
    prompts = make_set([good[0], CHAT, *good[1:], CHAT], on_bad_row="skip")
    while not prompts.tokenize(2):
        pass
    assert [prompts.prompt(index)[1] for index in prompts.admissible] == good
    (remark,) = prompts.remarks("data")
    assert remark.kind == "bad_rows" and prompts.skipped == 2
    assert '): 2; the first: d.jsonl:2: chat messages need template = "chat"' in remark.told
    rows = [RawRow("e.jsonl", 1, {"prompt": text, "n": line}) for line, text in zip((1, 3, 4), good, strict=True)]
    dataset = collect("e.jsonl", rows, prompt_key="prompt", on_bad_row="error")
    assert prompts.fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match=r"e\.jsonl:1: the prompt has no tokens"):
        PromptSet(dataset, DataConfig(path="e.jsonl"), Silent()).tokenize(1)
