"""Attention over a packed row of T tokens, without the cost of a T x T square.

A row is a list of pieces. A piece is a whole sequence, a beginning that several sequences share, or the rest of such a
sequence. A position attends to itself and the earlier positions of its own piece. If the piece has a prefix (a shared
beginning), the position also attends to all of that. A piece costs its length times the number of tokens that it
attends to. transformers instead masks a T x T square. There are two implementations, each registered with transformers
under its own name:

    VARLEN   one kernel: torch.nn.attention.varlen, which is flash attention on CUDA
    PACKED   torch's dot-product attention, once for each run of equally long pieces; VARLEN's fallback

A model that runs with one of them gets ``sequence_lengths``, ``key_lengths`` and ``key_index`` as keyword arguments of
its forward. It passes them to every attention layer. VARLEN also needs ``cu_seqlens``, ``cu_seqlens_k`` and
``max_seqlen``. ``key_index`` copies the keys and values of a shared beginning for each of its sequences, so they
collect the gradients of all.

If ranks share a row (packed_row.py), both implementations are wrapped: they get all tokens and some of the heads.

PACKED reads the lengths from tensors, outside the graphs of torch.compile. As numbers they would be guards, and each
count of sequences would need another graph. VARLEN reads no values of a tensor, so a compiled layer stays one graph for
every packing, and one more for shared beginnings. A layer that asks for more than the kernel can do takes PACKED;
``refusal`` gives the reason. attention_kernels.py chooses the kernel and tries it.

Computes causal dot-product attention, soft-capped or not. Fails with NotImplementedError for any other (sinks, a
bidirectional layer), and for a model that does not pass the lengths on. The checks at start (startup_check.py,
sharded_check.py) try both implementations before training uses one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from asyncrl.learner.fsdp.model.packed_row import sharing_heads

PACKED, VARLEN = "asyncrl_packed", "asyncrl_varlen"
"""Values of transformers' ``attn_implementation``."""
DEVICE = "cuda"
"""Type of device for which torch has the kernel."""
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""The kernel supports heads whose dimension is a multiple of the first number, up to the second."""
LEAST_LONGEST = 128
"""Least value of ``max_seqlen``: a block of the kernel."""
# Whether keys and values may have fewer heads than queries; before torch 2.12 they may not.
_HAS_GQA = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a row of T tokens, in the order of the row (algorithm/packing.py)."""

    lengths: tuple[int, ...]
    """Length of each piece; sums to T."""
    key_lengths: tuple[int, ...]
    """Number of tokens that each piece attends to: its prefix and itself; sums to K."""
    positions: np.ndarray
    """Position of each token, from 0 in each sequence: int64 [T]."""
    key_index: np.ndarray | None
    """Indices in the row of the tokens that each piece attends to, piece by piece: int64 [K]. None if no piece has a
    prefix, since it would be 0 to T - 1."""


