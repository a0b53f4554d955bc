"""Routers of experts: what they choose is recorded, and a recorded choice is replayed with a gradient to the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_matrix import EXPERTS, VOCABULARY, make_family
from torch import Tensor

from asyncrl.messages.routes import Experts
from asyncrl.weights.routers import Routers

COUNT, CHOSEN = 4, 2
IDS = torch.tensor([[(5 * i + 2) % VOCABULARY for i in range(24)]])


def _logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return logits


def _other_routes(routes: Tensor) -> Tensor:
    """In each layer the experts that were not chosen."""
    taken = (torch.arange(COUNT)[:, None] == routes[..., None, :]).any(-1)
    return taken.int().argsort(dim=-1, stable=True)[..., :CHOSEN]


@pytest.fixture(params=EXPERTS)
def model(request) -> Any:
    return make_family(request.param, tied=False)


def test_routes_are_recorded_and_their_replay_changes_nothing(model) -> None:
    with torch.no_grad():
        plain = _logits(model)
        routers = Routers(model)
        assert torch.equal(_logits(model), plain), "a router without routes chooses as before"
        routes = routers.recorded()
        assert routers.experts == Experts(layers=2, count=COUNT, chosen=CHOSEN)
        assert routes.shape == (IDS.shape[1], 2, CHOSEN)
        assert routers.take_differing() == (0.0, 0.0), "nothing was replayed"
        routers.replay(routes)
        torch.testing.assert_close(_logits(model), plain, atol=1e-5, rtol=0)
        with_experts = sum("Router" in type(module).__name__ for module in model.modules())
        assert routers.take_differing() == (0.0, routes[:, :with_experts].numel())


def test_other_experts_are_computed_and_counted_and_the_router_learns_to_weigh_them(model) -> None:
    routers = Routers(model)
    with torch.no_grad():
        plain = _logits(model)
        first = routers.recorded()
        other = _other_routes(first)
        routers.replay(other)
        replayed = _logits(model)
    assert float((replayed - plain).abs().max()) > 1e-2
    differing, total = routers.take_differing()
    gates = [module for module in model.modules() if "Router" in type(module).__name__]
    # In the first layer with experts none of them is the router's own; later layers see other hidden states.
    assert 0 < differing <= total == other[:, : len(gates)].numel()
    routers.replay(other, follow=False)
    with torch.no_grad():
        torch.testing.assert_close(_logits(model), plain, atol=0, rtol=0)
    assert routers.take_differing()[0] > 0

    routers.replay(other)
    _logits(model).square().sum().backward()
    for gate in gates:
        assert float(gate.weight.grad.abs().sum()) > 0
        # A finite difference along the gradient of the router, whose experts stay the recorded ones.
        step = 1e-3 * gate.weight.grad / gate.weight.grad.norm()
        slope = float((gate.weight.grad * step).sum())
        with torch.no_grad():
            gate.weight.add_(step)
            high = float(_logits(model).square().sum())
            gate.weight.sub_(2 * step)
            low = float(_logits(model).square().sum())
            gate.weight.add_(step)
        assert (high - low) / 2 == pytest.approx(slope, rel=0.05)


def test_routes_of_another_shape_are_refused() -> None:
    model = make_family("Qwen3Moe", tied=False)
    routers = Routers(model)
    with pytest.raises(ValueError, match=r"2 layers of 2 experts"):
        routers.replay(torch.zeros(IDS.shape[1], 3, CHOSEN, dtype=torch.int64))
    routers.replay(torch.zeros(5, 2, CHOSEN, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"5 tokens for a row of 24"):
        _logits(model)


def test_a_dense_model_has_no_routers() -> None:
    assert Routers(make_family("Qwen3", tied=False)).experts is None


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_the_balance_loss_is_that_of_the_model(family: str) -> None:
    model = make_family(family, tied=False, output_router_logits=True)
    expected = model(input_ids=IDS, use_cache=False).aux_loss
    expected.backward()
    truth = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    routers = Routers(model)
    routers.keep_logits()
    model.base_model(input_ids=IDS, use_cache=False)
    found = routers.balance_loss()
    torch.testing.assert_close(found, expected)
    found.backward()
    ours = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(ours) == len(truth) > 2
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("family", "has"), [("Qwen3Moe", True), ("Glm4Moe", False), ("Qwen3", False)])
def test_some_models_have_no_balance_loss(family: str, has: bool) -> None:
    assert Routers(make_family(family, tied=False)).has_balance is has
