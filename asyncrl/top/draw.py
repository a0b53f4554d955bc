"""Parts of a screen that Rich lays out: styled text, lines of facts, bars, tables, panes. Pure.

A pane is a tree of Rich renderables, ``lines`` draws it for a width. Invariant: all text of a run passes ``text``,
which makes it printable (core/printable.py). So control characters of a run never reach the terminal.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.style import Style as RichStyle
from rich.table import Column as GridColumn
from rich.table import Table as Grid
from rich.text import Text

from asyncrl.core.numbers import ABSENT, count
from asyncrl.core.printable import printable
from asyncrl.core.states import FlowKind
from asyncrl.top.bottleneck import KINDS, kind_of

Style = Literal[
    "", "dim", "bold", "good", "warn", "bad", "mark", "work", "weights", "upkeep", "start", "wait", "level", "chosen"
]
_STYLES: dict[Style, str] = {
    "": "",
    "dim": "#8a93a6",
    "bold": "bold",
    "good": "#8fbf7f",
    "warn": "#e0b050",
    "bad": "bold #e06c75",
    "mark": "bold #f0a060",
    "work": "#6aa784",
    "weights": "#6b93c9",
    "upkeep": "#a585c0",
    "start": "#d9b45b",
    "wait": "#59617a",
    "level": "#7aa2c4",
    "chosen": "bold underline #f0a060",
}
STYLES = {name: RichStyle.parse(style) for name, style in _STYLES.items()}
BARS: dict[FlowKind, str] = {"work": "█", "weights": "▓", "upkeep": "▚", "start": "▒", "wait": "░"}
SPARKS = "▁▂▃▄▅▆▇█"
_CONSOLE = Console(file=io.StringIO(), width=80, color_system="truecolor", legacy_windows=False)
_TO_ASCII = str.maketrans(
    dict(zip(f"{ABSENT}…→←↑↓×·µ≤±▾▴─━◆█▓▚▒░▁▂▃▄▅▆▇", "-~><^vx.u<~v^-=*#%+*._.-~=+*", strict=True))
)


def lines(renderable: RenderableType, width: int) -> list[Text]:
    """Draw something of Rich as lines of ``width`` cells."""
    drawn = _CONSOLE.render_lines(renderable, _CONSOLE.options.update(width=max(1, width)))
    return [Text.assemble(*((each.text, each.style or "") for each in line)) for line in drawn]


def to_ascii(text: str) -> str:
    """Text for a terminal that knows only ASCII; one character for one."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


# --- text ---


