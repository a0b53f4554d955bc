"""Whole runs of episodes on the simulated engine: many that are open on one rollouter, and a step without a barrier.

``measure_open``: the lag of the event loops of the rollouter and of its episode host with many open episodes. Most of
these wait for their tools. ``measure_async``: the step time of an asynchronous run, compared with ``staleness.max =
0``, where all episodes of a step end before it is trained. The time of tools is lognormal with sigma 1.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from asyncrl.core.errors import ActorFailed
from asyncrl.messages.snapshot import Snapshot
from asyncrl.observe.snapshots.rates import Interval
from asyncrl.rpc.vitals import PROBE_S
from asyncrl.top.client import Viewer, find_target
from tools.bench.paired import LEVEL, RESAMPLES
from tools.bench.report import Report, Target
from tools.bench.scale_report import LAG_TARGET_S, report_lag
from tools.bench.scale_watch import total
from tools.live_run import LiveRun

SAMPLES = 8
READY_S = 300.0
RUN_S = 1800.0
SETTLED_S, MEASURED_S = 15.0, 45.0
OPEN_SHARE = 0.95
"""Share of the episodes that are to be open: with fewer, nothing is measured."""
TURNS, TOOL_S, TOOL_SIGMA = 4.0, 1.0, 1.0
ASYNC_STALENESS = 4
ASYNC_SHARE = 5
"""Asynchronous steps for each synchronous one."""
FILL_STEPS = ASYNC_STALENESS + 1
ASYNC_TARGET = 3.0


def tree(**tables: dict[str, Any]) -> dict[str, Any]:
    """A run of the rehearsed agent; ``tables`` are laid over it."""
    found: dict[str, Any] = {
        "data": {"source": "synthetic", "size": 1 << 16, "template": "chat", "max_prompt_tokens": 64},
        "episode": {
            "function": "asyncrl.episodes.rehearsal:play",
            "workers": 2,
            "max_context_tokens": 8192,
            "turn_timeout_s": 600.0,
            "timeout_s": 3600.0,
        },
        "rollout": {
            "engine": "sim",
            "replicas": 1,
            "gpus_per_replica": 0,
            "samples_per_prompt": SAMPLES,
            "max_tokens": 128,
            "stream_interval": 32,
            "sim": {
                "decode_step_s": 0.015,
                "decode_step_per_request_s": 0.0001,
                "length_median": 32.0,
                "length_sigma": 0.5,
            },
        },
        "learner": {"backend": "sim", "dynamic_sampling": False, "sim": {"step_s": 1.0, "publish_bytes": 1 << 20}},
        "checkpoint": {"every_versions": 0, "export_at_end": False},
        "log": {"level": "warning"},
    }
    for name, table in tables.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def measure_open(report: Report, *, episodes: int) -> None:
    """Fill the report."""
    groups = -(-episodes // SAMPLES)
    step = max(1, groups // 4)
    options = {"turns": 8.0, "tool_s": 10.0, "tool_sigma": 1.0, "observation": 200.0}
    chosen = tree(
        rollout={"episodes": episodes, "concurrency": 256},
        learner={"steps": 10_000, "groups_per_step": step},
        staleness={"max": 7, "adapt": False},
    )
    chosen["episode"]["options"] = options
    report.settings["open"] = {"episodes": episodes, **options}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        run = LiveRun(chosen, Path(name))
        try:
            run.until(lambda: (run.run_dir / "private" / "controller.json").exists(), "its controller", READY_S)
            first, last, bare = uvloop.run(_watch(run, episodes))
        finally:
            run.close()
    actors = {actor.name: actor for actor in last.actors}
    meanwhile = Interval(first, last)
    host = actors["episodes/0"]
    figures = report.figures["open"] = {
        "measured_s": round(last.wall - first.wall, 1),
        "episodes_open": host.metrics["episodes/open"],
        "episodes_per_s": meanwhile.rate(host, "episodes/played"),
        "calls_per_s": meanwhile.rate(actors["rollouter/0"], "rollout/calls"),
        "tokens_per_s": meanwhile.rate(actors["rollouter/0"], "rollout/sampled_tokens"),
    }
    shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if value is not None)
    report.say(f"open episodes: {shown}")
    for who in ("rollouter/0", "episodes/0"):
        report_lag(report, "open", actors[who], meanwhile)
    late = float(np.quantile(bare, 0.99))
    over = float(np.mean(np.asarray(bare) > LAG_TARGET_S))
    report.figures["lag_bare"] = {"p99_s": late, "over_50ms_share": over, "samples": len(bare)}
    report.say(
        f"bare loop      lag p99 {1e3 * late:.0f} ms, {100 * over:.2f} % over 50 ms: of an idle loop on this machine"
    )


async def _measure_lag(late: list[float]) -> None:
    """Measure the lag of an event loop that has nothing to do, as actors measure theirs."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        late.append(max(0.0, loop.time() - due))


