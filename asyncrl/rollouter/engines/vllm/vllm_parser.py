"""vLLM's parsers of tool calls and reasoning as an AnswerParser (text/chat/parsers.py), by the names of its server.

Used in the rollouter's process. The import takes seconds and belongs on a thread. Invariant: no text of a model makes a
parser fail. A call that vLLM cannot read stays in the content and is counted.

Fails with ConfigError for a name that vLLM does not know, and for a tokenizer without the tokens of a parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.core.errors import ConfigError
from asyncrl.text.chat.messages import Tool
from asyncrl.text.chat.parsers import Parsed, ParsedCall, make_call


def make_parser(
    folder: str, tool_parser: str | None, reasoning_parser: str | None, *, trust_remote_code: bool = False
) -> VllmParser:
    """The parser of a model folder that reads calls, reasoning or both. Raises ConfigError."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    problems = []
    for key, name, known in (
        ("chat.tool_parser", tool_parser, ToolParserManager.list_registered()),
        ("chat.reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            problems.append(f"{key}: vLLM has no parser {name!r}; it has {', '.join(known)}")
    if problems:
        raise ConfigError(problems)
    tokenizer = get_tokenizer(folder, trust_remote_code=trust_remote_code)
    return VllmParser(tokenizer, tool_parser, reasoning_parser)


class VllmParser:
    """Parser that makes a new one of vLLM's for each answer: those keep what they have seen."""

    markers: frozenset[str] | None = None

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager

        self._request: Any = ChatCompletionRequest
        self._tokenizer = tokenizer
        self._reads_calls = tool_parser is not None
        found: Any = None
        try:
            found = ParserManager.get_parser(
                tool_parser, reasoning_parser, enable_auto_tools=self._reads_calls, tokenizer=tokenizer
            )
        except Exception as error:
            # vLLM raises TypeError, and parsers errors of any type.
            keys = {"chat.tool_parser": tool_parser, "chat.reasoning_parser": reasoning_parser}
            named = ", ".join(key for key, name in keys.items() if name is not None)
            raise ConfigError([f"{named}: {error}"]) from None
        assert found is not None
        self._class = found

    def __call__(
        self,
        text: str,
        tools: Sequence[Tool],
        *,
        thinking: bool = False,
        ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Parsed:
        try:
            reasoning, content, calls = self._parse(text, tools, ids, options)
            if calls or not tools or not self._reads_calls:
                return Parsed(content, reasoning, calls)
            # The text that vLLM drops of a call that it cannot read, it keeps where there are no tools.
            _, whole, _ = self._parse(text, (), ids, options)
        except Exception:
            # They raise errors of any type at a model's text.
            return Parsed(text, malformed=1)
        return Parsed(whole, reasoning, malformed=int(whole.strip() != content.strip() or self._begins_call(whole)))

    def _parse(
        self, text: str, tools: Sequence[Tool], ids: Sequence[int], options: Mapping[str, Any] | None
    ) -> tuple[str | None, str, list[ParsedCall]]:
        """Reasoning, content and calls. Raises ValueError for a call with no object that could be sent."""
        request = self._request(
            messages=[{"role": "user", "content": ""}],
            tools=list(tools) or None,
            tool_choice="auto" if tools else "none",
        )
        parser = self._class(self._tokenizer, request.tools, chat_template_kwargs=dict(options or {}))
        reasoning, content, found = parser.parse(text, request, bool(tools), ids)
        calls = []
        for call in found or ():
            made = make_call(call.name, call.arguments)
            if made is None:
                raise ValueError(f"the arguments of {call.name} are no object that could be sent")
            calls.append(made)
        return reasoning or None, content or "", calls

    def _begins_call(self, text: str) -> bool:
        parser = self._class(self._tokenizer, None).tool_parser
        names = ("tool_call_start_token", "bot_token", "tool_calls_start_token")
        starts = (getattr(parser, name, None) for name in names)
        return any(isinstance(start, str) and start and start in text for start in starts)
