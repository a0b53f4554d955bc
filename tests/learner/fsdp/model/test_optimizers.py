"""The optimizers: the parameters that each of them moves, and by how much."""

import logging

import pytest
import torch
from learner.learner_cases import make_config, plan_of, same, save_small_model
from segment_reading import weights_of

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.errors import CheckpointError
from asyncrl.learner.fsdp.model.lora import add_adapters
from asyncrl.learner.fsdp.model.optimizers import MuonWithAdamW, make_optimizer, orthogonal, state_of
from asyncrl.learner.fsdp.startup.loading import load_policy

LR = 1e-2
STEPS = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("optimizers"))


def _with_gradients(folder, **learner):
    config = make_config(folder, lr=LR, **learner)
    policy = load_policy(config.model)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return policy, config


def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest(small):
    policy, config = _with_gradients(small, optimizer="muon", weight_decay=0.1)
    optimizer = make_optimizer(policy, config)
    assert isinstance(optimizer, MuonWithAdamW)
    names = {parameter: name for name, parameter in policy.named_parameters()}
    assert {names[p] for p in optimizer.matrices} == {
        name for p, name in names.items() if ".layers." in name and name.endswith("proj.weight")
    }
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(members) == len(set(members)) == len(names)
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {name: 0.1 if p.ndim > 1 else 0.0 for p, name in names.items()}


def test_a_step_of_muon_is_orthogonal_and_has_the_length_of_an_adamw_step(small):
    policy, config = _with_gradients(small, optimizer="muon")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    other, of_adamw = _with_gradients(small)
    make_optimizer(other, of_adamw).step()
    optimizer = make_optimizer(policy, config)
    optimizer.step()
    for (name, parameter), adamw in zip(policy.named_parameters(), other.parameters(), strict=True):
        if parameter not in optimizer.matrices:
            assert torch.equal(parameter, adamw), name
            continue
        moved = (before[name] - parameter.detach()).double()
        # arXiv 2502.16982, section 2.2: an orthogonal matrix times 0.2 sqrt(max(A, B)) has the RMS of AdamW's steps.
        scaled = moved / (LR * 0.2 * max(parameter.shape) ** 0.5)
        values = torch.linalg.svdvals(scaled)
        # Five iterations bring singular values to about 1, not to 1.
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3, name
        left, _, right = torch.linalg.svd(parameter.grad.double(), full_matrices=False)
        nearest = left @ right
        assert float((scaled * nearest).sum() / scaled.norm() / nearest.norm()) > 0.95, name
        assert 0.1 * LR < float(moved.square().mean().sqrt()) < 0.3 * LR, name


def test_the_optimizer_sets_the_rate_and_clears_gradients_of_all_groups(small):
    policy, config = _with_gradients(small, optimizer="muon")
    optimizer = make_optimizer(policy, config)
    before = [p.detach().clone() for p in policy.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True))
    assert {tuple(sorted(optimizer.state[p])) for p in policy.parameters()} == {
        tuple(sorted(state_of(optimizer, p))) for p in policy.parameters()
    }
    optimizer.zero_grad()
    assert all(p.grad is None for p in policy.parameters())
    optimizer.state.clear()
    assert not any(each.state for each in optimizer._both)


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (16, 16), (1, 8)])
def test_the_orthogonal_matrix_matches_that_of_torch(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = gradient
    torch.optim.Muon([matrix], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    expected = -matrix.detach() / (0.2 * max(shape) ** 0.5)
    assert torch.allclose(orthogonal(gradient.bfloat16()).float(), expected, atol=2e-2)


def test_muon_updates_adapter_matrices_and_no_frozen_ones(small):
    policy, config = _with_gradients(small, optimizer="muon")
    add_adapters(policy, LoraConfig(rank=4), seed=0)
    optimizer = make_optimizer(policy, config)
    assert optimizer.matrices == {p for p in policy.parameters() if p.requires_grad}


def _steps(backend, config):
    for step in range(STEPS):
        backend.train(plan_of(backend, config, step))
    return weights_of(backend.publish(1).result(60))


def test_two_shards_are_updated_like_the_whole_matrix(small, run_well):
    alone, together, offloaded, adamw = (
        run_well(make_config(small, ranks=ranks, lr=LR, optimizer=optimizer, offload=offload), _steps)
        for ranks, optimizer, offload in [
            (1, "muon", False),
            (2, "muon", False),
            (2, "muon", True),
            (1, "adamw", False),
        ]
    )
    assert same(offloaded, together)
    assert not same(alone, adamw)
    for name, weight in alone.items():
        off = (weight - together[name]).abs().flatten()
        # Muon computes in bfloat16. Where Adam's gradient is a rounding error, a weight may be a step off.
        assert float(off.quantile(0.99)) < 0.1 * LR, name
        assert float(off.max()) < 2 * STEPS * LR, name


def test_adapters_are_trained_by_muon(small, run_well):
    def adapted(optimizer):
        config = make_config(small, lr=LR, optimizer=optimizer)
        return config.model_copy(update={"lora": LoraConfig(rank=4, publish="merged")})

    muon, adamw = (run_well(adapted(optimizer), _steps) for optimizer in ("muon", "adamw"))
    assert muon.keys() == adamw.keys() and not same(muon, adamw)


def _save(backend, config, target, lacks=()):
    backend.train(plan_of(backend, config, 0))
    for state in backend._optimizer.state.values():
        for name in lacks:
            del state[name]
    backend.save(target).result(60)
    return weights_of(backend.publish(1).result(60))


def _load(backend, config, source):
    reported = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())
    logging.getLogger("asyncrl").addHandler(handler)
    try:
        backend.load(source)
    finally:
        logging.getLogger("asyncrl").removeHandler(handler)
    found = weights_of(backend.publish(1).result(60))
    with_state = sorted(name for name, p in backend.policy.named_parameters() if backend._optimizer.state.get(p))
    backend.train(plan_of(backend, config, 1))
    return found, with_state, [line for line in reported if "begin anew" in line]


@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_checkpoint_of_the_other_optimizer_restores_weights_and_common_state(
    before, after, small, tmp_path, run_well
):
    source = tmp_path / "trainer"
    saved = run_well(make_config(small, lr=LR, optimizer=before), _save, source)
    found, with_state, reported = run_well(make_config(small, lr=LR, optimizer=after), _load, source)
    assert same(found, saved)
    assert with_state and not any(name.endswith("proj.weight") for name in with_state)
    (line,) = reported
    assert "learner.optimizer: the states of 14 parameters begin anew, the first " in line
    *_, reported = run_well(make_config(small, lr=LR, optimizer=before), _load, source)
    assert not reported


def test_a_checkpoint_with_a_part_of_a_state_is_refused(small, tmp_path, run_well):
    config = make_config(small, lr=LR)
    run_well(config, _save, tmp_path / "trainer", ("exp_avg_sq",))

    def load(backend, config):
        with pytest.raises(CheckpointError, match="has step, exp_avg alone of the optimizer's state of model"):
            backend.load(tmp_path / "trainer")

    run_well(config, load)
