"""The plan of a step, from its groups to the work of each rank: advantages, packed micro-batches, the denominator.

Pure functions in numpy; torch is not imported. Advantages are computed over whole groups before anything is split.

    loss = (1 / denominator) * sum over all tokens of the update of weight * token loss

Weights and the denominator, over all ranks and micro-batches, are fixed here, so the gradient does not depend on how
the step is cut. Their unit is the trajectory: a fork of its conversation into several sequences changes no weight.

A sequence is its prompt and its tokens up to the last trained one, which is only a target: position i predicts token
i + 1. The arrays of the loss (targets, behaviour log-probs, advantages) exist only at the positions in ``predict``,
whose next token has a loss. Sequences behind the same prompt may share their beginning (packing.py), which changes the
work and nothing else.

Every sampled token is trained in exactly one sequence. Context, and tokens repeated from another sequence, are computed
and have no loss. A sequence without a loss token is not computed. If the objective is a multiple of the advantage, a
sequence whose advantages are all 0 has no gradient. Its tokens count in the denominator, but it is computed only if
its update has no sequence with a gradient.

A masked trajectory (cut by a limit under ``reward.truncated = "mask"``) counts in the baseline of its group. It counts
in no loss, no denominator and no statistic of the policy but ``policy/reference_kl``. The same holds for a token staler
than ``staleness.max``, unless ``staleness.late`` is "train".

A step has one update or several, each from its share of the groups. Advantages are those of the whole step; each update
has the denominator of its own tokens.

Fails with ValueError for a group that ``check_group`` refuses, and as the advantage does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from asyncrl.config import Config
from asyncrl.learner.algorithm.advantages import Advantage, Advantages, Penalties, ScoredGroup, scored_group
from asyncrl.learner.algorithm.group_metrics import (
    reward_metrics,
    rollout_metrics,
    signal_metrics,
    staleness_metrics,
)
from asyncrl.learner.algorithm.packing import (
    MicroBatch,
    SharedPrefixes,
    count_tokens,
    find_shared_prefixes,
    make_micro_batches,
    nothing_shared,
    pack,
)
from asyncrl.messages.groups import (
    Group,
    Trajectory,
    VersionSpan,
    check_group,
    is_truncated,
    past_rewards,
    sampled_positions,
    sampled_spans,
)
from asyncrl.messages.groups import Sequence as TokenSequence

GroupScores = list[list[np.ndarray]]
"""One value for each sampled token: [trajectory][sequence], each float64 [sampled tokens]."""


@dataclass(frozen=True, slots=True)
class SequenceId:
    """Names a sequence: the uid of its group, its trajectory's ``sample`` number, its number in the trajectory."""

    uid: str
    sample: int
    sequence: int


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """The supervised term of an update (supervised_steps.py). Every rank has the same number of micro-batches."""

    ranks: list[list[MicroBatch]]
    """Micro-batches: [row groups][micro-batches]; ``MicroBatch.sequences`` are indices in ``places``."""
    denominator: float
    """Tokens with a loss over the whole update."""
    coefficient: float
    """Factor of the mean loss of these tokens."""
    places: list[str]
    """FILE:LINE of each sequence."""
    tokens: int
    """Tokens computed by all ranks, context included."""


