"""TRL's side of two benchmarks, in its environment: ``python -I trl_side.py BENCH MODEL DATA OUT SETTINGS``.

``quickstart`` trains with ``GRPOTrainer`` (responses by ``generate`` of transformers, a step at a time) on the prompts
of the file DATA. It leaves OUT/vN, the weights after N steps, and OUT/steps.json: the seconds of each step, generation
included and the writing of weights left out.

``learner`` reads one JSON object a line from stdin, ``{"sigma": S}``, takes a step on ``DATA/S.npz`` and answers with a
line, as learner_side.py does. The step is that of ``GRPOTrainer``: it splits and shuffles the batch, its
``training_step`` runs each micro-batch, and its optimizer steps. Each micro-batch is as wide as the longest response of
the whole batch, as there; it has as many rows as the budget of tokens allows at that width.

The loss is ``dapo``. The learner's is without a clip: with the behaviour's log-probs as the old ones, that is the mean
over tokens of -ratio * advantage, whose gradient is that of the other sides as long as no ratio passes their cap.
"""

from __future__ import annotations

import json
import os
import re
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

UNBOUNDED = 1e9


def arguments_of(settings: dict[str, Any], out: Path, rows: int, **further: Any) -> GRPOConfig:
    """Train on CPU by these settings, ``rows`` responses at a time."""
    return GRPOConfig(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=settings["sequences"] // rows,
        num_generations=settings["samples"],
        max_completion_length=settings["longest"],
        loss_type="dapo",
        learning_rate=settings["lr"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        lr_scheduler_type="constant",
        **further,
    )


class Steps(TrainerCallback):  # type: ignore[misc]
    """Times each step and keeps the weights of some."""

    def __init__(self, out: Path, every: int) -> None:
        self._out, self._every = out, every
        self._began = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The clock rests while weights are written."""
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) % self._every == 0:
            model.save_pretrained(self._out / f"v{len(self.seconds)}")


def quickstart(model: str, data: Path, out: Path, settings: dict[str, Any]) -> None:
    pattern = re.compile(settings["pattern"])

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [pattern.search(completion) for completion in completions]
        return [float(each is not None and each[1] == right) for each, right in zip(found, answer, strict=True)]

    steps = Steps(out, settings["every"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.padding_side = "left"
    arguments = arguments_of(
        settings,
        out,
        settings["sequences"],
        logging_strategy="no",
        disable_tqdm=True,
        seed=settings["seed"],
        max_steps=settings["steps"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()]),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.train()
    (out / "steps.json").write_text(json.dumps(steps.seconds))


class Step(GRPOTrainer):  # type: ignore[misc]
    """A trainer whose batch is given instead of generated."""

    batch: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.batch)


def make_trainer(model: str, settings: dict[str, Any], out: Path, rows: int) -> Step:
    """A trainer whose step takes all of the batch, ``rows`` of it at a time."""
    words = {str(token): token for token in range(settings["vocabulary"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")
    arguments = arguments_of(settings, out, rows, epsilon=1.0, epsilon_high=UNBOUNDED, max_steps=1)
    trainer = Step(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "0"}] * settings["sequences"]),
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


def learner(model: str, data: Path, out: Path, settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainer: Step | None = None
    for line in sys.stdin:
        with np.load(data / f"{json.loads(line)['sigma']:g}.npz") as found:
            batch = {name: torch.from_numpy(found[name]) for name in found.files}
        if trainer is None:
            trainer = make_trainer(model, settings, out, fitting_rows(batch, settings["budget"]))
        trainer.batch = batch
        began = time.perf_counter()
        loss = train(trainer, settings["max_grad_norm"])
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}), file=answers, flush=True)


if __name__ == "__main__":
    bench, model, data, out, text = sys.argv[1:]
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    {"quickstart": quickstart, "learner": learner}[bench](model, Path(data), Path(out), settings)
