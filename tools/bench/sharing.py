"""``python -m tools.bench sharing``: CPU time of a training step in which the common beginning of the samples of a
group is computed once, against the same step with each sequence whole.

Both sides are the same trainer with the quickstart's model in one process and one thread, planning included; they train
the same groups in turn, and their losses are equal, or the measurement is an error. One batch is like the quickstart's,
short prompts and responses of nearly equal lengths, the other has prompts twice as long as its responses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.learner.algorithm.plan.batch import StepPlan, build_step
from asyncrl.learner.fsdp.trainer import Trainer
from asyncrl.learner.functions.user_functions import find_advantage
from asyncrl.messages.groups import Group, Lease, Sequence, Trajectory, VersionSpan
from tools.bench.paired import compare, measure_pairs
from tools.bench.report import Report, Target
from tools.quickstart.model import make_model
from tools.quickstart.settings import Settings

SAMPLES = 8
SAME_LOSS = 1e-4
"""Largest relative difference of the two losses that is rounding, past the first steps with a rate of nearly 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a step."""

    groups: int
    prompt: int
    """Tokens of a prompt."""
    responses: tuple[int, int]
    """Least and most tokens of a response."""
    wanted: float
    """Largest ratio of the CPU times."""


BATCHES = {
    "quickstart": Batch(groups=16, prompt=10, responses=(33, 42), wanted=0.9),
    "long_prompts": Batch(groups=2, prompt=512, responses=(224, 288), wanted=0.6),
}


def make_groups(batch: Batch, vocabulary: int) -> list[Group]:
    """Scored groups with behaviour log-probs near those of random weights."""
    random, found = np.random.default_rng(0), []
    for index in range(batch.groups):
        trajectories = []
        for sample in range(SAMPLES):
            count = int(random.integers(batch.responses[0], batch.responses[1] + 1))
            logprobs = np.full(count, -np.log(vocabulary), np.float32)
            tokens = random.integers(0, vocabulary, count, dtype=np.int32)
            sequence = Sequence(tokens=tokens, logprobs=logprobs, spans=[VersionSpan(0, 0, count)])
            reward = float(random.random())
            trajectories.append(
                Trajectory(sample=sample, sequences=[sequence], finish_reason="stop", text="", reward=reward)
            )
        lease = Lease(
            uid=f"0-{index}",
            number=index + 1,
            purpose="train",
            epoch=0,
            index=index,
            param_version=0,
            prompt_ids=random.integers(0, vocabulary, batch.prompt, dtype=np.int32),
            prompt="",
            row={},
            samples=SAMPLES,
            temperature=1.0,
            max_tokens=batch.responses[1],
        )
        found.append(Group(lease=lease, trajectories=trajectories))
    return found


def config(model: Path, batch: Batch) -> Config:
    """One rank and one thread; the rate is so small that both sides train the same weights."""
    return validate_config(
        {
            "model": {"path": str(model)},
            "data": {"source": "synthetic", "max_prompt_tokens": batch.prompt},
            "rollout": {"max_tokens": batch.responses[1], "samples_per_prompt": SAMPLES, "gpus_per_replica": 0},
            "learner": {"device": "cpu", "threads": 1, "groups_per_step": batch.groups, "lr": 1e-12},
        }
    )


def plan(groups: list[Group], chosen: Config, *, shared: bool) -> StepPlan:
    """The plan of a step."""
    advantage = find_advantage(chosen.learner)
    return build_step(groups, advantage=advantage, version=0, config=chosen, world_size=1, packed=True, shared=shared)


async def measure(report: Report, *, pairs: int) -> None:
    """Fill the report. Raises ValueError when the sides do not train the same."""
    for name, batch in BATCHES.items():
        settings = Settings(positions=batch.prompt + batch.responses[1])
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            model = make_model(settings)
            model.save_pretrained(folder)
            (Path(folder) / "tokenizer.json").write_text("{}")
            chosen = config(Path(folder), batch)
            trainer = Trainer(chosen, rank=0)
            trainer.setup(*trainer.open_store("127.0.0.1"))
            try:
                groups = make_groups(batch, model.config.vocab_size)
                await _compare(report, name, batch, trainer, groups, chosen, pairs)
            finally:
                trainer.stop()


async def _compare(
    report: Report, name: str, batch: Batch, trainer: Trainer, groups: list[Group], chosen: Config, pairs: int
) -> None:
    if not trainer.shares_prefixes:
        raise ValueError("the trainer does not share what sequences begin with; its log says why")
    losses: dict[bool, float] = {}

    def side(shared: bool) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            began = time.process_time()
            losses[shared] = trainer.train(plan(groups, chosen, shared=shared))["loss/policy"]
            return 1e3 * (time.process_time() - began)

        return once

    report.same(name, compare(await measure_pairs(side(True), side(True), pairs)))
    found = compare(await measure_pairs(side(True), side(False), pairs))
    if abs(losses[True] - losses[False]) > SAME_LOSS * max(1e-2, abs(losses[False])):
        raise ValueError(f"the sides do not train the same: losses {losses} of {name}")
    tokens = {shared: plan(groups, chosen, shared=shared).tokens for shared in (True, False)}
    report.settings[name] = {"groups": batch.groups, "samples": SAMPLES, "prompt": batch.prompt, "tokens": tokens}
    report.comparison(name, found, unit="ms of CPU", sides=("shared", "whole"), target=Target("<=", batch.wanted))
