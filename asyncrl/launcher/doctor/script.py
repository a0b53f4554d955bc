"""A scripted policy, which answers without a model: it calls some of the agent's tools once, then answers in text.

Invariant: the same requests get the same answers. An agent that ends only by a tool call, as those of smolagents do,
gets that call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from asyncrl.messages.episodes import Chat
from asyncrl.text.chat.parsers import END_THINK, THINK, write_calls
from asyncrl.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asyncrl.rollouter.serving.generation import PolicyRequest

MOST_CALLED = 4
"""The script calls at most so many tools, and one of ENDS; an agent may declare dozens."""
ENDS = ("final_answer", "submit", "finish", "done")
"""Names of tools that end an episode: the script calls one last."""
CODE_END = "</code>"
"""Stop string of agents that have no tools and run the code in answers."""
DEEPEST = 8
"""Deepest level of a JSON schema for which ``example_of`` makes a value."""
asked: ContextVar[Chat] = ContextVar("asked")
"""The call of the policy that the current task answers; LoneEpisode sets it."""


class Script:
    """Writes the policy's answers in one episode. ``thinks``: each answer begins with reasoning."""

    def __init__(self, *, thinks: bool) -> None:
        self._thinks = thinks
        self._called: set[str] = set()
        self._answer_count = 0

    def answer(self, tools: Sequence[Mapping[str, Any]], *, stop: Sequence[str] = (), thinking: bool = False) -> str:
        """Return the next answer, without its end token.

        ``tools`` are those of the request, ``stop`` its stop strings. ``thinking``: the prompt already ends within the
        reasoning, so the answer does not open it.
        """
        self._answer_count += 1
        reasoning = f"{'' if thinking else THINK}\nThis is thought {self._answer_count}.\n{END_THINK}\n\n"
        return (reasoning if self._thinks else "") + self._text(tools, stop)

    def _text(self, tools: Sequence[Mapping[str, Any]], stop: Sequence[str]) -> str:
        """Return a tool call, a sentence, or code for an agent that runs code.

        Code ends the episode from the second answer on.
        """
        if tool := self._next_tool(tools):
            function = tool["function"]
            self._called.add(function["name"])
            arguments = example_of(function.get("parameters") or {})
            return write_calls([{"function": {"name": function["name"], "arguments": arguments}}])
        answer = f"This is answer {self._answer_count}."
        if tools or CODE_END not in stop:
            return answer
        code = f'final_answer("{answer}")' if self._answer_count > 1 else f'print("{answer}")'
        return f"<code>\n{code}\n{CODE_END}"

    def _next_tool(self, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the tool to call: first up to MOST_CALLED tools, once each, then one of ENDS; None for a sentence."""
        ending = [tool for tool in tools if tool["function"]["name"] in ENDS]
        uncalled = [tool for tool in tools if tool not in ending and tool["function"]["name"] not in self._called]
        if uncalled and len(self._called) < MOST_CALLED:
            return uncalled[0]
        return ending[0] if ending else None


class ScriptedPolicy:
    """The policy of the sessions: takes the place of the engine and answers by a Script."""

    def __init__(self, script: Script, tokenizer: Tokenizer) -> None:
        self._script, self._tokenizer = script, tokenizer

    async def generate(self, request: PolicyRequest) -> None:
        """Fill the response with the tokens of the script's answer, at once."""
        chat, response = asked.get(), request.response
        # The end of the prompt shows whether the template has opened the reasoning.
        prompt = self._tokenizer.decode(request.ids[-64:], keep_special=True)
        thinking = prompt.rfind(THINK) > prompt.rfind(END_THINK)
        text = self._script.answer(chat.tools, stop=chat.stop, thinking=thinking)
        tokens = [*self._tokenizer.encode(text), *sorted(self._tokenizer.eos_ids)[:1]]
        response.submitted(0)
        room = response.remaining
        response.extend(tokens, [0.0] * len(tokens), self._tokenizer.decode)
        request.watch.sampled(response)
        response.end_submission("stop" if len(tokens) <= room else "length")


def example_of(schema: Mapping[str, Any], *, root: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Make a value that a JSON schema allows, with only its required properties; None if the schema is not understood.

    ``root`` is the whole schema, in which references are resolved; ``depth`` is the level of ``schema`` in it.
    """
    root = schema if root is None else root
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if depth > DEEPEST:
        return None
    if "$ref" in schema:
        return example_of(_resolve(root, str(schema["$ref"])), root=root, depth=depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example_of(schema[key][0], root=root, depth=depth + 1)
    type_name = schema.get("type", "object" if "properties" in schema or depth == 0 else None)
    type_name = type_name[0] if isinstance(type_name, list) and type_name else type_name
    if type_name == "object":
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or () if name in properties]
        return {name: example_of(properties[name], root=root, depth=depth + 1) for name in required}
    examples: dict[Any, Any] = {"string": "example", "integer": 1, "number": 1.0, "boolean": True, "array": []}
    return examples.get(type_name)


def _resolve(root: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    """Follow a reference such as "#/$defs/Name" in ``root``; an empty schema if it leads nowhere."""
    value: Any = root
    for part in reference.removeprefix("#/").split("/"):
        value = value.get(part, {}) if isinstance(value, Mapping) else {}
    return value if isinstance(value, Mapping) else {}
