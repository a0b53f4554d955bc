"""The findings of the check of a chat template, for the log, the run folder and people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from asyncrl.config.episode import ChatConfig
from asyncrl.text.chat.probe import CASES, Shape, TurnCheck, Verdict

FILE = "chat.json"
"""Name of the report in the run folder."""


class CaseFinding(msgspec.Struct, frozen=True):
    """The verdict on one kind of turn."""

    case: str
    verdict: Verdict
    reason: str = ""
    by_policy: bool = False
    """Whether it forks because chat.history says so."""


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings about a template."""

    renderer: str
    history: str
    date: str | None
    tool_parser: str
    reasoning_parser: str
    shows_tools: bool
    """Whether the template shows tools to the model."""
    end: str
    """The token that ends an answer, as text; empty where the template writes none that the model samples."""
    seam: str
    """Text that the template writes between that token and the next message."""
    cases: list[CaseFinding]
    notes: list[str]

    @property
    def works(self) -> bool:
        """Whether any kind of conversation is possible."""
        return any(case.verdict != "refused" for case in self.cases)

    def lines(self) -> list[str]:
        """Lines for people: one for each kind of turn, then the rest."""
        width = max(len(case.case) for case in self.cases)
        rows = [f"{case.verdict:<7}  {case.case:<{width}}  {case.reason}".rstrip() for case in self.cases]
        rows.append(f"history {self.history}; date {self.date or 'of today'}")
        rows.append(f"calls of tools are read by {self.tool_parser!r}, reasoning by {self.reasoning_parser!r}")
        rows.append(f"an answer ends with {self.end!r}, and {self.seam!r} follows before the next message")
        return rows + self.notes

    def to_json(self) -> bytes:
        """The content of FILE."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def make_report(
    chat: ChatConfig,
    examine: Callable[[Shape], TurnCheck],
    *,
    tool_parser: str,
    reasoning_parser: str,
    shows_tools: bool,
    end: str,
    seam: str,
    notes: Sequence[str] = (),
) -> ChatReport:
    """Check every case, those with reasoning only if there is a parser for it."""
    cases = [(name, shape) for name, shape in CASES if not shape.reasoning or reasoning_parser != "none"]
    found = [(name, examine(shape)) for name, shape in cases]
    return ChatReport(
        renderer=chat.renderer,
        history=chat.history,
        date=chat.date,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        shows_tools=shows_tools,
        end=end,
        seam=seam,
        cases=[CaseFinding(name, each.verdict, each.reason, each.by_policy) for name, each in found],
        notes=list(notes),
    )
