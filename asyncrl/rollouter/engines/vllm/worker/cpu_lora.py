"""The arithmetic of the one adapter that an engine on CPU serves: that of slot 0 for every token.

vLLM's own arithmetic, made for many adapters, copies both matrices for each token before it multiplies. That takes
several times as long as the layer itself. Fails with AssertionError if an engine has several slots.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):
    """Adds the adapter in slot 0 to the result of a linear layer for every token."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add ``scale`` x aᵀ bᵀ to y, slice by slice.

        y: [T, the sum of output_slices]; x: [T, in]; each a: [1, 1, rank, in]; each b: [1, 1, out, rank].
        """
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + size].addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)
            start += size


def compute_at_once(manager: Any) -> None:
    """Make all layers of vLLM's LoRAModelManager, which has one slot, compute with OneAdapter. May be repeated."""
    assert manager.lora_slots == 1, "all requests have the same adapter"
    for prefix, wrapper in manager.punica_wrapper_mapping.items():
        if isinstance(wrapper, OneAdapter):
            continue
        one_adapter = OneAdapter(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
        manager.punica_wrapper_mapping[prefix] = one_adapter
        for module in manager.modules.values():
            if module.punica_wrapper is wrapper:
                module.set_mapping(one_adapter)
