"""The cost of rows without shared prompts, in words."""

from __future__ import annotations

import pytest

from asyncrl.learner.fsdp.startup.startup_check import Scoring, sharing_cost


@pytest.mark.parametrize(
    ("shared", "samples", "packing", "expected"),
    [
        (True, 8, "auto", ""),
        (False, 1, "auto", ""),
        (False, 8, "off", ""),
        (False, 8, "auto", "computes each prompt 8 times a group"),
        (False, 8, "auto", "A prompt of 512 tokens (data.max_prompt_tokens) costs 3,584 more tokens a group"),
    ],
)
def test_the_cost_names_the_prompt_and_the_samples(shared: bool, samples: int, packing: str, expected: str) -> None:
    scoring = Scoring(packed=True, attention="packed", chunked=True, shared=shared)
    found = sharing_cost(scoring, samples=samples, prompt_tokens=512, packing=packing)
    assert expected in found and bool(found) == bool(expected)
