from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from asyncrl.learner.fsdp.model import head
from asyncrl.learner.fsdp.model.head import score_hidden, score_logits

VOCABULARY, WIDTH, COUNT = 64, 16, 50


def _case(dtype: torch.dtype, *, bias: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(COUNT, WIDTH), 0.3 * torch.randn(VOCABULARY, WIDTH)
    shift = torch.randn(VOCABULARY) if bias else None
    leaves = [None if each is None else each.to(dtype).requires_grad_() for each in (hidden, weight, shift)]
    return (*leaves, torch.randint(0, VOCABULARY, (COUNT,)), torch.randn(COUNT), torch.randn(COUNT))


@pytest.mark.parametrize("positions", [1, 7, 50, 1000])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize(("bias", "softcap"), [(True, None), (False, None), (True, 0.5)])
def test_chunks_have_the_values_and_gradients_of_the_whole(
    positions, entropy_gradient, bias, softcap, monkeypatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * positions)
    found = []
    for chunked in (True, False):
        hidden, weight, shift, targets, by_logprob, by_entropy = _case(torch.float32, bias=bias)
        if chunked:
            scores = score_hidden(
                hidden, weight, shift, targets, 0.7, softcap=softcap, entropy_gradient=entropy_gradient
            )
        else:
            logits = F.linear(hidden, weight, shift)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            scores = score_logits(logits, targets, 0.7, entropy_gradient=entropy_gradient)
        assert scores[1].requires_grad == entropy_gradient
        total = (scores[0] * by_logprob).sum()
        if entropy_gradient:
            total = total + (scores[1] * by_entropy).sum()
        total.backward()
        leaves = [each for each in (hidden, weight, shift) if each is not None]
        found.append([*(s.detach() for s in scores), *(each.grad for each in leaves)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_what_is_below_it_the_same(monkeypatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * 7)
    found = []
    for is_frozen in (False, True):
        hidden, weight, shift, targets, by_logprob, _ = _case(torch.float32, bias=True)
        for each in (weight, shift):
            each.requires_grad_(not is_frozen)
        (score_hidden(hidden, weight, shift, targets, 0.7)[0] * by_logprob).sum().backward()
        found.append(hidden.grad)
        assert (weight.grad is None, shift.grad is None) == (is_frozen, is_frozen)
    assert torch.equal(*found)


def test_more_chunks_do_not_make_the_gradient_of_the_head_worse(monkeypatch) -> None:
    """Advantages of both signs, as in a step: what the parts sum to is small beside them."""
    torch.manual_seed(0)
    count = 4096
    hidden, weight = torch.randn(count, 64).bfloat16(), (0.05 * torch.randn(1024, 64)).bfloat16()
    targets, advantages = torch.randint(0, 1024, (count,)), torch.randn(count).sign() + 0.05

    def gradient(dtype: torch.dtype, positions: int) -> torch.Tensor:
        monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 1024 * positions)
        leaf = weight.to(dtype, copy=True).requires_grad_()
        (score_hidden(hidden.to(dtype), leaf, None, targets, 1.0)[0] * advantages / count).sum().backward()
        return leaf.grad.double()

    truth = gradient(torch.float64, count)
    errors = [float((gradient(torch.bfloat16, n) - truth).norm() / truth.norm()) for n in (count, count // 64)]
    assert errors[1] < 1.5 * errors[0] < 0.01
