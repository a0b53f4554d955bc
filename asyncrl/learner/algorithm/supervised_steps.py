"""Supervised plans: the conversations of a step, packed into micro-batches. Pure; torch is not imported.

    term = coefficient * (1 / tokens) * sum over the tokens with a loss of -log pi(token)

The term is the mean over its own tokens, on all ranks; the denominator of the policy's loss plays no part. pi is at
temperature 1: the policy did not sample these tokens. If a step has several updates, each gets a share of the
conversations with its own mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import OptimizerUpdatePlan, StepPlan, SupervisedPlan
from asyncrl.learner.algorithm.packing import MicroBatch, count_tokens, make_micro_batches, nothing_shared, pack
from asyncrl.messages.token_sets import TokenSets
from asyncrl.text.sft.conversations import Conversations, TokenizedRow
from asyncrl.text.sft.encoding import Encoded


class SupervisedSteps:
    """Makes the supervised plan of each step by its number, from the conversations of sft.data."""

    def __init__(self, config: Config, conversations: Conversations, *, packed: bool) -> None:
        self._config, self._conversations, self._packed = config, conversations, packed

    def warm_step(self, number: int) -> StepPlan:
        """Plan of warm step ``number``, counted from 1: one update with conversations and no groups."""
        term = self._term(self._conversations.of_step(number), 1.0)
        nothing: list[list[MicroBatch]] = [[] for _ in range(self._config.learner.row_groups)]
        update = OptimizerUpdatePlan(ranks=nothing, denominator=1.0, sequences=[], tokens=term.tokens, supervised=term)
        metrics = {"sft/tokens": term.denominator, "sft/epochs": self._conversations.epochs(number)}
        return StepPlan(
            updates=[update],
            temperature=self._config.rollout.temperature,
            fresh=False,
            metrics=metrics,
            warm=True,
        )

    def beside(self, plan: StepPlan, step: int) -> StepPlan:
        """Add the supervised term of step ``step``, counted from 1, to each update of ``plan``.

        Without updates, or if sft.weight is 0, the plan does not change.
        """
        sft = self._config.sft
        if not plan.updates or not sft.weight:
            return plan
        # The conversations continue behind those of all warm steps.
        number = sft.warm_steps + step
        conversations = self._conversations.of_step(number)
        shares = np.array_split(np.arange(len(conversations)), len(plan.updates))
        terms = [self._term([conversations[i] for i in share], sft.weight) for share in shares]
        metrics = {
            "sft/tokens": sum(term.denominator for term in terms),
            "sft/epochs": self._conversations.epochs(number),
        }
        return _with_terms(plan, terms, metrics)

    def _term(self, conversations: Sequence[TokenizedRow], coefficient: float) -> SupervisedPlan:
        """Pack the sequences of these conversations into a supervised plan with this coefficient."""
        members = [(each.place, sequence) for each in conversations for sequence in each.sequences]
        sequences = [_Demonstration(sequence) for _, sequence in members]
        lengths = [len(sequence.input_ids) for sequence in sequences]
        learner = self._config.learner
        rows = pack(lengths, budget=learner.tokens_per_row, world_size=learner.row_groups, packed=self._packed)
        ranks = make_micro_batches(sequences, [1.0] * len(sequences), rows, nothing_shared(len(sequences)))
        return SupervisedPlan(
            ranks=ranks,
            denominator=float(sum(len(sequence.predict) for sequence in sequences)),
            coefficient=coefficient,
            places=[place for place, _ in members],
            tokens=count_tokens(ranks),
        )


class _Demonstration:
    """A sequence of a conversation as the learner computes it.

    It is cut before its last token with a loss, which is only a target.
    """

    def __init__(self, sequence: Encoded) -> None:
        count = len(sequence.trained)
        self.input_ids = sequence.ids[: sequence.trained[-1]]
        self.predict = sequence.trained - np.int32(1)
        self.targets = sequence.ids[sequence.trained]
        # Placeholders: the policy did not sample the sequence, and the supervised loss does not use the fields below.
        self.behaviour = self.advantages = np.zeros(count, np.float32)
        self.staleness = np.full(count, -1, np.int32)
        self.teacher = np.empty(0, np.float32)
        self.sets: TokenSets | None = None
        self.routes: np.ndarray | None = None


def _with_terms(plan: StepPlan, terms: Sequence[SupervisedPlan], metrics: dict[str, float]) -> StepPlan:
    """Add one term to each update of the plan, and ``metrics`` to its metrics."""
    updates = [
        replace(update, tokens=update.tokens + term.tokens, supervised=term)
        for update, term in zip(plan.updates, terms, strict=True)
    ]
    return replace(plan, updates=updates, metrics=plan.metrics | metrics)
