"""Weights, staleness, reward and ledger, as numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.monitor.catalogue import EDGES, quantile
from asyncrl.monitor.metrics_line import number_in
from asyncrl.monitor.top.document import (
    LedgerView,
    RewardView,
    RollouterRow,
    StalenessView,
    UpdateRow,
    WeightsView,
)
from asyncrl.monitor.top.model.facts import Facts


def weights(facts: Facts, rollouters: Sequence[RollouterRow]) -> WeightsView:
    """Publications and updates."""
    lags = [row.lag for row in rollouters if row.lag is not None]
    idle = [seconds for line in facts.snapshot.train if (seconds := number_in(line, "time/publish_s"))]
    again, updates = number_in(facts.last, "rollout/reprefill_tokens"), number_in(facts.last, "weights/updates")
    return WeightsView(
        idle_s=idle[-1] if idle else None,
        gather_s=number_in(facts.last, "weights/gather_s"),
        publish_bytes=number_in(facts.last, "weights/publish_bytes"),
        failures=facts.counted("parameter_server", "weights/updates_failed"),
        behind=sum(lag > 0 for lag in lags) if lags else None,
        paused=facts.level("parameter_server", "weights/replicas_paused"),
        reprefill_tokens=again / updates if again is not None and updates else None,
        updates=[
            UpdateRow(
                version=int(line.get("weights/version", -1)),
                replica=str(line.get("replica", "")),
                transport=str(line.get("weights/transport", "")),
                stage_s=number_in(line, "weights/stage_s"),
                pause_s=number_in(line, "weights/pause_s"),
                load_s=number_in(line, "weights/load_s"),
                resume_s=number_in(line, "weights/resume_s"),
                stall_s=number_in(line, "weights/stall_s"),
                bytes=number_in(line, "weights/bytes"),
                encoded_bytes=number_in(line, "weights/encoded_bytes"),
            )
            for line in reversed(facts.snapshot.updates)
        ],
    )


def staleness(facts: Facts) -> StalenessView:
    """Versions between sampling and training."""
    leader = next(iter(facts.of("learner")), None)
    tokens = leader.histograms.get("staleness/tokens") if leader is not None else None
    groups = leader.histograms.get("staleness/groups") if leader is not None else None
    limit = facts.level("dataloader", "staleness/limit")
    return StalenessView(
        limit=number_in(facts.last, "staleness/limit") if limit is None else limit,
        max=facts.run.staleness_max,
        token_mean=number_in(facts.last, "staleness/token_mean"),
        token_max=number_in(facts.last, "staleness/token_max"),
        late_groups=number_in(facts.last, "staleness/late_groups"),
        late_trained=facts.counted("learner", "staleness/late_trained_groups"),
        late_masked=facts.counted("learner", "staleness/late_masked_groups"),
        waited=facts.counted("learner", "staleness/waited_groups"),
        requeued=facts.counted("learner", "staleness/requeued_groups"),
        edges=list(EDGES["staleness/tokens"]),
        tokens=tokens.counts if tokens is not None else [],
        groups=groups.counts if groups is not None else [],
    )


def reward(facts: Facts) -> RewardView:
    """All reward pools together."""
    pools = facts.of("reward")
    spent = [each.counts for pool in pools if (each := pool.histograms.get("reward/run_s")) is not None]
    counts = [sum(bucket) for bucket in zip(*spent, strict=True)]
    return RewardView(
        workers=sum(len(pool.resources) for pool in facts.living("reward")),
        rate=facts.rate("reward", "reward/scored"),
        queued=facts.level("reward", "reward/queued"),
        running=facts.level("reward", "reward/running"),
        p50_s=quantile(counts, EDGES["reward/run_s"], 0.5),
        p99_s=quantile(counts, EDGES["reward/run_s"], 0.99),
        timeouts=facts.counted("reward", "reward/timed_out"),
        killed=facts.counted("reward", "reward/workers_killed"),
        failed=facts.counted("reward", "reward/failed"),
        states=facts.shares(pools),
    )


def ledger(facts: Facts) -> LedgerView:
    """Prompt groups by what became of them, and those under way."""
    return LedgerView(
        trained=facts.ledger_figure("ledger/trained"),
        filtered=facts.ledger_figure("ledger/filtered"),
        quarantined=facts.ledger_figure("ledger/quarantined"),
        outstanding=facts.level("dataloader", "tickets/outstanding"),
        gate=facts.level("dataloader", "tickets/gate"),
        buffered=facts.buffered(),
        groups_per_step=facts.run.groups_per_step,
    )
