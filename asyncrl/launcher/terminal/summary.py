"""Shows the end of a run: its results, where its files are, and why it ended. Fails with OSError."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.core.formatting import fixed
from asyncrl.launcher.common.agent_messages import EndedEvent
from asyncrl.launcher.run_folder.ended import describe_end, exported_model, find_left
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.terminal.metrics_words import mean_in_words
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.observe.metrics_line import Line, is_eval_mean, number_in, read_metrics
from asyncrl.observe.recording import last_recorded

TENTH = 10
LEARNER = "learner/0"
OF_THE_RUN = {
    "ledger/filtered": "groups filtered",
    "ledger/quarantined": "groups quarantined",
    "ledger/left_out": "prompts left out",
    "ledger/rested": "rests of prompts",
}
OF_A_LEARNER = {"rollout/dropped_trajectories": "trajectories dropped", "rollout/failed_attempts": "failed attempts"}
"""Metrics that count what was not trained: OF_THE_RUN since its start, OF_A_LEARNER since each learner's start."""


def show_end(config: Config, folder: RunFolder, ended: EndedEvent, progress: TerminalProgress) -> int:
    """Show the results of a run, its notices and how it ended, and return its exit code."""
    progress.end()
    left = find_left(config, folder, heard=progress.step)
    lines = read_metrics(folder.path / "metrics.jsonl", ("train", "eval"))
    for row in summarise(
        lines,
        folder.path,
        folder.logs,
        config.learner.steps,
        trained=left.trained,
        checkpoint=left.checkpoint.path if left.checkpoint is not None else None,
        restarts=progress.restarts,
        last_metrics={} if left.trained else _last_metrics(folder),
    ):
        progress.say(row)
    progress.warn(progress.notices.summary())
    rows = describe_end(folder, ended, left)
    if ended.result == "failed":
        progress.warn(rows)
    else:
        for row in rows:
            progress.say(row)
    return ended.exit_code


def _last_metrics(folder: RunFolder) -> dict[str, float]:
    """Return the learner's metrics in the last snapshot of the recording; empty without a recording on this host."""
    try:
        recorded = last_recorded(folder.path, folder.attempt)
    except OSError:
        return {}
    learner = [actor for actor in recorded.actors if actor.name == LEARNER] if recorded is not None else []
    return learner[0].metrics if learner else {}


def summarise(
    lines: Sequence[Line],
    run_dir: Path,
    log_dir: Path,
    steps: int,
    *,
    trained: int = 0,
    checkpoint: Path | None = None,
    restarts: Mapping[str, int] | None = None,
    last_metrics: Mapping[str, float] | None = None,
) -> list[str]:
    """Return rows on the results of a run: steps, reward and evaluations (first → last), and the paths of its files.

    ``lines`` of metrics.jsonl are those of training and evaluations. Lines after step ``steps`` do not count: an
    attempt with a larger learner.steps wrote them. Lines may be missing after a full disk, so at least ``trained``
    steps count. ``checkpoint`` is the newest complete one, ``restarts`` counts the restarts of each actor.
    ``last_metrics`` are those of the learner, for a run without a line of training.
    """
    lines = [line for line in lines if line.get("step", 0) <= steps]
    train = [line for line in lines if line.get("kind") != "eval"]
    rows = [("steps", f"{max([trained, *(line.get('step', 0) for line in train)])} of {steps}")] if steps else []
    if reward := _reward(train):
        rows.append(("reward", reward))
    evals: dict[str, list[Any]] = {}
    for line in lines:
        for key in filter(is_eval_mean, line):
            evals.setdefault(key.removesuffix("/mean"), []).append(line[key])
    for name, values in sorted(evals.items()):
        rows.append((name, " → ".join(mean_in_words(value) for value in dict.fromkeys((values[0], values[-1])))))
    if untrained := _untrained(train or [dict(last_metrics or {})]):
        rows.append(("not trained", untrained))
    if restarts:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in sorted(restarts.items()))))
    rows.append(("run folder", str(run_dir)))
    top = f"asyncrl-top {shlex.quote(str(run_dir))}"
    for label, place in (
        ("metrics", run_dir / "metrics.jsonl"),
        ("samples", run_dir / "samples"),
        ("checkpoint", checkpoint),
        ("model", exported_model(run_dir)),
        ("trace", run_dir / "trace"),
        ("logs", log_dir),
    ):
        if place is None or not place.exists():
            continue
        # A run without samples has an empty folder of them.
        if label != "samples" or any(place.iterdir()):
            rows.append((label, f"{place}; {top} --samples prints the newest" if label == "samples" else str(place)))
    if (quarantine := run_dir / "quarantine.jsonl").exists():
        rows.append(("quarantine", f"{quarantine}; {top} --explain UID shows the history of one of its groups"))
    if (run_dir / "monitor").exists():
        rows.append(("replay", f"{top} --replay, or --report FILE.html"))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def _reward(train: Sequence[Line]) -> str:
    """Return the mean reward over the first and the last tenth of the steps as text, because single steps are noisy."""
    known = [(line.get("step", 0), reward) for line in train if (reward := number_in(line, "reward/mean")) is not None]
    if not known:
        return ""
    tenth = max(1, len(known) // TENTH)
    ends = [known[:tenth], known[-tenth:]] if len(known) > 1 else [known]
    means = " → ".join(fixed(sum(reward for _, reward in end) / len(end), 3) for end in ends)
    return f"{means} (mean of {' and of '.join(_steps(end[0][0], end[-1][0]) for end in ends)})"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _untrained(train: Sequence[Line]) -> str:
    """Return the counts of what was not trained as text; counts of a learner are summed over the learner's starts."""
    last_line_by_start: dict[int, Line] = {line.get("start", 0): line for line in train}
    counts = {words: int(number_in(train[-1], key) or 0) for key, words in OF_THE_RUN.items()}
    for key, words in OF_A_LEARNER.items():
        counts[words] = int(sum(number_in(line, key) or 0 for line in last_line_by_start.values()))
    return ", ".join(f"{words} {count}" for words, count in counts.items() if count)
