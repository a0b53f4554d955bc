"""Attention over a packed row: each sequence attends to itself alone, at the cost of the sum of squared
lengths.

transformers' own way with a packed row masks a T x T square, which costs what one sequence of T tokens would.
Registered with transformers under NAME; a model that runs with it gets ``sequence_lengths`` as a keyword
argument of its forward and hands it down to every attention layer.

The lengths are a tensor: as numbers they would be guards of torch.compile, and each count of sequences one graph
more. The attention itself stays out of the graphs (``packed_attention`` is the one place that reads the lengths). It
runs where the kernel of varlen.py does not.

Fails with NotImplementedError for attention that is more than causal dot-product, soft-capped or not (sinks,
a bidirectional layer) and for a model that does not hand the lengths down. The start-up check (startup_check.py)
tries it before it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "asyncrl_packed"


def register() -> None:
    """Make NAME a value of transformers' ``attn_implementation``. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed row, in the form that transformers calls.

    ``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv heads, T, D]; ``sequence_lengths`` int64 on the CPU, sums
    to T. Returns [1, T, heads, D]. ``attention_mask`` is not looked at: the lengths say it all.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    refuse_unknown(module, kwargs, sequence_lengths)
    assert sequence_lengths is not None
    outputs = []
    for q, k, v in zip(*(torch.split(x, sequence_lengths.tolist(), dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        mask = None
        if softcap is not None or (sliding_window is not None and length > sliding_window):
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = mask.tril().triu(1 - (sliding_window or length))[None, None]
        if softcap is None:
            output = sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=scaling)[0]
        else:
            output = _soft_capped(q, k, v, mask, dropout=dropout, scaling=scaling, softcap=softcap)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any], lengths: Tensor | None) -> None:
    """Raise NotImplementedError for attention that is more than causal, or that is not told what is packed."""
    if lengths is None:
        raise NotImplementedError(f"{type(module).__name__} is not given the lengths of the packed sequences")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs s_aux")
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") in (None, True)):
        raise NotImplementedError(f"{type(module).__name__} is not causal")


def _soft_capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention of one sequence with scores s bounded as c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2).

    torch's dot-product attention has no such bound, and would leave it out without a word.
    """
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.dropout(weights, dropout, train=dropout > 0.0)
    return (weights @ value).transpose(1, 2)