def connect(lengths: Sequence[int] | np.ndarray, prefixes: Sequence[int] | np.ndarray | None = None) -> Pieces:
    """Describe the pieces of a row, given their lengths.

    ``prefixes`` has for each piece the index of its prefix among the pieces, or -1; None if no piece has a prefix.
    """
    own = np.asarray(lengths, np.int64)
    prefix = np.full(len(own), -1) if prefixes is None else np.asarray(prefixes)
    starts = np.cumsum(own) - own
    # Without a prefix (-1), ``own[prefix]`` is the last length; ``where`` replaces it by 0.
    prefix_lengths = np.where(prefix >= 0, own[prefix], 0)
    index: np.ndarray | None = None
    if (prefix >= 0).any():
        # For each piece its prefix, if it has one, and then the piece itself.
        seen = [piece for pair in zip(prefix.tolist(), range(len(own)), strict=True) for piece in pair if piece >= 0]
        index = np.concatenate([np.arange(starts[piece], starts[piece] + own[piece]) for piece in seen])
    return Pieces(
        lengths=tuple(own.tolist()),
        key_lengths=tuple((own + prefix_lengths).tolist()),
        # A piece with a prefix continues the positions of the prefix.
        positions=np.arange(own.sum()) - np.repeat(starts - prefix_lengths, own),
        key_index=index,
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a layer: numbers of heads of queries and of keys, and their width."""

    queries: int
    keys: int
    width: int
    """Dimension of each head."""
    softcap: float | None = None
    """Bound c of the scores s, which become c tanh(s / c); None without one."""


def register() -> None:
    """Make PACKED and VARLEN values of transformers' ``attn_implementation``. Idempotent."""
    from transformers import AttentionInterface

    # The wrapper is not compiled either: its graph would break at the call of ``packed_attention``.
    whole: Any = torch.compiler.disable(sharing_heads(packed_attention))  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED, whole)
    AttentionInterface.register(VARLEN, sharing_heads(varlen_attention))


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
    """PACKED: compute causal attention over one packed row, with the signature that transformers calls.

    ``query`` is [1, heads, T, D], ``key`` and ``value`` are [1, kv heads, T, D]. ``sequence_lengths``, ``key_lengths``
    and ``key_index`` are those of Pieces, the lengths as int64 on the CPU. Returns [1, T, heads, D]. Neighbouring
    pieces of equal lengths are computed in one call. ``attention_mask`` is ignored: the lengths replace it.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    refuse_unsupported(module, kwargs, sequence_lengths)
    assert sequence_lengths is not None
    if key_index is None:
        key_lengths = sequence_lengths
    else:
        key, value = key.index_select(2, key_index), value.index_select(2, key_index)
    assert key_lengths is not None
    each = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", each) != each:
        # Ranks that share rows have repeated the keys. transformers reads the number of queries per key from the layer.
        module = cast("nn.Module", SimpleNamespace(num_key_value_groups=each))
    # A run is (number of pieces, length, key length) of neighbouring pieces with equal lengths.
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
        # Without a mask torch takes its own causal one. That aligns the first query with the first key, which is wrong
        # for a piece with a prefix.
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
    """Make the mask to add to the scores of a piece: 0 or -inf, [length, seen].

    The piece is the last ``length`` of ``seen`` tokens. A position sees itself and those before it, ``window`` in all.
    """
    hidden = torch.full((length, seen), -torch.inf, dtype=like.dtype, device=like.device)
    mask = hidden.triu(1 + seen - length)
    return mask if window is None else mask + hidden.tril(seen - length - window)


def refuse_unsupported(module: nn.Module, kwargs: dict[str, Any], lengths: Tensor | None) -> None:
    """Raise NotImplementedError if the layer is not causal or has sinks, or if the model does not pass the lengths."""
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
    """Compute attention of pieces of equal lengths, with scores s bounded as c tanh(s / c) (arXiv 2408.00118).

    torch's dot-product attention has no such bound, and would silently leave it out.
    """
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.dropout(weights, dropout, train=dropout > 0.0)
    return (weights @ value).transpose(1, 2)


def refusal(
    *, device: str, dtype: torch.dtype, head: int, value_head: int, softcap: float | None = None, dropout: float = 0.0
) -> str | None:
    """Return the reason that VARLEN's kernel cannot compute attention with these properties; None if it can. Pure.

    ``head`` and ``value_head`` are the dimensions of a head of queries and of values.
    """
    if device != DEVICE:
        return f"the kernel is for {DEVICE} alone"
    if dtype not in (torch.bfloat16, torch.float16):
        return "the kernel computes in bfloat16 and float16 alone"
    if head != value_head:
        return "heads of values have another dimension than those of queries"
    if head % HEAD_MULTIPLE or head > LARGEST_HEAD:
        return f"the kernel has heads of a multiple of {HEAD_MULTIPLE} up to {LARGEST_HEAD} dimensions"
    if softcap is not None:
        return "the kernel has no soft cap"
    if dropout:
        return "the kernel has no dropout"
    return None


def round_longest(length: int) -> int:
    """Round a longest length up to a power of 2, at least LEAST_LONGEST, for ``max_seqlen``.

    So few different values occur: torch.compile may build a graph for each.
    """
    return max(LEAST_LONGEST, 1 << (length - 1).bit_length())


def cumulate(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``cu_seqlens`` for these lengths: the beginning of each piece, and the end, int32 [pieces + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def varlen_attention(
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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int = 0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """VARLEN: compute the same as ``packed_attention``, in one kernel.

    Calls ``packed_attention`` if the kernel cannot compute this layer (``refusal``).
    """
    reason = refusal(
        device=query.device.type,
        dtype=query.dtype,
        head=query.shape[-1],
        value_head=value.shape[-1],
        softcap=softcap,
        dropout=dropout,
    )
    if reason is not None:
        attended: tuple[Tensor, None] = packed_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            sequence_lengths=sequence_lengths,
            key_lengths=key_lengths,
            key_index=key_index,
            softcap=softcap,
            **kwargs,
        )
        return attended
    refuse_unsupported(module, kwargs, cu_seqlens)
    assert cu_seqlens is not None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if key_index is not None:
        # Copied in float32, so that the gradients of a shared key are summed in float32.
        key, value = (x.float().index_select(0, key_index).to(x.dtype) for x in (key, value))
    output = attend(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen,
        scaling=scaling,
        sliding_window=sliding_window,
    )
    return output[None], None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Call the kernel: ``query`` [T, heads, D], ``key`` and ``value`` [K, kv heads, D]; returns [T, heads, D].

    With a ``sliding_window`` a position sees itself and the ``sliding_window`` - 1 before it.
    """
    gqa = query.shape[1] != key.shape[1]
    if gqa and not _HAS_GQA:
        each = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    # Positions that are seen before and after each one, not counting itself; -1 is no limit.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    named: dict[str, Any] = {"enable_gqa": gqa} if _HAS_GQA else {}
    output = varlen.varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen, scale=scaling, window_size=window, **named
    )
    assert isinstance(output, Tensor)
    return output