def text(words: str, style: Style = "", *, wraps: bool = False) -> Text:
    """Text of one line, cut with a mark where it has no room, or of as many lines as it needs if it ``wraps``."""
    found = Text(no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    return found.append(printable(words), STYLES[style])


def wrapped(line: Text, width: int, most: int) -> list[Text]:
    """The text in at most ``most`` lines. The last has all the rest, which is cut where it has no room."""
    found = line.wrap(_CONSOLE, max(2, width), no_wrap=False, overflow="fold")
    for each in found:
        each.rstrip()
    return [*found[: most - 1], joined(*found[most - 1 :], between=" ")]


def labelled(name: str, value: str, style: Style = "") -> Text:
    """A value with its name before it."""
    return text(f"{name} ", "dim") + text(value, style)


def warn_style(problem: object, otherwise: Style = "") -> Style:
    """The style of a value that shows a problem, or not."""
    return "warn" if problem else otherwise


def joined(*parts: Text, between: str = "   ") -> Text:
    """The parts that are not empty, one after the other."""
    return text(between).join(part for part in parts if part)


class Facts:
    """A line with as many of the parts as fit, and the first in any case. Empty parts are left out."""

    def __init__(self, *parts: Text, between: str = "   ") -> None:
        self._parts, self._between = [part for part in parts if part], between

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        shown = list(self._parts)
        while len(shown) > 1 and joined(*shown, between=self._between).cell_len > options.max_width:
            shown.pop()
        yield joined(*shown, between=self._between)


def in_columns(facts: Sequence[tuple[str, str, Style]], *, right: bool = False) -> Columns:
    """Names and values in as many columns as fit, down each column first; values on the right if ``right``."""
    name_wide, value_wide = (max(len(fact[i]) for fact in facts) for i in (0, 1))
    entries = [
        text(f"{name:<{name_wide}}  ", "dim") + text(f"{value:{'>' if right else '<'}{value_wide}}", style)
        for name, value, style in facts
    ]
    return Columns(entries, padding=(0, 4), column_first=True)


def side_by_side(*parts: Text | Bar | Facts, expand: bool = False) -> Grid:
    """Parts of a line: text keeps its width, a bar or facts on the right have the room that is left."""
    ratio = 1 if expand else None
    columns = [
        GridColumn(no_wrap=True) if isinstance(part, Text) else GridColumn(ratio=ratio, justify="right")
        for part in parts
    ]
    grid = Grid.grid(*columns, padding=(0, 2), expand=expand)
    grid.add_row(*parts)
    return grid


# --- bars ---


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole, each as a run of its mark, over all the width that there is."""

    parts: Sequence[tuple[float, str, Style]]
    """Size, mark and style of each part; sizes are not negative."""

    def drawn(self, width: int) -> Text:
        """The bar as text of ``width`` cells; blank if the whole is 0."""
        sizes = [size for size, _, _ in self.parts]
        if (whole := sum(sizes)) <= 0:
            return text(" " * width)
        ends = [round(end / whole * width) for end in accumulate(sizes)]
        runs = zip([0, *ends], ends, self.parts, strict=False)
        return joined(*(text(mark * (end - begin), style) for begin, end, (_, mark, style) in runs), between="")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield self.drawn(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


def state_bar(kinds: Mapping[FlowKind, float]) -> Bar:
    """A bar over all of the time, split by kinds of states."""
    return Bar([(max(0.0, kinds.get(kind, 0.0)), BARS[kind], kind) for kind in KINDS])


def level_bar(value: float | None, limit: float | None, style: Style = "level") -> Bar:
    """A bar that is as full as ``value`` of ``limit``."""
    if value is None or not limit:
        return Bar([])
    full = max(0.0, min(1.0, value / limit))
    return Bar([(full, "█", style), (1.0 - full, "·", "dim")])


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest ``width`` values, between the smallest and the largest of them."""
    shown = list(values)[-width:]
    # The values are halved, because the difference of the largest floats would be infinite.
    low, high = min(shown, default=0.0) / 2, max(shown, default=0.0) / 2
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round((value / 2 - low) / (high - low) * steps) if high > low else 0] for value in shown)


# --- states of actors ---


def is_there(condition: str) -> bool:
    """Whether an actor in this condition can work."""
    return condition in ("ready", "starting", "silent")


def is_problem(condition: str) -> bool:
    """Whether this condition is a problem."""
    return condition in ("condemned", "dead", "lost", "resting")


def state_text(condition: str, state: str, awaiting: str) -> Text:
    """Words for the state of an actor."""
    if condition in ("ready", "starting") and state:
        kind = kind_of(state)
        waits_for = awaiting.removeprefix("weights ") if kind in ("wait", "weights") else ""
        return text(f"{state} {waits_for}".rstrip(), "dim" if kind == "wait" else "" if kind == "work" else kind)
    return text(
        condition, "start" if condition in ("starting", "absent") else "bad" if is_problem(condition) else "dim"
    )


# --- tables ---

