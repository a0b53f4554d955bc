from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import REFERENCES, by_sequence, make_batch
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.losses import BUILT_IN
from asyncrl.learner.algorithm.user_functions import find_loss

OPTIONS = [
    ("decoupled", {}),
    ("decoupled", {"clip_low": 0.1, "clip_high": 0.5}),
    ("bypass", {}),
    ("bypass", {"clip_low": 0.1, "clip_high": 0.5}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.1}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("dppo", {}),
    ("dppo", {"threshold": 0.05}),
    ("reinforce", {}),
    ("reinforce", {"clamp": 1.5}),
    ("distill", {}),
    ("distill", {"reward": 0.7}),
]


def test_each_built_in_loss_matches_a_second_implementation() -> None:
    assert set(BUILT_IN) == set(REFERENCES) == {name for name, _ in OPTIONS}


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32 - 1), drift=st.sampled_from([0.0, 0.1, 1.0]))
def test_a_loss_and_its_gradient_match_the_formula(name, options, seed, drift) -> None:
    batch = make_batch(seed, drift=drift)
    loss, _ = find_loss(LearnerConfig(loss=name, loss_options=options))
    values, _ = loss(batch=batch)
    values.sum().backward()
    expected = [REFERENCES[name](tokens, **options) for tokens in by_sequence(batch)]
    np.testing.assert_allclose(values.detach(), np.concatenate([e[0] for e in expected]), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(batch.logprobs.grad, np.concatenate([e[1] for e in expected]), rtol=1e-9, atol=1e-12)


def test_sums_count_only_tokens_with_a_weight() -> None:
    batch, outside, above = make_batch(5, drift=2.0), 0, 0
    for t in (t for tokens in by_sequence(batch) for t in tokens if t["weights"] > 0):
        ratio = math.exp(t["logprobs"] - t["behaviour"])
        outside += ratio > 1.2 if t["advantages"] > 0 else ratio < 0.8
        above += ratio > 5.0
    for name, count in (("bypass", outside), ("cispo", above)):
        assert int(BUILT_IN[name](batch=batch)[1]["clipped_fraction"]) == count > 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_loss_declares_if_tokens_of_advantage_0_have_no_gradient(name) -> None:
    batch = make_batch(4, drift=1.0)
    advantages = batch.advantages.where(batch.segments > 0, 0.0)
    loss, traits = find_loss(LearnerConfig(loss=name))
    loss(batch=replace(batch, advantages=advantages))[0].sum().backward()
    assert bool((batch.logprobs.grad[batch.segments == 0] == 0).all()) == traits.multiple_of_advantage
    assert (batch.logprobs.grad[batch.segments > 0] != 0).any()


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_extreme_ratio_stays_finite_and_nan_stays_visible(name) -> None:
    batch = make_batch(1, dtype=torch.float32)
    far = replace(batch, behaviour=batch.behaviour - 1e4, proximal=batch.proximal - 1e4)
    values, _ = BUILT_IN[name](batch=far)
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(batch.logprobs.grad).all()
    logprobs = batch.logprobs.detach().clone()
    logprobs[0] = math.nan
    values, _ = BUILT_IN[name](batch=replace(batch, logprobs=logprobs.requires_grad_()))
    assert math.isnan(values.detach()[0])


def test_a_user_loss_is_found_with_its_options_and_traits() -> None:
    config = LearnerConfig(loss="losses_of_a_user:squared", loss_options={"scale": 3.0})
    loss, traits = find_loss(config)
    batch = make_batch(2)
    torch.testing.assert_close(loss(batch=batch)[0], 3.0 * batch.logprobs**2)
    assert (traits.entropy_gradient, traits.corrects) == (True, False)


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        ("decuopled", {}, r"learner\.loss: there is no built-in loss 'decuopled'; did you mean decoupled"),
        ("decoupled", {"clip": 1.0}, r"learner\.loss_options\.clip: decoupled takes no such option"),
        ("losses_of_a_user:nothing", {}, r"learner\.loss: module losses_of_a_user .* has no 'nothing'"),
        ("losses_of_a_user:scaleless", {}, r"learner\.loss_options\.scale: is required by losses_of_a_user:scaleless"),
        ("losses_of_a_user:odd", {}, r"learner\.loss: losses_of_a_user:odd does not take 'batch'"),
    ],
)
def test_a_missing_loss_is_named_with_its_key(loss, options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        find_loss(LearnerConfig(loss=loss, loss_options=options))
