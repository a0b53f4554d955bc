"""The model and the batch that the benchmark of the learner trains on; the same bits in every process.

Lengths are lognormal, as those of responses are: at sigma 0.9 the longest of 64 is eight times the median.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.groups import Group, Lease, Sequence, Trajectory, VersionSpan

VOCABULARY = 2048
PROMPT, MEDIAN, LONGEST = 32, 128, 2000
"""Tokens of a prompt, and of a response."""
GROUPS, SAMPLES = 8, 8
BUDGET = 4096
"""Tokens of a micro-batch."""
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": PROMPT + LONGEST,
    "tie_word_embeddings": False,
}
LR, MAX_NORM = 1e-4, 1.0
THREADS = 1
"""Of each side."""
LORA_RANK, LORA_ALPHA = 16, 32.0
CAP = 100.0
"""Cap that no ratio of the batch reaches, so a loss without a cap is the same."""


def make_model(folder: Path) -> None:
    """A Qwen2 with random weights, float32, and no tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SETTINGS)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def config(model: Path, *, lora: bool) -> Config:
    """One rank on CPU, that trains all weights, or adapters on every linear layer of the decoder."""
    return validate_config(
        {
            "model": {"path": str(model)},
            "data": {"source": "synthetic", "max_prompt_tokens": PROMPT},
            "rollout": {"max_tokens": LONGEST, "samples_per_prompt": SAMPLES, "gpus_per_replica": 0},
            "lora": {"rank": LORA_RANK if lora else 0, "alpha": LORA_ALPHA},
            "learner": {
                "device": "cpu",
                "threads": THREADS,
                "groups_per_step": GROUPS,
                "tokens_per_microbatch": BUDGET,
                "lr": LR,
                "tis_cap": CAP,
                "max_grad_norm": MAX_NORM,
            },
        }
    )


def lengths(sigma: float) -> np.ndarray:
    """int64 [GROUPS, SAMPLES]: tokens of each response."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), sigma, (GROUPS, SAMPLES))
    return np.clip(drawn.astype(np.int64), 1, LONGEST)


def random_groups(random: np.random.Generator, lengths: np.ndarray, *, prompt: int, vocabulary: int) -> list[Group]:
    """Groups with behaviour log-probs near those of random weights.

    ``lengths`` is int64 [groups, samples]: tokens of each response. A prompt has ``prompt`` tokens.
    """

    def trajectory(sample: int, count: int) -> Trajectory:
        sequence = Sequence(
            tokens=random.integers(0, vocabulary, count, dtype=np.int32),
            logprobs=(-np.log(vocabulary) + 0.1 * random.standard_normal(count)).astype(np.float32),
            spans=[VersionSpan(0, 0, count)],
        )
        return Trajectory(
            sample=sample, sequences=[sequence], finish_reason="stop", text="", reward=float(random.random())
        )

    found = []
    for index, counts in enumerate(lengths.tolist()):
        trajectories = [trajectory(sample, count) for sample, count in enumerate(counts)]
        lease = Lease(
            uid=f"0-{index}",
            number=index + 1,
            purpose="train",
            epoch=0,
            index=index,
            param_version=0,
            prompt_ids=random.integers(0, vocabulary, prompt, dtype=np.int32),
            prompt="",
            row={},
            samples=len(counts),
            temperature=1.0,
            max_tokens=int(lengths.max()),
        )
        found.append(Group(lease=lease, trajectories=trajectories))
    return found


def make_groups(sigma: float) -> list[Group]:
    """Scored groups, with behaviour log-probs near those of random weights."""
    return random_groups(np.random.default_rng(1), lengths(sigma), prompt=PROMPT, vocabulary=VOCABULARY)


def advantages(group: Group) -> np.ndarray:
    """float64 [SAMPLES]: rewards less their mean, over their standard deviation."""
    rewards = np.array([trajectory.reward for trajectory in group.trajectories])
    return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))


def padded(groups: list[Group]) -> dict[str, np.ndarray]:
    """The batch by the names that TRL has for it, padded on the right to its longest response."""
    rows = [trajectory.sequences[0] for group in groups for trajectory in group.trajectories]
    shape = len(rows), max(len(row.tokens) for row in rows)
    completion, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    behaviour = np.zeros(shape, dtype=np.float32)
    for at, row in enumerate(rows):
        count = len(row.tokens)
        completion[at, :count], mask[at, :count], behaviour[at, :count] = row.tokens, 1, row.logprobs
    return {
        "prompt_ids": np.repeat([group.lease.prompt_ids for group in groups], SAMPLES, axis=0).astype(np.int64),
        "completion_ids": completion,
        "completion_mask": mask,
        "old_per_token_logps": behaviour,
        "advantages": np.concatenate([advantages(group) for group in groups]).astype(np.float32),
    }


def write_padded(sigma: float, folder: Path, model: Path, *, lora: bool) -> list[str]:
    """Write the batch in FOLDER/SIGMA.npz; returns the arguments of trl_side.py."""
    batch: dict[str, Any] = dict(padded(make_groups(sigma)))
    batch |= {"prompt_mask": np.ones_like(batch["prompt_ids"]), "num_items_in_batch": batch["completion_mask"].sum()}
    np.savez(folder / f"{sigma:g}.npz", **batch)
    settings = trl_settings(config(model, lora=lora)) | {
        "vocabulary": VOCABULARY,
        "budget": BUDGET,
        "threads": THREADS,
        "lora": {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"} if lora else None,
    }
    return ["learner", str(model), str(folder), str(folder), json.dumps(settings)]


def trl_settings(config: Config) -> dict[str, Any]:
    """The settings of trl_side.py that follow from a configuration."""
    learner, rollout = config.learner, config.rollout
    return {
        "sequences": learner.groups_per_step * rollout.samples_per_prompt,
        "samples": rollout.samples_per_prompt,
        "longest": rollout.max_tokens,
        "lr": learner.lr,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
    }
