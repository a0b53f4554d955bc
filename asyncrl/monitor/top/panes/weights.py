"""Weights on their way from the learner to the engines. Pure."""

from __future__ import annotations

from asyncrl.monitor.numbers import count, duration, size
from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.panes.base import Choice, Pane, matches
from asyncrl.monitor.top.table import Column, Row, Table
from asyncrl.monitor.top.text import Glyphs, joined

UPDATES = (
    Column(title="v", right=True, width=4),
    Column(title="replica", width=9, most=14),
    Column(title="by", width=6, drop=3),
    Column(title="stage", right=True, width=6),
    Column(title="pause", right=True, width=6),
    Column(title="load", right=True, width=6),
    Column(title="stall", right=True, width=6),
    Column(title="bytes", right=True, width=7),
    Column(title="read", right=True, width=7, drop=2),
)


def weights(document: Document, choice: Choice, width: int, glyphs: Glyphs) -> Pane:
    """The newest publication, and the newest updates of replicas."""
    view = document.weights
    version = joined(
        [
            [("learner idle ", "dim"), (duration(view.idle_s), "")],
            [("gather ", "dim"), (duration(view.gather_s), "")],
            [("published ", "dim"), (size(view.publish_bytes), "")],
        ]
    )
    replicas = joined(
        [
            [("behind ", "dim"), (count(view.behind), "")],
            [("paused ", "dim"), (count(view.paused), "")],
            [("failures ", "dim"), (count(view.failures), "bad" if view.failures else "")],
            [("prefilled again ", "dim"), (count(view.reprefill_tokens), ""), (" an update", "dim")],
        ]
    )
    rows = [
        Row(
            update.replica,
            (
                (count(update.version), ""),
                (update.replica, ""),
                (update.transport, "dim"),
                (duration(update.stage_s), ""),
                (duration(update.pause_s), ""),
                (duration(update.load_s), ""),
                (duration(update.stall_s), ""),
                (size(update.bytes), ""),
                (size(update.encoded_bytes), ""),
            ),
        )
        for update in view.updates
        if matches(choice, update.replica, update.transport)
    ]
    titles, line = Table(UPDATES, rows).laid(width)
    if not rows:
        said = f"no update matches {choice.needle}" if view.updates else "no update is reported so far"
        return Pane([version, replicas, [(said, "dim")]], about="parameter_server/0")
    return Pane([version, replicas, titles], [row.key for row in rows], line, "parameter_server/0")
