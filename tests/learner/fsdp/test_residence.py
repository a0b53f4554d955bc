"""Weights and states that leave their device and come back."""

import pytest
import torch
from torch import nn

from asyncrl.learner.fsdp.residence import Residence

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale.sum()


def tensors_of(model, optimizer):
    yield from model.buffers()
    yield from model.parameters()
    for states in optimizer.state.values():
        yield from states.values()


def train(steps, moves):
    """The weights after some steps of AdamW, with a move away and back before each if ``moves``."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    residence = Residence(lambda: tensors_of(model, optimizer), CPU)
    view = model.first.weight.view(-1)
    for step in range(steps):
        if moves:
            residence.leave()
            assert model.first.weight.untyped_storage().nbytes() == 0
            residence.come_back()
        model(torch.full((4, 16), float(step + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(view, model.first.weight.view(-1)) and model.second.weight is model.first.weight
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_does_not_notice_a_move():
    for ours, theirs in zip(train(4, moves=True), train(4, moves=False), strict=True):
        assert torch.equal(ours, theirs)


def test_a_storage_moves_once_and_its_host_memory_is_used_again():
    model = Tied()
    residence = Residence(lambda: [*model.parameters(), model.first.weight.view(-1)], CPU)
    residence.leave()
    # One shared weight and two biases.
    hosts = {host.data_ptr() for _, host in residence._away}
    assert len(hosts) == 3
    residence.come_back()
    residence.leave()
    assert {host.data_ptr() for _, host in residence._away} == hosts
    with pytest.raises(AssertionError, match="away"):
        residence.leave()
    residence.come_back()


def test_what_is_on_another_device_stays():
    weight = torch.ones(4)
    residence = Residence(lambda: [weight], torch.device("meta"))
    residence.leave()
    assert torch.equal(weight, torch.ones(4))
    residence.come_back()
