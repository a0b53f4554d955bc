"""Metrics of a step that follow from its groups alone: rewards, staleness, lengths.

Pure functions. ``reward/*`` and ``rollout/*`` speak of everything scored since the last step, filtered groups
included, and ``reward/trained_mean`` and ``staleness/*`` of what is trained. A fraction or mean of nothing is
left out rather than reported as 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.messages.groups import Group, Trajectory
from asyncrl.monitor.metrics import Histograms


def rewards_of(group: Group) -> np.ndarray:
    """float64 [n], in the order of the trajectories. Each trajectory is scored."""
    return np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64)


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """int64 [T]: the version that sampled each response token."""
    versions = np.empty(len(trajectory.tokens), dtype=np.int64)
    for span in trajectory.spans:
        versions[span.start : span.end] = span.version
    return versions


def first_sampled_version(trajectory: Trajectory) -> int | None:
    """The version of the first sampled token; None if there is none."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(token_versions(trajectory)[sampled[0]]) if len(sampled) else None


def is_late(trajectory: Trajectory, *, version: int, limit: int) -> bool:
    """Whether the staleness of its first sampled token exceeds ``limit`` (eta) when trained at ``version``."""
    first = first_sampled_version(trajectory)
    return first is not None and version - first > limit


def reward_metrics(trained: Sequence[Group], filtered: Sequence[Group], tolerance: float) -> dict[str, float]:
    """``reward/mean``, ``reward/std``, ``reward/trained_mean``, the component means and the fractions without
    signal.

    ``reward/all_zero_fraction``: groups whose rewards all are 0 within ``tolerance``.
    ``reward/all_max_fraction``: groups whose rewards all equal the best there is, 1 or, where rewards go
    beyond, the largest of this step.
    """
    groups = [rewards_of(group) for group in (*trained, *filtered)]
    if not groups:
        return {}
    every = np.concatenate(groups)
    best = max(1.0, float(every.max()))
    found = {
        "reward/mean": float(every.mean()),
        "reward/std": float(every.std()),
        "reward/all_zero_fraction": float(np.mean([np.all(np.abs(r) <= tolerance) for r in groups])),
        "reward/all_max_fraction": float(np.mean([np.all(r >= best - tolerance) for r in groups])),
    }
    if trained:
        found["reward/trained_mean"] = float(np.concatenate(groups[: len(trained)]).mean())
    components: dict[str, list[float]] = {}
    for group in (*trained, *filtered):
        for trajectory in group.trajectories:
            for name, value in trajectory.components.items():
                components.setdefault(name, []).append(value)
    return found | {f"reward/component/{name}": float(np.mean(values)) for name, values in sorted(components.items())}


def rollout_metrics(trained: Sequence[Group], filtered: Sequence[Group]) -> dict[str, float]:
    """Response lengths in tokens, and the fractions truncated, resumed and sampled under several versions."""
    trajectories = [t for group in (*trained, *filtered) for t in group.trajectories]
    if not trajectories:
        return {}
    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.float64)
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_p95": float(np.percentile(lengths, 95)),
        "rollout/truncated_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "rollout/mixed_version_fraction": float(
            np.mean([len({span.version for span in t.spans}) > 1 for t in trajectories])
        ),
        "rollout/resumed_trajectories": float(sum(t.resumes > 0 for t in trajectories)),
    }


def observe_staleness(histograms: Histograms, trained: Sequence[Group], version: int) -> None:
    """Count the trained tokens and groups by their staleness under ``version``."""
    for group in trained:
        oldest = None
        for trajectory in group.trajectories:
            first = None
            for span in trajectory.spans:
                sampled = int(np.count_nonzero(trajectory.loss_mask[span.start : span.end]))
                if sampled:
                    histograms.observe("staleness/tokens", version - span.version, sampled)
                    first = span.version if first is None else first
            if first is not None:
                oldest = first if oldest is None else min(oldest, first)
        if oldest is not None:
            histograms.observe("staleness/groups", version - oldest)


def staleness_metrics(trained: Sequence[Group], *, version: int, limit: int) -> dict[str, float]:
    """Staleness, in versions, of the sampled tokens of the trained groups, and how many groups were late.

    ``staleness/late_groups`` counts groups with at least one late trajectory (is_late).
    """
    stale = [(version - token_versions(t))[t.loss_mask.astype(bool)] for group in trained for t in group.trajectories]
    found = {
        "staleness/late_groups": float(
            sum(any(is_late(t, version=version, limit=limit) for t in group.trajectories) for group in trained)
        )
    }
    tokens = np.concatenate(stale) if stale else np.empty(0)
    if len(tokens):
        found["staleness/token_mean"] = float(tokens.mean())
        found["staleness/token_max"] = float(tokens.max())
    return found
