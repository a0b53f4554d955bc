"""Observation of a run: timeline, sinks, recording, drift, log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, Section


class TraceConfig(Section):
    """The timeline of the run for Perfetto (docs/timeline.md)."""

    window_s: Annotated[float, Field(ge=0, le=86400.0)] = 300.0
    """Seconds of the past that are kept; 0 writes no trace."""


class WandbConfig(Section):
    """Weights & Biases. Its key comes from WANDB_API_KEY or the user's netrc, never from here."""

    mode: Literal["off", "offline", "online"] = "off"
    """online sends during the run; offline writes to the run folder, for `wandb sync`."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9._ -]{1,128}$")] = "asyncrl"
    """Project of the run."""
    entity: str | None = None
    """User or team; by default that of the user's W&B settings."""


class PrometheusConfig(Section):
    """An endpoint for Prometheus on the head."""

    enabled: bool = False
    """Serve /metrics to anyone who reaches the port."""
    host: str | None = None
    """Address to bind; by default that of the head's actors."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 takes a free one, named in the log and in monitor/prometheus.json."""


class SinksConfig(Section):
    """Destinations of metrics in addition to metrics.jsonl (docs/sinks.md). No sink stops or slows a run."""

    tensorboard: bool = False
    """Write event files to tensorboard/ in the run folder."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """An endpoint for Prometheus."""

    @property
    def are_wanted(self) -> bool:
        """Whether any sink is configured."""
        return self.tensorboard or self.wandb.mode != "off" or self.prometheus.enabled


class MonitorConfig(Section):
    """Recording of the run for a replay."""

    record_s: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 2.0
    """Interval of the snapshots in monitor/."""
    record_bytes: NonNegative = 256 << 20
    """Largest size of the recording; beyond it, old snapshots are thinned out. 0 records nothing."""


class DriftConfig(Section):
    """Detection of engines that compute other log-probs than the learner.

    The drift compares log-probs of both after each update (docs/weights.md).
    """

    warn: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Drift above which the terminal and the log warn. auto is 0.003 in float32 with the engine on CPU, 0.45 with
    quantized engines, else 0.12."""
    stop: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = "auto"
    """Drift that ends the run as failed. auto is 0.01 in float32 on CPU, 0.6 with quantized engines, else 0.15. 1e6
    stops only for non-finite log-probs."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
