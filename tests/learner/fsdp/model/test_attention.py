"""Attention over a packed row in one kernel: when it is taken, and that it is what each sequence alone gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.attention import connect, refusal, round_longest

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head": 256, "value_head": 256}, None),
        ({"device": "cpu"}, "cuda alone"),
        ({"dtype": torch.float32}, "bfloat16"),
        ({"value_head": 64}, "values"),
        ({"head": 100, "value_head": 100}, "multiple of 8"),
        ({"head": 264, "value_head": 264}, "up to 256"),
        ({"softcap": 50.0}, "soft cap"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_the_varlen_kernel_is_refused_for_unsupported_inputs(changed: dict[str, Any], why: str | None) -> None:
    asked: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "head": 128, "value_head": 128}
    found = refusal(**(asked | changed))
    assert (found is None) if why is None else (found is not None and why in found)


def test_the_longest_sequence_is_rounded_to_a_power_of_two() -> None:
    rounded = {n: round_longest(n) for n in range(1, 5000)}
    assert all(n <= longest for n, longest in rounded.items())
    assert sorted(set(rounded.values())) == [128, 256, 512, 1024, 2048, 4096, 8192]


def _attended(
    attend: Any, module: nn.Module, values: list[torch.Tensor], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Output, and the gradients of its sum of squares."""
    leaves = [x.detach().requires_grad_() for x in values]
    output = attend(module, *leaves, None, **options)[0]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]


def _both(
    lengths: tuple[int, ...], keys: int, prefixes: tuple[int, ...] | None = None, **named: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradients in one kernel, in bfloat16, and sequence by sequence, in float32."""
    random, total = torch.Generator().manual_seed(0), sum(lengths)
    pieces = connect(lengths, prefixes)
    seen = pieces.key_lengths
    values = [torch.randn(1, heads, total, 16, generator=random).bfloat16() for heads in (4, keys, keys)]
    options = {"sequence_lengths": torch.tensor(lengths), "key_lengths": torch.tensor(seen), **named}
    options |= {"key_index": None if pieces.key_index is None else torch.from_numpy(pieces.key_index)}
    packed = {"cu_seqlens": attention.cumulate(lengths, CPU), "cu_seqlens_k": attention.cumulate(seen, CPU)}
    packed |= {"max_seqlen": round_longest(max(seen))}
    module = nn.Module()
    module.num_key_value_groups = 4 // keys  # type: ignore[assignment]
    ours = _attended(attention.varlen_attention, module, values, options | packed)
    truth = _attended(attention.packed_attention, module, [x.float() for x in values], options)
    return list(zip(ours, truth, strict=True))


@pytest.mark.parametrize(
    ("keys", "lengths", "prefixes", "named"),
    [
        (1, (9, 1, 30, 4), None, {}),
        (4, (9, 1, 30, 4), None, {"sliding_window": 2}),
        (2, (9, 1, 30, 4), None, {"sliding_window": 5, "scaling": 0.9}),
        # Keys of a common beginning collect the gradients of all who share it.
        (2, (9, 20, 4, 4, 30), (-1, -1, 0, 0, 1), {}),
        (2, (9, 20, 4, 4, 30), (-1, -1, 0, 0, 1), {"sliding_window": 12}),
        # More than the kernel can do: sequence by sequence.
        (2, (9, 3), None, {"softcap": 2.0}),
    ],
)
def test_one_kernel_over_a_row_equals_attention_over_each_sequence(kernel, keys, lengths, prefixes, named) -> None:
    for ours, truth in _both(lengths, keys, prefixes, **named):
        assert float((ours.float() - truth).norm() / truth.norm()) < 0.02


def test_keys_are_repeated_if_torch_has_no_grouped_attention(kernel, monkeypatch) -> None:
    attend = attention.varlen.varlen_attn

    def of_2_11(query: Any, key: Any, *rest: Any, scale: Any, window_size: Any) -> Any:
        assert query.shape == key.shape
        return attend(query, key, *rest, scale=scale, window_size=window_size)

    monkeypatch.setattr(attention.varlen, "varlen_attn", of_2_11)
    monkeypatch.setattr(attention, "_HAS_GQA", False)
    for ours, truth in _both((9, 3), 2, sliding_window=4):
        assert float((ours.float() - truth).norm() / truth.norm()) < 0.02
