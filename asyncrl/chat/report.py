"""The findings of the check of a chat template, for the log, the run folder and people. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncrl.chat.choice import Parsers
from asyncrl.chat.probe import CASES, Shape, TurnCheck, Verdict, example
from asyncrl.chat.template import ChatTemplate
from asyncrl.chat.turns import ANSWER, learn_turn
from asyncrl.config.episode import ChatConfig
from asyncrl.errors import ChatRefused

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
    """Whether the template tells the model of tools."""
    end: str
    """The token that ends an answer, as text; empty where the template writes none that the model samples."""
    seam: str
    """Text that the template writes between that token and the next message."""
    cases: list[CaseFinding]
    notes: list[str]

    @property
    def works(self) -> bool:
        """Whether conversations can be had at all."""
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
    template: ChatTemplate,
    parsers: Parsers,
    chat: ChatConfig,
    examine: Callable[[Shape], TurnCheck],
) -> ChatReport:
    """Check every case."""
    cases = []
    for name, shape in CASES:
        if shape.reasoning and not parsers.thinks:
            continue
        found = examine(shape)
        cases.append(CaseFinding(name, found.verdict, found.reason, found.by_policy))
    end, seam, note = _seam(template)
    return ChatReport(
        renderer=chat.renderer,
        history=chat.history,
        date=chat.date,
        tool_parser=parsers.tools,
        reasoning_parser=parsers.reasoning,
        shows_tools=template.shows_tools,
        end=end,
        seam=seam,
        cases=cases,
        notes=[*parsers.notes, *([note] if note else [])],
    )


def _seam(template: ChatTemplate) -> tuple[str, str, str]:
    """The end of an answer, the text that the template writes behind it, and a note where nothing stops at that end."""
    before, answer, tail = example(Shape(tail=("user",), with_tools=False))
    try:
        turn = learn_turn(template, before, answer, tail, (), {})
        alone = template.text([*before, answer], (), {}, generate=False)
    except ChatRefused:
        return "", "", ""
    if isinstance(turn, str):
        return "", "", ""
    # Some templates frame the last message in another way.
    framed, goes_on = alone.rpartition(ANSWER)[2], turn.end + turn.after
    shared = next((place for place, (a, b) in enumerate(zip(framed, goes_on, strict=False)) if a != b), len(framed))
    seam = framed[:shared].removeprefix(turn.end)
    note = ""
    for text in template.tokenizer.special_ids:
        if not turn.end and seam.startswith(text):
            note = f"the template ends answers with {text!r}, where no answer stops: put it into rollout.stop"
    return turn.end, seam, note
