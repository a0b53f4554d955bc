"""Helpers that the tests of the sinks share."""

import functools
import json
import threading

import harness

from asyncrl.messages.monitor import ActorView, Histogram, Resource, RunView, Snapshot

NET_S = 60.0
"""For what must come to pass."""
until = functools.partial(harness.until, within_s=NET_S)


def train(step, start=1, **figures):
    line = {"kind": "train", "step": step, "start": start, "weights/version": step, "reward/mean": step / 100}
    return line | {name.replace("__", "/"): value for name, value in figures.items()}


def evaluation(step, name="gsm", start=1, mean=0.5):
    return {"kind": "eval", "step": step, "start": start, "weights/version": step, f"eval/{name}/mean": mean}


def update(version, replica="rollouter/0", start=1):
    figures = {"step": version, "weights/version": version, "weights/transport": "shm", "weights/stall_s": 0.25}
    return {"kind": "update", "replica": replica, "start": start, **figures}


def snapshot(step=7, wall=100.0, **run):
    return Snapshot(
        wall=wall,
        run=RunView(
            **{"name": "trial", "run_id": "r", "phase": "running", "attempt": 1, "age_s": 3.0}
            | {"step": step, "steps": 40, "version": step}
            | run
        ),
        actors=[
            ActorView(
                name="rollouter/0",
                host="node1",
                condition="ready",
                restarts=2,
                metrics={"rollout/in_flight": 3.0, "rollout/sampled_tokens": 900.0},
                histograms={"rollout/response_tokens": Histogram([0, 3, 1] + [0] * 12 + [2], 5e5)},
                resources=[
                    Resource(name="engine", state="generating", seconds={"generating": wall - 10, "waiting": 10.0})
                ],
            )
        ],
    )


def address_of(run_dir):
    """The address of the endpoint for Prometheus."""
    return json.loads((run_dir / "monitor" / "prometheus.json").read_text())["address"]


def ends(what, *args):
    """Do it, in a thread of its own, for it may hang."""
    thread = threading.Thread(target=what, args=args, daemon=True)
    thread.start()
    thread.join(NET_S)
    assert not thread.is_alive(), f"{what} has not ended after {NET_S:g} s"
