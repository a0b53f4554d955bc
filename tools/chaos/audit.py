"""Checks the files of a finished run: nothing is lost and nothing is repeated. Pure over files.

The truth is the ledger of the newest complete checkpoint, and samples/ for later steps. The ledger says which prompts
have an outcome, and how many prompts have each outcome. samples/ and quarantine.jsonl say which outcome a prompt has;
if they are complete, a prompt in neither was filtered. For each step, the history of the final weights is what the last
learner that trained the step wrote.

The gate leases prompts in the order of the data and no more than the run needs. So the prompts with an outcome are the
first of that order, and a gap is a lost prompt. Each difference between metrics, samples, quarantine and ledger is a
problem of its own.

Raises OSError (CheckpointError is a subclass) if there are no files to check.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.core.errors import CheckpointError
from asyncrl.data.rows import EpochOrder
from asyncrl.messages.ledger import KINDS, Ledger, position_of

LISTED = 5
"""Most examples that the report lists for one problem."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The numbers that the configuration promises."""

    steps: int
    groups_per_step: int
    prompts: int
    """Prompts in the data."""
    shuffle: bool = True
    outcome: Callable[[int], str] | None = None
    """Return the outcome of the prompt at an index of the data, if it is known before the run."""


@dataclass(frozen=True, slots=True)
class Problem:
    """``kind``: lost, repeated, outcome, ledger, history, version, spans, unrecorded, left or end."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class Findings:
    """Problems and numbers. ``unrecorded`` means a missing record; every other kind means a fault."""

    problems: list[Problem] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def say(self, kind: str, text: str, examples: Iterable[Any] = ()) -> None:
        """Add a problem, unless ``examples`` is empty."""
        listed = list(examples)
        shown = ", ".join(map(str, listed[:LISTED])) + (f" and {len(listed) - LISTED} more" * (len(listed) > LISTED))
        self.problems.append(Problem(kind, f"{text}{': ' if shown else ''}{shown}"))

    def say_any(self, kind: str, text: str, examples: Iterable[Any]) -> None:
        """Add a problem if there are examples of it."""
        if listed := list(examples):
            self.say(kind, f"{len(listed)} {text}", listed)


def audit(run_dir: Path, expected: Expected) -> Findings:
    findings = Findings()
    metrics, torn = read_lines(run_dir / "metrics.jsonl")
    history = _history(findings, [line for line in metrics if line.get("kind") == "train"], expected)
    samples, torn_samples = _samples(run_dir, history)
    findings.figures["torn_lines"] = torn + torn_samples
    findings.figures["starts"] = len({line["start"] for line in metrics if "start" in line})
    _spans(findings, samples)
    recorded = {step: [str(group["uid"]) for group in groups] for step, groups in samples.items()}
    _repeated(findings, recorded, expected)
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    if newest is None:
        raise CheckpointError(str(run_dir / "checkpoints"), "there is no complete checkpoint")
    state = read_state(newest.path)
    quarantined, torn_quarantine = read_lines(run_dir / "quarantine.jsonl")
    findings.figures["torn_lines"] += torn_quarantine
    said = {str(line["uid"]) for line in quarantined}
    ledger = Ledger.restore(state.ledger)
    outcomes = _outcomes(findings, ledger, state.step, recorded, said, expected)
    order = EpochOrder(state.fingerprint, state.seed, expected.prompts, shuffle=expected.shuffle)
    _gaps(findings, outcomes, order)
    if expected.outcome is not None:
        known = expected.outcome
        wrong = [
            f"{uid} was {kind}"
            for uid, kind in outcomes.items()
            if kind != "unknown" and known(position_of(uid)[1]) != kind
        ]
        findings.say_any("outcome", "prompts have another outcome than their rewards give", wrong)
    trained = ledger.count("trained") + sum(len(uids) for at, uids in recorded.items() if at > state.step)
    if history and (counted := history[max(history)].get("ledger/trained")) != trained:
        findings.say("ledger", f"the last line of metrics counts {counted} trained, not {trained}")
    findings.figures |= dict(Counter(outcomes.values()))
    _leftovers(findings, run_dir)
    return findings


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of an append-only file, and the number of torn lines (a full disk, a death)."""
    found: list[dict[str, Any]] = []
    torn = 0
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                torn += 1
    return found, torn


