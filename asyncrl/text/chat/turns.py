"""How a template writes an answer and the text behind it, learnt from a rendered conversation. Pure.

A conversation with made-up words in known places is rendered twice: up to the question, and with the answer and the
rest. If the first text begins the second, the rest splits into the words that the model samples, the token that ends
them, and the context of the next answer.

Raises ChatRefused if the template refuses the conversation, and returns the reason if the answer is not found in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.text.chat.messages import Message, Tool
from asyncrl.text.chat.parsers import END_THINK, THINK
from asyncrl.text.chat.template import ChatTemplate

ANSWER = "qkzanswer"
THOUGHT = "qkzthought"
NEXT = "qkznext"
"""Words that no template holds."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """An answer in its context, in text: ``asked + sampled + end + after`` is the context of the next answer."""

    asked: str
    """Text up to the model's answer."""
    sampled: str
    """Words that the model would have sampled, without the token that ends them."""
    end: str
    """The token that ends an answer; empty if the template writes none that the model samples."""
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
    """The turn, or the reason why a single render does not continue the model's answer. Raises ChatRefused.

    The content of ``answer`` begins with ANSWER; without content ANSWER is the last word of its calls. Its reasoning is
    THOUGHT.
    """

    def text(messages: Sequence[Message], *, generate: bool = True) -> str:
        return template.text(messages, tools, options, generate=generate)

    if any(word in str(message) for message in tail for word in (ANSWER, THOUGHT)):
        return f"a message holds the word {ANSWER} or {THOUGHT}, which stands for the model's"
    base, asked, whole = text(before, generate=False), text(before), text([*before, answer, *tail])
    if not asked.startswith(base):
        return "the generation prompt changes what stands before it"
    if not whole.startswith(base):
        return "what comes later changes what stands before the answer"
    prompt, rest = asked[len(base) :], whole[len(base) :]
    head = _common_head(prompt, _plain_head(text, before, tail, base))
    if head is None or not rest.startswith(head):
        return "an answer in the context does not begin as the generation prompt does"
    excess, rest = prompt[len(head) :], rest[len(head) :]
    # The last occurrence: each of several calls has one.
    place = rest.rfind(ANSWER)
    if place < 0:
        return "the template leaves the answer out"
    dropped = ""
    # The generation prompt may begin the answer, as by <think>; a template may leave that out of earlier answers.
    if rest.startswith(excess):
        rest, place = rest[len(excess) :], place - len(excess)
    else:
        dropped = excess
    thought = _dropped_thought(excess, "reasoning_content" in answer, rest[:place], dropped != "")
    words = answer["content"] or ANSWER
    if not rest.startswith(words, place):
        # The template trims the words.
        words = ANSWER
    found = _split(template, rest, place + len(words), text, before, answer)
    if isinstance(found, str):
        return found
    sampled, end, after = found
    return ChatTurn(asked, thought + sampled, end, after, dropped + thought)


def _plain_head(text: Any, before: Sequence[Message], tail: Sequence[Message], base: str) -> str:
    """Text of the template before the words of an answer without reasoning or calls."""
    plain: Message = {"role": "assistant", "content": ANSWER}
    later = [message for message in tail if message["role"] != "tool"] or [{"role": "user", "content": NEXT}]
    try:
        whole: str = text([*before, plain, *later])
    except ValueError:
        whole = text([*before, plain], generate=False)
    return whole[len(base) : whole.find(ANSWER)]


def _common_head(prompt: str, head: str) -> str | None:
    if prompt.startswith(head):
        return head
    return prompt if head.startswith(prompt) else None


def _dropped_thought(excess: str, thinks: bool, lead: str, is_dropped: bool) -> str:
    """Reasoning that the model samples but the template leaves out of ``lead``, the text before the answer."""
    opened = THINK in excess and END_THINK not in excess.rpartition(THINK)[2]
    if THOUGHT in lead or not (thinks or (opened and is_dropped)):
        return ""
    return f"{'' if opened else THINK + chr(10)}{THOUGHT}\n{END_THINK}\n\n"


def _split(
    template: ChatTemplate, rest: str, place: int, text: Any, before: Sequence[Message], answer: Message
) -> tuple[str, str, str] | str:
    """The words of the answer, its end, and the text after it; ``place`` follows the last known word of the answer."""
    limit = rest.find(NEXT, place)
    behind = rest[place : limit if limit >= 0 else len(rest)]
    ends = [(at, -len(end), end) for end in template.ends if (at := behind.find(end)) >= 0]
    if ends:
        # The first end; of several at one place the longest.
        at, _, end = min(ends)
        return rest[: place + at], end, rest[place + at + len(end) :]
    if not answer.get("tool_calls"):
        return rest[:place], "", rest[place:]
    # Answers without calls show where the call ends and the frame of the answer begins.
    plain = text([*before, {"role": "assistant", "content": ANSWER}], generate=False)
    called = text([*before, answer], generate=False)
    frame = plain[plain.rfind(ANSWER) + len(ANSWER) :]
    written = called[called.rfind(ANSWER) + len(ANSWER) :]
    if not written.endswith(frame) or not rest[place:].startswith(written):
        return "the end of the call is not found"
    end_of_call = place + len(written) - len(frame)
    return rest[:end_of_call], "", rest[end_of_call:]
