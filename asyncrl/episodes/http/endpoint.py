"""The policy for programs: the APIs of OpenAI and Anthropic over HTTP, on this host's loopback.

Invariant: a request reaches only the conversation of its own key, and no key is in a log. A request is checked first.
Then it waits as long as the policy needs, and signs of life keep its connection open. So no client sees a pause, new
weights or the death of an engine. A client that neither reads nor sends is closed.

A failure before the first byte of the answer is an HTTP status; later it is a closed connection or an event of the
stream. A call of an episode that is over gets status 400, so that no client tries again. A request is a marked retry if
it has an Idempotency-Key or its client counts a retry.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from asyncrl.core.errors import ChatRefused, EpisodeOver, WireError
from asyncrl.episodes.http.anthropic_messages import AnthropicMessages
from asyncrl.episodes.http.calls import USUAL, Core, Patience, PolicyCalls, TooManyCalls
from asyncrl.episodes.http.chat_completions import ChatCompletions
from asyncrl.episodes.http.dialect import Body, ChatRequest, Dialect, Failure
from asyncrl.episodes.http.http_answer import CutConnection, HttpAnswer, send
from asyncrl.episodes.http.responses import Responses
from asyncrl.messages.reward import BadOutcome, read_number
from asyncrl.observe.logging import Logger
from asyncrl.rpc.services import Notify

LOOPBACK = "127.0.0.1"
SHUTDOWN_S = 0.2
"""Seconds that open answers have when the endpoint closes."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
KEY = re.compile(r"[0-9a-f]{32,64}")
SERVED: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
}
REWARD = ("/asyncrl/reward", "/v1/asyncrl/reward")
"""Paths for rewards; a client with the base URL of OpenAI's API finds the second."""
MOST_COUNTED = 256
"""Number of counted names after which further refused fields share one: programs choose the names of fields."""
COMPLETION = re.compile(r"(?:chatcmpl-|resp_|msg_)?(call)?(\d{1,18})", re.ASCII)
"""The id of an answer: with ``call`` it has the number of the call, otherwise that of the node."""
LARGE_BODY = 256 << 10
"""Size from which on a body is decoded in a thread (bytes)."""
_RAW_OBJECT, _RAW_LIST = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(list[msgspec.Raw])
UNTRAINED = "x-asyncrl-untrained"
"""Header of a request for an untrained answer."""


