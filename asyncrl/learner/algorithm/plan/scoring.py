"""A scoring pass over the groups of a step before its plan is made: all sampled tokens, cut up for the ranks as a
step is. Pure; torch is not imported.

Scored is every sampled token, also one that is masked or late and has no loss: the rewards of all trajectories of a
group are in its baseline. Invariant: the result has one value for each sampled token in the order of
``Sequence.logprobs``, however the pass was cut.

Fails with nothing: the groups have been checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.learner.algorithm.plan.batch import GroupScores, SampledSequence, sharing_of
from asyncrl.learner.algorithm.plan.micro_batch import MicroBatch, make_micro_batches
from asyncrl.learner.algorithm.plan.packing import pack
from asyncrl.messages.groups import Group
from asyncrl.messages.groups import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """A scoring pass. Every rank has the same number of micro-batches."""

    ranks: list[list[MicroBatch]]
    """Micro-batches: [world size][micro-batches]; ``MicroBatch.sequences`` count sequences with a sampled token."""
    lengths: list[int]
    """Number of sampled tokens of each of these sequences."""
    temperature: float
    """Divisor of the logits."""

    def in_order(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The values of each sequence, from those of each rank, [tokens of all of its micro-batches], fillers
        included.
        """
        found: list[np.ndarray] = [np.empty(0)] * len(self.lengths)
        for batches, of_rank in zip(self.ranks, values, strict=True):
            start = 0
            for index in (int(i) for batch in batches for i in batch.sequences):
                # A filler has one token.
                end = start + (self.lengths[index] if index >= 0 else 1)
                if index >= 0:
                    found[index] = np.asarray(of_rank[start:end], np.float64)
                start = end
        return found


def sampled_sequences(groups: Iterable[Group]) -> Iterator[tuple[Group, TokenSequence]]:
    """Sequences with a sampled token, in the order of groups, trajectories and sequences."""
    for group in groups:
        for trajectory in group.trajectories:
            yield from ((group, sequence) for sequence in trajectory.sequences if len(sequence.logprobs))


def build_scoring(
    groups: Sequence[Group], *, config: Config, world_size: int, packed: bool, shared: bool = False
) -> ScoringPlan:
    """The pass over all sampled tokens of ``groups``; ``packed`` and ``shared`` as for build_step."""
    sequences = [SampledSequence.whole(group, sequence) for group, sequence in sampled_sequences(groups)]
    lengths = [len(sequence.input_ids) for sequence in sequences]
    sharing, budget = sharing_of(sequences, shared=shared), config.learner.tokens_per_microbatch
    rows = pack(lengths, budget=budget, world_size=world_size, packed=packed, sharing=sharing)
    return ScoringPlan(
        ranks=make_micro_batches(sequences, [1.0] * len(sequences), rows, sharing),
        lengths=[len(sequence.predict) for sequence in sequences],
        temperature=config.rollout.temperature,
    )


def by_group(groups: Sequence[Group], values: Sequence[np.ndarray]) -> list[GroupScores]:
    """The values of ``sampled_sequences``, in its order, as GroupScores; a sequence without a sampled token has [0]."""
    left = iter(values)
    return [
        [
            [next(left) if len(sequence.logprobs) else np.empty(0) for sequence in trajectory.sequences]
            for trajectory in group.trajectories
        ]
        for group in groups
    ]
