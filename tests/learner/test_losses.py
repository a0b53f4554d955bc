from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.learner.aggregation import step_denominator, token_weight
from asyncrl.learner.losses import TokenSums, decoupled_loss, token_sums

CAP = 2.0


def _case(seed: int, n: int = 200) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(n, generator=random)
    return {
        "logprobs": logprobs,
        "behaviour": logprobs + 0.7 * torch.randn(n, generator=random),
        "advantages": torch.randn(n, generator=random),
        "weights": torch.rand(n, generator=random) + 0.1,
    }


def test_loss_and_gradient_are_those_of_the_formula() -> None:
    case = _case(0)
    logprobs = case["logprobs"].requires_grad_()
    loss = decoupled_loss(logprobs, *list(case.values())[1:], denominator=37.0, cap=CAP)
    loss.backward()
    theta, mu, a, w = (t.detach().double().tolist() for t in case.values())
    importance = [min(math.exp(p - q), CAP) for p, q in zip(theta, mu, strict=True)]
    terms = [-wi * ri * ai / 37.0 for wi, ri, ai in zip(w, importance, a, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(terms), rel=1e-5)
    # d/dlogpi of pi/sg(pi) is 1: the gradient at each token is its own term.
    np.testing.assert_allclose(logprobs.grad.double().numpy(), terms, rtol=1e-5, atol=1e-8)


def test_an_absurd_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    behaviour = torch.tensor([-1e4, 0.0])
    ones = torch.ones(2)
    loss = decoupled_loss(logprobs, behaviour, ones, ones, denominator=1.0, cap=CAP)
    assert float(loss.detach()) == pytest.approx(-2.0, abs=1e-6)
    sums = TokenSums(*token_sums(logprobs, behaviour, ones, ones, ones > 0, cap=CAP).tolist())
    assert all(math.isfinite(value) for value in sums.metrics().values())


def test_a_log_prob_that_is_no_number_is_not_hidden() -> None:
    nan = torch.tensor([float("nan")])
    one = torch.ones(1)
    assert math.isnan(decoupled_loss(nan, -one, one, one, denominator=1.0, cap=CAP))
    assert math.isnan(decoupled_loss(-one, nan, one, one, denominator=1.0, cap=CAP))


def test_statistics_against_a_float64_reference() -> None:
    case = _case(1)
    random = torch.Generator().manual_seed(2)
    entropies = torch.rand(200, generator=random)
    weights, fresh = case["weights"].clone(), torch.rand(200, generator=random) < 0.3
    weights[:20] = 0.0
    total = TokenSums()
    for part in (slice(0, 70), slice(70, 200)):
        values = token_sums(
            case["logprobs"][part], case["behaviour"][part], entropies[part], weights[part], fresh[part], cap=CAP
        )
        total.add(TokenSums(*values.tolist()))
    metrics = total.metrics()
    keep = weights.numpy() > 0
    d = (case["logprobs"].double() - case["behaviour"].double()).numpy()[keep]
    r, new = np.exp(d), fresh.numpy()[keep]
    k3 = r - 1 - d
    assert metrics == pytest.approx(
        {
            "policy/entropy": entropies.double().numpy()[keep].mean(),
            "policy/ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
            "policy/behaviour_kl": k3.mean(),
            "policy/tis_clipped_fraction": (r > CAP).mean(),
            "policy/ratio_max": r.max(),
            "policy/engine_kl": k3[new].mean(),
            "policy/engine_kl_tokens": new.sum(),
        },
        rel=1e-6,
    )


def test_no_number_without_tokens() -> None:
    assert TokenSums().metrics() == {}
    assert "policy/engine_kl" not in TokenSums(count=1, ratio=1, ratio_squared=1).metrics()


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [("token", [1, 1, 1], 10.0), ("sequence", [1.0, 0.25, 0.2], 3.0), ("constant", [1, 1, 1], 96.0)],
)
def test_aggregation(aggregation: str, weights: list[float], denominator: float) -> None:
    counts = [1, 4, 5]
    assert [token_weight(aggregation, c) for c in counts] == weights
    assert step_denominator(aggregation, counts, 32) == denominator
    assert step_denominator(aggregation, [], 32) == 1.0