@dataclass(frozen=True, slots=True)
class OptimizerUpdatePlan:
    """One update of the weights. Every rank has the same number of micro-batches."""

    ranks: list[list[MicroBatch]]
    """Micro-batches of the policy's loss: [row groups][micro-batches].

    A row group is a rank, or the ranks that share rows (fsdp/model/packed_row.py).
    """
    denominator: float
    """Denominator of the sum of weighted token losses over the whole update."""
    sequences: list[SequenceId]
    """Every sequence that has a loss, also if its advantages are 0; ``MicroBatch.sequences`` are indices in this list.

    In the order of groups and trajectories. Empty in a warm step.
    """
    tokens: int
    """Tokens computed by all ranks, prompts and conversations included. A beginning shared in a row counts once."""
    supervised: SupervisedPlan | None = None
    recorded: list[np.ndarray] = field(default_factory=list)
    """Which sampled tokens have a loss, bool [S], for each sequence of the groups that samples/ gets.

    These are the first of ``sequences``.
    """

    @property
    def uids(self) -> list[str]:
        """Uids of the prompt groups that have a loss, in order."""
        return list(dict.fromkeys(sequence.uid for sequence in self.sequences))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step: its updates, in order."""

    updates: list[OptimizerUpdatePlan]
    """Updates with at least one loss token; empty if no token of the step has a loss."""
    temperature: float
    """Divisor of the logits."""
    fresh: bool
    """Whether the weights that the step starts from are the newest published ones: no step was trained since.

    Only then do tokens of staleness 0 show how engine and learner differ (``policy/engine_kl``).
    """
    metrics: dict[str, float]
    """Metrics of the KL penalties and of the supervised term; ``step_metrics`` gives those of the groups."""
    warm: bool = False
    """Whether this is a warm step: a supervised step before the first step of the run."""

    @property
    def tokens(self) -> int:
        """Tokens computed by all updates."""
        return sum(update.tokens for update in self.updates)

    @property
    def sequences(self) -> list[SequenceId]:
        """Sequences of all updates."""
        return [sequence for update in self.updates for sequence in update.sequences]


Aggregation = Literal["token", "sequence", "constant"]
"""Divisor of the loss (``step_denominator``): loss tokens, trajectories, or trajectories * max_tokens."""


def token_weight(aggregation: Aggregation, loss_tokens: int) -> float:
    """Weight of each token of a trajectory with ``loss_tokens`` (at least 1) of them.

    It is 1 under "token" and "constant". Under "sequence" it is 1 / loss_tokens, so that a trajectory counts by its
    mean.
    """
    return 1.0 / loss_tokens if aggregation == "sequence" else 1.0


def step_denominator(aggregation: Aggregation, loss_tokens: Sequence[int], max_tokens: int) -> float:
    """Denominator of an update's weighted sum; ``loss_tokens`` holds one count (at least 1) for each trajectory.

    Under "token" it is the number of loss tokens (DAPO, arXiv 2503.14476, eq. 12). Under "sequence" it is the number of
    trajectories (GRPO, arXiv 2402.03300, eq. 3). Under "constant" it is trajectories * max_tokens (Dr. GRPO, arXiv
    2503.20783, section 3.2). Without trajectories it is 1.
    """
    if not loss_tokens:
        return 1.0
    if aggregation == "token":
        return float(sum(loss_tokens))
    if aggregation == "sequence":
        return float(len(loss_tokens))
    return float(len(loss_tokens) * max_tokens)


def build_step(
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    penalties: Penalties | None = None,
    teacher: Sequence[GroupScores] | None = None,
    version: int,
    fresh: bool = True,
    config: Config,
    world_size: int,
    packed: bool,
    shared: bool = False,
    skip_zero_advantages: bool = False,
) -> StepPlan:
    """Plan one step: compute advantages, split the groups among the updates, pack each update into rows.

    ``groups`` are trained in the order given (the caller orders them by (epoch, index)). ``penalties`` are subtracted
    from the rewards, for the advantages only; ``teacher`` holds log-probs of ``groups`` by a teacher on a server.
    ``version`` is the newest published version, ``fresh`` whether no step was trained since. ``world_size`` is the
    number of row groups. ``packed`` False puts each sequence in a row of its own; ``shared`` lets rows compute the
    common beginning of a group's sequences once.

    Masked trajectories and late tokens get no loss. An update without a loss token is left out of the plan. With
    ``skip_zero_advantages`` a token of advantage 0 has no gradient (losses.py). A sequence of such tokens is not
    computed, unless the update has only such sequences.
    """
    learner = config.learner
    # The intake checks groups, but not those that a checkpoint has restored.
    for group in groups:
        if problem := check_group(group):
            raise ValueError(f"group {group.lease.uid} cannot be trained: {problem}")
    masking = config.reward.truncated == "mask"
    # Tokens of versions before ``oldest`` are late. With None late tokens are trained.
    oldest = version - config.staleness.max if config.staleness.hard else None
    updates: list[OptimizerUpdatePlan] = []
    advantages = _advantages(groups, penalties, advantage)
    for share in np.array_split(np.arange(len(groups)), learner.updates_per_batch):
        sequences: list[SampledSequence] = []
        weights: list[float] = []
        loss_tokens: list[int] = []
        recorded: list[np.ndarray] = []
        for i in share:
            group = groups[i]
            for n, (trajectory, turn_advantages) in enumerate(zip(group.trajectories, advantages[i], strict=True)):
                if masking and is_truncated(trajectory):
                    continue
                teacher_logprobs = teacher[i][n] if teacher is not None else None
                trained = _trained_sequences(group, trajectory, turn_advantages, version, oldest, teacher_logprobs)
                if trained:
                    loss_tokens.append(sum(len(sequence.predict) for sequence in trained))
                    weights += [token_weight(learner.aggregation, loss_tokens[-1])] * len(trained)
                    sequences += trained
                    # StepLines records the first groups of a step.
                    if i < config.run.samples_per_step:
                        recorded += [sequence.has_loss for sequence in trained]
        if sequences:
            computed = list(range(len(sequences)))
            if skip_zero_advantages:
                computed = [i for i in computed if sequences[i].advantages.any()] or computed
            shared_prefixes = shared_prefixes_of(sequences, shared=shared)
            rows = pack(
                [len(sequences[i].input_ids) for i in computed],
                budget=learner.tokens_per_row,
                world_size=world_size,
                packed=packed,
                shared_prefixes=shared_prefixes.among(computed),
            )
            # ``rows`` has indices into ``computed``; ``make_micro_batches`` needs indices into ``sequences``.
            rows = [[[computed[i] for i in row] for row in rank] for rank in rows]
            ranks = make_micro_batches(sequences, weights, rows, shared_prefixes)
            updates.append(
                OptimizerUpdatePlan(
                    ranks=ranks,
                    denominator=step_denominator(learner.aggregation, loss_tokens, config.rollout.max_tokens),
                    sequences=[s.id for s in sequences],
                    tokens=count_tokens(ranks),
                    recorded=recorded,
                )
            )
    return StepPlan(
        updates=updates,
        temperature=config.rollout.temperature,
        fresh=fresh,
        metrics=dict(penalties.metrics) if penalties is not None else {},
    )


def step_metrics(trained: Sequence[Group], filtered: Sequence[Group], version: int, config: Config) -> dict[str, float]:
    """Metrics (group_metrics.py) of a step that trains the groups ``trained``, with ``version`` as the newest version.

    ``filtered`` are the groups filtered since the step before, which are not trained.
    """
    return (
        reward_metrics(trained, filtered, config.learner.signal_tolerance)
        | signal_metrics(trained, filtered, config.learner)
        | rollout_metrics(trained, filtered)
        | staleness_metrics(trained, version=version, config=config.staleness)
    )


def _advantages(groups: Sequence[Group], penalties: Penalties | None, advantage: Advantage) -> Advantages:
    """Compute the advantages of the groups from their rewards, less the penalties if there are any."""
    if not groups:
        return []
    scored = [scored_group(group) for group in groups]
    if penalties is not None:
        with_penalties = zip(scored, penalties.total, penalties.past, strict=True)
        scored = [_subtract_penalties(group, total, past) for group, total, past in with_penalties]
    return advantage(scored)


def _subtract_penalties(group: ScoredGroup, total: np.ndarray, past: Sequence[np.ndarray]) -> ScoredGroup:
    """Subtract penalties from a group's rewards, and from the reward that each turn cannot have caused.

    ``total`` is the penalty of each trajectory, float64 [n], and ``past`` that of the earlier turns in a turn's
    sequence. A turn's return does not bear ``past``, since it is subtracted from both terms of the return.
    """
    net_past = [reward - penalty for reward, penalty in zip(group.past, past, strict=True)]
    return replace(group, rewards=group.rewards - total, past=net_past)


def _trained_sequences(
    group: Group,
    trajectory: Trajectory,
    advantages: np.ndarray,
    version: int,
    oldest: int | None,
    teacher: Sequence[np.ndarray] | None,
) -> list[SampledSequence]:
    """The sequences of a trajectory that have a loss token.

    ``advantages`` is float64 [turns] over all its sequences. Tokens of versions before ``oldest`` have no loss; None
    keeps tokens of all versions. ``teacher`` has log-probs for each sequence.
    """
    trained, turns_done = [], 0
    values = advantages.astype(np.float32)
    for number, sequence in enumerate(trajectory.sequences):
        _, turn_lengths = past_rewards(sequence)
        turn_advantages = values[turns_done : turns_done + len(turn_lengths)]
        turns_done += len(turn_lengths)
        spans = list(sampled_spans(sequence))
        # None means that all sampled tokens have a loss.
        kept = _kept(spans, oldest)
        if spans and (kept is None or len(kept)):
            trained.append(
                SampledSequence(
                    SequenceId(group.lease.uid, trajectory.sample, number),
                    _prompt_ids(group, sequence),
                    sequence,
                    np.repeat(turn_advantages, turn_lengths),
                    _staleness(spans, version),
                    kept,
                    teacher[number] if teacher is not None else None,
                )
            )
    return trained


def _prompt_ids(group: Group, sequence: TokenSequence) -> np.ndarray:
    """The sequence's own prompt, or else the prompt of the lease."""
    return group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids


