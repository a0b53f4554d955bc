"""Rollouters and ranks, a row each. Pure."""

from __future__ import annotations

from asyncrl.monitor.metrics_line import number_in
from asyncrl.monitor.top.document import RankRow, RollouterRow
from asyncrl.monitor.top.levels import GONE, served_version, versions_behind
from asyncrl.monitor.top.model.facts import Facts
from asyncrl.snapshot import ActorView


def rollouter(facts: Facts, actor: ActorView) -> RollouterRow:
    """A rollouter and its engine."""
    figures, gone = actor.figures, actor.condition in GONE
    in_flight = None if gone else figures.get("rollout/in_flight")
    version = served_version(actor)
    state, awaiting, state_s = _present(actor)
    return RollouterRow(
        name=actor.name,
        host=actor.host,
        condition=facts.condition(actor),
        state="" if gone else state,
        awaiting="" if gone else awaiting,
        state_s=0.0 if gone else state_s,
        states=facts.shares([actor]),
        in_flight=in_flight,
        waiting=None if gone else figures.get("rollout/waiting"),
        concurrency=None if gone else figures.get("rollout/concurrency"),
        tokens_per_s=facts.rate_of(actor, "rollout/sampled_tokens"),
        kv_use=None if gone else figures.get("rollout/kv_use"),
        version=None if gone else version,
        lag=None if gone else versions_behind(facts.run, actor),
        restarts=actor.restarts + int(figures.get("rollout/engine_restarts", 0)),
        oldest_s=figures.get("rollout/oldest_s") if in_flight else None,
        stall_s=None if gone else figures.get("weights/stall_s"),
        drift=None if gone else figures.get("rollout/drift"),
        drift_largest=figures.get("rollout/drift_largest"),
        drift_warnings=int(figures.get("rollout/drift_warnings", 0)),
    )


def rank(facts: Facts, actor: ActorView) -> RankRow:
    """A rank of the learner."""
    gone = actor.condition in GONE
    state, awaiting, state_s = _present(actor)
    return RankRow(
        name=actor.name,
        host=actor.host,
        condition=facts.condition(actor),
        state="" if gone else state,
        awaiting="" if gone else awaiting,
        state_s=0.0 if gone else state_s,
        states=facts.shares([actor]),
        tokens_per_s=facts.rate_of(actor, "learner/tokens"),
        # A step is of all ranks, and so is its share of the peak.
        mfu=None if gone else number_in(facts.last, "perf/mfu"),
        rss_bytes=None if gone else actor.rss_bytes or None,
        gpu_bytes=sum(gpu.memory_bytes for gpu in actor.gpus) if actor.gpus and not gone else None,
        gpu_total_bytes=sum(gpu.memory_total_bytes for gpu in actor.gpus) if actor.gpus and not gone else None,
    )


def _present(actor: ActorView) -> tuple[str, str, float]:
    """State, whom it waits for, and seconds since it was entered: of an actor's serial resource, or its own."""
    for resource in actor.resources[:1]:
        return resource.state, resource.awaiting, resource.state_s
    return actor.state, actor.awaiting, actor.state_s
