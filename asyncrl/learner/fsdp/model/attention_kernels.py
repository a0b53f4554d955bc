"""Chooses the kernel that VARLEN (attention.py) calls: the fastest one that is installed and computes correctly.

torch has kernels of its own, FlashAttention 2. FlashAttention 4 and 3 are packages, which ``use_kernel`` puts in their
place for the whole process. ``kernel_problem`` tries the present kernel on the device, forward and backward, against
float32.

Invariant: ``choose_kernel`` chooses the same kernel on all ranks, after each of them has tried it. A kernel that does
not work is not used, and the reason is returned.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from asyncrl.learner.fsdp.model import attention


class Kernel(NamedTuple):
    """A package with kernels that torch can call."""

    name: str
    """Its name in torch."""
    title: str
    module: str
    """Module that the package must have."""
    majors: tuple[int, ...]
    """Major numbers of the CUDA compute capabilities that it supports."""


KERNELS = (
    Kernel("FA4", "FlashAttention 4", "flash_attn.cute.interface", (9, 10)),
    Kernel("FA3", "FlashAttention 3", "flash_attn_interface", (9,)),
)
"""The packages, the fastest first."""
ABSENT = "it is not installed"
"""Problem of a package that is not there, which ``choose_kernel`` does not report."""
CAPABILITY = (8, 0)
"""Least CUDA compute capability of a device (Ampere)."""
# The row on which ``kernel_problem`` tries the kernel: two pieces have the third as their prefix. Some pieces have one
# token, some are longer than the window, one has several blocks, and no length is a multiple of a block.
TRIED_LENGTHS = (33, 1, 70, 20, 1, 333)
TRIED_PREFIXES = (-1, -1, -1, 2, 2, -1)
TRIED_WINDOW = 16
TRIED_DISTANCE = 0.05
"""Largest relative error of the kernel's results against float32; rounding to bfloat16 alone gives 0.002."""


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    heads: attention.Heads,
    *,
    windowed: bool,
    agree: Callable[[str | None, str], list[str]],
    is_policy: bool = True,
) -> tuple[str | None, list[str]]:
    """All ranks together: let torch call the fastest kernel that works on every rank for the policy's heads.

    The choice holds for the whole process. So for another model (not ``is_policy``), which is loaded later, only the
    kernel of the policy is tried. ``agree`` returns the problems of all ranks (``Ranks.agree``). Returns the problem if
    no kernel works, else None; and a text for each installed package that does not work.
    """
    if not is_policy:
        problems = agree(
            kernel_problem(device, dtype, heads, windowed=windowed), "the check of attention in one kernel"
        )
        return (problems[0] if problems else None), []
    texts = list[str]()
    for kernel in (*KERNELS, None):
        problem = use_kernel(kernel, device)
        if problem is None:
            problem = kernel_problem(device, dtype, heads, windowed=windowed)
        title = "torch's own kernel" if kernel is None else kernel.title
        problems = agree(problem, f"the check of attention in one kernel, {title}")
        if not problems:
            return None, texts
        if kernel is None:
            return problems[0], texts
        if any(problem != ABSENT for problem in problems):
            texts.append(f"{title} is not used for attention: {next(each for each in problems if each != ABSENT)}")
    raise AssertionError("torch's own kernel is the last")


def use_kernel(kernel: Kernel | None, device: torch.device) -> str | None:
    """Let torch call this kernel, or its own (None), from now on in this process. Returns the reason if it cannot."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if kernel is None:
        return None
    if kernel.name not in list_flash_attention_impls():
        return ABSENT
    if (problem := _import_problem(kernel.module)) is not None:
        return problem
    if torch.cuda.get_device_capability(device)[0] not in kernel.majors:
        return f"it supports devices of capability {' and '.join(f'{major}.x' for major in kernel.majors)}"
    try:
        activate_flash_attention_impl(kernel.name)
    except Exception as error:
        # Importing the package runs its code, which raises errors of any type.
        return f"{type(error).__name__}: {error}"
    return None


def _import_problem(module: str) -> str | None:
    """Return the reason that a module of a package is not there; None if it is."""
    try:
        return None if importlib.util.find_spec(module) is not None else ABSENT
    except ModuleNotFoundError:
        return ABSENT
    except Exception as error:
        # Looking for a module runs the code of the packages above it, which raises errors of any type.
        return f"{type(error).__name__}: {error}"


def kernel_problem(device: torch.device, dtype: torch.dtype, heads: attention.Heads, *, windowed: bool) -> str | None:
    """Return the reason that the kernel which torch now calls does not work on this device; None if it does.

    Runs the kernel on random numbers, forward and backward, and compares the results with PACKED in float32.
    ``windowed``: whether the model has a sliding window.
    """
    reason = attention.refusal(
        device=device.type, dtype=dtype, head=heads.width, value_head=heads.width, softcap=heads.softcap
    )
    if reason is None and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        reason = f"the kernel needs a device of capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    if reason is not None:
        return reason
    generator, pieces = torch.Generator().manual_seed(0), attention.connect(TRIED_LENGTHS, TRIED_PREFIXES)
    values = [
        torch.randn(1, count, sum(pieces.lengths), heads.width, generator=generator).to(device, dtype)
        for count in (heads.queries, heads.keys, heads.keys)
    ]
    window = TRIED_WINDOW if windowed else None
    arguments = {
        "sliding_window": window,
        "sequence_lengths": torch.tensor(pieces.lengths),
        "key_lengths": torch.tensor(pieces.key_lengths),
        "key_index": torch.as_tensor(pieces.key_index).to(device),
        "cu_seqlens": attention.cumulate(pieces.lengths, device),
        "cu_seqlens_k": attention.cumulate(pieces.key_lengths, device),
        "max_seqlen": attention.round_longest(max(pieces.key_lengths)),
    }
    module = nn.Module()
    # transformers reads from the layer how many query heads share a key head.
    module.num_key_value_groups = heads.queries // heads.keys  # type: ignore[assignment]
    try:
        results = _with_gradients(attention.varlen_attention, module, values, arguments)
        expected = _with_gradients(attention.packed_attention, module, [x.float() for x in values], arguments)
        distances = [
            float((result.float() - truth).norm() / truth.norm())
            for result, truth in zip(results, expected, strict=True)
        ]
    except Exception as error:
        # A package that compiles its kernel at the first call raises errors of any type, and the device reports some of
        # them only when a result is read.
        return f"{type(error).__name__}: {error}"
    # Written with ``not``, so that NaN fails too.
    if wrong := [distance for distance in distances if not distance <= TRIED_DISTANCE]:
        return f"what the kernel gives is {wrong[0]:.2g} away from float32, relative to its size"
    return None


def _with_gradients(attend: Any, module: nn.Module, values: list[Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    """Return the output of an attention, and the gradients of its sum of squares by query, key and value."""
    leaves = [x.detach().requires_grad_() for x in values]
    output = attend(module, *leaves, None, **arguments)[0]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]
