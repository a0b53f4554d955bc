"""Makes vLLM's parsers of tool calls and reasoning usable as an AnswerParser (text/chat/parsers.py).

The parsers have the names that vLLM's server gives them, and run in the rollouter's process. Importing vLLM takes
seconds, so call ``make_parser`` on a thread. Invariant: no text of a model makes the parser fail. A tool call that vLLM
cannot read stays in the content and is counted as malformed.

Fails with ConfigError for a name that vLLM does not know, and for a tokenizer without the tokens of a parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.core.errors import ConfigError
from asyncrl.text.chat.chat_messages import Tool
from asyncrl.text.chat.parsers import Parsed, ParsedCall, make_call


def make_parser(
    folder: str, tool_parser: str | None, reasoning_parser: str | None, *, trust_remote_code: bool = False
) -> VllmParser:
    """Make the parser for a model's folder. A name of None leaves out tool calls or reasoning. Raises ConfigError."""
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
    """Parses answers, each with a new parser of vLLM, because vLLM's parsers keep state."""

    markers: frozenset[str] | None = None

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager

        self._request: Any = ChatCompletionRequest
        """vLLM's class of a chat request, which its parsers take."""
        self._tokenizer = tokenizer
        self._reads_calls = tool_parser is not None
        parser_class: Any = None
        try:
            parser_class = ParserManager.get_parser(
                tool_parser, reasoning_parser, enable_auto_tools=self._reads_calls, tokenizer=tokenizer
            )
        except Exception as error:
            # vLLM raises TypeError, and its parsers raise errors of any type.
            keys = {"chat.tool_parser": tool_parser, "chat.reasoning_parser": reasoning_parser}
            named = ", ".join(key for key, name in keys.items() if name is not None)
            raise ConfigError([f"{named}: {error}"]) from None
        assert parser_class is not None
        self._class = parser_class
        """vLLM's class of a parser with both named parts."""

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
            # No call was read. With tools vLLM drops the text of an unreadable call; parsed without tools it stays.
            _, whole, _ = self._parse(text, (), ids, options)
        except Exception:
            # vLLM's parsers raise errors of any type.
            return Parsed(text, malformed=1)
        # A call is malformed if vLLM dropped text of the answer, or kept the beginning of a call as text.
        return Parsed(whole, reasoning, malformed=int(whole.strip() != content.strip() or self._begins_call(whole)))

    def _parse(
        self, text: str, tools: Sequence[Tool], ids: Sequence[int], options: Mapping[str, Any] | None
    ) -> tuple[str | None, str, list[ParsedCall]]:
        """Return reasoning, content and tool calls. Raises ValueError if the arguments of a call are no object."""
        request = self._request(
            messages=[{"role": "user", "content": ""}],
            tools=list(tools) or None,
            tool_choice="auto" if tools else "none",
        )
        parser = self._class(self._tokenizer, request.tools, chat_template_kwargs=dict(options or {}))
        reasoning, content, parsed_calls = parser.parse(text, request, bool(tools), ids)
        calls = []
        for call in parsed_calls or ():
            valid = make_call(call.name, call.arguments)
            if valid is None:
                raise ValueError(f"the arguments of {call.name} are no object that could be sent")
            calls.append(valid)
        return reasoning or None, content or "", calls

    def _begins_call(self, text: str) -> bool:
        """Whether the text has one of the parser's tokens that begin tool calls."""
        parser = self._class(self._tokenizer, None).tool_parser
        names = ("tool_call_start_token", "bot_token", "tool_calls_start_token")
        starts = (getattr(parser, name, None) for name in names)
        return any(isinstance(start, str) and start and start in text for start in starts)
