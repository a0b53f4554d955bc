"""Weights and states that leave their device and come back."""

import threading
import time

import pytest
import torch
from torch import nn

from asyncrl.gpu.slices import RankSlices
from asyncrl.learner.fsdp import residence as module
from asyncrl.learner.fsdp.residence import Residence, wait_for_gpu_memory

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


@pytest.mark.parametrize("chunk_bytes", [100, 64 * 16, 1 << 20])
def test_moving_the_model_does_not_change_training(chunk_bytes, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    for ours, theirs in zip(train(4, moves=True), train(4, moves=False), strict=True):
        assert torch.equal(ours, theirs)


def test_a_storage_moves_once_and_its_host_memory_is_used_again(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 512)
    model = Tied()
    residence = Residence(lambda: [*model.parameters(), model.first.weight.view(-1)], CPU)
    residence.leave()
    # One shared weight of 1,024 bytes, and two biases of 64.
    assert sorted(size for _, size, _ in residence._away) == [64, 64, 1024]
    chunks = [chunk.data_ptr() for chunk in residence._chunks]
    assert len(chunks) == 3
    residence.come_back()
    residence.leave()
    assert [chunk.data_ptr() for chunk in residence._chunks] == chunks
    with pytest.raises(AssertionError, match="away"):
        residence.leave()
    residence.come_back()


def test_tensors_on_another_device_are_not_moved():
    weight = torch.ones(4)
    residence = Residence(lambda: [weight], torch.device("meta"))
    residence.leave()
    assert torch.equal(weight, torch.ones(4))
    residence.come_back()


def test_a_rank_waits_until_its_share_of_the_gpu_is_free(monkeypatch):
    free = iter([1, 5, 8, 8])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10))
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    wait_for_gpu_memory(torch.device("cuda", 0), 0.8, 60.0, time.sleep)
    assert next(free) == 8
    # At the deadline the caller tries it all the same.
    wait_for_gpu_memory(torch.device("cuda", 0), 0.9, 0.0, time.sleep)
    wait_for_gpu_memory(CPU, 0.9, 60.0, time.sleep)


class Full:
    """A storage for which the device has no room."""

    def resize_(self, size):
        raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    "wait",
    [
        lambda residence, pause: wait_for_gpu_memory(torch.device("cuda", 0), 0.8, 60.0, pause),
        lambda residence, pause: residence.come_back(60.0, pause),
    ],
    ids=["at the start", "in a turn"],
)
def test_the_end_of_the_run_ends_a_wait_for_gpu_memory_at_once(wait, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 10))
    slices = RankSlices("0", "learner/0", "rollouter/0", 60.0)
    pause = lambda seconds: slices.pause(seconds, "room in the memory")  # noqa: E731
    residence = Residence(list, CPU)
    residence._away.append((Full(), 64, 0))
    threading.Timer(0.2, slices.interrupt).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="learner/0 ends, and waits no more for room in the memory of GPU 0"):
        wait(residence, pause)
    assert time.monotonic() - began < 10.0
