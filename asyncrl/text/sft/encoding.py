"""Encodes a row of ``sft.data`` as sequences of tokens, with the positions that have a loss. Pure.

A conversation is laid out as the rollouter lays out an episode of the policy: an answer's tokens follow the generation
prompt. The context of the next answer extends these tokens if the chat template allows it. Otherwise another sequence
begins, in which earlier answers are context. Invariant: each answer with a weight of 1 is trained once, from its first
token to its end token, unless sft.on_long cuts it.

Fails with BadConversation, which names the problem of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import Message, Tool, read_conversation, read_tools
from asyncrl.text.chat.renderer import Renderer
from asyncrl.text.chat.template import ChatTemplate, ShownCheck, conversation
from asyncrl.text.chat.turns import continuation
from asyncrl.text.tokenizer import Tokenizer

KEYS = '{"messages": [...]} or {"prompt": ..., "completion": ...}'


class BadConversation(ValueError):
    """A row that cannot be trained."""


class LongConversation(BadConversation):
    """A row with more tokens than the longest sequence may have."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sequence of T tokens; N of them have a loss."""

    ids: np.ndarray
    """int32 [T]."""
    trained: np.ndarray
    """int32 [N], ascending, each above 0: the positions of the tokens with a loss."""


class Encoder:
    """Encodes the rows of a run. A model without a chat template has no ``renderer``."""

    def __init__(self, config: Config, tokenizer: Tokenizer, renderer: Renderer | None) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._template, self._system = config.data.template, config.data.system
        self._max_tokens, self._may_cut = config.longest_supervised, config.sft.on_long == "cut"
        self._shown: ShownCheck | None = None
        """Check whether the template shows all parts of a row; None without a template."""
        if renderer is not None:
            self._shown = _shown_check(config, tokenizer, renderer)

    def __call__(self, row: Any) -> list[Encoded]:
        """Encode a row as sequences: at least one, each with a loss. Raises BadConversation."""
        if not isinstance(row, dict):
            raise BadConversation(f"is no object; a row is {KEYS}")
        try:
            sequences = self._plain(row) if self._is_plain(row) else self._chat(row)
        except (ChatRefused, ValueError) as error:
            raise BadConversation(str(error)) from None
        fitted = [each for each in map(self._fit, sequences) if len(each.trained)]
        if not fitted:
            raise BadConversation(
                f"has no answer within {self._max_tokens} tokens" if sequences else "has no answer to train"
            )
        return fitted

    def _is_plain(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is a prompt and a completion to be encoded as plain text. Raises BadConversation."""
        if "messages" in row:
            return False
        if "prompt" not in row or "completion" not in row:
            raise BadConversation(f"has the keys {', '.join(map(repr, row)) or 'of nothing'}; a row is {KEYS}")
        return self._template == "plain"

    def _plain(self, row: Mapping[str, Any]) -> list[Encoded]:
        """Encode a prompt and its completion as plain text: one sequence, or none if the completion has no tokens.

        A completion without an end token gets the smallest one.
        """
        prompt, completion = row["prompt"], row["completion"]
        for key, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise BadConversation(f'{key}: must be text under data.template = "plain"')
        ids = self._tokenizer.encode_prompt(prompt)
        if not ids:
            raise BadConversation("prompt: has no tokens")
        # ``continuation`` encodes prompt and completion without the tokens that a tokenizer adds in front.
        bare_ids = self._tokenizer.encode(prompt)
        answer = continuation(self._tokenizer, bare_ids, prompt, completion)
        ends = self._tokenizer.eos_ids
        if ends and answer[-1:] and answer[-1] not in ends:
            answer = [*answer, min(ends)]
        trained = np.arange(len(ids), len(ids) + len(answer), dtype=np.int32)
        return [Encoded(np.array([*ids, *answer], np.int32), trained)] if answer else []

    def _chat(self, row: Mapping[str, Any]) -> list[Encoded]:
        """Check that the template shows all of a conversation, and encode it as sequences."""
        if self._renderer is None or self._shown is None:
            raise BadConversation("needs a chat template, and the model has none")
        given = row["messages"] if "messages" in row else _messages_of_prompt(row)
        row_messages = read_conversation(given, "messages", also=("weight",))
        tools = read_tools(row.get("tools"), "tools")
        weights = [_weight(message, f"messages[{number}]") for number, message in enumerate(given)]
        messages = conversation(row_messages, self._system)
        added = len(messages) - len(row_messages)
        self._shown.require(messages, tools, field="messages", tools_field="tools", system=added > 0)
        return _lay_out(self._renderer, messages, [1] * added + weights, tools, added=added)

    def _fit(self, whole: Encoded) -> Encoded:
        """Return the sequence, cut to the longest length if sft.on_long allows it. Raises LongConversation."""
        if len(whole.ids) <= self._max_tokens:
            return whole
        if not self._may_cut:
            problem = f"takes {len(whole.ids)} tokens, and the longest sequence is {self._max_tokens}"
            raise LongConversation(problem)
        return Encoded(whole.ids[: self._max_tokens], whole.trained[whole.trained < self._max_tokens])


def _shown_check(config: Config, tokenizer: Tokenizer, renderer: Renderer) -> ShownCheck:
    """Make the check that the model reads all of a row, with the renderer that lays the row out."""
    if config.chat.renderer == "template":
        return ShownCheck.of(ChatTemplate(tokenizer, tokenizer.eos_ids), config.chat, by_answer=True)
    return ShownCheck(
        lambda messages, tools: tokenizer.decode(renderer.render(messages, tools, {}), keep_special=True),
        writes_calls=True,
        shows_reasoning=True,
        by_answer=True,
    )


def _lay_out(
    renderer: Renderer, messages: Sequence[Message], weights: Sequence[int], tools: Sequence[Tool], *, added: int
) -> list[Encoded]:
    """Lay a conversation out as sequences. Raises ChatRefused.

    For each answer, the tokens between it and the last answer extend the sequence if the renderer can extend it.
    Otherwise a new sequence begins with the rendered messages before the answer. Then the answer's tokens follow; they
    are trained if the message's entry in ``weights`` is 1. ``added`` messages stand in front of the row's own.
    """
    sequences: list[Encoded] = []
    ids: list[int] = []
    trained: list[int] = []
    last_answer: list[int] = []
    # Index of the last answer; -1 before the first.
    last_at = -1
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not number:
            raise ChatRefused("messages[0]", "is an answer to nothing")
        between = messages[last_at + 1 : number]
        context = renderer.extension(between, tools, {}, last_ids=last_answer) if last_at >= 0 else None
        if context is None:
            if trained:
                sequences.append(_encoded(ids, trained))
            ids, trained = renderer.render(messages[:number], tools, {}), []
        else:
            ids += context
        try:
            last_answer = renderer.answer(messages[:number], message, tools, {})
        except ChatRefused as error:
            raise ChatRefused(f"messages[{number - added}]", error.problem) from None
        if weights[number]:
            trained += range(len(ids), len(ids) + len(last_answer))
        ids, last_at = [*ids, *last_answer], number
    if trained:
        sequences.append(_encoded(ids, trained))
    return sequences


def _encoded(ids: Sequence[int], trained: Sequence[int]) -> Encoded:
    return Encoded(np.array(ids, np.int32), np.array(trained, np.int32))


def _messages_of_prompt(row: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a row with a prompt and its completion. Raises BadConversation."""
    prompt, completion = row["prompt"], row["completion"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if not isinstance(asked, list) or not isinstance(answered, list):
        raise BadConversation("prompt and completion: each must be text or a list of messages")
    return [*asked, *answered]


def _weight(message: Mapping[str, Any], field: str) -> int:
    """Return 1 if an answer is trained, else 0: its ``weight``, as in OpenAI's files. Raises BadConversation."""
    weight = message.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise BadConversation(f"{field}.weight: must be 0 or 1")
    return int(weight)