async def _watch(run: LiveRun, episodes: int) -> tuple[Snapshot, Snapshot, list[float]]:
    """Snapshots at the beginning and the end of the measured time, and the lag of a bare loop in it (s).

    Raises ActorFailed.
    """
    bare: list[float] = []
    measuring = asyncio.create_task(_measure_lag(bare))
    try:
        return *await _measured(run, episodes, bare), bare
    finally:
        measuring.cancel()


async def _measured(run: LiveRun, episodes: int, bare: list[float]) -> tuple[Snapshot, Snapshot]:
    loop = asyncio.get_running_loop()
    settled: float | None = None
    first: Snapshot | None = None
    with Viewer(find_target(str(run.run_dir))) as viewer:
        async with asyncio.timeout(READY_S + SETTLED_S + MEASURED_S):
            async for news in viewer.snapshots():
                if run.exit_code is not None:
                    raise ActorFailed("the run", run.output[-2000:])
                if not isinstance(news, Snapshot):
                    continue
                now = loop.time()
                if total(news, "episodes/open") < OPEN_SHARE * episodes:
                    settled = first = None
                elif settled is None:
                    settled = now
                elif first is None and now - settled > SETTLED_S:
                    first = news
                    bare.clear()
                elif first is not None and news.wall - first.wall > MEASURED_S:
                    return first, news
    raise ActorFailed("the run", "its controller is gone")


def measure_async(report: Report, *, steps: int) -> None:
    """Fill the report."""
    options = {"turns": TURNS, "tool_s": TOOL_S, "tool_sigma": TOOL_SIGMA}
    report.settings["async"] = {"groups_per_step": 4, "samples": SAMPLES, "staleness_max": ASYNC_STALENESS, **options}
    times = {}
    for name, staleness, count in (
        ("synchronous", 0, steps + 1),
        ("asynchronous", ASYNC_STALENESS, ASYNC_SHARE * steps + FILL_STEPS),
    ):
        chosen = tree(
            rollout={"episodes": 256, "concurrency": 64},
            learner={"steps": count, "groups_per_step": 4},
            staleness={"max": staleness, "adapt": False},
        )
        chosen["episode"]["options"] = options
        times[name] = _step_times(chosen)[1 if staleness == 0 else FILL_STEPS :]
        mean = float(np.mean(times[name]))
        report.figures[name] = {"steps": len(times[name]), "step_s": {"mean": mean, "median": np.median(times[name])}}
        report.say(f"{name:13} {len(times[name])} steps, mean {mean:.2f} s, median {np.median(times[name]):.2f} s")
    ratio, low, high = ratio_of_means(times["synchronous"], times["asynchronous"])
    report.figures["synchronous_vs_asynchronous"] = {"ratio": ratio, "low": low, "high": high}
    target = Target(">=", ASYNC_TARGET)
    report.ratio("synchronous_vs_asynchronous", ratio, target)
    verdict = "met" if target.met(ratio) else "NOT MET"
    report.say(
        f"asynchronous episodes    {ratio:.2f} times as fast [{low:.2f}, {high:.2f}]  target {target}  {verdict}"
    )


def _step_times(chosen: dict[str, Any]) -> list[float]:
    """Seconds of each step."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        run = LiveRun(chosen, Path(name))
        try:
            code = run.wait(RUN_S)
            if code:
                raise ActorFailed("the run", f"exit code {code}: {run.output[-2000:]}")
            return [line["time/step_s"] for line in run.lines("train")]
        finally:
            run.close()


def ratio_of_means(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the means with its percentile bootstrap interval, over steps."""
    chance = np.random.default_rng(0)
    means = [
        np.asarray(each)[chance.integers(0, len(each), (RESAMPLES, len(each)))].mean(1) for each in (first, second)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means[0] / means[1], [tail, 1 - tail])
    return float(np.mean(first) / np.mean(second)), float(low), float(high)
