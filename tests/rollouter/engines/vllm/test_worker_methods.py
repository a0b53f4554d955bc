"""Methods that the engine calls in vLLM's workers, without vLLM around them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from asyncrl.rollouter.engines.vllm.worker.weights import WorkerMethods


def test_positions_of_padding_are_reset_after_a_sleep() -> None:
    """Only vLLM's second model runner has them in memory that the sleep discards, and only for M-RoPE."""
    methods = WorkerMethods()
    for runner in (SimpleNamespace(), SimpleNamespace(model_state=SimpleNamespace(rope_state=None))):
        methods.model_runner = runner
        methods.clear_positions()
    positions = torch.full((3, 5), 7)
    methods.model_runner = SimpleNamespace(model_state=SimpleNamespace(rope_state=SimpleNamespace(positions=positions)))
    methods.clear_positions()
    assert not positions.any()
