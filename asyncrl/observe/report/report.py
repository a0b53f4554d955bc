"""A report of a run as one HTML page that needs nothing else: no network, no other file.

It is made from the run folder, during the run or after it: metrics.jsonl, config.json and the recorded snapshots. The
page names missing or unreadable parts, except evaluations, episodes and events, which a run need not have. All text of
the run is escaped (panels.shown). Under the page's security policy only its own scripts run, which draw the charts, and
nothing is loaded. Raises UsageError without a run or if the file cannot be there, and OSError if the page cannot be
written.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncrl.core.errors import UsageError, phase_and_reason
from asyncrl.core.files import read_json_object, replace_file
from asyncrl.core.formatting import exact, fixed, percent
from asyncrl.messages.monitor import Event, Snapshot
from asyncrl.observe.metrics_line import Line, number_in, read_metrics, without_first
from asyncrl.observe.pages import UPLOT_SCRIPT, UPLOT_STYLE, policy, resource_text
from asyncrl.observe.recording import decode, ended, read_bodies
from asyncrl.observe.report import charts
from asyncrl.observe.report.charts import evenly, mean, spans
from asyncrl.observe.report.panels import Panel, draw, shown

MOST_SNAPSHOTS = 240
MOST_EVENTS = 50
EXCERPT = (
    *("model.path", "data.source", "data.path", "rollout.engine", "rollout.replicas", "rollout.samples_per_prompt"),
    *("rollout.max_tokens", "rollout.concurrency", "reward.function", "learner.backend", "learner.ranks"),
    *("learner.steps", "learner.groups_per_step", "learner.lr", "staleness.max", "weights.transport", "run.seed"),
)
"""Keys of the configuration that the page shows first."""
STYLES = (UPLOT_STYLE, "observe/report/report.css")
SCRIPTS = (UPLOT_SCRIPT, "observe/report/report.js")


def write_report(run_dir: Path, out: Path, *, lives: bool = False) -> None:
    """Write the report of the run in ``run_dir``, which ``lives`` or has ended, to ``out``, whole or not at all."""
    check_writable(out)
    write_user_file(out, report_page(run_dir, lives=lives))


def report_page(run_dir: Path, *, lives: bool = False, viewer: str = "") -> str:
    """Read the run folder and make the whole page: header, sections of charts, events, configuration.

    ``viewer`` is a relative URL of the run's rollouts, for a page that asyncrl-view serves. Raises UsageError.
    """
    if not (run_dir / "config.json").is_file():
        raise UsageError(f"{run_dir} is not a run folder: it holds no config.json")
    config, problem = _read_config(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl", KINDS_OF_LINES, charts.OF_UPDATES)
    train, evals, updates = ([line for line in lines if line.get("kind") == kind] for kind in KINDS_OF_LINES)
    train = [line for line in train if "step" in line]
    snapshots = _snapshots(run_dir)
    last = ended(snapshots[-1], lives=lives) if snapshots else None
    name = shown(run_dir.resolve().name)
    no_lines = "metrics.jsonl has no such lines."
    no_recording = f"{'Too few' if snapshots else 'No'} snapshots of this run were recorded."
    # Arguments of ``_section``: title, panels, text without panels, note.
    sections = [
        (
            "Reward",
            charts.reward(train, evals),
            no_lines,
            "Mean over everything scored since the last step. An evaluation stands at the step that made the newest of "
            "the weights that sampled it.",
        ),
        (
            "Evaluations",
            charts.evaluations(train, evals),
            "",
            "A sample passes from a reward of eval.NAME.pass_at on.",
        ),
        ("Learning", charts.learning(train), no_lines, "Values of each step."),
        ("Staleness", charts.staleness(train), no_lines, "Versions between sampling and training of a token."),
        ("Utilisation", charts.utilisation(spans(snapshots)), no_recording, "Shares of time by state (UTC)."),
        ("Step", charts.step_breakdown(train), no_lines, "Parts of a training step."),
        ("Weight updates", charts.weight_stall(train, updates), no_lines, "Generation time lost."),
        ("Lengths", charts.lengths(train), no_lines, "Tokens of a response."),
        ("Episodes", charts.episodes(train), "", "Turns of an episode, and shares of its time."),
        ("Throughput", charts.tokens(train), no_lines, "Tokens sampled a second, by all engines together."),
        ("Ledger", charts.ledger(train), no_lines, "Prompt groups by outcome, since the start of the run."),
    ]
    command = shown(f"asyncrl-view {shlex.quote(run_dir.resolve().name)}")
    link = f'<a href="{shown(viewer)}">{command}</a>' if viewer else command
    rollouts = f"<p class=note>Its rollouts: {link}</p>"
    styles, scripts = ([resource_text(name) for name in names] for names in (STYLES, SCRIPTS))
    body = [
        f"<header><h1>{name}</h1><p class=phase>{_phase(last, train, config)}</p>{rollouts}{_figures(train)}</header>",
        *(_section(*section) for section in sections),
        _events(last.events if last is not None else []),
        _config(config, problem),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang=en><head><meta charset="utf-8"><title>{name} – asyncrl</title>',
            policy(scripts, styles),
            '<meta name="viewport" content="width=device-width">',
            *(f"<style>{style}</style>" for style in styles),
            "</head><body><main>",
            "<noscript><p class=note>The charts need JavaScript.</p></noscript>",
            *body,
            f"</main>{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n",
        ]
    )


def _read_config(run_dir: Path) -> tuple[dict[str, Any], str]:
    """Return the configuration and an empty text; if it cannot be read, an empty configuration and the reason."""
    try:
        return read_json_object(run_dir / "config.json"), ""
    except ValueError as error:
        return {}, str(error)


KINDS_OF_LINES = ("train", "eval", "update")


def _snapshots(run_dir: Path) -> list[Snapshot]:
    """Return at most MOST_SNAPSHOTS recorded snapshots, evenly over time.

    Reads the recording twice, first the times alone, so that the memory never holds all snapshots.
    """
    chosen = set(evenly([wall for wall, _ in read_bodies(run_dir)], MOST_SNAPSHOTS))
    decoded = (decode(body) for index, (_, body) in enumerate(read_bodies(run_dir)) if index in chosen)
    return [snapshot for snapshot in decoded if snapshot is not None]


def _section(title: str, panels: Sequence[Panel], missing: str, note: str) -> str:
    """Make the HTML of a section. Without panels it is the text ``missing``, or nothing if that is empty."""
    if not panels:
        return missing and f"<section><h2>{title}</h2><p class=none>{missing}</p></section>"
    drawn = "".join(map(draw, panels))
    return f"<section><h2>{title}</h2><p class=note>{note}</p><div class=panels>{drawn}</div></section>"


def _phase(last: Snapshot | None, train: Sequence[Line], config: Mapping[str, Any]) -> str:
    """Make the line below the title, as HTML: phase, step, version, attempt and time of the last snapshot."""
    steps = f"step {train[-1]['step'] if train else 0} of {_value(config, 'learner.steps', '?')}"
    if last is None:
        return shown(steps)
    run = last.run
    at = datetime.fromtimestamp(last.wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [phase_and_reason(run.phase, run.exit_code, run.reason), steps, f"version {run.version}"]
    parts += [f"attempt {run.attempt}", f"as of {at}"]
    return shown(" · ".join(parts))


def _figures(train: Sequence[Line]) -> str:
    """Make the HTML of the numbers in the header, such as mean step and throughput; empty if none is known."""

    def values(key: str) -> list[float]:
        return [value for line in train if (value := number_in(line, key)) is not None]

    rows: list[tuple[str, str]] = []
    if series := values("reward/mean"):
        rows.append(("reward, first → last", f"{fixed(series[0], 3)} → {fixed(series[-1], 3)}"))
    timed = [line for line in without_first(train) if (number_in(line, "time/step_s") or 0.0) > 0]
    steps_s = [float(line["time/step_s"]) for line in timed]
    rates = [number_in(line, "rollout/tokens_per_s") for line in timed]
    if steps_s:
        rows.append(("mean step", f"{fixed(mean(steps_s))} s"))
    # The mean is weighted by the time of each step: it is the tokens of all these steps over the time of the steps.
    if known := [(rate, step_s) for rate, step_s in zip(rates, steps_s, strict=True) if rate is not None]:
        mean_rate = sum(rate * step_s for rate, step_s in known) / sum(step_s for _, step_s in known)
        rows.append(("mean throughput", f"{exact(mean_rate)} tokens/s"))
    if series := values("perf/overlap"):
        rows.append(("generation during training", percent(mean(series))))
    if series := values("staleness/token_mean"):
        rows.append(("mean staleness", fixed(mean(series))))
    if not rows:
        return ""
    return "<div class=figures>" + "".join(f"<div><span>{key}</span>{value}</div>" for key, value in rows) + "</div>"


def _events(events: Iterable[Event]) -> str:
    """Make the HTML of the newest MOST_EVENTS events; empty without any."""
    chosen = list(events)[-MOST_EVENTS:]
    if not chosen:
        return ""
    rows = "".join(
        f"<tr><td>{datetime.fromtimestamp(event.wall, UTC):%m-%d %H:%M:%S}</td><td>{shown(event.actor)}</td>"
        f"<td class={shown(event.level)!r}>{shown(event.text)}</td></tr>"
        for event in chosen
    )
    return f"<section><h2>Latest events</h2><table>{rows}</table></section>"


def _config(config: Mapping[str, Any], problem: str) -> str:
    """Make the HTML of the configuration: the keys of EXCERPT, then the whole; or only the ``problem`` of its read."""
    if problem:
        return f"<section><h2>Configuration</h2><p class=none>{shown(problem)}</p></section>"
    rows = ""
    for key in EXCERPT:
        value = _value(config, key)
        if value is not None:
            rows += f"<tr><td>{key}</td><td>{shown(str(value))}</td></tr>"
    whole = shown(json.dumps(config, indent=2))
    return (
        f"<section><h2>Configuration</h2><table>{rows}</table>"
        f"<details><summary>All of it</summary><pre>{whole}</pre></details></section>"
    )


def _value(config: Mapping[str, Any], key: str, otherwise: Any = None) -> Any:
    """The value under a dotted key of the configuration; ``otherwise`` if there is no value."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return otherwise if value is None else value


def check_writable(path: Path) -> None:
    """Raise UsageError if no file can be at ``path``; permissions to write are not checked."""
    _mode(path)


def write_user_file(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to a path that a user has named, whole or not at all.

    The new file has the permissions of the one that it replaces. A link is followed. Raises UsageError for a target
    that is not a regular file, such as a device or a folder, and if no file can be there. Raises OSError with the
    user's path as ``filename``.
    """
    mode = _mode(path)
    target = Path(os.path.realpath(path))
    try:
        # A name in the run may contain bytes that are no text.
        data = text.encode("utf-8", "backslashreplace")
        replace_file(target, data, mode=mode, aside=target.with_name(f".{secrets.token_hex(8)}.new"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _mode(path: Path) -> int | None:
    """Read the permissions of the file at ``path``; None without a file. Raises UsageError if none can be there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise UsageError(f"{path}: there is no folder {folder}") from None
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no file can be there ({getattr(error, 'strerror', error)})") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is no regular file, and is left alone")
    return stat.S_IMODE(mode)
