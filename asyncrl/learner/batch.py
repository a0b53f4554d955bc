"""From the groups of a step to what each rank computes: advantages, packed micro-batches, and the
denominator.

Everything here is a pure function of its arguments, in numpy; torch is not imported. Advantages are taken
over whole groups before anything is split. The denominator is the step's, over all ranks and micro-batches,
fixed here.

A sequence is prompt + response with its last token left out: position i of the row predicts token i + 1. The
arrays that the loss needs (targets, behaviour log-probs, advantages ...) exist only at the positions that
predict a loss token, and ``predict`` says where in the row these are.

A masked trajectory (cut at max_tokens under ``reward.truncated = "mask"``) counts in its group's baseline and
in no loss, no denominator and no statistic of the policy; it is not computed at all.

Fails with ValueError for a group that ``check_group`` would have refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Config
from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.aggregation import step_denominator, token_weight
from asyncrl.learner.group_metrics import (
    reward_metrics,
    rewards_of,
    rollout_metrics,
    staleness_metrics,
    token_versions,
)
from asyncrl.learner.packing import pack
from asyncrl.messages.groups import Group, Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens holding S sequences, with N positions that have a loss."""

    input_ids: np.ndarray
    """int32 [T]."""
    lengths: np.ndarray
    """int32 [S], sums to T: the sequences, one after the other. Positions restart at 0 in each."""
    sequences: np.ndarray
    """int32 [S]: index of each in ``StepPlan.sequences``; -1 for a filler."""
    predict: np.ndarray
    """int32 [N], ascending: positions in the row whose next token has a loss."""
    targets: np.ndarray
    """int32 [N]: the token that each of them predicts."""
    behaviour: np.ndarray
    """float32 [N], nats: log-prob of the target when it was sampled."""
    advantages: np.ndarray
    """float32 [N]."""
    weights: np.ndarray
    """float32 [N]: share of each token in the sum that is divided by the denominator; 0 only in a filler."""
    staleness: np.ndarray
    """int32 [N]: versions between the newest published weights and those that sampled the target.

    -1 where the engine's log-prob is of no single version (mixed_kv).
    """


