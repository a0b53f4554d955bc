"""Renders chats with the package ``renderers`` (PyPI) in place of the chat template.

A renderer of the package is Python code that does the work of the chat template of one family of models. There are some
twenty families. The configuration names the family; it is never guessed. An extension is the tokens that the package's
bridge adds after an answer. Invariant: the sampled ids stay as they are. The check of kinds of turns (probe.py) is only
reported: the bridge decides which turns are extended. Fails with ConfigError if the package or the family is missing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from asyncrl.config.episode import ChatConfig
from asyncrl.core.errors import ChatRefused, ConfigError
from asyncrl.text.chat.chat_messages import Message, Tool
from asyncrl.text.chat.parsers import Parsed, make_call
from asyncrl.text.chat.probe import TOOLS, Shape, TurnCheck, example, make_report
from asyncrl.text.chat.turns import FIELD, QUESTION
from asyncrl.text.tokenizer import Tokenizer

PREFIX = "renderers:"
KEPT = 16
"""Most renderers that are kept, one for each set of options."""


class PackageRenderer:
    """The Renderer of the family that chat.renderer names."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int], chat: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_ids)
        self._chat = chat
        # The package takes options when it makes a renderer.
        self._cached_renderer = lru_cache(KEPT)(self._make)
        # Made at once, so that a wrong name or model is found at the start.
        self._renderer({})
        answered = self._ids([QUESTION, {"role": "assistant", "content": "Hi."}], (), {}, generate=False)
        # Index of the token that ends the answer; the seam follows it.
        end_at = next((index for index in range(len(answered))[::-1] if answered[index] in self._ends), len(answered))
        self.report = make_report(
            chat,
            self._examine,
            tool_parser=chat.renderer,
            reasoning_parser=chat.renderer,
            shows_tools=self.render([QUESTION], TOOLS, {}) != self.render([QUESTION], (), {}),
            end=tokenizer.decode(answered[end_at : end_at + 1], keep_special=True),
            seam=tokenizer.decode(answered[end_at + 1 :], keep_special=True),
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]) -> list[int]:
        return self._ids(messages, tools, options, generate=True)

    def extension(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, last_ids: Sequence[int]
    ) -> list[int] | None:
        """See Renderer. The package bridges from a made-up question and the answer to the new messages.

        None also if the bridge changes the tokens before the new messages.
        """
        if not messages or not last_ids:
            return None
        prompt = self.render([QUESTION], tools, options)
        try:
            bridged = self._renderer(options).bridge_to_next_turn(
                prompt, list(last_ids), list(messages), tools=list(tools) or None
            )
        except Exception as error:
            # The package raises errors of any type for a conversation that a family does not support.
            raise ChatRefused("messages", f"the renderer refuses them: {error}") from None
        context = [*prompt, *last_ids]
        if bridged is None or list(bridged.token_ids[: len(context)]) != context:
            return None
        return list(bridged.token_ids[len(context) :])

    def answer(
        self, before: Sequence[Message], answer: Message, tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> list[int]:
        prompt = self.render(before, tools, options)
        whole = self._ids([*before, answer], tools, options, generate=False)
        if whole[: len(prompt)] != prompt:
            raise ChatRefused(FIELD, "cannot be placed: the renderer does not begin it as the generation prompt does")
        rest = whole[len(prompt) :]
        end = next((index for index, id in enumerate(rest) if id in self._ends), None)
        if end is None:
            raise ChatRefused(FIELD, "cannot be placed: the renderer writes no token that ends an answer")
        return rest[: end + 1]

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def parse(self, ids: Sequence[int], tools: Sequence[Tool], options: Mapping[str, Any] | None = None) -> Parsed:
        """See Renderer. A call that the package cannot read stays in the content as text."""
        options = options or {}
        prompt = self.render([QUESTION], tools, options)
        try:
            response = self._renderer(options).parse_response(list(ids), tools=list(tools) or None, prompt_ids=prompt)
        except Exception:
            # No text of a model may make the parser fail.
            return Parsed(self._tokenizer.decode(ids), malformed=1)
        calls, content = [], response.content or ""
        for call in response.tool_calls:
            parsed_call = make_call(call.name, call.arguments) if tools and call.status == "ok" else None
            if parsed_call is not None:
                calls.append(parsed_call)
            else:
                content = "\n".join(text for text in (content, call.raw) if text)
        malformed = len(response.tool_calls) - len(calls) if tools else 0
        unfinished = response.reasoning_complete is False
        return Parsed(content, response.reasoning_content or None, calls, malformed, unfinished)

    def _renderer(self, options: Mapping[str, Any]) -> Any:
        """Return the package's renderer for ``options``, which override those of the run. Raises ConfigError."""
        return self._cached_renderer(json.dumps({**self._chat.template_options, **options}, sort_keys=True))

    def _make(self, options: str) -> Any:
        """Make the package's renderer for ``options``, which are JSON text. Raises ConfigError."""
        try:
            from pydantic import TypeAdapter
            from renderers import create_renderer
            from renderers.configs import RendererConfig
        except ImportError as error:
            problem = f"needs the package renderers ({error}): pip install 'asyncrl[renderers]'"
            raise ConfigError([f"chat.renderer: {problem}"]) from None
        given: dict[str, Any] = {"name": self._chat.renderer.removeprefix(PREFIX), **json.loads(options)}
        if self._chat.history == "sampled":
            given["thinking_retention"] = "all"
        try:
            config: Any = TypeAdapter(RendererConfig).validate_python(given)
            return create_renderer(_TokenizerAdapter(self._tokenizer), config)
        except Exception as error:
            # The error is pydantic's, or that of a family whose tokens the model does not have.
            lines = " ".join(str(error).split())
            raise ConfigError(
                [f"chat.renderer: {self._chat.renderer} cannot be made for this model: {lines}"]
            ) from None

    def _ids(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, generate: bool
    ) -> list[int]:
        """Render messages to tokens; with ``generate`` they end with the generation prompt. Raises ChatRefused."""
        renderer = self._renderer(options)
        try:
            return list(renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=generate))
        except Exception as error:
            raise ChatRefused("messages", f"the renderer refuses them: {error}") from None

    def _examine(self, shape: Shape) -> TurnCheck:
        """Check one kind of turn: compare an answer with its extension to a single render (probe.py).

        With reasoning, a difference is still ``extend``: the extension keeps the reasoning of earlier answers.
        """
        before, answer, tail = example(shape)
        tools = TOOLS if shape.with_tools else ()
        try:
            prompt = self.render(before, tools, {})
            answered = self._ids([*before, answer], tools, {}, generate=False)
            whole = self.render([*before, answer, *tail], tools, {})
            if answered[: len(prompt)] != prompt:
                return TurnCheck("fork", "an answer in the context does not begin as the generation prompt does")
            ends = [index for index in range(len(prompt), len(answered)) if answered[index] in self._ends]
            # An answer that was cut lacks the token that ends it.
            sampled = answered[len(prompt) : ends[0] + shape.ended] if ends else answered[len(prompt) :]
            extended = self.extension(tail, tools, {}, last_ids=sampled)
        except ChatRefused as error:
            return TurnCheck("refused", error.problem)
        if extended is None:
            return TurnCheck("fork", "the package does not extend this kind of turn")
        if [*prompt, *sampled, *extended] == whole:
            return TurnCheck("extend")
        return (
            TurnCheck("extend", "the reasoning stays, which a single render leaves out")
            if shape.reasoning
            else TurnCheck("fork", "the extension is not what a single render has")
        )


class _TokenizerAdapter:
    """Adapts a tokenizer to the interface that the package expects."""

    name_or_path = "asyncrl"
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids, default=None)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        listed = [ids] if isinstance(ids, int) else list(ids)
        return self._tokenizer.decode(listed, keep_special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        ids = self._tokenizer.encode(tokens)
        return ids[0] if len(ids) == 1 else None
