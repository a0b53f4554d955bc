"""The routes of a sequence's tokens through the experts of a model, as an engine returns them. Pure.

Routes are uint8 or uint16 [tokens, layers, chosen]: for each token and layer the ids of its experts, ascending. A layer
without experts holds zeros. The routes of a sequence of N tokens cover its first N - 1: the last token is never fed to
the engine. A token keeps the route with which it was first computed. This holds even if an engine computes the token
again, after an abort, a load or the death of an engine.

Invariant: if the learner uses routes, a group that is trained has those of all its tokens, in the shape of the
learner's model (``check_routes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncrl.messages.groups import Group, Sequence


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model."""

    layers: int
    """Number of all layers, with and without experts."""
    count: int
    """Number of experts of a layer; the largest if layers differ."""
    chosen: int
    """Number of experts that a token takes in a layer."""

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type of an expert's id."""
        return np.uint8 if self.count <= 1 << 8 else np.uint16


SIMULATED = Experts(layers=1, count=1 << 16, chosen=1)
"""Experts of the simulated engine, whose route of a token is the token's id."""


def check_routes(group: Group, experts: Experts) -> str | None:
    """Return the reason that the routes of a group cannot be replayed by a model with ``experts``; None if they can."""
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
            if problem := _check(sequence, len(prompt), experts):
                return f"sample {trajectory.sample}: {problem}"
    return None


def _check(sequence: Sequence, prompt: int, experts: Experts) -> str | None:
    """Check the routes of one sequence, whose prompt has ``prompt`` tokens. Returns the problem; None without one."""
    routes, tokens = sequence.routes, prompt + len(sequence.tokens) - 1
    if routes is None:
        return "it has no routes, and learner.routes needs those of its engine"
    if routes.dtype != experts.dtype or routes.shape != (tokens, experts.layers, experts.chosen):
        expected = f"{np.dtype(experts.dtype)}{[tokens, experts.layers, experts.chosen]}"
        return f"its routes are {routes.dtype}{list(routes.shape)} instead of {expected}"
    if routes.size and int(routes.max()) >= experts.count:
        return f"its routes name expert {int(routes.max())}, and the model has {experts.count}"
    return None
