"""The objective of a step and its statistics, against plain Python, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import by_sequence, make_batch
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.algorithm import CorrectionConfig, RejectConfig
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.losses import BUILT_IN, TokenBatch, TokenSums, correction, kl_losses, token_sums
from asyncrl.learner.algorithm.user_functions import find_loss, make_objective

CAP = 1.3
CONFIGS = [
    CorrectionConfig(weight="none"),
    CorrectionConfig(weight="token"),
    CorrectionConfig(weight="sequence"),
    CorrectionConfig(weight="none", mask=(0.8, 1.25)),
    CorrectionConfig(weight="token", mask=(0.5, 5.0), reject=RejectConfig(estimator="k3", over="mean", limit=0.05)),
    *(
        CorrectionConfig(weight="none", reject=RejectConfig(estimator=estimator, over=over, limit=0.2))
        for estimator, over in (("k1", "mean"), ("k2", "sum"), ("k3", "max"))
    ),
]


def _factor(tokens: list[dict[str, float]], config: CorrectionConfig) -> list[float]:
    """The factors of a sequence, one token after the other."""
    logs = [t["proximal"] - t["behaviour"] for t in tokens]
    found = []
    for log in logs:
        factor = 1.0
        if config.weight == "token":
            factor = min(math.exp(log), CAP)
        elif config.weight == "sequence":
            factor = min(math.exp(sum(logs)), CAP)
        if config.mask is not None and not config.mask[0] <= math.exp(log) <= config.mask[1]:
            factor = 0.0
        found.append(factor)
    if config.reject is not None:
        estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
        values = [estimate[config.reject.estimator](log) for log in logs]
        measure = {
            "mean": lambda v: abs(sum(v) / len(v)),
            "sum": lambda v: abs(sum(v)),
            "max": lambda v: max(map(abs, v)),
        }
        if measure[config.reject.over](values) > config.reject.limit:
            found = [0.0] * len(found)
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_dump_json(exclude_defaults=True))
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32 - 1))
def test_the_correction_factor_of_each_token_matches_the_formula(config, seed) -> None:
    batch = make_batch(seed, drift=0.4)
    found, sums = correction(batch, config, CAP)
    expected = np.concatenate([_factor(tokens, config) for tokens in by_sequence(batch)])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert not found.requires_grad
    real = batch.weights.numpy() > 0
    dropped = sum(int(count) for count in sums.values())
    assert dropped >= int(((expected == 0.0) & real).sum())


def test_a_correction_factor_of_nan_stays_visible() -> None:
    batch = make_batch(4)
    nan = batch.behaviour.clone()
    nan[0] = math.nan
    for config in CONFIGS[:2]:
        found, _ = make_objective(LearnerConfig(correction=config))(replace(batch, behaviour=nan), 1.0)
        assert config.weight == "none" or math.isnan(found.detach())


# --- the divergence from the reference ---


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32 - 1))
def test_kl_in_the_loss_matches_the_formula(name, seed) -> None:
    batch = make_batch(seed)
    found = kl_losses(batch, name, CAP)
    found.sum().backward()
    values, gradient = [], []
    for t in (t for tokens in by_sequence(batch) for t in tokens):
        x, ratio = t["reference"] - t["logprobs"], math.exp(t["logprobs"] - t["behaviour"])
        weight, slope = min(ratio, CAP), ratio if ratio < CAP else 0.0
        value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[name]
        by_itself = {"k1": 1.0, "k2": -x, "k3": 1 - math.exp(x)}[name]
        values.append(weight * value)
        gradient.append(weight * by_itself + (0.0 if name == "k2" else slope * value))
    np.testing.assert_allclose(found.detach(), values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(batch.logprobs.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_in_the_loss_has_the_gradient_of_the_divergence_on_average(name) -> None:
    """Over all tokens of a small vocabulary, each as often as the behaviour samples it."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference, behaviour = (torch.log_softmax(torch.randn(6, dtype=torch.float64), 0) for _ in range(2))
    logprobs = torch.log_softmax(logits, 0)
    batch = replace(
        make_batch(0),
        logprobs=logprobs,
        behaviour=behaviour,
        reference=reference,
        segments=torch.arange(6),
        sequences=6,
    )
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    estimate = (behaviour.exp() * kl_losses(batch, name, cap=1e9)).sum()
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, expected)


# --- the whole objective ---


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("weight", ["auto", "none"])
def test_the_objective_is_the_weighted_sum_of_its_parts(name, weight) -> None:
    batch, needs = make_batch(11), find_loss(LearnerConfig(loss=name))[1]
    config = LearnerConfig(
        loss=name,
        teacher="folder" if needs.teacher else None,
        tis_cap=CAP,
        correction=CorrectionConfig(weight=weight),
        kl={"coefficient": 0.3, "estimator": "k3"},
        entropy_bonus=0.2,
    )
    objective = make_objective(config)
    assert objective.needs_reference
    assert objective.needs_entropy_gradient
    found, sums = objective(batch, 7.0)
    values, _ = BUILT_IN[name](batch=batch)
    factor = torch.ones(1) if needs.corrects or weight == "none" else correction(batch, CONFIGS[1], CAP)[0]
    divergence = kl_losses(batch, "k3", CAP)
    expected = (batch.weights * (factor * values + 0.3 * divergence - 0.2 * batch.entropies)).sum() / 7.0
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert float(sums["reference_kl"]) == pytest.approx(float(divergence[batch.weights > 0].sum().detach()))
    found.backward()
    torch.testing.assert_close(batch.entropies.grad, -0.2 * batch.weights / 7.0)


