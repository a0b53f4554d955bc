"""Templates written for the tests of conversations, a policy that samples at random, and agents that call it."""

import json
from dataclasses import dataclass, field

import numpy as np

from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import make_sets

START, END, THINK, THOUGHT, CALL, CALLED = range(1, 7)
NEWLINE = ord("\n")
MERGES = {"ab": 300, "ba": 301}
"""Encoding uses these if it can; the policy does not always."""


def encode(text):
    ids, place = [], 0
    while place < len(text):
        pair = MERGES.get(text[place : place + 2])
        ids.append(pair or ord(text[place]))
        place += 2 if pair else 1
    return ids


def by_character(text):
    """Ids as encoding never gives them, and a policy may."""
    return [ord(character) for character in text]


def arguments_text(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


class ChatML:
    """<start>role NEWLINE content <end> NEWLINE; calls and reasoning between marks of their own."""

    end = (END,)
    seam = (NEWLINE,)
    strips_thinking = False
    goes_on_after_a_cut = True

    def render(self, messages, tools, options):
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        ids = encode(json.dumps(tools, sort_keys=True)) if tools else []
        for index, message in enumerate(messages):
            ids += self._message(message, thinking=index > last_user or not self.strips_thinking)
        return [*ids, *self._begin("assistant")]

    def extension(self, messages, tools, options, *, last_ids):
        if self.strips_thinking and THINK in last_ids and any(m["role"] == "user" for m in messages):
            return None
        seam = [*self.seam]
        if tuple(last_ids[len(last_ids) - len(self.end) :]) != self.end:
            if not self.goes_on_after_a_cut:
                return None
            seam = [*self.end, *seam]
        for message in messages:
            seam += self._message(message, thinking=True)
        return [*seam, *self._begin("assistant")]

    def answer(self, content, reasoning, calls, encode=encode):
        """The ids of an answer, its end among them."""
        thought = [THINK, *encode(reasoning), THOUGHT] if reasoning else []
        called = [id for name, arguments in calls for id in (CALL, *encode(f"{name} {arguments}"), CALLED)]
        return [*thought, *encode(content), *called, *self.end]

    def _begin(self, role):
        return [START, *encode(role), NEWLINE]

    def _message(self, message, thinking):
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(function["name"], arguments_text(function["arguments"])) for function in functions]
        reasoning = message.get("reasoning_content") if thinking else None
        return [*self._begin(message["role"]), *self.answer(message["content"] or "", reasoning, calls), *self.seam]


class StripsThinking(ChatML):
    """Reasoning before the last user message is left out, as Qwen3 does."""

    strips_thinking = True


class NoEnd(ChatML):
    """Answers end without a token of their own."""

    end = ()


class CutIsTheEnd(ChatML):
    """It cannot continue an answer without its end."""

    goes_on_after_a_cut = False


TEMPLATES = [ChatML, StripsThinking, NoEnd, CutIsTheEnd]


def user(text):
    return {"role": "user", "content": text}


def tool(call, text):
    return {"role": "tool", "tool_call_id": call, "content": text}


@dataclass
class Call:
    """One call, as the engine saw it."""

    submitted: list
    tokens: list
    logprobs: list
    versions: list
    untrained: bool
    prompt: object
    messages: list
    """As the agent sent them."""
    tools: list
    extension: bool
    """Whether it was not rendered as a whole."""
    longest_path: int
    """The longest of those that the submission started with, at that time."""
    node: object = None


@dataclass
class Player:
    """Calls of a conversation, with what the engine gets and returns."""

    conversation: object
    renderer: object
    calls: list = field(default_factory=list)
    _asked: dict = field(default_factory=dict)
    _score: float = 0.0

    def ask(self, messages, tools=(), options=None):
        """Up to the prompt."""
        tools, options = list(tools), options or {}
        resolved = self.conversation.resolve(messages, tools, options)
        extension = None
        if resolved.extends:
            parent = resolved.parent
            extension = self.renderer.extension(resolved.tail, tools, options, last_ids=parent.ids.tolist())
        if extension is not None:
            prompt = self.conversation.extend(resolved, extension)
        else:
            prompt = self.conversation.branch(resolved, self.renderer.render(resolved.messages, tools, options))
        longest = max(
            (node.length for node in self.conversation.nodes if begins(prompt.ids, node.path_ids().tolist())), default=0
        )
        self._asked[id(prompt)] = messages, tools, extension is not None, longest
        return prompt

    def answer(self, prompt, content="", *, reasoning=None, calls=(), versions=(3,), untrained=False, cut=False, **how):
        """From the engine to the node. ``versions`` are given to the tokens in turn, in blocks."""
        tokens = self.renderer.answer(content, reasoning, calls, **how)
        if cut and len(self.renderer.end):
            tokens = tokens[: -len(self.renderer.end)]
        tokens = tokens or [ord("a")]
        block = -(-len(tokens) // len(versions))
        each = [versions[i // block] for i in range(len(tokens))]
        logprobs = []
        for _ in tokens:
            # Different in float32, too, and so they name the token.
            self._score -= 2.0**-10
            logprobs.append(self._score)
        above = max(0, prompt.parent.length - 1) if prompt.parent else 0
        routes = np.array([*prompt.ids, *tokens], np.uint16)[above:-1].reshape(-1, 1, 1)
        call = Call(prompt.ids, tokens, logprobs, each, untrained, prompt, *self._asked[id(prompt)])
        call.node = self.conversation.commit(
            prompt,
            tokens=tokens,
            logprobs=logprobs,
            spans=spans_of(each),
            sets=make_sets([[token] * (1 + place % 2) for place, token in enumerate(tokens)]),
            finish="length" if cut else "stop",
            content=content,
            reasoning=reasoning,
            calls=calls,
            untrained=untrained,
            # The route of a token is its id.
            routes=routes,
        )
        self.calls.append(call)
        return call.node

    def chat(self, messages, content="", tools=(), options=None, **answer):
        """The whole call."""
        return self.answer(self.ask(messages, tools, options), content, **answer)


def begins(ids, prefix):
    return ids[: len(prefix)] == prefix


def spans_of(versions):
    spans = []
    for place, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, place + 1)
        else:
            spans.append(VersionSpan(version, place, place + 1))
    return spans


def echo(node, *, reasoning=False, arguments=str, strip=False):
    """An answer as a framework sends it back."""
    message = dict(node.message)
    if not reasoning:
        message.pop("reasoning_content", None)
    if strip:
        message["content"] = message["content"].strip()
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": arguments(c["function"]["arguments"])}} for c in calls
        ]
    return message


def reserialised(arguments):
    return json.dumps(json.loads(arguments), indent=1)
