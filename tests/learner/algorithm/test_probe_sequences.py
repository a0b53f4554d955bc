"""Sequences by which engines and learner are held against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import changed, make_config, make_group, make_trajectory, random_groups

from asyncrl.learner.algorithm.probe_sequences import (
    LENGTH,
    SEQUENCES,
    ProbeSequence,
    from_groups,
    from_prompts,
    probe_length,
)


def check(sequences: list[ProbeSequence], length: int) -> None:
    assert len(sequences) <= SEQUENCES
    for sequence in sequences:
        assert 1 <= len(sequence.tokens) <= length
        assert 1 <= sequence.begin <= len(sequence.tokens)


def test_the_probe_fits_into_the_smallest_context_of_an_engine(tmp_path) -> None:
    config = make_config(tmp_path)
    assert probe_length(config) == config.data.max_prompt_tokens + config.rollout.max_tokens - 1 < LENGTH
    assert probe_length(changed(config, rollout={"max_tokens": LENGTH})) == LENGTH


def test_the_probe_of_a_prompt_is_its_end() -> None:
    short, long = from_prompts([np.arange(5, dtype=np.int32), np.arange(200, dtype=np.int32)], 100)
    assert short == ProbeSequence([0, 1, 2, 3, 4], 3)
    assert long == ProbeSequence(list(range(100, 200)), 50)


def trained(prompt: list[int], response: list[int]):
    return make_group(0, prompt, [make_trajectory(response, reward=1.0)])


@pytest.mark.parametrize(
    ("prompt", "response", "length", "taken"),
    [
        (3, 5, 20, (3, 5)),
        # The beginning of a long response, after the end of a long prompt.
        (30, 30, 20, (10, 10)),
        (3, 30, 20, (3, 17)),
        (30, 3, 20, (17, 3)),
        (4, 4, 1, (1, 0)),
    ],
)
def test_the_probe_of_a_group_is_a_response_after_the_end_of_the_prompt(prompt, response, length, taken) -> None:
    before, after = list(range(100, 100 + prompt)), list(range(200, 200 + response))
    (sequence,) = from_groups([trained(before, after)], length)
    assert sequence.tokens == before[len(before) - taken[0] :] + after[: taken[1]]
    assert sequence.begin == taken[0]
    check([sequence], length)


def test_the_probe_takes_all_groups_and_all_samples_in_turn() -> None:
    many = random_groups(0, 2 * SEQUENCES, samples=3)
    sequences = from_groups(many, LENGTH)
    assert len(sequences) == SEQUENCES
    beginnings = [group.lease.prompt_ids.tolist() for group in many]
    used = [next(i for i, p in enumerate(beginnings) if s.tokens[: len(p)] == p) for s in sequences if s.tokens]
    assert used == list(range(0, 2 * SEQUENCES, 2))
    assert len(from_groups(many[:2], LENGTH)) == 6
    assert from_groups(many[:3], LENGTH) == from_groups(many[:3], LENGTH)
    assert from_groups([], LENGTH) == []


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), length=st.integers(1, 60))
def test_probe_sequences_fit_the_length_for_any_groups(seed: int, count: int, length: int) -> None:
    groups = random_groups(seed, count, samples=2)
    check(from_groups(groups, length), length)
    check(from_prompts([group.lease.prompt_ids for group in groups[:SEQUENCES]], length), length)
