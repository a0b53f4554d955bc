"""The watching of a run: timeline, sinks, recording, alarm for drift, log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, Section


class TraceConfig(Section):
    """The timeline of the run: what every actor did when, for Perfetto (docs/timeline.md)."""

    window_s: Annotated[float, Field(ge=0, le=86400.0)] = 300.0
    """Seconds of the past that are kept; 0 keeps nothing, and no trace is written."""


class WandbConfig(Section):
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or the user's netrc, never from here."""

    mode: Literal["off", "offline", "online"] = "off"
    """online sends as the run goes; offline writes to the run folder, for `wandb sync`."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9._ -]{1,128}$")] = "asyncrl"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; by default the user's own default."""


class PrometheusConfig(Section):
    """An endpoint for Prometheus on the head."""

    enabled: bool = False
    """Serve /metrics to everybody who reaches the port."""
    host: str | None = None
    """Address that the endpoint binds; by default that of the head's actors."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the endpoint; 0 takes any free one, told in the log and in monitor/prometheus.json of the run folder."""


class SinksConfig(Section):
    """Destinations of metrics besides metrics.jsonl (docs/sinks.md). No sink stops or slows a run."""

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
    """Records of the run for those who look at it later."""

    record_s: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 2.0
    """Interval at which a snapshot of the run is recorded in monitor/, for a replay."""
    record_bytes: NonNegative = 256 << 20
    """Largest size of the recording; past it the past is kept more coarsely. 0 records nothing."""


class DriftConfig(Section):
    """The alarm for engines that do not compute what the learner does.

    After each update every replica scores tokens of real prompts and of responses to them, and samples some as the run
    does; the learner has said what the weights of that version make of them. The drift is the root mean square of the
    differences between their log-probs over the scored tokens, or 1.25 times their mean size over the sampled ones,
    whichever is larger (asyncrl/rollouter/serving/drift.py).
    """

    warn: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Drift of a replica (nats) from which on the terminal and the log tell of it. auto is 0.003 where learner and
    engine compute in float32, the engine on CPU, else 0.12."""
    stop: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = "auto"
    """Drift (nats) that ends the run as failed; under weights.verify = "full" the engine loads again before. auto is
    0.01 in float32 on CPU, else 0.15. 1e6 stops for log-probs that are no numbers alone."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level written."""
