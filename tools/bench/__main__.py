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
from typing import Any, Literal, get_args, get_origin

import uvloop

from asyncrl.rpc.process import tune_memory
from tools import kept
from tools.bench.report import Report, for_json_alone

BENCHES = {
    "calls": "calls, reward tasks and payloads against raw pyzmq and Ray",
    "rollout": "tokens/s through the rollouter against a bare vLLM loop",
    "learner": "tokens/s of a training step against a padded plain loop of torch, and TRL's",
    "quickstart": "seconds until the quickstart's policy is right on held-out problems, against TRL",
    "curriculum": "tokens until the quickstart's policy is right, with and without a curriculum",
    "overlap": "throughput of the whole system against max(T_generate, T_train)",
    "stall": "generation time lost to an update in each mode, simulated",
    "weights": "bytes/s of each weight transport against memcpy, TCP and bare gloo",
    "scale": "one control plane under many rollouters with 16,384 trajectories in flight",
    "episodes": "what a call of the policy costs, and steps without barriers",
    "fanout": "time of a version until all hosts have it, against one copy to one host",
}
OPTIONS = {
    "pairs": "pairs of each comparison",
    "vs": "the other framework",
    "lengths": "of the responses",
    "seed": "of each pair of runs",
    "accuracy": "share of right samples that is waited for",
    "steps": "steps of a run, or those that are measured",
    "up_to": "largest layout",
    "replicas": "simulated rollouters",
    "freeze_s": "seconds for which one process is then frozen",
    "hosts": "without that of the parameter server",
}
"""Help of the options, which are the arguments of ``measure`` of the bench's module."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of a command line, with ``bench`` and ``json``. Only the module of its bench is imported."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, help in BENCHES.items():
        bench = benches.add_parser(name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        bench.add_argument("--json", action="store_true", help="print the figures as JSON")
        if name in arguments[:1]:
            measure = inspect.signature(import_module(f"tools.bench.{name}").measure, eval_str=True)
            for option in list(measure.parameters.values())[1:]:
                _add(bench, option)
    return vars(parser.parse_args(arguments))


def _add(bench: argparse.ArgumentParser, option: inspect.Parameter) -> None:
    """Add an argument of ``measure``: a number, one of some words, or several numbers (a tuple)."""
    settings: dict[str, Any] = {"type": {int: _positive, float: float}.get(option.annotation)}
    (kind, *_) = [each for each in get_args(option.annotation) if get_origin(each) is Literal] or [option.annotation]
    if get_origin(kind) is Literal:
        settings = {"choices": get_args(kind)}
    elif get_origin(kind) is tuple:
        settings = {"type": _positive, "nargs": "+"}
    required = option.default is inspect.Parameter.empty
    settings |= {"required": True} if required else {"default": option.default}
    bench.add_argument(f"--{option.name.replace('_', '-')}", help=OPTIONS[option.name], **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
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
