"""Evaluation rounds: collects their groups, and computes the metrics of each complete round. Pure.

A round is one run of an evaluation, called NAME@ROUND; the uids of its prompts are NAME@ROUND-INDEX. The version spans
of its tokens give the versions that sampled it. A failed group has no rewards; it counts as failed, not as a reward of
0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from asyncrl.learner.algorithm.group_metrics import component_means
from asyncrl.messages.dataloader import EvalRound
from asyncrl.messages.groups import Group, Lease, is_truncated, sampled_tokens, versions_of
from asyncrl.observe.evaluations import estimate_pass_at, pass_at_ks


class EvalCollector:
    """Collects the groups of evaluation rounds. ``closed`` are the rounds that a checkpoint names as over."""

    def __init__(self, closed: Iterable[str] = ()) -> None:
        self._sizes: dict[str, int] = {}
        """Number of prompts of each open round."""
        self._groups: dict[str, dict[str, Group]] = {}
        """Groups by round and uid; also of rounds that the dataloader has not named yet."""
        self._closed = set(closed)
        self._missing_rounds: set[str] = set()
        """Rounds with groups here that were missing in the dataloader's last list of open rounds."""

    @property
    def closed(self) -> list[str]:
        """Rounds that are over, sorted."""
        return sorted(self._closed)

    @property
    def open(self) -> list[EvalRound]:
        """Open rounds, each with the uids of its groups that have come."""
        return [EvalRound(name=round, held=list(self._groups.get(round, ()))) for round in self._sizes]

    def opened(self, sizes: dict[str, int]) -> None:
        """Take the dataloader's list of open rounds: ``DataloaderStatus.evals``, with the number of prompts of each.

        Groups of a round that is missing in two lists in a row are dropped: the round ended with an earlier learner.
        """
        named = {purpose.removeprefix("eval/"): size for purpose, size in sizes.items()}
        self._sizes = {round: size for round, size in named.items() if round not in self._closed}
        for round in self._missing_rounds - named.keys():
            self._groups.pop(round, None)
        self._missing_rounds = self._groups.keys() - named.keys()

    def add(self, group: Group) -> bool:
        """Take a group. Returns False if it is held already or its round is over."""
        uid = group.lease.uid
        if self.holds(uid):
            return False
        self._groups.setdefault(round_of(uid), {})[uid] = group
        return True

    def reject(self, uid: str, reason: str) -> None:
        """Count a prompt that gets no lease as failed: add a group without trajectories, unless ``holds(uid)``."""
        of_round, _, index = uid.rpartition("-")
        name, _, round_number = of_round.rpartition("@")
        lease = Lease(
            uid=uid,
            number=0,
            purpose=f"eval/{name}",
            epoch=int(round_number),
            index=int(index),
            param_version=-1,
            prompt_ids=np.zeros(0, np.int32),
            prompt="",
            row={},
            samples=1,
            temperature=0.0,
            max_tokens=1,
        )
        self.add(Group(lease=lease, trajectories=[], failure=reason))

    def holds(self, uid: str) -> bool:
        """Whether this group is held already or its round is over."""
        round = round_of(uid)
        return round in self._closed or uid in self._groups.get(round, {})

    def complete(self) -> list[tuple[str, list[Group]]]:
        """Close the rounds whose groups all have come. Returns each once, as (NAME@ROUND, groups)."""
        done = [round for round, size in self._sizes.items() if len(self._groups.get(round, {})) >= size]
        self._closed.update(done)
        self._sizes = {round: size for round, size in self._sizes.items() if round not in done}
        return [(round, list(self._groups.pop(round, {}).values())) for round in done]


def round_of(uid: str) -> str:
    """The round of a uid: NAME@ROUND from NAME@ROUND-INDEX."""
    return uid.rpartition("-")[0]


def eval_metrics(name: str, groups: list[Group], pass_at: float = 1.0) -> dict[str, Any]:
    """Compute the metrics of one complete round.

    ``mean`` is the mean reward over samples, and ``component/*`` the mean of each component over the samples that have
    it. A sample passes if its reward is ``pass_at`` or more. ``pass_at/K`` is the mean of estimate_pass_at over the
    prompts with K scored samples or more. ``pass_at_k`` is the share of scored prompts with a passing sample, and ``k``
    the largest number of samples of a prompt. Lengths are in sampled tokens. If no group has a reward, only ``prompts``
    and ``failed`` are returned.
    """
    scored = [group for group in groups if group.failure is None]
    trajectories = [trajectory for group in scored for trajectory in group.trajectories]
    metrics: dict[str, Any] = {
        f"eval/{name}/prompts": len(groups),
        f"eval/{name}/failed": len(groups) - len(scored),
    }
    if not trajectories:
        return metrics
    versions = [version for trajectory in trajectories for version in versions_of(trajectory)]
    if versions:
        metrics |= {"weights/version": max(versions), f"eval/{name}/version_min": min(versions)}
    counts = [(len(g.trajectories), sum((t.reward or 0) >= pass_at for t in g.trajectories)) for g in scored]
    most = max(samples for samples, _ in counts)
    lengths = np.array([sampled_tokens(t) for t in trajectories], dtype=np.float64)
    metrics |= {
        f"eval/{name}/mean": float(np.mean([t.reward for t in trajectories])),
        f"eval/{name}/pass_at_k": float(np.mean([passed > 0 for _, passed in counts])),
        f"eval/{name}/k": most,
        f"eval/{name}/truncated_fraction": float(np.mean([is_truncated(t) for t in trajectories])),
        f"eval/{name}/length_mean": float(lengths.mean()),
        f"eval/{name}/length_p95": float(np.percentile(lengths, 95)),
    }
    for k in pass_at_ks(most):
        each = [estimate_pass_at(k, samples, passed) for samples, passed in counts if samples >= k]
        metrics[f"eval/{name}/pass_at/{k}"] = float(np.mean(each))
    means = component_means(trajectories)
    return metrics | {f"eval/{name}/component/{component}": value for component, value in means.items()}
