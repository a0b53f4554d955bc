"""Attention over a packed row in one kernel: torch.nn.attention.varlen, which is flash attention on CUDA.

Registered with transformers under NAME. A model that runs with it gets, beside ``sequence_lengths`` (attention.py),
``cu_seqlens`` and ``cu_seqlens_k``, int32 [pieces + 1] on the device, and ``max_seqlen``, all made once a row. The
kernel aligns the queries of a piece with the last of its keys. Nothing here reads values of a tensor, so a compiled
layer stays one graph for every packing, and one more where something is shared.

A layer that asks for more than the kernel can do is attended to sequence by sequence, as attention.py does; ``refusal``
gives the reason. ``kernel_problem`` tries the kernel, forward and backward, where it is to run: the start-up check
(sharded_check.py) asks it first, and then holds the whole model against one sequence a row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from asyncrl.learner.fsdp.model.attention import packed_attention, refuse_unknown
from asyncrl.learner.fsdp.model.pieces import connect

NAME = "asyncrl_varlen"
DEVICE = "cuda"
"""Type of device for which torch has the kernel."""
CAPABILITY = (8, 0)
"""Least capability of a device (Ampere)."""
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Dimensions of a head for which there is a kernel: multiples of the first number up to the second."""
LEAST_LONGEST = 128
"""Least value of ``max_seqlen``: a block of the kernel."""
# Some pieces are a token, some longer than the window, none of a round length; two are behind the third.
TRIED_LENGTHS = (33, 1, 70, 20, 1)
TRIED_PREFIXES = (-1, -1, -1, 2, 2)
TRIED_WINDOW = 16
TRIED_DISTANCE = 0.05
"""Largest distance of the kernel's results from float32, relative to their size; rounding to bfloat16 is 0.002."""
# Before torch 2.12 keys and values need as many heads as queries.
_HAS_GQA = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a layer."""

    queries: int
    keys: int
    width: int
    """Dimension of each head."""
    softcap: float | None = None
    """Bound of the scores."""


def register() -> None:
    """Make NAME a value of transformers' ``attn_implementation``. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)


def refusal(
    *, device: str, dtype: torch.dtype, head: int, value_head: int, softcap: float | None = None, dropout: float = 0.0
) -> str | None:
    """Reason that the kernel cannot attend so, None where it can; ``head`` and ``value_head`` are dimensions. Pure."""
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
    """``max_seqlen`` for a longest sequence: the next power of 2, so that there are few, should one make a graph."""
    return max(LEAST_LONGEST, 1 << (length - 1).bit_length())


def cumulate(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths: int32 [sequences + 1], the beginning of each, and the end."""
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
    """Causal attention of one packed row, in the form that transformers calls; as ``packed_attention``."""
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
    refuse_unknown(module, kwargs, cu_seqlens)
    assert cu_seqlens is not None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if key_index is not None:
        # In float32, so that the gradients of all who share a key are summed in it.
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
    """The kernel: ``query`` [T, heads, D], ``key`` and ``value`` [K, kv heads, D]; returns [T, heads, D].

    A position sees itself and the ``sliding_window`` - 1 before it.
    """
    gqa = query.shape[1] != key.shape[1]
    if gqa and not _HAS_GQA:
        each = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    # The kernel counts positions before it.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    named: dict[str, Any] = {"enable_gqa": gqa} if _HAS_GQA else {}
    output = varlen.varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen, scale=scaling, window_size=window, **named
    )
    assert isinstance(output, Tensor)
    return output


def kernel_problem(device: torch.device, dtype: torch.dtype, heads: Heads, *, windowed: bool) -> str | None:
    """Reason that this device cannot use the kernel, None where it can: tried on random numbers, gradients as well."""
    reason = refusal(device=device.type, dtype=dtype, head=heads.width, value_head=heads.width, softcap=heads.softcap)
    if reason is None and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        reason = f"the kernel needs a device of capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    if reason is not None:
        return reason
    generator, pieces = torch.Generator().manual_seed(0), connect(TRIED_LENGTHS, TRIED_PREFIXES)
    values = [
        torch.randn(1, count, sum(pieces.lengths), heads.width, generator=generator).to(device, dtype)
        for count in (heads.queries, heads.keys, heads.keys)
    ]
    window = TRIED_WINDOW if windowed else None
    told = {
        "sliding_window": window,
        "sequence_lengths": torch.tensor(pieces.lengths),
        "key_lengths": torch.tensor(pieces.key_lengths),
        "key_index": torch.as_tensor(pieces.key_index).to(device),
        "cu_seqlens": cumulate(pieces.lengths, device),
        "cu_seqlens_k": cumulate(pieces.key_lengths, device),
        "max_seqlen": round_longest(max(pieces.key_lengths)),
    }
    module = nn.Module()
    module.num_key_value_groups = heads.queries // heads.keys  # type: ignore[assignment]
    try:
        found = _with_gradients(varlen_attention, module, values, told)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    exact = _with_gradients(packed_attention, module, [x.float() for x in values], told)
    for ours, truth in zip(found, exact, strict=True):
        distance = float((ours.float() - truth).norm() / truth.norm())
        # A distance that is no number fails, too.
        if not distance <= TRIED_DISTANCE:
            return f"what the kernel gives is {distance:.2g} away from float32, relative to its size"
    return None


def _with_gradients(attention: Any, module: nn.Module, values: list[Tensor], told: dict[str, Any]) -> list[Tensor]:
    """Output of an attention, and the gradient of its sum of squares by query, key and value."""
    leaves = [x.detach().requires_grad_() for x in values]
    output = attention(module, *leaves, None, **told)[0]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]
