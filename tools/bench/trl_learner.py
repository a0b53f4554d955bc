"""TRL's side of the benchmark of the learner: ``python -I trl_learner.py MODEL BATCHES SETTINGS``, in its environment.

Reads one JSON object a line from stdin, ``{"sigma": S}``, takes a step on ``BATCHES/S.npz`` and answers with a line, as
learner_side.py does. The step is that of ``GRPOTrainer``: it splits and shuffles the batch, its ``training_step`` runs
each micro-batch, and its optimizer steps. Each micro-batch is as wide as the longest response of the whole batch, as
there; it has as many rows as the budget of tokens allows at that width.

The loss is ``dapo`` without a clip: with the behaviour's log-probs as the old ones, that is the mean over tokens of
-ratio * advantage, whose gradient is that of the other sides as long as no ratio passes their cap.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

UNBOUNDED = 1e9


class Step(GRPOTrainer):  # type: ignore[misc]
    """A trainer whose batch is given instead of generated."""

    batch: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.batch)


def make_trainer(model: str, settings: dict[str, Any], rows: int) -> Step:
    """A trainer on CPU whose step takes all of the batch, ``rows`` of it at a time."""
    words = {str(token): token for token in range(settings["vocabulary"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")
    sequences = settings["sequences"]
    arguments = GRPOConfig(
        output_dir=settings["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=sequences // rows,
        num_generations=settings["samples"],
        max_completion_length=settings["longest"],
        loss_type="dapo",
        epsilon=1.0,
        epsilon_high=UNBOUNDED,
        learning_rate=settings["lr"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        lr_scheduler_type="constant",
        max_steps=1,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = Step(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "0"}] * sequences),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **settings["lora"]) if settings["lora"] else None,
    )
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    trainer.create_optimizer()
    trainer.model.train()
    return trainer


def fitting_rows(batch: dict[str, torch.Tensor], budget: int) -> int:
    """The most rows of a micro-batch that have ``budget`` tokens or fewer, and divide the batch; at least 1."""
    rows, width = batch["prompt_ids"].shape[0], batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    return max((count for count in range(1, rows + 1) if rows % count == 0 and count * width <= budget), default=1)


def train(trainer: Step, max_norm: float) -> float:
    """One step on its batch; returns the loss before."""
    loss = 0.0
    for _ in range(trainer.current_gradient_accumulation_steps):
        loss += trainer.training_step(trainer.model, {}, None).item()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), max_norm)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return loss


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, batches, text = sys.argv[1:]
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    trainer: Step | None = None
    for line in sys.stdin:
        with np.load(Path(batches) / f"{json.loads(line)['sigma']:g}.npz") as found:
            batch = {name: torch.from_numpy(found[name]) for name in found.files}
        if trainer is None:
            trainer = make_trainer(model, settings, fitting_rows(batch, settings["budget"]))
        trainer.batch = batch
        began = time.perf_counter()
        loss = train(trainer, settings["max_grad_norm"])
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answers.write(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
