"""Learns how a template writes an answer and the text after it, from a rendered conversation. Pure.

``learn_turn`` learns both from made-up words. ``answer_ids`` gives the tokens of a written answer, such as one of a
dataset, as the policy would sample them after its context. Invariant: the tokens of ``answer_ids`` follow the
generation prompt, and end with the token that ends an answer. So training matches the contexts that the model will see.
Only the template writes that token: an answer with its text is refused.

A conversation with made-up words in known places is rendered twice: up to the question, and with the answer and the
messages after it. If the first text begins the second, the rest of the second has three parts: the words that the model
samples, the token that ends them, and the context of the next answer. An answer's frame is the text that the template
writes around its words.

Raises ChatRefused, which names the part of the message, if the template refuses the conversation. ``learn_turn``
returns the reason if it does not find the answer in the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import Message, Tool
from asyncrl.text.chat.parsers import END_THINK, THINK
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.tokenizer import Tokenizer

ANSWER = "qkzanswer"
THOUGHT = "qkzthought"
NEXT = "qkznext"
"""Words that no template holds, for an answer, its reasoning, and the messages after it."""
FIELD = "answer"
"""Name of the answer in errors."""
OTHERS = ("qkz", "zqk")
"""Two answers that do not begin with the same character."""
QUESTION: Message = {"role": "user", "content": "Hello."}


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """An answer in its context, in text: ``asked + sampled + end + after`` is the context of the next answer."""

    asked: str
    """Text up to the model's answer."""
    sampled: str
    """Text that the model would have sampled, without the token that ends it."""
    end: str
    """Text of the token that ends the answer; empty if the template writes none at which the engine stops."""
    after: str
    """Text after the end: the rest of the answer's frame, the messages that follow, the next generation prompt."""
    dropped: str = ""
    """Reasoning, or its frame, that a single render leaves out."""


def learn_turn(
    template: ChatTemplate,
    before: Sequence[Message],
    answer: Message,
    tail: Sequence[Message],
    tools: Sequence[Tool],
    options: Mapping[str, Any],
) -> ChatTurn | str:
    """Learn the text of a turn; or return the reason why a single render does not continue the model's answer.

    ``before``, ``answer`` and ``tail`` are the conversation: the messages before the answer, and after it. The content
    of ``answer`` begins with ANSWER. If it has no content, ANSWER is the last word of its calls. Its reasoning is
    THOUGHT. Raises ChatRefused.
    """

    def text(messages: Sequence[Message], *, generate: bool = True) -> str:
        return template.text(messages, tools, options, generate=generate)

    if any(word in str(message) for message in tail for word in (ANSWER, THOUGHT)):
        return f"a message holds the word {ANSWER} or {THOUGHT}, which stands for the model's"
    # The question without and with the generation prompt, and the whole conversation.
    base, asked, whole = text(before, generate=False), text(before), text([*before, answer, *tail])
    if not asked.startswith(base):
        return "the generation prompt changes what stands before it"
    if not whole.startswith(base):
        return "what comes later changes what stands before the answer"
    prompt, rest = asked[len(base) :], whole[len(base) :]
    # ``head`` is the part of the generation prompt that the template also writes before an answer in the context.
    head = _common_head(prompt, _plain_head(text, before, tail, base))
    if head is None or not rest.startswith(head):
        return "an answer in the context does not begin as the generation prompt does"
    opening, rest = prompt[len(head) :], rest[len(head) :]
    # The last occurrence, because each call has one.
    index = rest.rfind(ANSWER)
    if index < 0:
        return "the template leaves the answer out"
    dropped = ""
    # ``opening`` is the part of the generation prompt that begins the answer, such as <think>. A template may leave it
    # out of earlier answers.
    if rest.startswith(opening):
        rest, index = rest[len(opening) :], index - len(opening)
    else:
        dropped = opening
    thinks = "reasoning_content" in answer
    thought = _dropped_thought(opening, rest[:index], thinks=thinks, opening_is_dropped=dropped != "")
    words = answer["content"] or ANSWER
    if not rest.startswith(words, index):
        # The template has removed blanks at the end.
        words = ANSWER
    found = _split_answer(template, rest, index + len(words), text, before, answer)
    if isinstance(found, str):
        return found
    sampled, end, after = found
    return ChatTurn(asked, thought + sampled, end, after, dropped + thought)


def _plain_head(text: Any, before: Sequence[Message], tail: Sequence[Message], base: str) -> str:
    """Return the text between ``base`` and the words of an answer without reasoning and calls.

    ``text`` renders messages; ``base`` is the text of ``before`` without the generation prompt. The messages of
    ``tail`` that are no results of tools follow the answer, or else a made-up one. If the template refuses them, no
    message follows.
    """
    plain: Message = {"role": "assistant", "content": ANSWER}
    later = [message for message in tail if message["role"] != "tool"] or [{"role": "user", "content": NEXT}]
    try:
        whole: str = text([*before, plain, *later])
    except ValueError:
        whole = text([*before, plain], generate=False)
    return whole[len(base) : whole.find(ANSWER)]


def _common_head(prompt: str, head: str) -> str | None:
    """Return the shorter of the generation prompt and ``head`` if it begins the other; else None."""
    if prompt.startswith(head):
        return head
    return prompt if head.startswith(prompt) else None


def _dropped_thought(opening: str, lead: str, *, thinks: bool, opening_is_dropped: bool) -> str:
    """Return the reasoning that the model samples, with its tags, if the template leaves it out; else an empty string.

    ``opening`` is the beginning of the answer in the generation prompt; ``opening_is_dropped``: whether the template
    leaves it out. ``lead`` is the text before the answer's words. ``thinks``: whether the answer has reasoning.
    """
    opened = THINK in opening and END_THINK not in opening.rpartition(THINK)[2]
    if THOUGHT in lead or not (thinks or (opened and opening_is_dropped)):
        return ""
    return f"{'' if opened else THINK + chr(10)}{THOUGHT}\n{END_THINK}\n\n"


