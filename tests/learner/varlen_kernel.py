"""A kernel for CPUs below torch.nn.attention.varlen: what its documentation says, computed in plain float32.

Arguments are checked, traced and differentiated by torch as on CUDA; only the numbers are made here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _sequences(ends: Tensor, longest: int) -> list[slice]:
    assert ends.dtype == torch.int32
    places = ends.tolist()
    assert places[0] == 0
    assert all(0 < end - start <= longest for start, end in itertools.pairwise(places))
    return [slice(start, end) for start, end in itertools.pairwise(places)]


def _weights(query: Tensor, key: Tensor, scale: float, window: list[int]) -> Tensor:
    """Scores of one sequence before the softmax, [heads, T, K]; ``query`` and ``key`` [heads, T or K, D]."""
    scores = query @ key.transpose(1, 2) * scale
    i, j = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])[None]
    left, right = window
    # A query counts from where it would be if the last of both were at one place.
    i = i + scores.shape[2] - scores.shape[1]
    hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    return scores.masked_fill(hidden, -torch.inf)


def _heads(tensor: Tensor, part: slice, count: int) -> Tensor:
    """float32 [count, T, D] of one sequence, heads of keys repeated."""
    found = tensor[part].float().transpose(0, 1)
    return found.repeat_interleave(count // found.shape[0], dim=0)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    window_size: list[int],
    *_rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert is_causal == (window_size == [-1, 0])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    output, sums = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for part, seen in zip(_sequences(cu_seq_q, max_q), _sequences(cu_seq_k, max_k), strict=True):
        q = _heads(query, part, query.shape[1])
        k, v = (_heads(x, seen, query.shape[1]) for x in (key, value))
        scores = _weights(q, k, scale, window_size)
        output[part] = (torch.softmax(scores, -1) @ v).transpose(0, 1).to(query.dtype)
        sums[:, part] = torch.logsumexp(scores, -1)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None,
    window_size: list[int],
) -> tuple[Tensor, ...]:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    found = [torch.empty_like(x) for x in (query, key, value)]
    for part, seen in zip(_sequences(cu_seq_q, max_q), _sequences(cu_seq_k, max_k), strict=True):
        q, g, o = (_heads(x, part, query.shape[1]) for x in (query, gradient, out))
        k, v = (_heads(x, seen, query.shape[1]) for x in (key, value))
        weights = torch.exp(_weights(q, k, scale, window_size) - lse[:, part, None])
        scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        of_each = [scores @ k, scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g]
        for whole, each, its in zip(found, of_each, (part, seen, seen), strict=True):
            each = each.unflatten(0, (whole.shape[1], -1)).sum(1)
            whole[its] = each.transpose(0, 1).to(whole.dtype)
    return tuple(found)


_KERNELS: list[tuple[Any, Callable[..., Any]]] = [
    (varlen._varlen_attn, _forward),
    (varlen._varlen_attn_backward, _backward),
]


def install() -> None:
    """For the rest of this process."""
    for operator, kernel in _KERNELS:
        operator.register_kernel("cpu")(kernel)
