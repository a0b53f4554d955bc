"""Everything that is known of one actor, and what the keys do, for screens of their own. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from asyncrl.snapshot import ActorView, Resource
from asyncrl.text.json_text import from_json
from asyncrl.text.numbers import ABSENT, count, duration, fixed, percent, size
from asyncrl.top.drawing.text import Glyphs, Line, Style, columns, fit, joined, length, rich_text, state_bar, wrapped
from asyncrl.top.figures.bottleneck import by_kind, kind_of
from asyncrl.top.figures.document import Document
from asyncrl.top.panes import CONTROLLER, LEVEL_STYLES, said_state
from asyncrl.top.source.history import GONE

EVENTS_SHOWN = 20
RESOURCES_SHOWN = 16
LOG_LINES = 3
"""Lines of the screen for a warning or an error in a log; one for anything else."""
EVENT_LINES = 40
"""Lines of the screen for an event."""
LABEL = 12
NONE: list[Line] = [[("none", "dim")]]
NONE_SO_FAR: list[Line] = [[("none up to here", "dim")]]
HELP_WIDTH = 70
"""Columns from which on there is room for two keys side by side."""
KEY_WIDTH = 13
LEAD = 20
"""Columns before the text of an event."""


def detail(document: Document, name: str, log: Sequence[str] | None, width: int, glyphs: Glyphs) -> list[Text]:
    """Lines on an actor. ``log``: the last lines of its log file, oldest first; None where that cannot be read."""
    actor = next((each for each in document.actors if each.name == name), None)
    if actor is None:
        return [fit([(f"{name} is not part of this run", "bad")], width, glyphs)]
    parts: list[tuple[str, list[Line] | list[Text]]] = [("", _facts(actor))]
    if actor.resources:
        bars = [line for each in actor.resources[:RESOURCES_SHOWN] for line in _resource(each, width, glyphs)]
        if len(actor.resources) > RESOURCES_SHOWN:
            bars.append([(f"and {len(actor.resources) - RESOURCES_SHOWN} more", "dim")])
        parts.append(("TIME, since its start", bars))
    waits: list[Line] = []
    for wait in actor.waits:
        style: Style = "dim" if wait.idle else ""
        idle = "  (idle)" if wait.idle else ""
        waits.append([(f"{duration(wait.seconds):>8}  {wait.whom}  {wait.what}", style), (idle, "dim")])
    parts.append(("OPEN AWAITS, the oldest first", waits or NONE))
    if log is not None:
        told = [line for text in log for line in _log_lines(text, width, glyphs)]
        parts.append(("LOG, its last lines", told or NONE_SO_FAR))
    events = [event for event in document.events if (event.actor or CONTROLLER) == name][-EVENTS_SHOWN:]
    told = [
        line
        for event in reversed(events)
        for line in _entry(
            f"{time.strftime('%H:%M:%S', time.localtime(event.wall))}  {event.level}", event.text, event.level, width,
            EVENT_LINES, glyphs,
        )
    ]  # fmt: skip
    parts.append(("EVENTS, the newest first", told or NONE))
    if actor.figures:
        figures: list[tuple[str, str, Style]] = [
            (figure, _figure(figure, value), "") for figure, value in sorted(actor.figures.items())
        ]
        parts.append(("FIGURES", columns(figures, width, right=True)))
    found: list[Text] = []
    for title, lines in parts:
        if title:
            found += [Text(), fit([(title, "bold")], width, glyphs)]
        found += [line if isinstance(line, Text) else fit(line, width, glyphs) for line in lines]
    return found


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


def _log_lines(text: str, width: int, glyphs: Glyphs) -> list[Text]:
    """A line of a log: JSON as the actors write it, or other text that was printed."""
    try:
        entry = from_json(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return wrapped([(text, "")], width, len(text), glyphs)
    level, at, event = (str(entry.pop(key, "")) for key in ("level", "timestamp", "event"))
    entry.pop("actor", None)
    rest = " ".join(f"{key}={value}" for key, value in entry.items())
    most = LOG_LINES if LEVEL_STYLES.get(level) in ("warn", "bad") else 1
    return _entry(f"{at[11:19]}  {level}", f"{event}  {rest}", level, width, most, glyphs)


def _entry(lead: str, text: str, level: str, width: int, most: int, glyphs: Glyphs) -> list[Text]:
    """A text beside its time and level, on at most so many lines."""
    said = wrapped([(" ".join(text.split()), LEVEL_STYLES.get(level, ""))], max(20, width - LEAD), most, glyphs)
    leads = [lead, *[""] * (len(said) - 1)]
    return [
        Text("", end="").join([fit([(each, "dim")], LEAD, glyphs), part])
        for each, part in zip(leads, said, strict=True)
    ]


# --- keys ---

HELP = (
    "The stage marked with a diamond sets the pace; the line below the pipeline says why. "
    "Bars split all time by what it was spent on:"
)
KEYS = (
    ("1 … 8, tab", "panes"),
    ("↑ ↓ enter", "an actor in detail, n p: the next ones"),
    ("space", "freeze, go on"),
    ("l", "level of events"),
    ("s", "sort by the next column"),
    ("r", "the other way round"),
    ("/", "filter, esc shows all again"),
    ("t", "have a trace written"),
    ("q", "quit; the run does not notice"),
    ("", ""),
)
REPLAY_KEYS = (
    ("← →", "one snapshot"),
    ("space", "play, stop"),
    ("< >", "a twentieth of it"),
    ("- +", "slower, faster"),
)
WORDS = (
    ("flight", "trajectories in a rollouter"),
    ("wait", "of these not in the engine"),
    ("v, lag", "weights served, versions behind"),
    ("rst", "restarts of process, engine"),
    ("oldest", "age of a trajectory"),
    ("", ""),
)


def help_page(width: int, glyphs: Glyphs) -> list[Text]:
    """Lines on the keys; in one column where there is no room for two."""
    kinds: list[Line] = [
        [(f"{glyphs.kinds[kind]} {said}", kind)]
        for kind, said in zip(glyphs.kinds, ("work", "weights", "checkpoints", "starting", "waiting"), strict=True)
    ]

    def entry(key: str, said: str, wide: int) -> list[Text]:
        keys = [fit([(each, "bold")], KEY_WIDTH, glyphs) for each in (key, *[""] * len(said))]
        told = wrapped([(said, "")], wide - KEY_WIDTH, len(said), glyphs)
        return [Text().join(parts) for parts in zip(keys, told, strict=False)]

    def pairs(entries: Sequence[tuple[str, str]]) -> list[Text]:
        if width < HELP_WIDTH:
            return [line for key, said in entries for line in entry(key, said, width)]
        half, found = len(entries) // 2, []
        for left, right in zip(entries[:half], entries[half:], strict=True):
            lines = [entry(*left, width // 2), entry(*right, width // 2)]
            for one, two in zip_longest(*lines, fillvalue=Text()):
                one = one.copy()
                one.pad_right(width // 2 - one.cell_len)
                found.append(Text().join([one, two]))
        return found

    def title(said: str) -> Text:
        return rich_text([(said, "bold")], glyphs)

    return [
        title("who waits on whom"),
        *wrapped([(HELP, "")], width, len(HELP), glyphs),
        *wrapped(joined(kinds), width, len(HELP), glyphs),
        Text(),
        *pairs(KEYS),
        title("in a replay"),
        *pairs(REPLAY_KEYS),
        Text(),
        *pairs(WORDS),
    ]
