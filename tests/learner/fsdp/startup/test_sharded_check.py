"""The check at start where the model will run: past its window, in the compute type, after sharding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import make_config
from model_matrix import make_family, save_family

from asyncrl.learner.fsdp.gang.ranks import Ranks
from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.startup import sharding
from asyncrl.learner.fsdp.startup.sharded_check import FLOPS, LONG, PAST, STRETCH, attention_window, long_length
from asyncrl.learner.fsdp.startup.startup_check import LENGTHS

WINDOW = 2 * max(LENGTHS)
"""Longer than all sequences of the first part."""
SHORT = sum(LENGTHS)
"""Tokens in a row of the first part."""


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 7}, 7),
        ({"sliding_window": 7, "use_sliding_window": False}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, 7),
        ({"attention_chunk_size": 5, "layer_types": ["full_attention", "chunked_attention"]}, 5),
    ],
)
def test_the_window_is_that_of_the_layers_that_have_one(model: dict[str, Any], window: int | None) -> None:
    assert attention_window(SimpleNamespace(**model)) == window


@pytest.mark.parametrize(
    ("window", "longest", "parameters", "device", "length"),
    [
        (None, 9999, 1000, "cpu", LONG),
        (None, 300, 1000, "cpu", 300),
        (4096, 9999, 1000, "cpu", 4096 + PAST),
        (4096, 1000, 1000, "cpu", 1000),
        (4096, 9999, 10**8, "cpu", int(FLOPS["cpu"] / 2e8)),
        (4096, 9999, 7 * 10**9, "cuda", 4096 + PAST),
        (None, 9999, 10**13, "cpu", STRETCH),
    ],
)
def test_the_long_sequence_passes_the_window_and_costs_seconds(window, longest, parameters, device, length) -> None:
    assert long_length(window, longest=longest, parameters=parameters, device=device) == length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_family("Mistral", tied=False, sliding_window=WINDOW)
    return save_family(tmp_path_factory.mktemp("model") / "model", model)


def _way(backend: Any, config: Any) -> tuple[bool, str, bool]:
    policy = backend._policy
    return backend.packed, policy.model.config._attn_implementation, policy.chunked


def _without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our attention lets every position see all before it."""
    plain = attention.packed_attention

    def blind(*arguments: Any, **named: Any) -> Any:
        return plain(*arguments, **(named | {"sliding_window": None}))

    monkeypatch.setattr(attention, "packed_attention", blind)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch):
    yield
    monkeypatch.undo()
    attention.register()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_is_not_kept_is_seen(dtype: str, folder: Path, run, monkeypatch, caplog) -> None:
    right, _ = run(make_config(folder, dtype="bfloat16"), _way)
    assert right == (True, attention.NAME, True)
    assert not caplog.records
    _without_a_window(monkeypatch)
    found, _ = run(make_config(folder, dtype="bfloat16"), _way)
    assert found == (True, "sdpa", True)
    assert "own attention over packed rows cannot be used" in caplog.text
    assert "in bfloat16 on cpu" in caplog.text


def _leak(monkeypatch: pytest.MonkeyPatch, *, beyond: int) -> None:
    """Rows of more than ``beyond`` tokens are taken for one long sequence."""
    forward = Policy.forward

    def leaking(self: Policy, input_ids: Any, position_ids: Any, lengths: Any, seen: Any, *rest: Any) -> Any:
        if position_ids.shape[1] > beyond:
            lengths = seen = (position_ids.shape[1],)
            position_ids = torch.arange(position_ids.shape[1])[None]
        return forward(self, input_ids, position_ids, lengths, seen, *rest)

    monkeypatch.setattr(Policy, "forward", leaking)


def test_a_leak_into_long_rows_alone_ends_packing(folder: Path, run, monkeypatch, caplog) -> None:
    _leak(monkeypatch, beyond=SHORT)
    found, _ = run(make_config(folder), _way)
    assert found == (False, "sdpa", True)
    assert "each row holds one sequence" in caplog.text
    with pytest.raises(AssertionError, match=r'ConfigError: .*learner\.packing: is "required"'):
        run(make_config(folder, packing="required"), _way)


def test_one_rank_that_differs_decides_for_all(folder: Path, run, monkeypatch) -> None:
    gather = Ranks.all_gather

    def beside_another(self: Ranks, values: Any, what: str) -> Any:
        ours = gather(self, values, what)
        return ours if what != "the check at start" else np.vstack([ours, [[next(theirs)]]])

    monkeypatch.setattr(Ranks, "all_gather", beside_another)
    theirs = iter([0.0, 0.0, float("nan"), 1.0, 0.0])
    assert run(make_config(folder), _way)[0] == (True, "eager", True)
    theirs = iter([0.0, 1.0, 1.0, 1.0, 1.0])
    assert run(make_config(folder), _way)[0] == (False, "sdpa", False)


def test_another_model_than_was_loaded_is_refused(folder: Path, run, monkeypatch) -> None:
    fill, filled = sharding.fill, []

    def wrong(policy: Policy, *rest: Any) -> None:
        fill(policy, *rest)
        filled.append(policy)
        if len(filled) == 2:
            # The one that trains.
            with torch.no_grad():
                policy.model.lm_head.weight.mul_(-1.0)

    monkeypatch.setattr(sharding, "fill", wrong)
    with pytest.raises(AssertionError, match=rf"ConfigError: .*model\.path: {folder}: .* no rounding explains"):
        run(make_config(folder), _way)
