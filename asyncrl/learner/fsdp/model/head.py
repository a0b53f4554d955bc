"""The head of a causal LM: computes log-probs and entropies from hidden states, a chunk of logits at a time.

The head is applied in chunks of positions, and again in the backward pass. A chunk's softmax statistics are float32. On
CUDA the arithmetic of a chunk is compiled into two kernels, one forward and one backward; where the compiler fails, it
runs as it is written, which is logged once.

Invariant: the gradient of the head's weights is summed over chunks in float32, in every compute type, so more chunks do
not make it worse. A frozen head gets no gradient and no memory for one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.gpu.learner_memory import CHUNK_BYTES

_LOG = logging.getLogger(__name__)


def chunk_size(vocabulary: int) -> int:
    """Return the number of positions whose logits are in memory at once, for a vocabulary of this size."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature) at the targets, and the entropy -sum p log p, in nats.

    ``logits`` [N, V] and ``targets`` [N] give two float32 [N].

    With ``entropy_gradient`` the entropy has a gradient, at the cost of one more [N, V] in the backward pass.
    """
    logits = logits.float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        logs = logits - normaliser[:, None]
        entropies = _entropies(logs)
    return logprobs, entropies


def find_likeliest(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """Find the ``count`` likeliest tokens and their log-probs: [N, V] -> int64 and float32 [N, count], nats."""
    logits = logits.float() / temperature
    values, tokens = logits.topk(count, dim=-1)
    return tokens, values - torch.logsumexp(logits, dim=-1, keepdim=True)


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``score_logits`` of ``hidden @ weight.T + bias`` chunk by chunk. Returns two float32 [N].

    The shapes are: ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V] or None, ``targets`` [N].

    With a ``softcap`` c logits x become c tanh(x / c) before the temperature (Gemma 2, arXiv 2408.00118, section 2).
    """
    size = chunk_size(weight.shape[0])
    scores: tuple[Tensor, Tensor] = _ScoreHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, softcap, entropy_gradient, size
    )
    return scores


def head_logits(softcap: float | None, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute all logits at once, with the soft cap of ``score_hidden``: ``hidden`` [N, H] -> [N, V]."""
    return _capped(F.linear(hidden, weight, bias), softcap)


class _ScoreHidden(torch.autograd.Function):
    """``score_hidden`` with its own backward pass, so that no chunk's logits are kept for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        entropy_gradient: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        """Score the positions in chunks of ``size``; keep hidden states, entropies and normalisers, but no logits."""
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        scores = _on(hidden.device.type, _scores)
        for chunk in _chunks(len(hidden), size):
            logits = F.linear(hidden[chunk], weight, bias)
            chunk_scores = scores(logits, targets[chunk], temperature, softcap)
            logprobs[chunk], entropies[chunk], normalisers[chunk] = chunk_scores
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, normalisers)
        ctx.temperature, ctx.softcap, ctx.size, ctx.entropy_gradient = temperature, softcap, size, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the logits again, chunk by chunk, and the gradients.

        ``of_x`` is the gradient of the loss with respect to x.
        """
        hidden, weight, bias, targets, entropies, normalisers = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight, of_bias = (
            torch.zeros_like(p, dtype=torch.float32) if needed else None
            for p, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        slopes = _on(hidden.device.type, _slopes)
        for chunk in _chunks(len(hidden), ctx.size):
            of_logits = slopes(
                F.linear(hidden[chunk], weight, bias),
                targets[chunk],
                normalisers[chunk],
                entropies[chunk],
                of_logprobs[chunk],
                of_entropies[chunk] if ctx.entropy_gradient else None,
                ctx.temperature,
                ctx.softcap,
            )
            of_hidden[chunk] = of_logits @ weight
            # A chunk's gradient has the compute type, and is added to a sum in float32.
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[chunk]
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0)
        of_head = (None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias))
        return of_hidden, *of_head, None, None, None, None, None


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a chunk's log-probs, entropies and normalisers (logarithms of the softmax's denominators)."""
    logits = _capped(logits, softcap).float() / temperature
    normalisers = torch.logsumexp(logits, dim=-1)
    logs = logits - normalisers[:, None]
    entropies = _entropies(logs)
    return logs.gather(-1, targets[:, None])[:, 0], entropies, normalisers


def _slopes(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Compute the loss's gradient with respect to a chunk's logits (before the soft cap), in their type.

    ``of_logprobs`` and ``of_entropies`` are the gradients with respect to log-probs and entropies. The latter may be
    missing (None).

    With p the softmax of z, and H its entropy: d log p_t / d z_j = [j = t] - p_j, and d H / d z_j = -p_j (log p_j + H).
    """
    capped = _capped(logits, softcap)
    logs = capped.float() / temperature - normalisers[:, None]
    p = logs.exp()
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    gradient = of_logprobs[:, None] * ((tokens == targets[:, None]).float() - p)
    if of_entropies is not None:
        gradient = gradient - of_entropies[:, None] * p * (_finite(logs) + entropies[:, None])
    if softcap is not None:
        gradient = gradient * (1 - (capped.float() / softcap) ** 2)
    return (gradient / temperature).to(logits.dtype)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _entropies(logs: Tensor) -> Tensor:
    """-sum p log p of log-probs [N, V]: float32 [N]."""
    return -(logs.exp() * _finite(logs)).sum(dim=-1)


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf, the logarithm of probability 0, by the least finite number, so that p log p is 0 and not NaN."""
    return logs.clamp(min=torch.finfo(logs.dtype).min)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


@functools.cache
def _on(device_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a type of device: compiled on CUDA, as it is elsewhere or if compiling fails."""
    if device_type != "cuda":
        return function
    compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*arguments)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                # For example, Triton needs a C compiler.
                _LOG.warning("the head is not compiled: %s: %s", type(error).__name__, error)
                compiled = None
        return function(*arguments)

    return run