def test_sequences_of_advantage_0_are_computed_if_another_term_needs_them() -> None:
    objective = make_objective(LearnerConfig())
    assert (objective.needs_reference, objective.needs_entropy_gradient) == (False, False)
    assert objective.skips_zero_advantages
    bare: TokenBatch = replace(make_batch(1), reference=None)
    assert float(objective(bare, 1.0)[0].detach()) == float(objective(make_batch(1), 1.0)[0].detach())
    for more in (
        {"kl": {"coefficient": 0.1}},
        {"entropy_bonus": 0.1},
        {"loss": "distill", "teacher": "folder"},
        {"loss": "losses_of_a_user:squared", "loss_options": {"scale": 1.0}},
    ):
        assert not make_objective(LearnerConfig(**more)).skips_zero_advantages, more


@pytest.mark.parametrize("name", ["bypass", "gspo", "cispo", "dppo", "reinforce"])
def test_a_configuration_that_corrects_twice_is_refused(name) -> None:
    weight = "token" if name == "bypass" else "sequence"
    with pytest.raises(ConfigError, match=rf'learner\.correction\.weight: is "{weight}", but the loss {name} corrects'):
        make_objective(LearnerConfig(loss=name, correction=CorrectionConfig(weight=weight)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"failed: ZeroDivisionError: a user's fault \(.*losses_of_a_"),
        ("too_few", r"returned losses of shape \(1,\) for \d+ tokens"),
        ("counts", "returned 'tokens', which is not a tensor of one number$"),
        ("unsummed", "returned 'squares', which is not a tensor of one number"),
        ("alone", r"returned list and dict; return a tensor with a loss for each token, and a mapping of sums"),
        ("many_sums", r"\(.*losses_of_a_user.py:\d+\) returned 65 sums, .*64 names of 100 characters are allowed"),
    ],
)
def test_a_users_loss_that_fails_is_named(name, said) -> None:
    objective = make_objective(LearnerConfig(loss=f"losses_of_a_user:{name}"))
    with pytest.raises(ConfigError, match=rf"learner\.loss: losses_of_a_user:{name} {said}"):
        objective(make_batch(0), 1.0)


def test_sums_of_a_users_loss_have_the_same_names_in_each_batch() -> None:
    """They are added up over batches and ranks."""
    objective, batch = make_objective(LearnerConfig(loss="losses_of_a_user:sometimes")), make_batch(0)
    _, sums = objective(replace(batch, staleness=torch.zeros_like(batch.staleness)), 1.0)
    assert not sums["all"].requires_grad
    with pytest.raises(ConfigError, match=r"returned the sums \['all'\] with one batch and \['all', 'late'\] with"):
        objective(replace(batch, staleness=torch.ones_like(batch.staleness)), 1.0)


@pytest.mark.parametrize("fresh", [True, False])
def test_statistics_match_a_float64_reference(fresh) -> None:
    """Sums of two micro-batches together."""
    batches, total = [make_batch(1), make_batch(2)], TokenSums()
    for batch in batches:
        total.add(TokenSums(*token_sums(batch, fresh=fresh, cap=CAP).tolist()))

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name).detach().double().numpy() for batch in batches])

    keep = column("weights") > 0
    d = (column("logprobs") - column("behaviour"))[keep]
    r, new = np.exp(d), (column("staleness") == 0)[keep]
    assert new.any()
    k3 = r - 1 - d
    expected = {
        "policy/entropy": column("entropies")[keep].mean(),
        "policy/ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "policy/behaviour_kl": k3.mean(),
        "policy/tis_clipped_fraction": (r > CAP).mean(),
        "policy/ratio_max": r.max(),
    }
    if fresh:
        expected |= {"policy/engine_kl": k3[new].mean(), "policy/engine_kl_tokens": new.sum()}
    assert total.metrics() == pytest.approx(expected, rel=1e-6)


def test_metrics_without_tokens_are_omitted_and_all_others_are_finite() -> None:
    assert TokenSums().metrics() == {}
    assert "policy/engine_kl" not in TokenSums(count=1, ratio=1, ratio_squared=1).metrics()
    batch = make_batch(1, dtype=torch.float32)
    far = replace(batch, behaviour=batch.behaviour - 1e4)
    sums = TokenSums(*token_sums(far, fresh=True, cap=CAP).tolist())
    assert all(math.isfinite(value) for value in sums.metrics().values())
