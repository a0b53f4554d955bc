"""States of serial resources: an engine, a rank of the learner, a worker of the reward pool. Pure.

A serial resource does one thing at a time, so it is always in exactly one state of its kind.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["actor", "engine", "rank", "worker", "player"]
OF_ACTORS: tuple[Kind, ...] = ("actor", "engine", "rank")
"""Kinds of the states that an actor itself is in."""
FlowKind = Literal["work", "weights", "upkeep", "start", "wait"]
"""Kinds of states for the flow of a run (top/bottleneck.py). Upkeep is checkpoints and exports."""


class State(NamedTuple):
    """A state of a resource. States of the same name have the same ``flow``."""

    flow: FlowKind
    meaning: str


STATES: dict[Kind, dict[str, State]] = {
    "actor": {
        "starting": State("start", "it loads its code or sets itself up"),
        "ready": State("work", "it serves calls"),
    },
    "engine": {
        "starting": State("start", "the process, its model or its kernels start; it does not serve"),
        "waiting": State("wait", "it serves and has nothing to generate (no leases, or no first weights yet)"),
        "generating": State("work", "at least one request runs"),
        "pausing": State("weights", "an update is due, and running requests end or are aborted"),
        "paused": State("weights", "idle for an update, waiting for its turn or for the bytes"),
        "loading": State("weights", "weights are replaced"),
        "probing": State("weights", "new weights are compared with the learner's log-probs; no request is admitted"),
        "restarting": State("start", "it has died, and another one starts"),
        "asleep": State("wait", "the learner has the GPU"),
        "waking": State("start", "it gets its memory back"),
    },
    "rank": {
        "starting": State("start", "imports, rendezvous, the model, the newest checkpoint"),
        "waiting": State("wait", "for groups, for the dataloader, for the last evaluations, or for the engines' GPU"),
        "following": State("wait", "a rank above 0 waits for the next command of rank 0"),
        "training": State("work", "a step: batch, forward, backward, optimizer"),
        "publishing": State("weights", "weights are gathered and written for the engines"),
        "checkpointing": State("upkeep", "a checkpoint is staged; it is written during training"),
        "exporting": State("upkeep", "the model is exported"),
        "done": State("wait", "all steps are trained and all files are written"),
    },
    "worker": {
        "starting": State("start", "its process starts and imports the function"),
        "idle": State("wait", "it has no task"),
        "scoring": State("work", "it runs the reward function"),
    },
    "player": {
        "starting": State("start", "its process starts and imports the user's code"),
        "idle": State("wait", "it has no episode"),
        "playing": State("work", "at least one episode is open"),
    },
}
"""The states of each kind of resource."""
