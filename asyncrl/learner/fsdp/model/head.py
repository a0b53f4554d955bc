"""Log-probs and entropies from hidden states, without the logits of all positions at once.

The head is applied to chunks of positions, in the forward pass and again in the backward pass. Invariant: the gradient
of the head's weights is summed over chunks in float32, in every compute type, so more chunks do not make it worse. A
frozen head gets no gradient and no memory for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 256 << 20
"""Bytes of the float32 logits of one chunk."""


def chunk_size(vocabulary: int) -> int:
    """Positions whose logits are there at once."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and -sum p log p. [N, V], [N] -> two float32 [N].

    With ``entropy_gradient`` the entropy has a gradient, at the cost of one more [N, V] in the backward pass.
    """
    logits = logits.float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        logs = logits - normaliser[:, None]
        # From log p: the derivative of p log p by p is infinite at p = 0, which is 105 nats below the normaliser.
        entropies = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(dim=-1)
    return logprobs, entropies


def find_likeliest(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of log softmax(logits / temperature): [N, V] -> int64 and float32 [N, count], nats."""
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
    """``score_logits`` of ``hidden @ weight.T + bias``: [N, H], [V, H], [V] or None, [N] -> two float32 [N].

    With a ``softcap`` c logits x become c tanh(x / c) before the temperature (Gemma 2, arXiv 2408.00118, section 2).
    """
    size = chunk_size(weight.shape[0])
    scores: tuple[Tensor, Tensor] = _ScoreHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, softcap, entropy_gradient, size
    )
    return scores


class _ScoreHidden(torch.autograd.Function):
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
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.entropy_gradient, ctx.size = entropy_gradient, size
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        for chunk in _chunks(len(hidden), size):
            logits = head_logits(softcap, hidden[chunk], weight, bias)
            logprobs[chunk], entropies[chunk] = score_logits(logits, targets[chunk], temperature)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        of_hidden, head, needed = torch.empty_like(hidden), (weight, bias), ctx.needs_input_grad[1:3]
        # Each chunk's own gradient is of the compute type; only their sum is not.
        sums = [torch.zeros_like(p, dtype=torch.float32) for p, needs in zip(head, needed, strict=True) if needs]
        # Without a gradient the entropies are no output to go back from.
        outputs = slice(None) if ctx.entropy_gradient else slice(1)
        for chunk in _chunks(len(hidden), ctx.size):
            with torch.enable_grad():
                inputs: list[Any] = [
                    None if p is None else p.detach().requires_grad_(needs)
                    for p, needs in zip((hidden[chunk], *head), (True, *needed), strict=True)
                ]
                logits = head_logits(ctx.softcap, *inputs)
                scores = score_logits(logits, targets[chunk], ctx.temperature, entropy_gradient=ctx.entropy_gradient)
            learnt = [p for p in inputs if p is not None and p.requires_grad]
            found = torch.autograd.grad(scores[outputs], learnt, [g[chunk] for g in gradients[outputs]])
            of_hidden[chunk] = found[0]
            for total, part in zip(sums, found[1:], strict=True):
                total += part
        totals = iter(sums)
        of_head = [next(totals).to(weight.dtype) if needs else None for needs in needed]
        return of_hidden, *of_head, None, None, None, None, None


def head_logits(softcap: float | None, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, H] -> [N, V], with the soft cap of ``score_hidden``."""
    logits = F.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
