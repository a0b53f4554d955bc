"""Scored groups of random tokens, for measuring the learner without engines."""

from __future__ import annotations

import numpy as np

from asyncrl.messages.groups import Group, Lease, Sequence, Trajectory, VersionSpan


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
