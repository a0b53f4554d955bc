"""Attention over a packed row: each sequence attends to itself alone, at the cost of the sum of squared
lengths.

transformers' own way with a packed row masks a T x T square, which costs what one sequence of T tokens would.
Registered with transformers under NAME; a model that runs with it gets ``sequence_lengths`` as a keyword
argument of its forward and hands it down to every attention layer.

Fails with NotImplementedError for attention that is more than causal dot-product (soft-capped scores, sinks,
a bidirectional layer) and for a model that does not hand the lengths down. The start-up check (check.py)
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
    sequence_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed row, in the form that transformers calls.

    ``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv heads, T, D]; ``sequence_lengths`` sums to T.
    Returns [1, T, heads, D]. ``attention_mask`` is not looked at: the lengths say it all.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sequence_lengths is None:
        raise NotImplementedError(f"{type(module).__name__} is not given the lengths of the packed sequences")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} needs {name}")
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") in (None, True)):
        raise NotImplementedError(f"{type(module).__name__} is not causal")
    outputs = []
    for q, k, v in zip(*(torch.split(x, list(sequence_lengths), dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = mask.tril().triu(1 - sliding_window)[None, None]
        outputs.append(sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=scaling)[0])
    return torch.cat(outputs, dim=1), None
