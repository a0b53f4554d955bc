"""Choice of the parsers that read a model's answers: those of the configuration, or those that its template calls for.

``auto`` takes our parsers where the template writes their form: calls are written by the template and read back, and
reasoning is recognised in its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.chat.parsers import THINK, AnswerParser, Both, JsonCallParser, NoParser, ThinkParser
from asyncrl.chat.probe import TOOLS, Shape, example
from asyncrl.chat.template import ChatTemplate
from asyncrl.chat.turns import ANSWER
from asyncrl.config.episode import OWN_REASONING_PARSERS, OWN_TOOL_PARSERS, ChatConfig
from asyncrl.errors import ChatRefused

EngineParsers = Callable[[str | None, str | None], AnswerParser]
"""Maker of a parser of an inference engine, by the name of its parser of calls, of that of reasoning, or of both."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of a model."""

    tools: str
    reasoning: str
    parser: AnswerParser
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def thinks(self) -> bool:
        """Whether answers may have reasoning."""
        return self.reasoning != "none"


def choose_parsers(template: ChatTemplate, chat: ChatConfig, engine_parsers: EngineParsers | None = None) -> Parsers:
    """The parsers that ``chat`` names; without ``engine_parsers`` an engine's read nothing, as suffices for a check."""
    notes: list[str] = []
    tools, reasoning = chat.tool_parser, chat.reasoning_parser
    if reasoning == "auto":
        text = template.tokenizer.template_text(with_tools=True) or ""
        reasoning = "think" if THINK in text or THINK in template.tokenizer.special_ids else "none"
    if tools == "auto":
        tools, note = _recognise_calls(template)
        notes += [note] if note else []
    if not template.shows_tools:
        notes.append("the template does not show tools to the model: name them in a system message")
    engine_tools = None if tools in OWN_TOOL_PARSERS else tools
    engine_reasoning = None if reasoning in OWN_REASONING_PARSERS else reasoning
    engine: AnswerParser = NoParser()
    if engine_parsers is not None and (engine_tools or engine_reasoning):
        engine = engine_parsers(engine_tools, engine_reasoning)
    if engine_tools and engine_reasoning:
        # Some models have one parser for both.
        return Parsers(tools, reasoning, engine, tuple(notes))
    first = engine if engine_reasoning else ThinkParser() if reasoning == "think" else NoParser()
    second = engine if engine_tools else JsonCallParser() if tools == "json" else NoParser()
    return Parsers(tools, reasoning, Both(first, second), tuple(notes))


def _recognise_calls(template: ChatTemplate) -> tuple[str, str]:
    """The parser's name, json if the calls that the template writes are read back, else none; and a note."""
    if not template.writes_calls:
        return "none", "the template writes no calls of tools: set chat.tool_parser to the form that the model uses"
    before, answer, tail = example(Shape(tail=("tool", "tool")))
    for calls in (answer, answer | {"tool_calls": answer["tool_calls"][:1]}):
        try:
            text = template.text([*before, calls, *tail[: len(calls["tool_calls"])]], TOOLS)
        except ChatRefused:
            # Some templates take one call at a time.
            continue
        parsed = JsonCallParser()(text, TOOLS, thinking=False)
        names = [call["function"]["name"] for call in calls["tool_calls"]]
        if [call.name for call in parsed.calls] == names and ANSWER in parsed.calls[0].arguments:
            return "json", ""
        # The template has written them, so its form is seen not to be this one.
        break
    return "none", "the form in which the template writes calls is not known here: set chat.tool_parser to vLLM's name"