def _split_answer(
    template: ChatTemplate, rest: str, index: int, text: Any, before: Sequence[Message], answer: Message
) -> tuple[str, str, str] | str:
    """Split ``rest`` into the words of the answer, its end, and the text after it; or return why that is impossible.

    ``rest`` begins with the answer; ``index`` is the position after its last known word. ``text`` renders messages.
    """
    limit = rest.find(NEXT, index)
    behind = rest[index : limit if limit >= 0 else len(rest)]
    if (found := template.first_end(behind)) is not None:
        at, end = found
        return rest[: index + at], end, rest[index + at + len(end) :]
    if not answer.get("tool_calls"):
        return rest[:index], "", rest[index:]
    # An answer without calls shows the frame. The text before the frame in this answer belongs to the call.
    plain = text([*before, {"role": "assistant", "content": ANSWER}], generate=False)
    called = text([*before, answer], generate=False)
    frame = plain[plain.rfind(ANSWER) + len(ANSWER) :]
    written = called[called.rfind(ANSWER) + len(ANSWER) :]
    if not written.endswith(frame) or not rest[index:].startswith(written):
        return "the end of the call is not found"
    end_of_call = index + len(written) - len(frame)
    return rest[:end_of_call], "", rest[end_of_call:]


def answer_ids(
    template: ChatTemplate,
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Tool],
    options: Mapping[str, Any],
) -> list[int]:
    """Return the tokens of a written answer up to its end token, as the policy would sample them after ``before``.

    Raises ChatRefused.
    """
    asked = template.text(before, tools, options)
    whole = template.text([*before, answer], tools, options, generate=False)
    written = _all_text(answer)
    for end in template.ends:
        if end in written:
            raise ChatRefused(FIELD, f"holds {end}, at which an answer ends")
    rest = _text_after_prompt(asked, whole, answer)
    if rest is None:
        rest = _text_after_moved_prompt(template, before, asked, whole, tools, options)
    if (found := template.first_end(rest)) is not None:
        at, end = found
        words, last = rest[:at], [template.ends[end]]
    else:
        # The template writes no end token, so the engine stops at any of them: take the smallest id.
        words, last = _without_frame(template, rest, options), sorted(template.end_ids)[:1]
    return [*continuation(template.tokenizer, template.ids(asked), asked, words), *last]


def continuation(tokenizer: Tokenizer, context: Sequence[int], text: str, words: str) -> list[int]:
    """Return the tokens of ``words`` after ``text``, whose tokens are ``context``. Raises ChatRefused.

    Both texts are encoded together and the context is cut off. If a token spans the boundary, the words are encoded
    alone.
    """
    try:
        whole = tokenizer.encode(text + words)
        if whole[: len(context)] == list(context):
            return whole[len(context) :]
        return tokenizer.encode(words)
    except ValueError as error:
        raise ChatRefused(FIELD, str(error)) from None


def _text_after_prompt(asked: str, whole: str, answer: Message) -> str | None:
    """Return the text that follows the generation prompt; None if ``whole`` does not continue ``asked``.

    If the generation prompt opens the reasoning, and the template leaves reasoning out, the answer's reasoning is
    added. Raises ChatRefused if the answer then has none.
    """
    if whole.startswith(asked):
        return whole[len(asked) :]
    head, opens, tail = asked.rpartition(THINK)
    if not opens or tail.strip() or not whole.startswith(head):
        return None
    thought, rest = answer.get("reasoning_content", "").strip("\n"), whole[len(head) :]
    if not thought:
        problem = f"has no reasoning, and the generation prompt opens it by {THINK}; give the message reasoning_content"
        raise ChatRefused(FIELD, problem)
    return f"{thought}\n{END_THINK}\n\n{rest}"


def _text_after_moved_prompt(
    template: ChatTemplate,
    before: Sequence[Message],
    asked: str,
    whole: str,
    tools: Sequence[Tool],
    options: Mapping[str, Any],
) -> str:
    """Return the text that follows the generation prompt, if an answer changes the text before it.

    Some templates move tools or the system message with the last question. Two answers that begin differently are
    rendered; their texts are equal up to the place where an answer begins. Raises ChatRefused.
    """
    base = template.text(before, tools, options, generate=False)
    others = ({"role": "assistant", "content": word} for word in OTHERS)
    first, second = (template.text([*before, each], tools, options, generate=False) for each in others)
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    head = "".join(letter for letter, _ in equal)
    prompt = asked[len(base) :]
    if not (asked.startswith(base) and head.endswith(prompt) and whole.startswith(head)):
        raise ChatRefused(FIELD, "cannot be placed: the template does not begin it as the generation prompt does")
    return whole[len(head) :]


def _without_frame(template: ChatTemplate, rest: str, options: Mapping[str, Any]) -> str:
    """Remove the frame after an answer that has no end token. Returns the answer's words. Raises ChatRefused."""
    shown = template.text([QUESTION, {"role": "assistant", "content": ANSWER}], (), options, generate=False)
    frame = shown[shown.rfind(ANSWER) + len(ANSWER) :]
    if not rest.endswith(frame):
        raise ChatRefused(FIELD, "cannot be placed: its end is not found in the template's text")
    return rest[: len(rest) - len(frame)]


def _all_text(answer: Message) -> str:
    """Return all text of a message: content, reasoning and calls."""
    calls = answer.get("tool_calls", ())
    return "\n".join([answer["content"], answer.get("reasoning_content", ""), json.dumps(calls, ensure_ascii=False)])