def _kept(spans: Sequence[VersionSpan], oldest: int | None) -> np.ndarray | None:
    """Indices of the sampled tokens in ``spans`` whose version is ``oldest`` or newer; None if that is all of them."""
    if oldest is None or all(span.version >= oldest for span in spans):
        return None
    return np.flatnonzero(np.repeat([span.version >= oldest for span in spans], _lengths(spans)))


def _staleness(spans: Sequence[VersionSpan], version: int) -> np.ndarray:
    """Staleness of each sampled token, int32: -1 where its log-prob is of no single version (``mixed_kv``)."""
    stale = np.array([-1 if span.mixed_kv else version - span.version for span in spans], np.int32)
    return np.repeat(stale, _lengths(spans))


def _lengths(spans: Sequence[VersionSpan]) -> list[int]:
    return [span.end - span.start for span in spans]


class SampledSequence:
    """A sampled sequence, cut and indexed as the learner computes it.

    ``advantages`` float32, ``stale`` int32 and ``teacher`` float64 are [S] for S sampled tokens. ``kept`` holds the
    indices of the sampled tokens that have a loss; None means all.
    """

    def __init__(
        self,
        name: SequenceId,
        prompt_ids: np.ndarray,
        sequence: TokenSequence,
        advantages: np.ndarray,
        stale: np.ndarray,
        kept: np.ndarray | None,
        teacher: np.ndarray | None = None,
    ) -> None:
        def chosen(values: np.ndarray) -> np.ndarray:
            return values if kept is None else values[kept]

        self.id = name
        self.has_loss = np.ones(len(sequence.logprobs), bool) if kept is None else _mask(kept, len(sequence.logprobs))
        """Which sampled tokens have a loss: bool [S]."""
        # ``last`` is the index of the last trained token. If all tokens are sampled and trained, it needs no search.
        if kept is None and len(sequence.logprobs) == len(sequence.tokens):
            last = len(sequence.tokens) - 1
            self.predict = np.arange(len(prompt_ids) - 1, len(prompt_ids) + last, dtype=np.int32)
            targets = sequence.tokens
        else:
            positions = chosen(sampled_positions(sequence))
            last = int(positions[-1])
            # The position before a token predicts it.
            self.predict = (positions + (len(prompt_ids) - 1)).astype(np.int32)
            targets = sequence.tokens[positions]
        self.input_ids = _as(np.concatenate([prompt_ids, sequence.tokens[:last]]), np.int32)
        self.routes = None if sequence.routes is None else sequence.routes[: len(self.input_ids)]
        prompt_routes = b"" if self.routes is None else self.routes[: len(prompt_ids)].tobytes()
        self.family = name.uid, self.input_ids[: len(prompt_ids)].tobytes(), prompt_routes
        """Group, prompt and its routes: sequences that have all of these in common may share their beginning."""
        self.targets = _as(targets, np.int32)
        self.behaviour = _as(chosen(sequence.logprobs), np.float32)
        self.advantages = chosen(advantages)
        self.staleness = chosen(stale)
        self.sets = sequence.sets if sequence.sets is None or kept is None else sequence.sets.chosen(kept)
        self.teacher = np.empty(0, np.float32) if teacher is None else _as(chosen(teacher), np.float32)

    @classmethod
    def whole(cls, group: Group, sequence: TokenSequence) -> SampledSequence:
        """The sequence with a target at every sampled token: a scoring pass computes it, nothing trains it."""
        nothing = np.zeros(len(sequence.logprobs), np.float32)
        # No number of a trajectory or sequence: nothing looks them up.
        name = SequenceId(group.lease.uid, -1, -1)
        return cls(name, _prompt_ids(group, sequence), sequence, nothing, nothing.astype(np.int32), None)


def _mask(indices: np.ndarray, count: int) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[indices] = True
    return mask


def _as(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Convert ``values`` to ``dtype``, without a copy if their type is ``dtype`` already."""
    return values.astype(dtype, copy=False)


def shared_prefixes_of(sequences: Sequence[SampledSequence], *, shared: bool) -> SharedPrefixes:
    """Find the beginnings that sequences of a group share behind the same prompt; none unless ``shared``."""
    if not shared:
        return nothing_shared(len(sequences))
    return find_shared_prefixes([_identity(s) for s in sequences], [s.family for s in sequences])


def _identity(sequence: SampledSequence) -> np.ndarray:
    """Join the ids and routes of tokens, which must be equal to compute a token once: int32 [L, 1 + routes]."""
    if sequence.routes is None:
        return sequence.input_ids
    routes = sequence.routes.reshape(len(sequence.input_ids), -1).astype(np.int32)
    return np.concatenate([sequence.input_ids[:, None], routes], axis=1)
