"""The model and the batch that the benchmark of the learner trains on; the same bits in every process.

Lengths are lognormal, as those of responses are: at sigma 0.9 the longest of 64 is eight times the median.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.groups import Group, Sequence, Ticket, Trajectory, VersionSpan

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
LR, CAP, MAX_NORM = 1e-4, 2.0, 1.0


def make_model(folder: Path) -> None:
    """A Qwen2 with random weights, float32, and no tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SETTINGS)).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / "tokenizer.json").write_text("{}")


def config(model: Path, threads: int) -> Config:
    """One rank on CPU."""
    return validate_config(
        {
            "model": {"path": str(model)},
            "data": {"source": "synthetic", "max_prompt_tokens": PROMPT},
            "rollout": {"max_tokens": LONGEST, "samples_per_prompt": SAMPLES, "gpus_per_replica": 0},
            "learner": {
                "device": "cpu",
                "threads": threads,
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


def make_groups(sigma: float) -> list[Group]:
    """Scored groups, with behaviour log-probs near those of random weights."""
    random = np.random.default_rng(1)
    found = []
    for index, counts in enumerate(lengths(sigma)):
        trajectories = [
            Trajectory(
                sample=sample,
                sequences=[
                    Sequence(
                        tokens=random.integers(0, VOCABULARY, count, dtype=np.int32),
                        logprobs=(-np.log(VOCABULARY) + 0.1 * random.standard_normal(count)).astype(np.float32),
                        spans=[VersionSpan(0, 0, int(count))],
                    )
                ],
                finish_reason="stop",
                text="",
                reward=float(random.random()),
            )
            for sample, count in enumerate(counts)
        ]
        ticket = Ticket(
            uid=f"0-{index}",
            grant=index + 1,
            purpose="train",
            epoch=0,
            index=index,
            param_version=0,
            prompt_ids=random.integers(0, VOCABULARY, PROMPT, dtype=np.int32),
            prompt="",
            row={},
            samples=SAMPLES,
            temperature=1.0,
            max_tokens=LONGEST,
        )
        found.append(Group(ticket=ticket, trajectories=trajectories))
    return found