@dataclass(frozen=True, slots=True)
class SequenceId:
    """Which trajectory a sequence is."""

    uid: str
    sample: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step. Every rank has the same number of micro-batches."""

    ranks: list[list[MicroBatch]]
    """[world size][micro-batches]."""
    denominator: float
    """What the sum of weighted token losses over the whole step is divided by."""
    sequences: list[SequenceId]
    """Every sequence that has a loss, in the order of the groups."""
    temperature: float
    """Logits are divided by it."""
    fresh: bool
    """Whether the weights being trained are the newest published ones: no step was taken since."""
    tokens: int
    """Tokens computed, prompts included."""
    metrics: dict[str, float]
    """Group-level metrics (group_metrics.py)."""

    @property
    def uids(self) -> list[str]:
        """The prompt groups that have a loss, in order."""
        return list(dict.fromkeys(sequence.uid for sequence in self.sequences))


def check_group(group: Group) -> str | None:
    """Why a delivered group cannot be trained (to be quarantined with this reason), or None.

    ``failure`` itself comes first. Everything that build_step relies on is checked here.
    """
    if group.failure is not None:
        return group.failure
    if len(group.trajectories) < 2:
        return f"{len(group.trajectories)} trajectories; an advantage needs at least 2"
    if not len(group.ticket.prompt_ids):
        return "the prompt is empty; its first response token has nothing to be predicted from"
    for trajectory in group.trajectories:
        if problem := _check_trajectory(trajectory):
            return f"sample {trajectory.sample}: {problem}"
    return None


def _check_trajectory(trajectory: Trajectory) -> str | None:
    count = len(trajectory.tokens)
    if not count:
        return "no tokens"
    if len(trajectory.logprobs) != count or len(trajectory.loss_mask) != count:
        return f"{count} tokens, {len(trajectory.logprobs)} log-probs, {len(trajectory.loss_mask)} mask entries"
    ends = [0, *(span.end for span in trajectory.spans)]
    if ends[-1] != count or any(
        s.start != end or s.end <= s.start for s, end in zip(trajectory.spans, ends, strict=False)
    ):
        return f"version spans do not cover its {count} tokens: {[(s.start, s.end) for s in trajectory.spans]}"
    logprobs = trajectory.logprobs[trajectory.loss_mask.astype(bool)]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        return "a log-prob is not finite or above 0"
    if trajectory.reward is None or not np.isfinite(trajectory.reward):
        return f"the reward is {trajectory.reward}"
    return None


def has_signal(group: Group, tolerance: float) -> bool:
    """Whether the rewards of the group differ by more than ``tolerance``; without it no estimator has a
    gradient.
    """
    rewards = rewards_of(group)
    return bool(rewards.max() - rewards.min() > tolerance)


def build_step(
    groups: Sequence[Group],
    *,
    filtered: Sequence[Group] = (),
    version: int,
    fresh: bool = True,
    config: Config,
    world_size: int,
    packed: bool,
) -> StepPlan:
    """The plan of one optimizer step.

    ``groups`` are trained, in the order given (the caller orders them by (epoch, index)); ``filtered`` were
    scored since the last step and are not trained: they appear in the metrics alone. ``version`` is the
    newest published version and ``fresh`` whether no step was taken since it was. ``packed`` False puts each
    sequence in a row of its own.
    """
    learner = config.learner
    masking = config.reward.truncated == "mask"
    sequences: list[_Sequence] = []
    for group in groups:
        if problem := check_group(group):
            raise ValueError(f"group {group.ticket.uid} cannot be trained: {problem}")
        advantages = ESTIMATORS[learner.advantage](rewards_of(group))
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if trajectory.loss_mask.any() and not (masking and trajectory.finish_reason == "length"):
                sequences.append(_Sequence(group, trajectory, float(advantage), version))
    loss_tokens = [len(sequence.predict) for sequence in sequences]
    rows = pack(
        [len(sequence.input_ids) for sequence in sequences],
        budget=learner.tokens_per_microbatch,
        world_size=world_size,
        packed=packed,
    )
    weights = [token_weight(learner.aggregation, count) for count in loss_tokens]
    return StepPlan(
        ranks=[[_micro_batch(sequences, weights, row) for row in rank] for rank in rows],
        denominator=step_denominator(learner.aggregation, loss_tokens, config.rollout.max_tokens),
        sequences=[SequenceId(s.uid, s.sample) for s in sequences],
        temperature=config.rollout.temperature,
        fresh=fresh,
        tokens=sum(len(s.input_ids) for s in sequences),
        metrics=reward_metrics(groups, filtered, learner.signal_tolerance)
        | rollout_metrics(groups, filtered)
        | staleness_metrics(groups, version=version, limit=config.staleness.max),
    )


class _Sequence:
    """One trajectory as the learner computes it."""

    def __init__(self, group: Group, trajectory: Trajectory, advantage: float, version: int) -> None:
        self.uid, self.sample = group.ticket.uid, trajectory.sample
        prompt = len(group.ticket.prompt_ids)
        self.input_ids = np.concatenate([group.ticket.prompt_ids, trajectory.tokens[:-1]]).astype(np.int32)
        response = np.flatnonzero(trajectory.loss_mask)
        self.predict = (response + prompt - 1).astype(np.int32)
        self.targets = trajectory.tokens[response].astype(np.int32)
        self.behaviour = trajectory.logprobs[response].astype(np.float32)
        self.advantage = advantage
        stale = version - token_versions(trajectory)
        for span in trajectory.spans:
            if span.mixed_kv:
                stale[span.start : span.end] = -1
        self.staleness = stale[response].astype(np.int32)


def _micro_batch(sequences: list[_Sequence], weights: list[float], row: list[int]) -> MicroBatch:
    if not row:
        return _filler()
    members = [sequences[i] for i in row]
    lengths = np.array([len(s.input_ids) for s in members], dtype=np.int32)
    counts = [len(s.predict) for s in members]
    starts = np.cumsum(lengths) - lengths
    return MicroBatch(
        input_ids=np.concatenate([s.input_ids for s in members]),
        lengths=lengths,
        sequences=np.array(row, dtype=np.int32),
        predict=np.concatenate([s.predict + start for s, start in zip(members, starts, strict=True)]).astype(np.int32),
        targets=np.concatenate([s.targets for s in members]),
        behaviour=np.concatenate([s.behaviour for s in members]),
        advantages=np.repeat(np.array([s.advantage for s in members], dtype=np.float32), counts),
        weights=np.repeat(np.array([weights[i] for i in row], dtype=np.float32), counts),
        staleness=np.concatenate([s.staleness for s in members]),
    )


def _filler() -> MicroBatch:
    """A row of one token with no weight, for a rank that has nothing to do while the others have."""
    nothing, one = np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.int32)
    return MicroBatch(
        input_ids=one * 0,
        lengths=one,
        sequences=-one,
        predict=one * 0,
        targets=one * 0,
        behaviour=nothing,
        advantages=nothing,
        weights=nothing,
        staleness=-one,
    )
