"""Everything that is known of one actor, as lines. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.monitor.bottleneck import by_kind, kind_of
from asyncrl.monitor.json_text import from_json
from asyncrl.monitor.numbers import ABSENT, count, duration, fixed, percent, size
from asyncrl.monitor.top.bars import state_bar
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.levels import GONE
from asyncrl.monitor.top.panes.base import Pane, said_state
from asyncrl.monitor.top.panes.events import CONTROLLER, LEVEL_STYLES
from asyncrl.monitor.top.text import Glyphs, Line, Style, columns, joined, length, wrapped
from asyncrl.snapshot import ActorView, Resource

EVENTS_SHOWN = 20
RESOURCES_SHOWN = 16
LOG_LINES = 3
"""Lines of the screen for a warning or an error in a log; one for anything else."""
LABEL = 12


def detail(document: Document, name: str, log: Sequence[str] | None, width: int, glyphs: Glyphs) -> Pane:
    """Lines on an actor. ``log``: the last lines of its log file, oldest first; None where that cannot be read."""
    actor = next((each for each in document.actors if each.name == name), None)
    if actor is None:
        return Pane([[(f"{name} is not part of this run", "bad")]])
    lines: list[Line] = [*_facts(actor)]
    if actor.resources:
        lines += [[], [("TIME, since its start", "bold")]]
        lines += [line for each in actor.resources[:RESOURCES_SHOWN] for line in _resource(each, width, glyphs)]
        if len(actor.resources) > RESOURCES_SHOWN:
            lines.append([(f"and {len(actor.resources) - RESOURCES_SHOWN} more", "dim")])
    lines += [[], [("OPEN AWAITS, the oldest first", "bold")]]
    lines += [
        [
            (f"{duration(wait.seconds):>8}  ", "dim" if wait.idle else ""),
            (f"{wait.whom}  {wait.what}", "dim" if wait.idle else ""),
            ("  (idle)" if wait.idle else "", "dim"),
        ]
        for wait in actor.waits
    ] or [[("none", "dim")]]
    if log is not None:
        lines += [[], [("LOG, its last lines", "bold")]]
        lines += [line for text in log for line in _log_lines(text, width)] or [[("none up to here", "dim")]]
    events = [event for event in document.events if (event.actor or CONTROLLER) == name][-EVENTS_SHOWN:]
    lines += [[], [("EVENTS, the newest first", "bold")]]
    for event in reversed(events):
        at = time.strftime("%H:%M:%S", time.localtime(event.wall))
        for number, text in enumerate(wrapped(" ".join(event.text.split()), max(20, width - 20))):
            lead = f"{at}  {event.level:<8}  " if not number else " " * 20
            lines.append([(lead, "dim"), (text, LEVEL_STYLES.get(event.level, ""))])
    if not events:
        lines.append([("none", "dim")])
    figures: list[tuple[str, str, Style]] = [
        (name, _figure(name, value), "") for name, value in sorted(actor.figures.items())
    ]
    if figures:
        lines += [[], [("FIGURES", "bold")], *columns(figures, width, right=True)]
    return Pane([], [""] * len(lines), lambda number: lines[number])


def _facts(actor: ActorView) -> list[Line]:
    state = said_state(actor.condition, actor.state, actor.awaiting)
    # Without a heartbeat nothing is known of it, and of what it takes of its host nothing once it is gone.
    told, known = bool(actor.state), actor.condition != "absent"
    there = told and actor.condition not in GONE
    heard = f"{duration(actor.heard_s)} ago" if known else ABSENT
    pairs: list[Line] = [
        [("condition ", "dim"), (actor.condition, state[1] if state[1] == "bad" else "")],
        [("state ", "dim"), (f"{actor.state} {actor.awaiting}".strip() or "–", "")],
        [("for ", "dim"), (duration(actor.state_s if told else None), "")],
        [("heard ", "dim"), (heard, "warn" if actor.heard_s > 10 else "")],
    ]
    place: list[Line] = [
        [("host ", "dim"), (actor.host or "–", "")],
        [("pid ", "dim"), (str(actor.pid or "–"), "")],
        [("restarts ", "dim"), (str(actor.restarts) if known else ABSENT, "warn" if actor.restarts else "")],
        [("version ", "dim"), (str(actor.version) if actor.version >= 0 else "–", "")],
    ]
    load: list[Line] = [
        [("processors ", "dim"), (fixed(actor.cpu if there else None), "")],
        [("memory ", "dim"), (size(actor.rss_bytes or None if there else None), "")],
        [
            ("event loop busy ", "dim"),
            (percent(actor.loop_busy if there else None), "warn" if there and actor.loop_busy > 0.8 else ""),
        ],
        [
            ("most late ", "dim"),
            (duration(actor.loop_lag_s if there else None), "warn" if there and actor.loop_lag_s > 0.5 else ""),
        ],
    ]
    gpus: list[Line] = [
        [
            (f"GPU {gpu.index} ", "dim"),
            (f"{percent(gpu.utilisation)}  {size(gpu.memory_bytes)} of {size(gpu.memory_total_bytes)}", ""),
        ]
        for gpu in actor.gpus
    ]
    return [joined(pairs), joined(place), joined(load), *gpus]


def _resource(resource: Resource, width: int, glyphs: Glyphs) -> list[Line]:
    """The bar of a resource and beside it its states, on as many lines as they need."""
    spent = resource.spent
    whole = sum(spent.values())
    shares = {state: seconds / whole for state, seconds in spent.items()} if whole > 0 else {}
    bar = state_bar(by_kind(shares), min(30, width // 3), glyphs)
    lines: list[Line] = [[(f"{resource.name:<{LABEL}}", "dim"), *bar]]
    beside = length(lines[0])
    for state, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share < 0.005:
            continue
        text = f"  {state} {percent(share)}"
        if length(lines[-1]) + len(text) > width:
            lines.append([(" " * beside, "")])
        lines[-1].append((text, "dim" if kind_of(state) == "wait" else ""))
    return lines


def _figure(name: str, value: float) -> str:
    if name.endswith("_s"):
        return duration(value)
    if name.endswith("_bytes") or name.endswith("/bytes"):
        return size(value)
    return count(value) if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def _log_lines(text: str, width: int) -> list[Line]:
    """A line of a log: JSON as the actors write it, or other text that was printed."""
    try:
        entry = from_json(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return [[(part, "")] for part in wrapped(text, width)]
    level, at = str(entry.pop("level", "")), str(entry.pop("timestamp", ""))
    event = str(entry.pop("event"))
    entry.pop("actor", None)
    rest = " ".join(f"{key}={value}" for key, value in entry.items())
    style = LEVEL_STYLES.get(level, "")
    found: list[Line] = []
    room = max(20, width - 20)
    said = " ".join(f"{event}  {rest}".split())
    most = LOG_LINES if style in ("warn", "bad") else 1
    parts = wrapped(said, room)
    if len(parts) > most:
        parts = [*parts[: most - 1], f"{parts[most - 1][: room - 2]} …"]
    for number, part in enumerate(parts):
        found.append([(f"{at[11:19]}  {level:<8}  " if not number else " " * 20, "dim"), (part, style)])
    return found
