"""Metrics of a step that follow from its groups alone: rewards, staleness, lengths.

Pure, except that ``observe_staleness`` fills histograms. ``reward/*`` and ``rollout/*`` count the groups that the step
trains, and those filtered since the step before. A trained group may have waited in the buffer for several steps.
``reward/trained_mean`` and ``staleness/*`` count trained groups only. A fraction or a mean that has nothing to count is
missing from the result; it is never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from asyncrl.config.training import LearnerConfig, StalenessConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.advantages import has_signal
from asyncrl.messages.groups import (
    Group,
    Trajectory,
    is_truncated,
    rewards_of,
    sampled_spans,
    sampled_tokens,
    versions_of,
)
from asyncrl.observe.catalogue import Histograms


def reward_metrics(trained: Sequence[Group], filtered: Sequence[Group], tolerance: float) -> dict[str, float]:
    """The metrics ``reward/*``.

    ``reward/all_zero_fraction``: groups whose rewards all are 0 within ``tolerance``. ``reward/all_max_fraction``:
    groups whose rewards all equal the best one: 1, or the largest of this step if that is above 1. ``tolerance`` is
    learner.signal_tolerance.
    """
    groups = [rewards_of(group) for group in (*trained, *filtered)]
    if not groups:
        return {}
    every = np.concatenate(groups)
    best = max(1.0, float(every.max()))
    metrics = {
        "reward/mean": float(every.mean()),
        "reward/std": float(every.std()),
        "reward/all_zero_fraction": float(np.mean([np.all(np.abs(r) <= tolerance) for r in groups])),
        "reward/all_max_fraction": float(np.mean([np.all(r >= best - tolerance) for r in groups])),
    }
    if trained:
        metrics["reward/trained_mean"] = float(np.concatenate(groups[: len(trained)]).mean())
    means = component_means(t for group in (*trained, *filtered) for t in group.trajectories)
    return metrics | {f"reward/component/{name}": value for name, value in means.items()}


def signal_metrics(trained: Sequence[Group], filtered: Sequence[Group], config: LearnerConfig) -> dict[str, float]:
    """Share of the groups that have a signal; and for each source of a mixture this share and the mean reward.

    The shares are missing if ``learner.signal`` names a component that all rewards of a group lack.
    """
    groups = [*trained, *filtered]
    # The source of a group is "" without a mixture.
    sources = np.array([group.lease.source for group in groups])
    metrics: dict[str, float] = {}
    for name in sorted({*sources} - {""}):
        rewards = np.concatenate([rewards_of(groups[at]) for at in np.flatnonzero(sources == name)])
        metrics[f"source/{name}/reward_mean"] = float(rewards.mean())
    try:
        signals = np.array([has_signal(group, config) for group in groups])
    except ConfigError:
        return metrics
    if groups:
        metrics["reward/signal_fraction"] = float(signals.mean())
    for name in sorted({*sources} - {""}):
        metrics[f"source/{name}/signal_fraction"] = float(signals[sources == name].mean())
    return metrics


def component_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean of each reward component over the trajectories that have it, sorted by name."""
    components: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.components.items():
            components.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(components.items())}


def rollout_metrics(trained: Sequence[Group], filtered: Sequence[Group]) -> dict[str, float]:
    """The metrics ``rollout/*``: lengths in sampled tokens, and shares of truncated and mixed-version trajectories.

    Counts resumed trajectories, and adds turns, forks and stages of episodes.
    """
    trajectories = [t for group in (*trained, *filtered) for t in group.trajectories]
    if not trajectories:
        return {}
    lengths = np.array([sampled_tokens(t) for t in trajectories], dtype=np.float64)
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_p95": float(np.percentile(lengths, 95)),
        "rollout/truncated_fraction": float(np.mean([is_truncated(t) for t in trajectories])),
        "rollout/mixed_version_fraction": float(np.mean([len(set(versions_of(t))) > 1 for t in trajectories])),
        "rollout/resumed_trajectories": float(sum(t.resumes > 0 for t in trajectories)),
    } | _episode_metrics([t for t in trajectories if t.turns])


def _episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, forks by cause, and each stage's share of the time, scoring included; empty without episodes."""
    if not episodes:
        return {}
    turns = np.array([episode.turns for episode in episodes], dtype=np.float64)
    forks: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for episode in episodes:
        forks.update(episode.forks)
        seconds.update(episode.stage_s | {"score": episode.score_s})
    total_s = float(seconds.total())
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_p95": float(np.percentile(turns, 95)),
        **{f"rollout/forks/{cause}": float(number) for cause, number in sorted(forks.items())},
        **{f"rollout/episode_share/{stage}": each / total_s for stage, each in sorted(seconds.items()) if total_s > 0},
    }


def observe_staleness(histograms: Histograms, trained: Sequence[Group], version: int, config: StalenessConfig) -> None:
    """Add the trained groups and their sampled tokens to the histograms of staleness, under version ``version``.

    Late tokens that are not trained are left out of ``staleness/tokens``, but count in ``staleness/groups``.
    """
    for group in trained:
        for trajectory in group.trajectories:
            for stale, tokens in _staleness(trajectory, version):
                if not _left_out(stale, config):
                    histograms.observe("staleness/tokens", stale, tokens)
        oldest = oldest_version(group)
        if oldest is not None:
            histograms.observe("staleness/groups", version - oldest)


def staleness_metrics(trained: Sequence[Group], *, version: int, config: StalenessConfig) -> dict[str, float]:
    """The metrics ``staleness/*`` of the sampled tokens of the trained groups, in versions.

    A token is late if it is staler than ``staleness.max``. ``late_groups`` counts groups with a late token,
    ``late_fraction`` is the share of late tokens. Unless ``staleness.late`` is "train", late tokens are not trained:
    ``masked_tokens`` counts them, and ``token_mean`` and ``token_max`` leave them out.
    """
    trajectories = [trajectory for group in trained for trajectory in group.trajectories]
    pairs = [pair for trajectory in trajectories for pair in _staleness(trajectory, version)]
    late = sum(tokens for stale, tokens in pairs if stale > config.max)
    metrics = {"staleness/late_groups": float(sum(is_late(group, version, config.max) for group in trained))}
    if pairs:
        metrics["staleness/late_fraction"] = late / sum(tokens for _, tokens in pairs)
    if config.hard:
        metrics["staleness/masked_tokens"] = float(late)
    kept = [(stale, tokens) for stale, tokens in pairs if not _left_out(stale, config)]
    if kept:
        metrics["staleness/token_mean"] = sum(stale * tokens for stale, tokens in kept) / sum(n for _, n in kept)
        metrics["staleness/token_max"] = float(max(stale for stale, _ in kept))
    return metrics


def oldest_version(group: Group) -> int | None:
    """Version of the group's oldest sampled token; None if it has no sampled token."""
    return min((version for trajectory in group.trajectories for version in versions_of(trajectory)), default=None)


def is_late(group: Group, version: int, limit: int) -> bool:
    """Whether a token of the group is staler than ``limit`` when it is trained at ``version``."""
    oldest = oldest_version(group)
    return oldest is not None and version - oldest > limit


def _left_out(stale: int, config: StalenessConfig) -> bool:
    """Whether tokens of this staleness get no loss."""
    return config.hard and stale > config.max


def _staleness(trajectory: Trajectory, version: int) -> list[tuple[int, int]]:
    """One (staleness in versions, number of tokens) for each sampled span."""
    spans = [span for sequence in trajectory.sequences for span in sampled_spans(sequence)]
    return [(version - span.version, span.end - span.start) for span in spans]
