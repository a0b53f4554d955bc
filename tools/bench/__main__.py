"""``python -m tools.bench NAME``: measure asyncrl against the floor.

A table and the logs of engines go to stderr. With ``--json``, stdout is one JSON object whose last key is ``ratios``.
The exit code does not depend on the targets: it is 0 if everything was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import uvloop

from asyncrl.rpc.process import tune_memory
from tools import kept
from tools.bench.report import Report, for_json_alone
from tools.bench.weights_layouts import LAYOUTS


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    benches = found.add_subparsers(dest="bench", required=True)
    for name, pairs, help in (
        ("calls", 30, "calls, reward tasks and payloads against raw pyzmq, memcpy and Ray"),
        ("rollout", 30, "tokens/s through the rollouter against a bare vLLM loop"),
    ):
        bench = benches.add_parser(name, help=help)
        bench.add_argument("--pairs", type=_positive, default=pairs, help=f"pairs of each comparison ({pairs})")
    benches.choices["calls"].add_argument("--vs", choices=["ray"], help="also measure against Ray")
    bench = benches.add_parser("learner", help="tokens/s of a training step against a padded plain loop of torch")
    bench.add_argument("--pairs", type=_positive, default=10, help="pairs of each comparison (10)")
    bench.add_argument("--threads", type=_positive, default=1, help="of each side (1)")
    bench.add_argument("--vs", choices=["trl"], help="also measure against TRL's GRPO")
    bench = benches.add_parser("quickstart", help="seconds until the quickstart's policy is right on held-out problems")
    bench.add_argument("--vs", choices=["trl"], required=True, help="the other side: TRL's GRPO")
    bench.add_argument("--lengths", choices=["equal", "lognormal"], default="equal", help="of the responses (equal)")
    bench.add_argument("--seed", type=_positive, action="append", metavar="N", help="of a pair of runs (1, 2 and 3)")
    bench.add_argument("--accuracy", type=float, default=0.8, help="share of right samples that is waited for (0.8)")
    bench.add_argument("--steps", type=_positive, default=40, help="of each run (40)")
    bench = benches.add_parser("overlap", help="throughput of the whole system against max(T_generate, T_train)")
    bench.add_argument("--steps", type=_positive, default=48, help="steps measured in each run (48)")
    bench = benches.add_parser("planning", help="how long the learner stands still to plan a step of 1M tokens")
    bench.add_argument("--pairs", type=_positive, default=5, help="pairs of each comparison (5)")
    bench.add_argument("--steps", type=_positive, default=5, help="steps measured in each run (5)")
    bench = benches.add_parser("stall", help="generation time lost to an update in each mode, simulated")
    bench.add_argument("--steps", type=_positive, default=20, help="steps, and updates, of each run (20)")
    bench = benches.add_parser("weights", help="bytes/s of each weight transport against memcpy, TCP and bare gloo")
    bench.add_argument("--up-to", choices=list(LAYOUTS), default="2B", help="largest layout (2B)")
    bench = benches.add_parser("scale", help="one control plane under many rollouters, and what watching it costs")
    bench.add_argument(
        "--replicas", type=_positive, default=256, help="simulated (256); 64 in flight in each, 16,384 in all"
    )
    bench.add_argument("--per-process", type=_positive, default=None, help="of them in a process (by the processors)")
    bench.add_argument("--steps", type=_positive, default=8, help="in which nothing happens (8)")
    bench.add_argument("--freeze-s", type=float, default=0.0, metavar="S", help="then one process stands still so long")
    bench.add_argument(
        "--break-broadcast", action="store_true", help="then one broadcast breaks; weights come by these"
    )
    bench.add_argument("--no-top", action="store_true", help="without a running asyncrl-top")
    bench = benches.add_parser("idle", help="processor time of rollouters that have nothing to do, and their start")
    bench.add_argument("--replicas", type=_positive, default=256, help="simulated (256)")
    bench.add_argument("--per-process", type=_positive, default=None, help="of them in a process (by the processors)")
    bench.add_argument("--seconds", type=_positive, default=30, help="measured (30)")
    bench = benches.add_parser("episodes", help="what a call of the policy costs; many open episodes; no barriers")
    bench.add_argument("--pairs", type=_positive, default=30, help="pairs of each comparison of calls (30)")
    bench.add_argument("--open", type=_positive, default=1000, help="episodes open on one rollouter (1000)")
    bench.add_argument("--steps", type=_positive, default=8, help="synchronous steps; 5 times as many without (8)")
    bench.add_argument("--only", choices=["calls", "open", "async"], help="one of the three parts")
    bench = benches.add_parser("fanout", help="time of a version until all hosts have it, against one copy to one host")
    bench.add_argument("--hosts", type=_positive, default=16, help="without that of the parameter server (16)")
    bench.add_argument("--pairs", type=_positive, default=3, help="pairs of each comparison, and deaths (3)")
    for bench in benches.choices.values():
        bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    return found


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    chosen = parser().parse_args(arguments)
    report = Report(chosen.bench)
    tune_memory()
    with for_json_alone() as stdout:
        _measure(chosen, report)
        if chosen.json:
            print(report.to_json(), file=stdout)
    return 0


def _measure(chosen: argparse.Namespace, report: Report) -> None:
    if chosen.bench == "calls":
        from tools.bench import calls

        uvloop.run(calls.measure(report, pairs=chosen.pairs, vs_ray=chosen.vs == "ray"))
    elif chosen.bench == "rollout":
        from tools.bench import rollout

        uvloop.run(rollout.measure(report, pairs=chosen.pairs))
    elif chosen.bench == "learner":
        from tools.bench import learner

        uvloop.run(learner.measure(report, pairs=chosen.pairs, threads=chosen.threads, vs_trl=chosen.vs == "trl"))
    elif chosen.bench == "quickstart":
        from tools.bench import quickstart

        given = {"lengths": chosen.lengths, "accuracy": chosen.accuracy, "steps": chosen.steps}
        quickstart.measure(report, seeds=chosen.seed or [1, 2, 3], **given)
    elif chosen.bench == "planning":
        from tools.bench import planning

        uvloop.run(planning.measure(report, pairs=chosen.pairs, steps=chosen.steps))
    elif chosen.bench == "stall":
        from tools.bench import stall

        stall.measure(report, steps=chosen.steps)
    elif chosen.bench == "weights":
        from tools.bench import weights

        uvloop.run(weights.measure(report, weights.sizes_up_to(chosen.up_to)))
    elif chosen.bench == "scale":
        from tools.bench import scale, scale_run

        per_process = chosen.per_process or scale_run.per_process(chosen.replicas)
        scale.measure(
            report,
            rollouters=chosen.replicas,
            per_process=per_process,
            steps=chosen.steps,
            top=not chosen.no_top,
            freeze_s=chosen.freeze_s,
            break_broadcast=chosen.break_broadcast,
        )
    elif chosen.bench == "idle":
        from tools.bench import scale_idle, scale_run

        scale_idle.measure(
            report,
            rollouters=chosen.replicas,
            per_process=chosen.per_process or scale_run.per_process(chosen.replicas),
            seconds=chosen.seconds,
        )
    elif chosen.bench == "episodes":
        from tools.bench import episode_calls, episode_runs

        if chosen.only in (None, "calls"):
            uvloop.run(episode_calls.measure(report, pairs=chosen.pairs))
        if chosen.only in (None, "open"):
            episode_runs.measure_open(report, episodes=chosen.open)
        if chosen.only in (None, "async"):
            episode_runs.measure_async(report, steps=chosen.steps)
    elif chosen.bench == "fanout":
        from tools.bench import fanout
        from tools.cluster.network import why_no_shaped_network

        if reason := why_no_shaped_network():
            raise SystemExit(f"there can be no hosts here: {reason}")
        asyncio.run(fanout.measure(report, fanout.Setting(hosts=chosen.hosts, pairs=chosen.pairs)))
    else:
        from tools.bench import overlap

        overlap.measure(report, steps=chosen.steps)


if __name__ == "__main__":
    sys.exit(kept.run(main))
