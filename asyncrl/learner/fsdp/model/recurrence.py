"""Keeps the sequences of a packed row apart in modules that carry a state from token to token.

Hybrid models (Qwen3.5, Qwen3-Next, LFM2, Falcon-H1) have such recurrent modules: linear attention, state spaces, short
convolutions. transformers carries their state from one sequence of a row to the next. ``separate`` makes them compute
each sequence alone:

    kernels   one call, given where the sequences begin: a gated delta rule on CUDA, with the packages KERNELS
    in turn   one call for each sequence; for everything else

Recurrent modules compute whole sequences. The hidden states of a shared beginning are copied for each of its sequences,
as attention.py copies keys and values. So a shared beginning passes recurrent modules once for each of its sequences,
and all other modules once.

Invariant: a layer that activation checkpointing computes again has the same boundaries, since they are arguments of the
layer. A module is found by its convolution; the check at start (startup_check.py) finds a model with other recurrent
modules, whose sequences then get a row each. It also tries the kernels.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.learner.fsdp.model import attention

KERNELS = ("fla", "causal_conv1d")
"""Packages whose kernels transformers calls for a gated delta rule, and passes the boundaries on to."""


@dataclass
class _Row:
    """The row that a layer computes: arguments of attention.packed_attention, None under other attention than ours."""

    lengths: Tensor | None = None
    key_lengths: Tensor | None = None
    key_index: Tensor | None = None


def recurrent_modules(layer: nn.Module) -> list[nn.Module]:
    """Find the modules of a decoder layer that carry a state from token to token: each of them owns a convolution."""
    return [module for module in layer.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]


def separate(layer: nn.Module) -> None:
    """Make the recurrent modules of a decoder layer compute each sequence of a packed row alone, in place."""
    modules = recurrent_modules(layer)
    if not modules:
        return
    row = _Row()
    # Not every layer passes its arguments on to its recurrent modules.
    layer.forward = functools.partial(_note_row, row, layer.forward)
    for module in modules:
        takes_boundaries = type(module).__name__.endswith("GatedDeltaNet")
        module.forward = functools.partial(_compute, row, module.forward, takes_boundaries)


def _note_row(row: _Row, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a layer's ``forward``, and note the boundaries among its arguments in ``row``."""
    row.lengths, row.key_lengths = named.get("sequence_lengths"), named.get("key_lengths")
    row.key_index = named.get("key_index")
    return forward(*arguments, **named)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compute(
    row: _Row, forward: Callable[..., Tensor], takes_boundaries: bool, hidden_states: Tensor, **named: Any
) -> Tensor:
    """Call a recurrent module's ``forward`` for each sequence of ``row``: [1, T, H] to [1, T, H].

    ``takes_boundaries``: whether it passes boundaries on to KERNELS. ``named`` are transformers' arguments, among them
    those of attention. They are dropped for a packed row, which has no cache and no padding.
    """
    if row.lengths is None or row.key_lengths is None:
        # Other attention than PACKED and VARLEN gives no boundaries: the row is computed as one sequence.
        return forward(hidden_states, **named)
    lengths, key_lengths = row.lengths.tolist(), row.key_lengths.tolist()
    if row.key_index is not None:
        # Copied in float32, so that the gradients of a shared beginning are summed in float32.
        hidden_states = hidden_states.float().index_select(1, row.key_index).to(hidden_states.dtype)
    if takes_boundaries and hidden_states.device.type == attention.DEVICE and has_kernels():
        ends = nn.functional.pad(row.key_lengths.cumsum(0), (1, 0))
        numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(row.key_lengths)[None]
        device = hidden_states.device
        whole = forward(hidden_states, cu_seq_lens_q=ends.to(device), seq_idx=numbers.to(device))
        outputs = torch.split(whole, key_lengths, dim=1)
    else:
        outputs = tuple(forward(sequence) for sequence in torch.split(hidden_states, key_lengths, dim=1))
    # The outputs of a shared beginning belong to another piece of the row, so each piece keeps its own alone.
    owned = [output[:, output.shape[1] - length :] for output, length in zip(outputs, lengths, strict=True)]
    return torch.cat(owned, dim=1)


@functools.cache
def has_kernels() -> bool:
    """Whether KERNELS are installed."""
    return all(importlib.util.find_spec(name) is not None for name in KERNELS)
