"""The part that all dialects share. A *dialect* is an HTTP API whose requests and answers are translated here.

A request's body becomes a ChatRequest, and the policy's reply becomes a body or a stream of events. Invariant:
translators are pure, so that the same body and the same replies give the same bytes.

Each field of a body has a treatment. Only a harmless field, without an effect on the answer, is ignored silently. A
field that would change probabilities, such as temperature, is ignored with a notice: the learner's log-probs are those
of the run's sampling. A field that would exclude tokens, such as a schema, is relaxed with a notice: sampling stays
free, because the learner excludes no token. A field that cannot be served, or is unknown, is refused before any
sampling, with ChatRefused. The error names the field as the program wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from asyncrl.core.errors import ChatRefused
from asyncrl.messages.episodes import ChatReply

Body = dict[str, Any]
LARGEST = (1 << 63) - 1
"""Largest whole number that fits into a message between actors."""
Treatment = Literal["honoured", "harmless", "ignored", "relaxed", "refused"]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request in the form that all dialects share. ``messages`` and ``tools`` are those of OpenAI's chat
    completions."""

    messages: list[Body]
    tools: list[Body] = field(default_factory=list)
    template_options: Body = field(default_factory=dict)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    ignored: list[str] = field(default_factory=list)
    """Names of fields that are set and do nothing: the run's own values hold."""
    relaxed: list[str] = field(default_factory=list)
    """Names of fields that are set and would constrain sampling, but do not."""
    echo: Body = field(default_factory=dict)
    """Fields of the request that its reply repeats."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The identity of a reply: number, model and time."""

    number: str
    """Id of the reply within its session, without the prefix of its dialect."""
    model: str
    created: int
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An answer that is an error. ``status`` is HTTP's."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    """Name of the field that is wrong; None if no single field is."""


class ReplyStream(Protocol):
    """Makes the events of one streamed reply: ``text`` any number of times, then ``end`` or ``failed``, once."""

    def text(self, choice: int, text: str) -> bytes:
        """Return the events for more content of a choice; the texts of a choice come in order and without gaps."""

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """Return the events for content that was not sent yet, and for the end of the stream.

        The content of each reply begins with the texts of its choice.
        """

    def failed(self, failure: Failure) -> bytes:
        """Return the last event of a stream that has failed."""


class Dialect(Protocol):
    """The translator of one HTTP API."""

    def parse(self, body: Body) -> ChatRequest:
        """Check the fields of a body and translate it into a request. Raises ChatRefused."""

    def reply(self, asked: ChatRequest, stamp: Stamp, replies: Sequence[ChatReply]) -> Body:
        """Return the body of the whole answer."""

    def events(self, asked: ChatRequest, stamp: Stamp) -> ReplyStream:
        """Return a new stream for the answer."""

    def failure(self, failure: Failure) -> Body:
        """Return the body of an error."""


def error_type(status: int) -> str:
    """The class of errors that both OpenAI and Anthropic have for ``status``."""
    types = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    return types.get(status, "invalid_request_error" if status < 500 else "api_error")


def openai_failure(failure: Failure) -> Body:
    """An error in the form of OpenAI's APIs."""
    error = {
        "message": failure.message,
        "type": error_type(failure.status),
        "param": failure.param,
        "code": failure.code,
    }
    return {"error": error}


def event(data: Body, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True)
class Field:
    """Treatment of a field. Its ``neutral`` values, and None, ask for nothing, so they pass without a notice."""

    treatment: Treatment
    neutral: tuple[Any, ...] = ()
    problem: str = "is not supported here"
    """Text of the error if the field is refused."""


HONOURED, HARMLESS, IGNORED = Field("honoured"), Field("harmless"), Field("ignored")
REFUSED = Field("refused", neutral=(False, 0, {}, []))
STRICT = Field("relaxed", neutral=(False,))
"""Treatment of a request for tool calls that follow their schema."""
PLAIN_TEXT = Field("relaxed", neutral=({"type": "text"},))
"""Treatment of a request for an answer of a certain form, such as a JSON schema."""
STATEFUL = Field("refused", problem="is not supported here: send the whole conversation with each request")