def _history(findings: Findings, lines: list[dict[str, Any]], expected: Expected) -> dict[int, dict[str, Any]]:
    """Return the line of each step in the history of the final weights."""
    history: dict[int, dict[str, Any]] = {}
    starts_of_version: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        starts_of_version[line["weights/version"]].add(line["start"])
        if line["step"] not in history or line["start"] >= history[line["step"]]["start"]:
            history[line["step"]] = line
    wanted = range(1, expected.steps + 1)
    findings.say_any(
        "unrecorded", "steps have no line in metrics.jsonl", [step for step in wanted if step not in history]
    )
    findings.say_any("history", "steps were never asked for", [step for step in history if step not in wanted])
    if history and max(history) != expected.steps:
        findings.say("end", f"training came to step {max(history)} of {expected.steps}")
    ordered = [history[step] for step in sorted(history)]
    back = [
        f"step {b['step']} of start {b['start']} after {a['start']}"
        for a, b in pairwise(ordered)
        if b["start"] < a["start"]
    ]
    findings.say_any("history", "steps follow one that a later start of the learner trained", back)
    falling = [b["step"] for a, b in pairwise(ordered) if b["weights/version"] < a["weights/version"]]
    findings.say_any("version", "steps have an older version than the one before", falling)
    # A learner that starts from a checkpoint publishes its version again, so no number has two starts.
    reused = [version for version, starts in starts_of_version.items() if len(starts) > 1]
    findings.say_any("version", "numbers of versions were used by two starts of the learner", reused)
    size = expected.groups_per_step
    miscounted = [line["step"] for line in ordered if line["ledger/trained"] != line["step"] * size]
    findings.say_any("ledger", f"steps were not counted as {size} groups each in metrics.jsonl", miscounted)
    findings.figures["steps"] = max(history, default=0)
    findings.figures["steps_trained_again"] = len({(line["step"], line["start"]) for line in lines}) - len(history)
    return history


def _samples(run_dir: Path, history: dict[int, dict[str, Any]]) -> tuple[dict[int, list[dict[str, Any]]], int]:
    """Return the recorded groups of each step of the history."""
    found: dict[int, list[dict[str, Any]]] = {}
    torn = 0
    for path in sorted((run_dir / "samples").glob("step_*.jsonl")):
        lines, bad = read_lines(path)
        torn += bad
        for line in lines:
            step = line["step"]
            if step in history and line["start"] == history[step]["start"]:
                found.setdefault(step, []).append(line)
    return found, torn


def covered(sequence: dict[str, Any]) -> bool:
    """Whether each token has one version, and no sampled token an older version than one before it."""
    spans = sequence["spans"]
    ends = [0, *(end for _, _, end, _ in spans)]
    versions = [version for version, _, _, role in spans if role == "sampled"]
    is_whole = [start for _, start, _, _ in spans] == ends[:-1] and ends[-1] == len(sequence["tokens"])
    return is_whole and versions == sorted(versions)


def _spans(findings: Findings, samples: dict[int, list[dict[str, Any]]]) -> None:
    """I3: the versions of a response cover its tokens, in order."""
    wrong = [
        f"{group['uid']} {sequence['spans']}"
        for groups in samples.values()
        for group in groups
        for trajectory in group["trajectories"]
        for sequence in trajectory["sequences"]
        if not covered(sequence)
    ]
    findings.say_any("spans", "sequences are not covered by versions in order", wrong)


