"""The tokens of a written answer, such as one of a dataset, as the policy would sample them behind its context. Pure.

Invariant: the tokens follow the generation prompt and end with the token that ends an answer, so training matches the
contexts that the model will see. Only the template writes that token: an answer with its text is refused. Fails with
ChatRefused, which names the part of the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import Message, Tool
from asyncrl.text.chat.parsers import END_THINK, THINK
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.chat.turns import ANSWER
from asyncrl.text.tokenizer import Tokenizer

FIELD = "answer"
OTHERS = ("qkz", "zqk")
"""Answers that share no beginning."""
_QUESTION: Message = {"role": "user", "content": "q"}


def answer_ids(
    template: ChatTemplate,
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Tool],
    options: Mapping[str, Any],
) -> list[int]:
    """The tokens of ``answer`` to ``before``, its end included. Raises ChatRefused."""
    asked = template.text(before, tools, options)
    whole = template.text([*before, answer], tools, options, generate=False)
    written = _written(answer)
    for end in template.ends:
        if end in written:
            raise ChatRefused(FIELD, f"holds {end}, at which an answer ends")
    rest = _behind(asked, whole, answer)
    if rest is None:
        rest = _behind_moved(template, before, asked, whole, tools, options)
    places = [(at, -len(end), end) for end in template.ends if (at := rest.find(end)) >= 0]
    if places:
        # The first end; of several at one place the longest.
        at, _, end = min(places)
        words, last = rest[:at], [template.ends[end]]
    else:
        # Any end token will do: always the smallest.
        words, last = _unframed(template, rest, options), sorted(template.end_ids)[:1]
    return [*continuation(template.tokenizer, template.ids(asked), asked, words), *last]


def continuation(tokenizer: Tokenizer, context: Sequence[int], text: str, words: str) -> list[int]:
    """The tokens of ``words`` behind ``text``, whose tokens are ``context``.

    They are cut from the tokens of both texts together, or, if a token would span the seam, encoded from the words
    alone. Raises ChatRefused.
    """
    try:
        whole = tokenizer.encode(text + words)
        if whole[: len(context)] == list(context):
            return whole[len(context) :]
        return tokenizer.encode(words)
    except ValueError as error:
        raise ChatRefused(FIELD, str(error)) from None


def _behind(asked: str, whole: str, answer: Message) -> str | None:
    """The text that follows the generation prompt; None if ``whole`` does not continue it."""
    if whole.startswith(asked):
        return whole[len(asked) :]
    head, opens, tail = asked.rpartition(THINK)
    if not opens or tail.strip() or not whole.startswith(head):
        return None
    # The generation prompt opens the reasoning, and the template leaves it out of an answer.
    thought, rest = answer.get("reasoning_content", "").strip("\n"), whole[len(head) :]
    if not thought:
        told = f"has no reasoning, and the generation prompt opens it by {THINK}; give the message reasoning_content"
        raise ChatRefused(FIELD, told)
    return f"{thought}\n{END_THINK}\n\n{rest}"


def _behind_moved(
    template: ChatTemplate,
    before: Sequence[Message],
    asked: str,
    whole: str,
    tools: Sequence[Tool],
    options: Mapping[str, Any],
) -> str:
    """The text that follows the generation prompt if an answer changes the text before it.

    Some templates move tools or the system message with the last question. Two answers without a common beginning are
    rendered; their common text ends where the answer begins.
    """
    base = template.text(before, tools, options, generate=False)
    others = ({"role": "assistant", "content": word} for word in OTHERS)
    first, second = (template.text([*before, each], tools, options, generate=False) for each in others)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    head = "".join(letter for letter, _ in alike)
    prompt = asked[len(base) :]
    if not (asked.startswith(base) and head.endswith(prompt) and whole.startswith(head)):
        raise ChatRefused(FIELD, "cannot be placed: the template does not begin it as the generation prompt does")
    return whole[len(head) :]


def _unframed(template: ChatTemplate, rest: str, options: Mapping[str, Any]) -> str:
    """The words of an answer without an end token in the template, without the frame that follows each answer."""
    shown = template.text([_QUESTION, {"role": "assistant", "content": ANSWER}], (), options, generate=False)
    frame = shown[shown.rfind(ANSWER) + len(ANSWER) :]
    if not rest.endswith(frame):
        raise ChatRefused(FIELD, "cannot be placed: its end is not found in the template's text")
    return rest[: len(rest) - len(frame)]


def _written(answer: Message) -> str:
    """All text of the message itself: content, reasoning and calls."""
    calls = answer.get("tool_calls", ())
    return "\n".join([answer["content"], answer.get("reasoning_content", ""), json.dumps(calls, ensure_ascii=False)])
