"""A process that trains one side's steps: ``python -m tools.bench.learner_side SIDE WEIGHTS MODEL``.

Reads one JSON object a line from stdin, ``{"sigma": S}``, takes a step on that batch and answers with a line:
``seconds`` of the step, planning or padding included, ``loss`` before it, and ``peak_bytes``, the most resident memory
that the process has had.

SIDE is ``learner``, the trainer of asyncrl with one rank, or ``padded``, a plain loop of torch: as many sequences a
micro-batch as its budget has room for at the longest of them, whole logits, AdamW. WEIGHTS is ``full`` or ``lora``.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import StepPlan, build_step
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.fsdp.model.lora import add_adapters
from asyncrl.learner.fsdp.model.optimizers import make_optimizer
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.trainer import Trainer
from asyncrl.messages.groups import Group
from tools.bench import learner_batch
from tools.bench.processes import answer_orders

Step = Callable[[list[Group]], float]
"""Trains on the groups, in place; returns the loss before."""


def new_trainer(config: Config) -> Trainer:
    """The trainer of a single rank."""
    trainer = Trainer(config, rank=0)
    trainer.setup(*trainer.open_store("127.0.0.1"))
    return trainer


def plan_of(trainer: Trainer, config: Config, groups: list[Group]) -> StepPlan:
    return build_step(
        groups,
        advantage=find_advantage(config.learner),
        version=0,
        config=config,
        world_size=1,
        packed=trainer.packed,
        shared=trainer.shares_prefixes,
    )


def learner(config: Config) -> Step:
    trainer = new_trainer(config)
    return lambda groups: trainer.train(plan_of(trainer, config, groups))["loss/policy"]


def padded(config: Config) -> Step:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(config.learner.threads or 1)
    assert config.model.path is not None
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    if config.lora.is_on:
        add_adapters(Policy(model), config.lora, seed=config.run.seed)
    optimizer = make_optimizer(model, config)

    def step(groups: list[Group]) -> float:
        rows = [row for group in groups for row in _rows(group)]
        total = sum(len(behaviour) for _, _, behaviour, _ in rows)
        loss = 0.0
        for batch in _batches(rows, config.learner.tokens_per_microbatch):
            part = _loss(model, batch, config.learner.tis_cap) / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


Padded = tuple[np.ndarray, int, np.ndarray, float]
"""Token ids of prompt and response, length of the prompt, behaviour log-probs, advantage."""


def _rows(group: Group) -> Iterator[Padded]:
    for trajectory, advantage in zip(group.trajectories, learner_batch.advantages(group), strict=True):
        (sequence,) = trajectory.sequences
        ids = np.concatenate([group.lease.prompt_ids, sequence.tokens])
        yield ids, len(group.lease.prompt_ids), sequence.logprobs, float(advantage)


def _batches(rows: list[Padded], budget: int) -> Iterator[list[Padded]]:
    """Rows in the order given, as many as fit when padded to the longest of them."""
    batch: list[Padded] = []
    for row in rows:
        longest = max(len(each[0]) for each in [*batch, row])
        if batch and longest * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _loss(model: Any, batch: list[Padded], cap: float) -> Tensor:
    """Loss, summed over the tokens of the batch. Padding is on the right, so causal attention needs no mask."""
    longest = max(len(ids) for ids, *_ in batch)
    shape = len(batch), longest - 1
    tokens = torch.zeros((len(batch), longest), dtype=torch.int64)
    behaviour, advantages, mask = (torch.zeros(shape) for _ in range(3))
    for at, (ids, prompt, sampled, advantage) in enumerate(batch):
        tokens[at, : len(ids)] = torch.from_numpy(ids)
        answer = slice(prompt - 1, len(ids) - 1)
        behaviour[at, answer] = torch.from_numpy(sampled)
        advantages[at, answer], mask[at, answer] = advantage, 1.0
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logprobs: Tensor = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    weight = (logprobs.detach() - behaviour).exp().clamp(max=cap)
    losses: Tensor = -weight * (logprobs - logprobs.detach()).exp() * advantages * mask
    return losses.sum()


def main() -> None:
    side, weights, model = sys.argv[1:]
    config = learner_batch.config(Path(model), lora=weights == "lora")
    step = {"learner": learner, "padded": padded}[side](config)

    def train(order: dict[str, Any]) -> dict[str, Any]:
        groups = learner_batch.make_groups(order["sigma"])
        began = time.perf_counter()
        loss = step(groups)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "loss": loss, "peak_bytes": peak}

    answer_orders(train)


if __name__ == "__main__":
    main()