SAMPLING = {
    "temperature": IGNORED,
    "top_p": Field("ignored", neutral=(1,)),
    "top_k": Field("ignored", neutral=(0, -1)),
    "min_p": Field("ignored", neutral=(0,)),
    "seed": IGNORED,
    "frequency_penalty": Field("ignored", neutral=(0,)),
    "presence_penalty": Field("ignored", neutral=(0,)),
    "repetition_penalty": Field("ignored", neutral=(1,)),
}
BOOKKEEPING = dict.fromkeys(
    (
        *("metadata", "user", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    ),
    HARMLESS,
)
CONSTRAINTS = {
    "tools.strict": STRICT,
    "tool_choice": Field("relaxed", neutral=("auto", "none")),
    "parallel_tool_calls": Field("relaxed", neutral=(True,)),
}
OURS = dict.fromkeys(("model", "stream", "tools", "chat_template_kwargs"), HONOURED)
"""Fields that all dialects take."""
CHAT_COMPLETIONS = {
    **OURS,
    **SAMPLING,
    **BOOKKEEPING,
    **CONSTRAINTS,
    **dict.fromkeys(("messages", "max_tokens", "max_completion_tokens", "stop", "n", "stream_options"), HONOURED),
    **dict.fromkeys(("reasoning_effort", "verbosity"), IGNORED),
    "response_format": PLAIN_TEXT,
    "modalities": Field("refused", neutral=(["text"],), problem="can only be ['text']"),
    **dict.fromkeys(("logit_bias", "logprobs", "top_logprobs", "audio", "prediction", "moderation"), REFUSED),
    "web_search_options": REFUSED,
    "functions": Field("refused", neutral=([],), problem="is superseded: use tools"),
    "function_call": Field("refused", neutral=("none", "auto"), problem="is superseded: use tool_choice"),
}
RESPONSES = {
    **OURS,
    **SAMPLING,
    **BOOKKEEPING,
    **CONSTRAINTS,
    **dict.fromkeys(("input", "instructions", "max_output_tokens"), HONOURED),
    **dict.fromkeys(("stream_options", "reasoning.summary", "reasoning.generate_summary"), HARMLESS),
    **dict.fromkeys(("text.verbosity", "reasoning.effort", "max_tool_calls"), IGNORED),
    "text.format": PLAIN_TEXT,
    # Reasoning that is sent back does nothing: the rollouter has the sampled tokens.
    "include": Field("refused", neutral=([], ["reasoning.encrypted_content"])),
    "truncation": Field("refused", neutral=("disabled",)),
    **dict.fromkeys(("top_logprobs", "background", "context_management", "moderation", "prompt"), REFUSED),
    **dict.fromkeys(("previous_response_id", "conversation"), STATEFUL),
}
MESSAGES = {
    **OURS,
    **SAMPLING,
    **dict.fromkeys(("messages", "system", "max_tokens", "stop_sequences"), HONOURED),
    **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo", "tool_choice.name"), HARMLESS),
    "tools.strict": STRICT,
    "messages.is_error": Field("ignored", neutral=(False,)),
    "tool_choice.type": Field("relaxed", neutral=("auto", "none")),
    "tool_choice.disable_parallel_tool_use": Field("relaxed", neutral=(False,)),
    "thinking": Field("ignored", neutral=({"type": "disabled"},)),
    "output_config.effort": IGNORED,
    **dict.fromkeys(("output_config.format", "output_format"), PLAIN_TEXT),
    **dict.fromkeys(("container", "context_management", "mcp_servers"), REFUSED),
}


def review(body: Body, table: dict[str, Field], *, nested: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Check the fields of ``body`` against ``table``. Returns the names of ignored fields and those of relaxed ones.

    A field that is null, or has a value that changes nothing (``Field.neutral``), passes. Fields in ``nested`` are
    objects, whose own fields are in the table as OUTER.INNER. Raises ChatRefused.
    """
    flat: Body = {}
    for name, value in body.items():
        if name in nested and isinstance(value, dict):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    names_by_treatment: dict[Treatment, list[str]] = {"ignored": [], "relaxed": []}
    for name, value in flat.items():
        known = table.get(name)
        if value is None or (known is not None and value in known.neutral):
            continue
        if known is None:
            raise ChatRefused(name, "is not a field that is known here")
        if known.treatment == "refused":
            raise ChatRefused(name, known.problem)
        if known.treatment in names_by_treatment:
            names_by_treatment[known.treatment].append(name)
    return sorted(names_by_treatment["ignored"]), sorted(names_by_treatment["relaxed"])


def strict_tools(body: Body) -> Body:
    """Return ``tools.strict`` as a field of its own: whether one of the tools, or its function, is strict."""
    listed = body.get("tools")
    tools = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    own = [each["function"] if isinstance(each.get("function"), dict) else each for each in tools]
    return {"tools.strict": any(each.get("strict") is True for each in own)}


def flag(body: Body, name: str) -> bool:
    """Read a field that is true or false, and false by default. Raises ChatRefused."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ChatRefused(name, "must be true or false")
    return bool(value)


def whole(body: Body, name: str, *, most: int = LARGEST) -> int | None:
    """Read a field that is a whole number from 1 to ``most``; None if it is unset. Raises ChatRefused."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ChatRefused(name, f"must be a whole number from 1 to {most}")
    return value


def mapping(body: Body, name: str) -> Body:
    """Read a field that is an object, and empty by default. Raises ChatRefused."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ChatRefused(name, "must be an object")
    return value


def objects(body: Body, name: str) -> list[Body]:
    """Read a field that is a list of objects, and empty by default. Raises ChatRefused."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ChatRefused(name, "must be a list of objects")
    return value


def string(body: Body, name: str, where: str) -> str:
    """Read a required field that is text; ``where`` is the field's full name for the error. Raises ChatRefused."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ChatRefused(where, "must be text" if name in body else "is missing")
    return value


def strings(body: Body, name: str) -> list[str]:
    """Read a field that is text or a list of texts, and empty by default. Raises ChatRefused."""
    value = body.get(name)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each for each in listed):
        raise ChatRefused(name, "must be text or a list of texts, without empty ones")
    return listed


def joined_text(content: object, where: str, types: tuple[str, ...] = ("text",)) -> str:
    """Read a message's content, which is text, a list of parts or null, as one text; null is empty.

    Raises ChatRefused for a part whose type is not in ``types``; ``where`` is the content's name for the error.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ChatRefused(where, "must be text, or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types:
            raise ChatRefused(f"{where}[{at}]", f"is a part of type {kind!r}; the policy takes text alone")
        texts.append(string(part, "refusal" if kind == "refusal" else "text", f"{where}[{at}].text"))
    return "\n".join(texts)
