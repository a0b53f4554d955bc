"""Renders messages to tokens by the chat template, extends the context after sampled answers, parses answers.

An extension is the tokens between a sampled answer and the next one. It begins with the seam, the text that the
template writes between the end of an answer and the next message. Invariant: TemplateRenderer returns an extension only
for kinds of turns that the check of the template (probe.py) found exact. Then the answer's own ids and the extension
equal a single render of the conversation, apart from reasoning that is kept. Otherwise the caller renders the
conversation again. Sampled ids of an extended context are never encoded again. Thread-safe. Raises ChatRefused for a
conversation that the template refuses, and ConfigError at the start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.config.episode import OWN_REASONING_PARSERS, OWN_TOOL_PARSERS, ChatConfig
from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import Message, Tool, normalise_tools
from asyncrl.text.chat.package import PackageRenderer
from asyncrl.text.chat.parsers import (
    END_THINK,
    THINK,
    AnswerParser,
    Both,
    EngineParsers,
    JsonCallParser,
    NoParser,
    Parsed,
    Parsers,
    ThinkParser,
)
from asyncrl.text.chat.probe import (
    TOOLS,
    ChatReport,
    History,
    Shape,
    TurnCheck,
    examine,
    example,
    extension_ids,
    make_report,
)
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.chat.turns import ANSWER, QUESTION, answer_ids, learn_turn
from asyncrl.text.stops import resolve_stops
from asyncrl.text.tokenizer import Tokenizer

KEPT = 256
"""Most kinds of turns (with template options) whose verdict is kept."""
CLOSED_THINK = f"\n{END_THINK}\n\n"
"""Text that closes the reasoning of an answer that was cut within it."""


class Renderer(Protocol):
    """Turns conversations into tokens and answers into messages. May be called from several threads at a time."""

    report: ChatReport
    """Result of the check of the template at the start."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]) -> list[int]:
        """Render messages to the tokens of a context that ends with the generation prompt. Raises ChatRefused."""

    def extension(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, last_ids: Sequence[int]
    ) -> list[int] | None:
        """Return the extension after a sampled answer: the seam, ``messages``, and the generation prompt.

        ``last_ids`` are all tokens of the answer. ``messages`` follow it, none of them by the assistant. None if an
        extension would not be exact: the caller must then render the whole conversation. Raises ChatRefused.
        """

    def answer(
        self, before: Sequence[Message], answer: Message, tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a written answer with its end token, as they follow ``render`` of ``before``.

        Raises ChatRefused.
        """

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, whole or only begun, that ``parse`` reads."""

    def parse(self, ids: Sequence[int], tools: Sequence[Tool], options: Mapping[str, Any] | None = None) -> Parsed:
        """Split a whole answer into its parts. Never fails."""


class TemplateRenderer:
    """The Renderer that uses the model's own chat template."""

    def __init__(self, template: ChatTemplate, parsers: Parsers, chat: ChatConfig) -> None:
        self._template = template
        self._parsers = parsers
        self._history: History = chat.history
        # A key has the options as JSON text. Two threads may do the same check at once.
        self._cached_check = lru_cache(KEPT)(self._examine)
        self._cached_opens_reasoning = lru_cache(KEPT)(self._prompt_opens_reasoning)
        keep = parsers.parser.markers
        self._hidden_ids = frozenset(
            id for text, id in template.tokenizer.special_ids.items() if keep is not None and text not in keep
        )
        """Ids of special tokens that the parser does not read; ``text`` leaves them out. Empty if it reads all."""
        end, seam, note = _find_seam(template)
        self.report = make_report(
            chat,
            lambda shape: self._cached_check(shape, _key({})),
            tool_parser=parsers.tools,
            reasoning_parser=parsers.reasoning,
            shows_tools=template.shows_tools,
            end=end,
            seam=seam,
            notes=[*parsers.notes, *([note] if note else [])],
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]) -> list[int]:
        return self._template.ids(self._template.text(messages, tools, options))

    def extension(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, last_ids: Sequence[int]
    ) -> list[int] | None:
        """See Renderer. Renders a made-up answer of the same kind, and takes what the template writes after it."""
        assert all(message["role"] != "assistant" for message in messages)
        if not messages or not last_ids:
            return None
        ended = last_ids[-1] in self._template.end_ids
        parsed = self.parse(last_ids, tools, options)
        if parsed.unfinished and (ended or self._history == "template"):
            # A single render would close the reasoning of this answer; the sampled tokens leave it open.
            return None
        # Under "template" the check includes reasoning, because earlier answers may have some. Under "sampled" the
        # context keeps all reasoning.
        thinks = self._parsers.thinks and self._history == "template"
        shape = Shape.of(messages, reasoning=thinks, ended=ended, with_tools=bool(tools))
        if self._cached_check(shape, _key(options)).verdict != "extend":
            return None
        answer = _make_similar_answer(messages, parsed)
        turn = learn_turn(self._template, [QUESTION], answer, messages, tools, options)
        if isinstance(turn, str) or (ended and self._template.ends.get(turn.end) != last_ids[-1]):
            # The model has ended the answer with another end token than the one that the template writes.
            return None
        # If the answer was cut within its reasoning, the reasoning is closed before the end token.
        close = CLOSED_THINK if parsed.unfinished else ""
        return extension_ids(self._template, turn, ended=ended, close=close)

    def answer(
        self, before: Sequence[Message], answer: Message, tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> list[int]:
        return answer_ids(self._template, before, answer, tools, options)

    def parse(self, ids: Sequence[int], tools: Sequence[Tool], options: Mapping[str, Any] | None = None) -> Parsed:
        options = options or {}
        thinking = self._cached_opens_reasoning(bool(tools), _key(options))
        return self._parsers.parser(
            self.text(ids), tools, thinking=thinking, ids=self._without_end(ids), options=options
        )

    def text(self, ids: Sequence[int]) -> str:
        # Special tokens that the parser looks for stay as text; the others are left out.
        kept = [id for id in self._without_end(ids) if id not in self._hidden_ids]
        return self._template.tokenizer.decode(kept, keep_special=True)

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of an answer without the token that ended it, if there is one."""
        return ids[:-1] if ids and ids[-1] in self._template.end_ids else ids

    def _examine(self, shape: Shape, options: str) -> TurnCheck:
        """Check one kind of turn under these options (JSON text)."""
        return examine(self._template, shape, self._history, json.loads(options))

    def _prompt_opens_reasoning(self, with_tools: bool, options: str) -> bool:
        """Whether the generation prompt opens the reasoning, with or without tools, under these options (JSON text)."""
        tools, given = TOOLS if with_tools else (), json.loads(options)
        try:
            asked = self._template.text([QUESTION], tools, given)
            base = self._template.text([QUESTION], tools, given, generate=False)
        except ChatRefused:
            return False
        prompt = asked.removeprefix(base)
        return prompt.rfind(THINK) > prompt.rfind(END_THINK)


def make_renderer(
    config: Config,
    tokenizer: Tokenizer,
    *,
    engine_parsers: EngineParsers | None = None,
) -> Renderer:
    """Make the renderer of a run and check its template, which takes some tenths of a second.

    Answers end at the tokenizer's own end tokens, at rollout.stop_token_ids, and at the special tokens of rollout.stop.
    ``engine_parsers`` makes the parsers of the inference engine. Raises ConfigError if an id of
    rollout.stop_token_ids is not in the vocabulary. Raises it too if the model's chat template is missing,
    or the package that chat.renderer names cannot be used.
    """
    chat = config.chat
    path = config.model.path or "the model"
    end_ids = tokenizer.eos_ids | set(resolve_stops(config.rollout, tokenizer).token_ids)
    if chat.renderer != "template":
        return PackageRenderer(tokenizer, end_ids, chat)
    template = ChatTemplate(tokenizer, end_ids, path=path)
    return TemplateRenderer(template, choose_parsers(template, chat, engine_parsers), chat)


def hidden_tools(renderer: Renderer, tools: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    """Return the names of tools in a request that do not change the rendered text; empty for a refused request."""
    question = [{"role": "user", "content": "q"}]
    try:
        found = normalise_tools(tools)
        whole = renderer.render(question, found, options)
        without = ((tool, [each for each in found if each is not tool]) for tool in found)
        return [tool["function"]["name"] for tool, rest in without if renderer.render(question, rest, options) == whole]
    except ChatRefused:
        return []


def choose_parsers(template: ChatTemplate, chat: ChatConfig, engine_parsers: EngineParsers | None = None) -> Parsers:
    """Choose the parsers that ``chat`` names, or for "auto" those that fit the template.

    Without ``engine_parsers``, an engine's parser is replaced by one that finds nothing, which is enough for a check.
    """
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
    reasoning_parser = engine if engine_reasoning else ThinkParser() if reasoning == "think" else NoParser()
    call_parser = engine if engine_tools else JsonCallParser() if tools == "json" else NoParser()
    return Parsers(tools, reasoning, Both(reasoning_parser, call_parser), tuple(notes))


def _recognise_calls(template: ChatTemplate) -> tuple[str, str]:
    """Find the parser that reads the calls which the template writes. Returns its name and a note for the user.

    The name is "json" if JsonCallParser reads them; the note is then empty. Otherwise the name is "none".
    """
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
        # The template has written the calls in another form; further tries would not change that.
        break
    return "none", "the form in which the template writes calls is not known here: set chat.tool_parser to vLLM's name"


def _find_seam(template: ChatTemplate) -> tuple[str, str, str]:
    """Find the text that ends an answer, the seam after it, and a note for the user.

    The note is empty, or says that the engine does not stop at the token with which the template ends answers. All
    three are empty if the template shows no such turn.
    """
    before, answer, tail = example(Shape(tail=("user",), with_tools=False))
    try:
        turn = learn_turn(template, before, answer, tail, (), {})
        as_last = template.text([*before, answer], (), {}, generate=False)
    except ChatRefused:
        return "", "", ""
    if isinstance(turn, str):
        return "", "", ""
    # Some templates frame the last message in another way.
    framed, continued = as_last.rpartition(ANSWER)[2], turn.end + turn.after
    shared = next((index for index, (a, b) in enumerate(zip(framed, continued, strict=False)) if a != b), len(framed))
    seam = framed[:shared].removeprefix(turn.end)
    note = ""
    for text in template.tokenizer.special_ids:
        if not turn.end and seam.startswith(text):
            note = f"the template ends answers with {text!r}, where no answer stops: put it into rollout.stop"
    return turn.end, seam, note


def _make_similar_answer(messages: Sequence[Message], parsed: Parsed) -> Message:
    """Return an answer with made-up words in the form of the sampled one, with a call for each result that follows."""
    answer: Message = {"role": "assistant", "content": ANSWER}
    results = list(takewhile(lambda message: message["role"] == "tool", messages))
    if not results:
        return answer
    calls = []
    for number, result in enumerate(results):
        called = parsed.calls[number].name if number < len(parsed.calls) else "f"
        function = {"name": result.get("name") or called, "arguments": {"q": ANSWER}}
        calls.append({"id": result["tool_call_id"], "type": "function", "function": function})
    return answer | {"content": "", "tool_calls": calls}


def _key(options: Mapping[str, Any]) -> str:
    """Return the options as JSON text, which can be the key of a cache."""
    return json.dumps(options, sort_keys=True, default=str)