NARROW = 100
"""Width below which one blank separates columns, else two."""
WIDEST = 18
"""Most cells of a column, but for a last one of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    cell: Callable[[Any], Text]
    """Cell of an entry."""
    value: Callable[[Any], Any] | None = None
    """Value of an entry that rows are sorted by; None is unknown."""
    width: int = 0
    """Smallest width, so that columns do not move with every value."""
    drop: int = 0
    """Columns with larger numbers go first when there is no room; a column with 0 stays."""
    right: bool = False
    """Whether the column has numbers. They stand right of all columns of text."""
    spare: bool = False
    """Whether the column is left out if all its values are unknown."""
    summed: bool = False
    """Whether a heading shows the sum of the rows below it."""


def number(
    title: str,
    value: Callable[[Any], float | None],
    show: Callable[[float | None], str] = count,
    style: Callable[[Any], Style] = lambda entry: "",
    **more: Any,
) -> Column:
    """Make a column of numbers: ``value`` reads that of an entry, ``show`` writes it, ``style`` gives its style."""

    def cell(entry: Any) -> Text:
        return text(show(value(entry)), style(entry))

    return Column(title=title, cell=cell, value=value, right=True, **more)


@dataclass(frozen=True, slots=True)
class Row:
    """A row. ``key`` is the actor that it is about; a heading has that of the first row below it."""

    key: str
    cells: Sequence[Text]
    heading: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in columns."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    sorted_by: str = ""
    descending: bool = False
    newest_first: bool = False
    """Whether rows are moments: the cursor stays at its place when newer rows push the others down."""

    def laid(self, width: int) -> list[tuple[int, Text, int]]:
        """Index, title and cells of each column that fits; columns with the largest ``drop`` go first.

        A last column of text takes all the room that is left.
        """
        gap, columns = 1 if width < NARROW else 2, self.columns
        mark = "▾" if self.descending else "▴"
        titles = [column.title + mark * (column.title == self.sorted_by) for column in columns]
        cells = [[row.cells[i] for row in self.rows if not row.heading] for i in range(len(columns))]
        wide = [
            max(len(title), column.width, min(WIDEST, max((cell.cell_len for cell in below), default=0))) + gap
            for title, column, below in zip(titles, columns, cells, strict=True)
        ]
        shown = [i for i in range(len(wide)) if not columns[i].spare or any(cell.plain != ABSENT for cell in cells[i])]
        while sum(wide[i] for i in shown) - gap > width and any(columns[i].drop for i in shown):
            shown.remove(max(shown, key=lambda i: (columns[i].drop, i)))
        # The gap is left of numbers and right of text, but for the last text.
        last = max(i for i in shown if not columns[i].right)
        wide[last] = wide[last] - gap if last != shown[-1] else max(1, width - sum(wide[i] for i in shown[:-1]))
        # If the column that sorts the rows has no room, the first title names it.
        for i, column in enumerate(columns):
            if column.title == self.sorted_by and i not in shown:
                titles[shown[0]] = f"by {titles[i]}"
        return [(i, _aligned(text(titles[i], "dim"), columns[i]), wide[i]) for i in shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Grid]:
        laid = self.laid(options.max_width)
        grid = Grid.grid(*(GridColumn(width=cells) for _, _, cells in laid))
        grid.add_row(*(title for _, title, _ in laid))
        for row in self.rows:
            grid.add_row(*(row.cells[i] for i, _, _ in laid))
        yield grid


def _aligned(cell: Text, column: Column) -> Text:
    cell.justify = "right" if column.right else "left"
    return cell


def row(key: str, columns: Sequence[Column], cells: Iterable[Text], *, heading: bool = False) -> Row:
    """The row of these cells."""
    return Row(key, [_aligned(cell, column) for cell, column in zip(cells, columns, strict=True)], heading)


def table_of(columns: Sequence[Column], entries: Iterable[Any], key: Callable[[Any], str], **more: Any) -> Table:
    """The table of these entries; ``key`` gives the actor that an entry is about."""
    rows = [row(key(entry), columns, (column.cell(entry) for column in columns)) for entry in entries]
    return Table(columns, rows, **more)


@dataclass(frozen=True, slots=True)
class Pane:
    """The content of a pane, and the table below it, if it has one."""

    head: Sequence[RenderableType] = ()
    table: Table | None = None
    about: str = ""
    """The actor that the pane as a whole is about."""

    def __rich__(self) -> Group:
        return Group(*self.head, *([self.table] if self.table is not None else []))


# --- the choice of the user ---

PaneName = Literal["rollouters", "learner", "weights", "staleness", "reward", "ledger", "events", "episodes"]
LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The user's choice of order, filter and level of events."""

    sort: str = "host"
    """Title of a column of the rollouters."""
    descending: bool = False
    needle: str = ""
    """Rows that hold this text, in any case."""
    level: str = "info"
    """Events of this level and above."""

    def matches(self, *texts: str) -> bool:
        """Whether one of the texts holds the needle."""
        return any(self.needle.lower() in text.lower() for text in texts)
