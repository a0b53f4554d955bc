"""Keys of the panes, with the names of their actions in app.py."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from asyncrl.monitor.top.panes import PANES

KEYS: list[BindingType] = [
    Binding("q", "quit", show=False),
    Binding("ctrl+c", "interrupt", show=False, priority=True),
    Binding("question_mark,h", "help", show=False),
    Binding("s", "sort", show=False),
    Binding("r", "reverse", show=False),
    # Before anything else is done with keys: what is typed right after it is meant for the filter.
    Binding("slash", "filter", show=False, priority=True),
    Binding("escape", "unfilter", show=False),
    Binding("space", "freeze", show=False),
    Binding("l", "level", show=False),
    Binding("t", "trace", show=False),
    Binding("tab", "next(1)", show=False, priority=True),
    Binding("shift+tab", "next(-1)", show=False, priority=True),
    *(Binding(str(number), f"pane({number})", show=False) for number in range(1, len(PANES) + 1)),
    Binding("left", "step(-1)", show=False),
    Binding("right", "step(1)", show=False),
    Binding("less_than_sign,comma", "seek(-0.05)", show=False),
    Binding("greater_than_sign,full_stop", "seek(0.05)", show=False),
    Binding("plus,equals_sign", "speed(1)", show=False),
    Binding("minus", "speed(-1)", show=False),
]
