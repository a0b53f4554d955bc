"""Log-probs of a step's groups, needed to plan the step, and the KL penalty that they give. Pure; imports no torch.

A scoring pass covers every sampled token, also masked or late ones without a loss: the rewards of all trajectories are
in the baseline of their group. Invariant: a pass gives one value for each sampled token in the order of
``Sequence.logprobs``, however the pass was cut for the ranks.

With ``learner.kl.place = "reward"`` the divergence from a frozen reference is a part of the reward:

    penalty of a token = coefficient * k(log(pi_b / pi_ref)),   k = k1 by default

pi_b is the policy that sampled the token, as the engine reported it; the mean of each estimator on its own samples is
KL(pi_b || pi_ref) (k2 nearly; http://joschu.net/blog/kl-approx.html). The penalties of a trajectory are subtracted from
its reward before the advantages are computed, as in InstructGPT (arXiv 2203.02155, eq. 2; arXiv 1909.08593, section 2),
so the baseline has them too. A turn's return bears every penalty of its trajectory, except those of earlier turns of
its sequence.
No gradient passes through the penalty, and dynamic sampling still compares the original rewards.

Fails with NonFiniteStep if a log-prob of the reference is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.config.algorithm import KLConfig
from asyncrl.core.errors import NonFiniteStep
from asyncrl.learner.algorithm.advantages import Penalties
from asyncrl.learner.algorithm.batch import GroupScores, SampledSequence, shared_prefixes_of
from asyncrl.learner.algorithm.packing import MicroBatch, make_micro_batches, pack
from asyncrl.messages.groups import Group, past_rewards
from asyncrl.messages.groups import Sequence as TokenSequence

LOG_RATIO_LIMIT = 20.0
"""Nats at which a log-ratio is clamped, as in a loss."""
ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda r: r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: np.exp(-r) - 1 + r,
}
"""Estimators by name, as functions of r = log(pi_b / pi_ref)."""


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """A scoring pass. Every rank has the same number of micro-batches."""

    ranks: list[list[MicroBatch]]
    """Micro-batches: [row groups][micro-batches]; ``MicroBatch.sequences`` are indices in ``lengths``."""
    lengths: list[int]
    """Number of sampled tokens of each sequence that has any, in the order of ``sampled_sequences``."""
    temperature: float
    """Divisor of the logits."""

    def in_order(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sort results by sequence: float64 [sampled tokens] each, in the order of ``lengths``.

        ``values`` has one array for each row group: all its micro-batches in order, fillers included.
        """
        by_sequence: list[np.ndarray] = [np.empty(0)] * len(self.lengths)
        for batches, rank_values in zip(self.ranks, values, strict=True):
            start = 0
            for index in (int(i) for batch in batches for i in batch.sequences):
                # A filler has one token.
                end = start + (self.lengths[index] if index >= 0 else 1)
                if index >= 0:
                    by_sequence[index] = np.asarray(rank_values[start:end], np.float64)
                start = end
        return by_sequence


def sampled_sequences(groups: Iterable[Group]) -> Iterator[tuple[Group, TokenSequence]]:
    """Sequences with a sampled token, in the order of groups, trajectories and sequences."""
    for group in groups:
        for trajectory in group.trajectories:
            yield from ((group, sequence) for sequence in trajectory.sequences if len(sequence.logprobs))


def build_scoring(
    groups: Sequence[Group], *, config: Config, world_size: int, packed: bool, shared: bool = False
) -> ScoringPlan:
    """Plan the pass that scores all sampled tokens of ``groups``; ``packed`` and ``shared`` as for build_step."""
    sequences = [SampledSequence.whole(group, sequence) for group, sequence in sampled_sequences(groups)]
    lengths = [len(sequence.input_ids) for sequence in sequences]
    shared_prefixes, budget = shared_prefixes_of(sequences, shared=shared), config.learner.tokens_per_row
    rows = pack(lengths, budget=budget, world_size=world_size, packed=packed, shared_prefixes=shared_prefixes)
    return ScoringPlan(
        ranks=make_micro_batches(sequences, [1.0] * len(sequences), rows, shared_prefixes),
        lengths=[len(sequence.predict) for sequence in sequences],
        temperature=config.rollout.temperature,
    )


def by_group(groups: Sequence[Group], values: Sequence[np.ndarray]) -> list[GroupScores]:
    """Arrange scores by group, trajectory and sequence.

    ``values`` follow the order of ``sampled_sequences``; a sequence without a sampled token gets an empty array.
    """
    left = iter(values)
    return [
        [
            [next(left) if len(sequence.logprobs) else np.empty(0) for sequence in trajectory.sequences]
            for trajectory in group.trajectories
        ]
        for group in groups
    ]


def kl_penalties(
    groups: Sequence[Group], reference: Sequence[GroupScores], config: KLConfig, *, step: int
) -> Penalties:
    """Compute the penalties of a step from its tokens' log-probs under the ``reference``, nats. Raises NonFiniteStep.

    ``past`` of a turn sums the penalties of earlier turns in its sequence. Log-ratios are clamped to LOG_RATIO_LIMIT.
    """
    estimate = ESTIMATORS[config.estimator_used]
    total: list[np.ndarray] = []
    past: list[list[np.ndarray]] = []
    penalty_sum, tokens = 0.0, 0
    for group, group_scores in zip(groups, reference, strict=True):
        group_totals, group_past = [], []
        for trajectory, trajectory_scores in zip(group.trajectories, group_scores, strict=True):
            turn_penalties, past_penalties = [np.zeros(0)], [np.zeros(0)]
            for sequence, scores in zip(trajectory.sequences, trajectory_scores, strict=True):
                log_ratio = sequence.logprobs.astype(np.float64) - scores
                if not np.isfinite(log_ratio).all():
                    raise NonFiniteStep("log-probs by the reference", step=step, uids=[group.lease.uid])
                values = estimate(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
                _, turn_lengths = past_rewards(sequence)
                # Index of the first token of each turn among the sampled tokens, and at last the number of tokens.
                bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(turn_lengths)])
                # The penalties summed up to the beginning of each turn; the last entry is the sum of all.
                sums = np.concatenate([np.zeros(1), np.cumsum(values)])[bounds]
                turn_penalties.append(np.diff(sums))
                past_penalties.append(sums[:-1])
                tokens += len(values)
            group_totals.append(config.coefficient * float(np.concatenate(turn_penalties).sum()))
            group_past.append(config.coefficient * np.concatenate(past_penalties))
        penalty_sum += sum(group_totals)
        total.append(np.array(group_totals))
        past.append(group_past)
    count = sum(map(len, total))
    metrics = {"reward/kl_penalty": penalty_sum / max(1, count)}
    if tokens:
        metrics["policy/reference_kl"] = penalty_sum / config.coefficient / tokens
    return Penalties(total, past, metrics)
