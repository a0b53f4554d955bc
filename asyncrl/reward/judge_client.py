"""The HTTP client under the ``openai`` package, for one judge.

Invariants: a request has the configured key and no other credential; in particular, it has nothing of the ``OPENAI_*``
variables. An answer takes no more than MOST_BYTES. No redirect is followed, so the key reaches no other host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai

MOST_BYTES = 4 << 20
"""Longest body of an answer. The body of a failed request is cut there."""


class AnswerRefused(openai.OpenAIError):  # type: ignore[misc]
    """The answer is too long or compressed. The ``openai`` package neither wraps this error nor tries again."""


class JudgeClient(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
    """Sends requests with ``key``, or with none if it is empty.

    ``on_request`` receives the bytes of a request before it is sent, and whether it is sent again. ``on_end`` receives
    the seconds of each request, from its start to the end of its answer, to its failure or to its cancellation.
    """

    def __init__(self, key: str, *, on_request: Callable[[int, bool], None], on_end: Callable[[float], None]) -> None:
        super().__init__(follow_redirects=False)
        self._on_request, self._on_end = on_request, on_end
        # A compressed answer could be far longer than what is received.
        self._sent = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._sent["Authorization"] = f"Bearer {key}"

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """The answer, with its body."""
        self._on_request(len(request.content), request.headers.get("x-stainless-retry-count", "0") != "0")
        # The openai package adds headers from OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS.
        sent = self.build_request(
            request.method, request.url, content=request.content, headers=self._sent, extensions=request.extensions
        )
        began = time.monotonic()
        try:
            response = await super().send(sent, stream=True, **options)
            try:
                body = await _read(response)
            finally:
                await response.aclose()
        finally:
            self._on_end(time.monotonic() - began)
        # The openai package looks for its own headers in the request.
        return type(response)(response.status_code, headers=response.headers, content=body, request=request)


async def _read(response: Any) -> bytes:
    """The body of an answer. Raises AnswerRefused. The body of a failed request is only part of a reason."""
    if response.headers.pop("Content-Encoding", "identity") != "identity":
        if response.is_success:
            raise AnswerRefused("a compressed answer, although the request excludes compression")
        return b""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MOST_BYTES:
            if response.is_success:
                raise AnswerRefused(f"an answer of more than {MOST_BYTES} bytes")
            break
    return bytes(body[:MOST_BYTES])
