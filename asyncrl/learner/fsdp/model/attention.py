"""Attention over a packed row: each piece attends to itself and to the piece before it, at the cost of the sum of the
products of their lengths.

transformers' own way with a packed row masks a T x T square, which costs as much as one sequence of T tokens.
Registered with transformers under NAME; a model that runs with it gets ``sequence_lengths``, ``key_lengths`` and
``key_index`` as keyword arguments of its forward and hands them down to every attention layer. Where a piece is a whole
sequence, its keys are its own; a common beginning of several sequences is a piece of its own, whose keys and values are
fetched for each of the rests, and collect the gradients of all.

The lengths are tensors: as numbers they would be guards of torch.compile, and each count of sequences one graph
more. The attention itself stays out of the graphs (``packed_attention`` is the one place that reads the lengths). It
runs where the kernel of varlen.py does not.

Fails with NotImplementedError for attention that is more than causal dot-product, soft-capped or not (sinks,
a bidirectional layer) and for a model that does not hand the lengths down. The start-up check (startup_check.py)
tries it before it is used.
"""

from __future__ import annotations

from itertools import groupby
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
    key_lengths: Tensor | None = None,
    key_index: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed row, in the form that transformers calls.

    ``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv heads, T, D]; ``sequence_lengths`` int64 on the CPU, sums
    to T, and likewise ``key_lengths`` to the K tokens that ``key_index`` fetches; without it keys are as they stand.
    Returns [1, T, heads, D]. ``attention_mask`` is not looked at: the lengths say it all.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    refuse_unknown(module, kwargs, sequence_lengths)
    assert sequence_lengths is not None
    if key_index is None:
        key_lengths = sequence_lengths
    else:
        key, value = key.index_select(2, key_index), value.index_select(2, key_index)
    assert key_lengths is not None
    # Pieces of equal lengths, side by side, are taken together.
    runs = [
        (len(list(run)), *shape)
        for shape, run in groupby(zip(sequence_lengths.tolist(), key_lengths.tolist(), strict=True))
    ]
    queries = torch.split(query, [count * length for count, length, _ in runs], dim=2)
    keys, values = (torch.split(x, [count * length for count, _, length in runs], dim=2) for x in (key, value))
    outputs = []
    for (count, length, seen), q, k, v in zip(runs, queries, keys, values, strict=True):
        # [1, heads, count * length, D] becomes [count, heads, length, D].
        q, k, v = (x[0].view(x.shape[1], count, -1, x.shape[3]).transpose(0, 1) for x in (q, k, v))
        # torch's own causal mask aligns the first query with the first key: it is none behind a common beginning.
        mask = None
        if softcap is not None or length != seen or (sliding_window is not None and length > sliding_window):
            mask = _mask(length, seen, sliding_window, q)
        if softcap is None:
            output = sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=scaling)[0]
        else:
            assert mask is not None
            output = _soft_capped(q, k, v, mask, dropout=dropout, scaling=scaling, softcap=softcap)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


def _mask(length: int, seen: int, window: int | None, like: Tensor) -> Tensor:
    """The mask that is added to the scores of the last ``length`` of ``seen`` tokens: 0 or -inf, [length, seen].

    A position sees itself and those before it, ``window`` in all.
    """
    hidden = torch.full((length, seen), -torch.inf, dtype=like.dtype, device=like.device)
    mask = hidden.triu(1 + seen - length)
    return mask if window is None else mask + hidden.tril(seen - length - window)


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any], lengths: Tensor | None) -> None:
    """Raise NotImplementedError for attention that is more than causal, or that is not told the lengths."""
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
    mask: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention of sequences of equal lengths with scores s bounded as c tanh(s / c) (Gemma 2, arXiv 2408.00118).

    torch's dot-product attention has no such bound, and would leave it out without a word.
    """
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.dropout(weights, dropout, train=dropout > 0.0)
    return (weights @ value).transpose(1, 2)
