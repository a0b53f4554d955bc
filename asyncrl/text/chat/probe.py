"""The check of a chat template: whether the context of a next answer may be extended or must be rendered again. Pure.

For each kind of turn, an answer's ids with its extension are compared with a single render of the same conversation.
Verdicts: ``extend`` if they are equal; ``fork`` if not, so another sequence begins; ``refused`` if the template accepts
no such conversation. A ChatReport has all verdicts. Nothing here ends a run.

Some templates leave the reasoning of earlier answers out. With ``history = "sampled"`` the context keeps it, and the
rest must be equal; ``history = "template"`` forks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from asyncrl.config.episode import ChatConfig
from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import Message, Tool
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.chat.turns import ANSWER, NEXT, THOUGHT, ChatTurn, learn_turn

Verdict = Literal["extend", "fork", "refused"]
History = Literal["sampled", "template"]

ENDINGS = ("", ".", "7", "}", "é", " ", "\n")
"""Last characters of answers: some would become one token with what follows."""
TOOLS: tuple[Tool, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
    for name in ("lookup", "search")
)
FILE = "chat.json"
"""Name of the report in the run folder."""
LONGEST_RUN = 2
"""Messages of one role in a row that make a difference between shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of turn."""

    tail: tuple[str, ...]
    """Roles of the messages behind the answer; one that begins with tool answers calls."""
    reasoning: bool = False
    ended: bool = True
    """Whether the answer has the token that ends it; one that was cut has not."""
    with_tools: bool = True

    @classmethod
    def of(cls, tail: Sequence[Message], *, reasoning: bool, ended: bool, with_tools: bool) -> Shape:
        """The shape of the messages behind an answer."""
        roles: list[str] = []
        for message in tail:
            role = message["role"]
            if roles[-LONGEST_RUN:] != [role] * LONGEST_RUN:
                roles.append(role)
        return cls(tail=tuple(roles), reasoning=reasoning, ended=ended, with_tools=with_tools)


CASES: tuple[tuple[str, Shape], ...] = (
    ("tool", Shape(tail=("tool",))),
    ("several tools", Shape(tail=("tool", "tool"))),
    ("user", Shape(tail=("user",), with_tools=False)),
    ("user, with tools", Shape(tail=("user",))),
    ("user after tool", Shape(tail=("tool", "user"))),
    ("system", Shape(tail=("system", "user"), with_tools=False)),
    ("cut by length", Shape(tail=("user",), ended=False, with_tools=False)),
    ("thinking, tool", Shape(tail=("tool",), reasoning=True)),
    ("thinking, user", Shape(tail=("user",), reasoning=True, with_tools=False)),
)
"""The kinds of turns that are checked at start; others are checked when they are met."""


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """The result of the check of one kind of turn."""

    verdict: Verdict
    reason: str = ""
    """Reason of a fork or a refusal; of an extension, the part of its context that a single render drops."""
    by_policy: bool = False
    """Whether it forks because ``history = "template"`` says so."""


def examine(template: ChatTemplate, shape: Shape, history: History, options: Mapping[str, Any]) -> TurnCheck:
    """Check a kind of turn, after several beginnings and with several endings of the answer; returns the worst
    verdict."""
    tools = TOOLS if shape.with_tools else ()
    found: TurnCheck | None = None
    refusal = "the template refuses every beginning"
    for place, before in _beginnings(shape):
        try:
            template.text(before, tools, options)
        except ChatRefused as error:
            refusal = error.problem
            continue
        # A call ends in the template's text; the ends of other answers are tried behind the plain question alone.
        endings = _known_endings(template) if not place and "tool" not in shape.tail else ENDINGS[:1]
        for ending in endings:
            answer, tail = _answer(shape, ending), _tail(shape)
            try:
                turn = learn_turn(template, before, answer, tail, tools, options)
                each = TurnCheck("fork", turn) if isinstance(turn, str) else _judge(template, turn, shape, history)
            except ChatRefused as error:
                return TurnCheck("refused", f"{error.problem}{place}")
            if each.verdict != "extend":
                return replace(each, reason=f"{each.reason}{place}")
            found = each if found is None or each.reason else found
    return found or TurnCheck("refused", refusal)


def _known_endings(template: ChatTemplate) -> list[str]:
    """Endings that the model can say: some vocabularies lack the last."""
    known = []
    for ending in ENDINGS:
        with suppress(ChatRefused):
            template.ids(ending)
            known.append(ending)
    return known


def _judge(template: ChatTemplate, turn: ChatTurn, shape: Shape, history: History) -> TurnCheck:
    """Decide whether the conversation after a turn can extend the sampled tokens, or has to fork.

    It can if the tokens of the parts (request, answer, end, what follows) are those of the whole text.
    """
    if shape.ended and not turn.end:
        return TurnCheck("fork", "the template writes no token behind an answer that ends it for the model")
    if turn.dropped and history == "template":
        return TurnCheck("fork", f"a single render leaves {turn.dropped!r} out", by_policy=True)
    asked = template.ids(turn.asked)
    answered = template.ids(turn.asked + turn.sampled)
    if answered[: len(asked)] != asked:
        return TurnCheck("fork", "the first token of an answer is one with the end of the generation prompt")
    whole = template.ids(turn.asked + turn.sampled + turn.end + turn.after)
    if answered + extension_ids(template, turn, ended=False) != whole:
        return TurnCheck("fork", "the last token of an answer is one with what follows")
    return TurnCheck("extend", f"{turn.dropped!r} stays, which a single render leaves out" if turn.dropped else "")


def extension_ids(template: ChatTemplate, turn: ChatTurn, *, ended: bool, close: str = "") -> list[int]:
    """The context tokens behind a sampled answer. One that was cut (not ``ended``) gets its end token, after
    ``close``."""
    if ended:
        # The end goes in front, so that the tokenizer does not take the rest for the beginning of a text.
        return template.ids(turn.end + turn.after)[1:]
    return template.ids(close + turn.end + turn.after)


def example(shape: Shape) -> tuple[list[Message], Message, list[Message]]:
    """A question, an answer with made-up words, and the messages that follow it."""
    return next(_beginnings(shape))[1], _answer(shape, ""), _tail(shape)


def _beginnings(shape: Shape) -> Iterator[tuple[str, list[Message]]]:
    """Messages that may stand before an answer, the plain question first, each with a description."""
    question: Message = {"role": "user", "content": "Hello."}
    yield "", [question]
    yield ", after a system message", [{"role": "system", "content": "Be brief."}, question]
    again = [question, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Go on."}]
    yield ", in a longer conversation", again
    if shape.with_tools:
        yield (
            ", after a call of a tool",
            [question, _calls(("lookup",), "word", "call_0_"), _result("lookup", "call_0_0")],
        )


def _answer(shape: Shape, ending: str) -> Message:
    names = [name for name, role in zip(("lookup", "search"), shape.tail, strict=False) if role == "tool"]
    if shape.tail[0] == "tool":
        answer = _calls(names, ANSWER, "call_1_")
    else:
        answer = {"role": "assistant", "content": ANSWER + ending}
    return answer | ({"reasoning_content": THOUGHT} if shape.reasoning else {})


def _tail(shape: Shape) -> list[Message]:
    tail: list[Message] = []
    for number, role in enumerate(shape.tail):
        if role == "tool":
            tail.append(_result(("lookup", "search")[number % 2], f"call_1_{number}"))
        else:
            tail.append({"role": role, "content": NEXT})
    return tail


def _calls(names: Sequence[str], word: str, ids: str) -> Message:
    calls = [
        {"id": f"{ids}{number}", "type": "function", "function": {"name": name, "arguments": {"word": word}}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(name: str, id: str) -> Message:
    return {"role": "tool", "content": NEXT, "tool_call_id": id, "name": name}


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
    """Check every case of CASES with ``examine``, those with reasoning only if there is a parser for it."""
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