class RejectedRequest(Exception):
    """A request that is answered with an error before any call."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class PolicyEndpoint:
    """The HTTP server of a host's sessions. ``counts`` counts events by name."""

    def __init__(
        self,
        core: Core,
        *,
        max_request_bytes: int,
        notify: Notify,
        log: Logger,
        patience: Patience = USUAL,
    ) -> None:
        self._core = core
        self._max_request_bytes = max_request_bytes
        self._notify = notify
        self._log = log
        self._patience = patience
        self.counts: Counter[str] = Counter()
        """Number of events by name: requests by path, and what happened to them."""
        self._first_texts: dict[str, str] = {}
        """By name of an event: the text of the notice at its first time."""
        self.calls = PolicyCalls(core, patience, self.counts, log)
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Begin to listen. Returns the URL without a path; the base URL for OpenAI's clients ends in /v1."""
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            # The lines of aiohttp's logger quote requests.
            logger=_silent_logger(),
            keepalive_timeout=self._patience.client_timeout_s,
            lingering_time=min(10.0, self._patience.client_timeout_s),
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        return f"http://{LOOPBACK}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Close every connection, and cancel the running calls."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self.calls.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Each kind of error becomes an answer with a status, or cuts the connection."""
        # Without a buffer here, a write lasts until the kernel has all bytes, so a slow reader is noticed.
        if request.transport is not None:
            request.transport.set_write_buffer_limits(0)
        # Errors on all other paths have the form of chat completions.
        dialect = SERVED.get(request.path, SERVED["/v1/chat/completions"])
        try:
            return await self._route(request, dialect)
        except RejectedRequest as rejected:
            return await self._send(request, dialect.failure(rejected.failure), rejected.failure.status)
        except web.RequestPayloadError:
            raise ConnectionResetError from None
        except CutConnection as cut:
            self.counts[f"cut/{cut.reason}"] += 1
            raise self._abort(request) from None
        except WireError:
            self._log.exception("a request of an episode failed", path=request.path)
            failure = Failure(status=500, message="the rollouter could not be asked")
            return await self._send(request, dialect.failure(failure), failure.status)
        except ConnectionError:
            raise
        except Exception:
            self._log.exception("a request of an episode failed", path=request.path)
            raise self._abort(request) from None

    def _abort(self, request: web.BaseRequest) -> ConnectionError:
        """Cut the connection. Returns an error to raise, by which the server sees a connection closed by the client."""
        if request.transport is not None:
            request.transport.abort()
        return ConnectionResetError("aborted")

    async def _route(self, request: web.BaseRequest, dialect: Dialect) -> web.StreamResponse:
        """Check path, HTTP method and key, and serve the request. Raises RejectedRequest."""
        routes: dict[str, tuple[str, Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]]] = {
            "/v1/models": ("GET", self._models),
            **dict.fromkeys(REWARD, ("POST", self._reward)),
            **dict.fromkeys(SERVED, ("POST", self._chat)),
        }
        method, serve = routes.get(request.path, ("", self._models))
        if not method:
            self.counts["unknown_paths"] += 1
            raise RejectedRequest(Failure(status=404, message=f"this path is not served here; {', '.join(routes)} are"))
        if request.method != method:
            raise RejectedRequest(Failure(status=405, message=f"{request.path} is for {method} alone"))
        return await serve(request, self._key(request))

    def _key(self, request: web.BaseRequest) -> str:
        """Read the session's key from the headers. Without such a session, counts the request and raises
        RejectedRequest."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not KEY.fullmatch(key) or not self._core.knows(key):
            self.counts["unauthorized"] += 1
            raise RejectedRequest(
                Failure(status=401, message="this is not the key of an episode", code="invalid_api_key")
            )
        return key

    async def _models(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        name = self._core.model
        model = {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0}
        model |= {"owned_by": "asyncrl", "created_at": "1970-01-01T00:00:00Z"}
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return await self._send(request, listed)

    async def _reward(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """Give a turn the reward in the body, and answer with the id of the rewarded answer."""
        body, _ = await self._read_body(request)
        try:
            value, node = reward_of(body, lambda number: self.calls.node(key, number))
            credited = await self._core.turn_reward(key, node, value)
        except (EpisodeOver, ChatRefused) as error:
            raise RejectedRequest(self._count_failure(error)) from None
        return await self._send(request, {"completion": f"chatcmpl-{credited}", "node": credited, "value": value})

    async def _chat(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """Serve a request for an answer: check it, find or start its call, and send the answer."""
        dialect = SERVED[request.path]
        self.counts[request.path] += 1
        body, identity = await self._read_body(request)
        try:
            asked = dialect.parse(body)
        except ChatRefused as refused:
            raise RejectedRequest(self._count_failure(refused)) from None
        self._count_unmet_fields(asked)
        self.counts["streamed"] += asked.stream
        retried = "Idempotency-Key" in request.headers or _retry_count(request) > 0
        untrained = request.headers.get(UNTRAINED, "").lower() in ("1", "true")
        try:
            call = self.calls.find(key, asked, identity, retried=retried, untrained=untrained)
        except TooManyCalls as error:
            raise RejectedRequest(Failure(status=429, message=str(error), code="too_many_calls")) from None
        answer = HttpAnswer(
            request,
            dialect,
            asked,
            call,
            model=self._core.model,
            count_failure=self._count_failure,
            patience=self._patience,
        )
        with self.calls.listening(call) as news:
            response = await (answer.stream(news) if asked.stream else answer.whole(news))
            call.delivered = True
        return response

    async def _read_body(self, request: web.BaseRequest) -> tuple[Body, bytes]:
        """Read the body. Returns it as an object, with the digest of the request, by which a retry is recognised.

        Raises RejectedRequest, CutConnection.
        """
        raw = await self._read_bytes(request)
        salt = f"{request.path}\n{request.headers.get('Idempotency-Key', '')}\n"
        try:
            if len(raw) < LARGE_BODY:
                return msgspec.json.decode(raw, type=Body), digest(raw, salt)
            return await asyncio.to_thread(_decoded_in_parts, raw), await asyncio.to_thread(digest, raw, salt)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = f"the body is no JSON object: {error}"
            raise RejectedRequest(Failure(status=400, message=problem, code="invalid_json")) from None

    async def _read_bytes(self, request: web.BaseRequest) -> bytearray:
        """Read the body as bytes. Raises RejectedRequest if it is too long, CutConnection if it comes too slowly."""
        most = self._max_request_bytes
        raw = bytearray()
        try:
            if (request.content_length or 0) <= most:
                # A client may ask before it sends. For a body that is too long, it gets no 100 Continue.
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(CONTINUE)
                    # Otherwise aiohttp takes these bytes for the beginning of the response, and sends no other.
                    request.writer.output_size = 0
                async with asyncio.timeout(self._patience.client_timeout_s):
                    async for chunk in request.content.iter_any():
                        raw += chunk
                        if len(raw) > most:
                            break
                    else:
                        return raw
        except TimeoutError:
            raise CutConnection("slow sender") from None
        self.counts["too_large"] += 1
        message = f"the request is longer than {most} bytes; episode.max_request_bytes sets the limit"
        raise RejectedRequest(Failure(status=413, message=message, code="request_too_large"))

    async def _send(self, request: web.BaseRequest, body: Body, status: int = 200) -> web.StreamResponse:
        return await send(request, body, status, timeout_s=self._patience.client_timeout_s)

    def _count_unmet_fields(self, asked: ChatRequest) -> None:
        """Count the ignored and the relaxed fields of a request, and notify the user of each."""
        for name in asked.ignored:
            self._count(
                f"ignored/{name}",
                f"an agent sets {name} in its requests; the field has no effect, because the run's own sampling holds",
            )
        for name in asked.relaxed:
            self._count(
                f"relaxed/{name}",
                f"an agent constrains its answers by {name}; they are sampled without, because constrained "
                "samples cannot be trained: the agent must accept an answer that does not comply",
            )

    def _count(self, name: str, text: str) -> None:
        """Count an event of this name, and notify the user with the text of its first occurrence and the count."""
        self.counts[name] += 1
        self._notify(f"agents: {name}", self._first_texts.setdefault(name, text), count=self.counts[name])

    def _count_failure(self, error: Exception) -> Failure:
        """Count an error of a call, and return the failure that the client receives for it.

        A refusal is counted by its field and shown to the user. Beyond MOST_COUNTED names, further fields share one.
        """
        if isinstance(error, EpisodeOver):
            self.counts["over"] += 1
            return Failure(status=400, message=str(error), code=EpisodeOver.code)
        if isinstance(error, ChatRefused):
            name = _outermost_name(error.field)
            if f"refused/{name}" not in self.counts and len(self.counts) >= MOST_COUNTED:
                name = "other fields"
            text = _shortened(str(error))
            self._count(f"refused/{name}", f"an agent's request was refused (400): {text}")
            return Failure(status=400, message=text, code=ChatRefused.code, param=_shortened(error.field))
        return Failure(status=500, message="the policy could not be asked")


def _retry_count(request: web.BaseRequest) -> int:
    # The clients of OpenAI and Anthropic count their retries in it.
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if re.fullmatch(r"\d{1,6}", count, re.ASCII) else 0


def _outermost_name(field: str) -> str:
    """The outermost name of a field (``messages[3].role`` is ``messages``), cut to a bounded length."""
    return re.split(r"[.\[]", field)[0][:64]


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _silent_logger() -> logging.Logger:
    logger = logging.Logger("asyncrl.episodes.http")
    logger.disabled = True
    return logger


def digest(raw: bytearray, salt: str) -> bytes:
    """Hash a body and a salt."""
    made = hashlib.blake2b(salt.encode(errors="surrogateescape"), digest_size=16)
    made.update(raw)
    return made.digest()


def reward_of(body: Body, node_of_call: Callable[[int], int | None]) -> tuple[float, int | None]:
    """Read the body of a reward. Returns its value and the node that gets it; None stands for the newest answer.

    ``node_of_call`` gives the node for a call's number, or None if that is unknown. Raises ChatRefused.
    """
    for name in body.keys() - {"value", "completion"}:
        raise ChatRefused(name, "is not a field that is known here")
    value, completion = body.get("value"), body.get("completion")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ChatRefused("value", "must be a finite number")
    try:
        reward = read_number(value, "is")
    except BadOutcome as error:
        raise ChatRefused("value", str(error)) from None
    if completion is None:
        return reward, None
    match = COMPLETION.fullmatch(completion) if isinstance(completion, str) else None
    node: int | None = None
    if match is not None:
        is_call, number = match[1], int(match[2])
        node = node_of_call(number) if is_call else number
    if node is None:
        raise ChatRefused("completion", f"{completion!r} is not the id of an answer of this episode")
    return reward, node


def _decoded_in_parts(raw: bytearray) -> Body:
    """Decode a large body element by element, so that other threads can run in between."""
    body: Body = {}
    for name, value in _RAW_OBJECT.decode(raw).items():
        if memoryview(value)[0] == ord("["):
            body[name] = [msgspec.json.decode(each) for each in _RAW_LIST.decode(value)]
        else:
            body[name] = msgspec.json.decode(value)
    return body
