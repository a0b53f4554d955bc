"""The controller's feed of the sinks, as far as any are configured; see monitor/sinks."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from asyncrl.config.monitor import SinksConfig
from asyncrl.runtime.actor import ActorContext
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.records import PrometheusSetup, Setup, WandbSetup

FLUSH_S = 5.0
"""Longest time that the sinks hold up the end of a run."""
FLUSH_SHARE = 0.8
"""Share of ``drain_s`` after which they hold it up no longer."""
LAST_WORDS_S = 0.5
"""Time that their process has beyond that of its sinks, to end by itself."""


def are_wanted(sinks: SinksConfig) -> bool:
    """Whether any sink is configured."""
    return sinks.tensorboard or sinks.wandb.mode != "off" or sinks.prometheus.enabled


def start_sinks(context: ActorContext, counters: dict[str, float], log: FilteringBoundLogger) -> SinkFeed | None:
    """The feed of the sinks of this run; None if it has none."""
    sinks = context.config.sinks
    wandb, prometheus = sinks.wandb, sinks.prometheus
    if not are_wanted(sinks):
        return None
    setup = Setup(
        run_dir=str(context.run_dir.absolute()),
        name=context.run_dir.name,
        config=context.config.model_dump(mode="json"),
        flush_s=FLUSH_S - LAST_WORDS_S,
        tensorboard=sinks.tensorboard,
        wandb=WandbSetup(wandb.mode, wandb.project, wandb.entity) if wandb.mode != "off" else None,
        prometheus=PrometheusSetup(prometheus.host or context.host, prometheus.port) if prometheus.enabled else None,
    )
    return SinkFeed(setup, counters=counters, log=log)
