"""Checks a chat template: may the context of the next answer be extended, or must it be rendered again? Pure.

An extension is the tokens between a sampled answer and the next one. For each kind of turn, made-up messages are
encoded in two ways: an answer's ids with its extension, and a single render of the conversation. Verdicts: ``extend``
if they are equal; ``fork`` if not, so another sequence begins; ``refused`` if the template accepts no such
conversation. A ChatReport has all verdicts. Nothing here ends a run.

Some templates leave the reasoning of earlier answers out. With ``history = "sampled"`` the context keeps this
reasoning, and everything else must equal the single render. With ``history = "template"`` the conversation forks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from asyncrl.config.episode import ChatConfig
from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import Message, Tool
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.chat.turns import ANSWER, NEXT, QUESTION, THOUGHT, ChatTurn, learn_turn

Verdict = Literal["extend", "fork", "refused"]
History = Literal["sampled", "template"]

ENDINGS = ("", ".", "7", "}", "é", " ", "\n")
"""Last characters of the answers that are tried: a tokenizer may join some with what follows into one token."""
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
"""A shape counts at most this many messages of one role in a row; more make no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of turn: an answer of the policy and the messages after it, described by roles and features."""

    tail: tuple[str, ...]
    """Roles of the messages after the answer. If the first is tool, the answer makes calls."""
    reasoning: bool = False
    ended: bool = True
    """Whether the answer has the token that ends it; an answer that was cut has none."""
    with_tools: bool = True

    @classmethod
    def of(cls, tail: Sequence[Message], *, reasoning: bool, ended: bool, with_tools: bool) -> Shape:
        """Make the shape of an answer with these messages after it."""
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
"""The kinds of turns that are checked at the start; others are checked when they first occur."""


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """The result of the check of one kind of turn."""

    verdict: Verdict
    reason: str = ""
    """Reason of a fork or a refusal. For an extension: the part of its context that a single render leaves out."""
    by_policy: bool = False
    """Whether it forks because ``history = "template"`` says so."""


def examine(template: ChatTemplate, shape: Shape, history: History, options: Mapping[str, Any]) -> TurnCheck:
    """Check one kind of turn after several beginnings of a conversation, and with several endings of the answer.

    Returns the first verdict that is not ``extend``, or else ``extend`` with the last reason that a check gave.
    Beginnings that the template refuses are left out; if it refuses all, the verdict is ``refused``.
    """
    tools = TOOLS if shape.with_tools else ()
    result: TurnCheck | None = None
    refusal = "the template refuses every beginning"
    for situation, before in _beginnings(shape):
        try:
            template.text(before, tools, options)
        except ChatRefused as error:
            refusal = error.problem
            continue
        # A call ends in the template's text. The endings of other answers are tried after the plain question only.
        endings = _known_endings(template) if not situation and "tool" not in shape.tail else ENDINGS[:1]
        for ending in endings:
            answer, tail = _answer(shape, ending), _tail(shape)
            try:
                turn = learn_turn(template, before, answer, tail, tools, options)
                check = TurnCheck("fork", turn) if isinstance(turn, str) else _judge(template, turn, shape, history)
            except ChatRefused as error:
                return TurnCheck("refused", f"{error.problem}{situation}")
            if check.verdict != "extend":
                return replace(check, reason=f"{check.reason}{situation}")
            result = check if result is None or check.reason else result
    return result or TurnCheck("refused", refusal)


def _known_endings(template: ChatTemplate) -> list[str]:
    """Return the ENDINGS that the tokenizer can encode: some vocabularies lack a few."""
    known = []
    for ending in ENDINGS:
        with suppress(ChatRefused):
            template.ids(ending)
            known.append(ending)
    return known


def _judge(template: ChatTemplate, turn: ChatTurn, shape: Shape, history: History) -> TurnCheck:
    """Decide whether the next prompt can extend the sampled tokens of this turn, or has to fork into a new sequence.

    The engine gets three parts: the prompt, the sampled answer, and the end token with the text after it. The verdict
    is ``extend`` if the tokens of the parts, one after another, are those of the whole text. An ended answer without an
    end token forks. With ``history = "template"``, an answer whose reasoning a single render drops forks too.
    """
    if shape.ended and not turn.end:
        return TurnCheck("fork", "the template writes no token behind an answer that ends it for the model")
    if turn.dropped and history == "template":
        return TurnCheck("fork", f"a single render leaves {turn.dropped!r} out", by_policy=True)
    prompt = template.ids(turn.asked)
    answered = template.ids(turn.asked + turn.sampled)
    if answered[: len(prompt)] != prompt:
        return TurnCheck("fork", "the first token of an answer is one with the end of the generation prompt")
    whole = template.ids(turn.asked + turn.sampled + turn.end + turn.after)
    if answered + extension_ids(template, turn, ended=False) != whole:
        return TurnCheck("fork", "the last token of an answer is one with what follows")
    return TurnCheck("extend", f"{turn.dropped!r} stays, which a single render leaves out" if turn.dropped else "")


def extension_ids(template: ChatTemplate, turn: ChatTurn, *, ended: bool, close: str = "") -> list[int]:
    """Return the context tokens after a sampled answer.

    The model has sampled the end token of an ended answer. For a cut answer (not ``ended``) the tokens begin with
    ``close``, such as the end of its reasoning, and the end token.
    """
    if ended:
        # The end token stands in front, so that the tokenizer does not see the rest as the beginning of a text; [1:]
        # removes the end token.
        return template.ids(turn.end + turn.after)[1:]
    return template.ids(close + turn.end + turn.after)


def example(shape: Shape) -> tuple[list[Message], Message, list[Message]]:
    """Return a question, an answer with made-up words, and the messages that follow it."""
    return next(_beginnings(shape))[1], _answer(shape, ""), _tail(shape)


def _beginnings(shape: Shape) -> Iterator[tuple[str, list[Message]]]:
    """Yield beginnings of a conversation up to an answer, each with a description; the plain question is first."""
    yield "", [QUESTION]
    yield ", after a system message", [{"role": "system", "content": "Be brief."}, QUESTION]
    again = [QUESTION, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Go on."}]
    yield ", in a longer conversation", again
    if shape.with_tools:
        yield (
            ", after a call of a tool",
            [QUESTION, _calls(("lookup",), "word", "call_0_"), _result("lookup", "call_0_0")],
        )


def _answer(shape: Shape, ending: str) -> Message:
    """Make the answer of a shape from made-up words. Its content ends with ``ending``, unless it makes calls."""
    names = [name for name, role in zip(("lookup", "search"), shape.tail, strict=False) if role == "tool"]
    if shape.tail[0] == "tool":
        answer = _calls(names, ANSWER, "call_1_")
    else:
        answer = {"role": "assistant", "content": ANSWER + ending}
    return answer | ({"reasoning_content": THOUGHT} if shape.reasoning else {})


def _tail(shape: Shape) -> list[Message]:
    """Make the messages after the answer of a shape."""
    tail: list[Message] = []
    for number, role in enumerate(shape.tail):
        if role == "tool":
            tail.append(_result(("lookup", "search")[number % 2], f"call_1_{number}"))
        else:
            tail.append({"role": role, "content": NEXT})
    return tail


def _calls(names: Sequence[str], word: str, ids: str) -> Message:
    """Make an answer that calls these tools with the argument ``word``; ``ids`` begins the id of each call."""
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
    """The result of the check of a template."""

    renderer: str
    history: str
    date: str | None
    tool_parser: str
    reasoning_parser: str
    shows_tools: bool
    """Whether the template shows tools to the model."""
    end: str
    """Text of the token that ends an answer; empty if the template writes none at which the engine stops."""
    seam: str
    """Text that the template writes between the end of an answer and the next message."""
    cases: list[CaseFinding]
    notes: list[str]

    @property
    def works(self) -> bool:
        """Whether any kind of conversation is possible."""
        return any(case.verdict != "refused" for case in self.cases)

    def lines(self) -> list[str]:
        """Return lines for people: one for each kind of turn, then the rest."""
        width = max(len(case.case) for case in self.cases)
        rows = [f"{case.verdict:<7}  {case.case:<{width}}  {case.reason}".rstrip() for case in self.cases]
        rows.append(f"history {self.history}; date {self.date or 'of today'}")
        rows.append(f"calls of tools are read by {self.tool_parser!r}, reasoning by {self.reasoning_parser!r}")
        rows.append(f"an answer ends with {self.end!r}, and {self.seam!r} follows before the next message")
        return rows + self.notes

    def to_json(self) -> bytes:
        """Return the content of FILE."""
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
    """Check the kinds of turns in CASES with ``examine``, and report the verdicts with the other findings.

    Kinds with reasoning are left out if no parser reads reasoning.
    """
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
