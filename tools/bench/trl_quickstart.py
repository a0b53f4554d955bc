"""TRL's side of the benchmark of the quickstart: ``python -I trl_quickstart.py MODEL DATA OUT SETTINGS``, there.

Trains with ``GRPOTrainer`` (responses by ``generate`` of transformers, a step at a time) on the prompts of DATA, and
leaves OUT/vN, the weights after N steps, and OUT/steps.json: the seconds of each step, generation included and the
writing of weights left out.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


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


def main() -> None:
    model, data, out, text = sys.argv[1:]
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    pattern = re.compile(settings["pattern"])

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [pattern.search(completion) for completion in completions]
        return [float(each is not None and each[1] == right) for each, right in zip(found, answer, strict=True)]

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    steps = Steps(Path(out), settings["every"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.padding_side = "left"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(Path(out) / "trainer"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=settings["seed"],
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["trajectories"],
            gradient_accumulation_steps=1,
            num_generations=settings["samples"],
            max_completion_length=settings["max_tokens"],
            temperature=1.0,
            top_k=0,
            loss_type="dapo",
            beta=0.0,
            learning_rate=settings["lr"],
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"],
            max_grad_norm=settings["max_grad_norm"],
            lr_scheduler_type="constant",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.train()
    (Path(out) / "steps.json").write_text(json.dumps(steps.seconds))


if __name__ == "__main__":
    main()
