"""The common side of all dialects: a body becomes a request to the policy, a reply a body or a stream of events.

Invariant: translators are pure, so that the same body and the same replies give the same bytes. A wish of a program
that cannot be met is refused with ChatRefused, which names the field as the program wrote it, before any sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from asyncrl.messages.episodes import ChatReply

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request, understood. ``messages`` and ``tools`` are those of OpenAI's chat completions."""

    messages: list[Body]
    tools: list[Body] = field(default_factory=list)
    template_options: Body = field(default_factory=dict)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    ignored: list[str] = field(default_factory=list)
    """Fields that are set and do nothing: the run's own values hold."""
    relaxed: list[str] = field(default_factory=list)
    """Fields that would constrain sampling, and do not."""
    echo: Body = field(default_factory=dict)
    """Fields of the request that its reply repeats."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The identity of a reply: number, model and time."""

    number: str
    """Name of the reply within its session, behind the prefix of its dialect."""
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
    """The field that is wrong."""


class ReplyStream(Protocol):
    """The event stream of one reply: ``text`` any number of times, then ``end`` or ``failed``, once."""

    def text(self, choice: int, text: str) -> bytes:
        """More of the content of a choice, from the beginning on and without gaps."""

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The end of the stream: everything that was not sent yet. Each reply's content begins with the texts of its
        choice.
        """

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that has failed."""


class Dialect(Protocol):
    """One HTTP API."""

    def parse(self, body: Body) -> ChatRequest:
        """The request that a body holds. Raises ChatRefused."""

    def reply(self, asked: ChatRequest, stamp: Stamp, replies: Sequence[ChatReply]) -> Body:
        """The body of the whole answer."""

    def events(self, asked: ChatRequest, stamp: Stamp) -> ReplyStream:
        """A new stream."""

    def failure(self, failure: Failure) -> Body:
        """The body of an error."""


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
