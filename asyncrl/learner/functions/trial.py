"""Trial of the advantage and the loss of a run on made-up tokens: ``python -m asyncrl.learner.functions.trial``.

Reads the section ``learner`` as JSON from standard input, and ``rollout.samples_per_prompt`` from its command line.
Writes a JSON list of problems, each beginning with its key, to standard output; prints of the user's code go to
standard error. In a process of its own, since that code may do anything when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.advantage.advantages import ScoredGroup
from asyncrl.learner.algorithm.token_batch import TokenBatch
from asyncrl.learner.functions.user_functions import find_advantage, make_objective
from asyncrl.workers.user_code import describe

LENGTHS = (3, 2)
"""Tokens of each of the two sequences."""


def problems_of(config: LearnerConfig, samples: int) -> list[str]:
    """Reasons that the advantage and the loss cannot be called, or return something wrong; none if they work.

    ``samples``: trajectories of a group.
    """
    return [*_of_advantage(config, samples), *_of_loss(config)]


class _AnyComponent(dict[str, np.ndarray]):
    """Components of made-up rewards: one by any name, since that of the user's reward function is not known here."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples

    def __missing__(self, name: str) -> np.ndarray:
        return np.linspace(0.0, 1.0, self._samples)

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _of_advantage(config: LearnerConfig, samples: int) -> list[str]:
    groups = [
        ScoredGroup(
            uid=f"trial-{number}",
            rewards=np.arange(samples) % (2.0 + number),
            past=[np.zeros(1 + index % 2) for index in range(samples)],
            lengths=2 + np.arange(samples) % 8,
            components=_AnyComponent(samples),
        )
        for number in range(2)
    ]
    try:
        find_advantage(config)(groups)
    except ConfigError as error:
        return error.problems
    return []


def _of_loss(config: LearnerConfig) -> list[str]:
    count = sum(LENGTHS)
    logprobs = torch.linspace(-3.0, -0.1, count, requires_grad=True)
    others = [logprobs.detach() - 0.05 * n for n in range(1, 5)]
    batch = TokenBatch(
        logprobs=logprobs,
        entropies=torch.linspace(0.1, 1.0, count, requires_grad=True),
        behaviour=others[0],
        proximal=others[1],
        advantages=torch.linspace(-1.0, 1.0, count),
        weights=torch.ones(count),
        segments=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequences=len(LENGTHS),
        staleness=torch.zeros(count, dtype=torch.int32),
        reference=others[2],
        teacher=others[3],
    )
    try:
        objective, _ = make_objective(config)(batch, float(count))
        torch.autograd.backward(objective)
    except ConfigError as error:
        return error.problems
    except Exception as error:
        return [f"learner.loss: {config.loss} has no gradient: {describe(error)}"]
    if logprobs.grad is None or not torch.isfinite(logprobs.grad).all():
        return [f"learner.loss: {config.loss} has no finite gradient by the log-probs of its batch"]
    return []


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answer:
        # The user's module may print, also from C and from processes of its own, and the answer is to stand alone.
        os.dup2(2, 1)
        answer.write(json.dumps(problems_of(LearnerConfig.model_validate_json(sys.stdin.read()), int(sys.argv[1]))))
