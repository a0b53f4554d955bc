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
        batch = {name: torch.from_numpy(each) for name, each in learner_batch.padded(groups).items()}
        tokens = batch["completion_mask"].sum()
        loss = 0.0
        for rows in _micro_batches(batch, config.learner.tokens_per_microbatch):
            part = _loss(model, {name: each[rows] for name, each in batch.items()}, config.learner.tis_cap) / tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _micro_batches(batch: dict[str, Tensor], budget: int) -> Iterator[slice]:
    """Rows in the order given, as many as fit when padded to the longest of them."""
    begin = longest = 0
    for end, count in enumerate((batch["prompt_ids"].shape[1] + batch["completion_mask"].sum(1)).tolist()):
        longest = max(longest, count)
        if end > begin and longest * (end + 1 - begin) > budget:
            yield slice(begin, end)
            begin, longest = end, count
    yield slice(begin, None)


def _loss(model: Any, batch: dict[str, Tensor], cap: float) -> Tensor:
    """Loss, summed over the tokens of the batch. Padding is on the right, so causal attention needs no mask."""
    longest = int(batch["completion_mask"].sum(1).max())
    answers, mask, behaviour = (
        batch[name][:, :longest] for name in ("completion_ids", "completion_mask", "old_per_token_logps")
    )
    tokens = torch.cat([batch["prompt_ids"], answers], 1)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logprobs: Tensor = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[:, -longest:, 0]
    weight = (logprobs.detach() - behaviour).exp().clamp(max=cap)
    losses: Tensor = -weight * (logprobs - logprobs.detach()).exp() * batch["advantages"][:, None] * mask
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
