"""``python -m tools.bench NAME``: measure asyncrl against the floor.

A table and the logs of engines go to stderr. With ``--json``, stdout is one JSON object whose last key is ``ratios``.
The exit code does not depend on the targets: it is 0 if everything was measured.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import uvloop

from asyncrl.rpc.process import tune_memory
from tools import kept
from tools.bench.report import Report, for_json_alone
from tools.bench.weights_sender import LAYOUTS


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count(default: int, help: str) -> dict[str, Any]:
    return {"type": _positive, "default": default, "help": f"{help} ({default})"}


def _pairs(default: int) -> dict[str, Any]:
    return _count(default, "pairs of each comparison")


ROLLOUTERS = {"--replicas": _count(256, "simulated rollouters")}
BENCHES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "calls": (
        "calls, reward tasks and payloads against raw pyzmq and Ray",
        {"--pairs": _pairs(30), "--vs": {"choices": ["ray"], "help": "also measure against Ray"}},
    ),
    "rollout": ("tokens/s through the rollouter against a bare vLLM loop", {"--pairs": _pairs(30)}),
    "learner": (
        "tokens/s of a training step against a padded plain loop of torch",
        {
            "--pairs": _pairs(10),
            "--threads": _count(1, "of each side"),
            "--vs": {"choices": ["trl"], "help": "also measure against TRL's GRPO"},
        },
    ),
    "quickstart": (
        "seconds until the quickstart's policy is right on held-out problems",
        {
            "--vs": {"choices": ["trl"], "required": True, "help": "the other side: TRL's GRPO"},
            "--lengths": {
                "choices": ["equal", "lognormal"],
                "default": "equal",
                "help": "of the responses (equal)",
            },
            "--seed": {"type": _positive, "action": "append", "help": "of a pair of runs (1, 2 and 3)"},
            "--accuracy": {"type": float, "default": 0.8, "help": "share of right samples that is waited for (0.8)"},
            "--steps": _count(40, "of each run"),
        },
    ),
    "curriculum": (
        "tokens until the quickstart's policy is right, with and without a curriculum",
        {
            "--seed": {"type": _positive, "action": "append", "help": "of a pair of runs (1, 2 and 3)"},
            "--accuracy": {"type": float, "default": 0.8, "help": "share of right samples that is waited for (0.8)"},
            "--steps": _count(44, "of each run"),
        },
    ),
    "overlap": (
        "throughput of the whole system against max(T_generate, T_train)",
        {"--steps": _count(48, "steps measured in each run")},
    ),
    "stall": (
        "generation time lost to an update in each mode, simulated",
        {"--steps": _count(20, "steps, and updates, of each run")},
    ),
    "weights": (
        "bytes/s of each weight transport against memcpy, TCP and bare gloo",
        {"--up-to": {"choices": list(LAYOUTS), "default": "2B", "help": "largest layout (2B)"}},
    ),
    "scale": (
        "one control plane under many rollouters with 16,384 trajectories in flight",
        {
            **ROLLOUTERS,
            "--steps": _count(8, "in which nothing happens"),
            "--freeze-s": {"type": float, "default": 0.0, "metavar": "S", "help": "then one process is frozen"},
        },
    ),
    "idle": (
        "processor time of rollouters that have nothing to do",
        {**ROLLOUTERS, "--seconds": _count(30, "measured")},
    ),
    "episodes": (
        "what a call of the policy costs, and steps without barriers",
        {
            "--pairs": _pairs(30),
            "--steps": _count(8, "synchronous steps; 5 times as many without barriers"),
            "--only": {"choices": ["calls", "async"], "help": "one of the two parts"},
        },
    ),
    "fanout": (
        "time of a version until all hosts have it, against one copy to one host",
        {
            "--hosts": _count(16, "without that of the parameter server"),
            "--pairs": _pairs(3),
        },
    ),
}
"""Help and options of each benchmark. The options are the arguments of ``measure`` of the module with its name."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    benches = found.add_subparsers(dest="bench", required=True)
    for name, (help, options) in BENCHES.items():
        bench = benches.add_parser(name, help=help)
        for flag, settings in options.items():
            bench.add_argument(flag, **settings)
        bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    options = vars(parser().parse_args(arguments))
    bench, as_json = options.pop("bench"), options.pop("json")
    report = Report(bench)
    tune_memory()
    with for_json_alone() as stdout:
        measuring = import_module(f"tools.bench.{bench}").measure(report, **options)
        if inspect.iscoroutine(measuring):
            uvloop.run(measuring)
        if as_json:
            print(report.to_json(), file=stdout)
    return 0


if __name__ == "__main__":
    sys.exit(kept.run(main))