def _repeated(findings: Findings, recorded: dict[int, list[str]], expected: Expected) -> None:
    """I1: no prompt in two steps of the history, nor twice in one."""
    steps_of: dict[str, list[int]] = defaultdict(list)
    for step, uids in sorted(recorded.items()):
        for uid in uids:
            steps_of[uid].append(step)
    again = [f"{uid} in steps {steps}" for uid, steps in steps_of.items() if len(steps) > 1]
    findings.say_any("repeated", "prompts were trained more than once", again)
    short = [step for step in range(1, expected.steps + 1) if len(recorded.get(step, [])) < expected.groups_per_step]
    findings.say_any("unrecorded", "steps are not complete in samples/", short)
    long = [step for step, uids in recorded.items() if len(uids) > expected.groups_per_step]
    findings.say_any("repeated", "steps have too many groups", long)


def _outcomes(
    findings: Findings,
    ledger: Ledger,
    step: int,
    recorded: dict[int, list[str]],
    quarantined: set[str],
    expected: Expected,
) -> dict[str, str]:
    """Return the outcome of every prompt: from the ledger of step ``step`` and from the steps trained since.

    ``unknown``: the record of the outcome is missing. ``quarantined``: the prompts of quarantine.jsonl.
    """
    indices = np.arange(expected.prompts)
    concluded = {
        f"{epoch}-{index}"
        for epoch in range(ledger.next_epoch)
        for index in np.flatnonzero(ledger.concluded_among(epoch, indices)).tolist()
    }
    counts = {kind: ledger.count(kind) for kind in KINDS}
    if len(concluded) != sum(counts.values()):
        findings.say(
            "ledger", f"{sum(counts.values()) - len(concluded)} prompts have an outcome and are not in the data"
        )
    if counts["trained"] != step * expected.groups_per_step:
        findings.say("ledger", f"the checkpoint of step {step} counts {counts['trained']} groups as trained")
    said = {uid for at, uids in recorded.items() if at <= step for uid in uids}
    findings.say_any("ledger", f"groups of steps up to {step} have no outcome in its checkpoint", said - concluded)
    trained, rest = said & concluded, concluded - said
    complete = all(len(recorded.get(at, [])) == expected.groups_per_step for at in range(1, step + 1))
    if complete and (more := counts["trained"] - len(trained)) > 0:
        findings.say("ledger", f"{more} groups are trained in the checkpoint and in no step")
    failed = rest & quarantined
    if (silent := counts["quarantined"] - len(failed)) > 0:
        findings.say("unrecorded", f"{silent} quarantined prompts are not in quarantine.jsonl")
    others = "filtered" if len(rest - failed) == counts["filtered"] else "unknown"
    later = [uid for at, uids in recorded.items() if at > step for uid in uids]
    findings.say_any(
        "repeated", f"groups trained after step {step} had an outcome", [u for u in later if u in concluded]
    )
    return (
        dict.fromkeys(rest - failed, others)
        | dict.fromkeys(failed, "quarantined")
        | dict.fromkeys([*trained, *later], "trained")
    )


def _gaps(findings: Findings, outcomes: dict[str, str], order: EpochOrder) -> None:
    """I1: no prompt is lost."""
    positions = {order.position(*position_of(uid)) for uid in outcomes}
    missing = sorted(set(range(max(positions, default=-1))) - positions)
    lost = ["{}-{}".format(*order.at(position)) for position in missing]
    findings.say_any("lost", "prompts have no outcome though later ones have", lost)


def _leftovers(findings: Findings, run_dir: Path) -> None:
    """I7, for the folder of the run."""
    if (run_dir / "private").exists():
        findings.say("left", "the private folder")
    hidden = [p for p in run_dir.rglob("*") if p.name.endswith((".tmp", ".new")) or p.name.startswith((".v", ".dead-"))]
    findings.say_any("left", "unfinished files and folders", [str(p.relative_to(run_dir)) for p in hidden])
