"""The endpoint against clients that break off, dawdle, send nonsense or too much, and against their retries."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from harness import until
from scripted_core import KEY, OTHER_KEY, ScriptedCore, played, reply, serving

from asyncrl.messages.episodes import ChatDelta
from asyncrl.observe.logging import configure_logging

RUN = played
CHAT = "/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
RETRY = {"x-stainless-retry-count": "1"}
LARGE = 8 << 20


@asynccontextmanager
async def http_client(core, **options):
    """Without a deadline of its own, and without connections that it keeps."""
    async with (
        serving(core, **options) as served,
        httpx.AsyncClient(
            base_url=served.url,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client,
    ):
        yield served, client


def request(body=b"", *, length=None):
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {length or len(body)}\r\n"
    )
    return f"{head}\r\n".encode() + body


@asynccontextmanager
async def socket_to(served, sent, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, **options)
    writer.write(sent)
    yield reader, writer
    writer.close()


async def closed(reader):
    """Everything that is sent until the connection closes."""
    async with asyncio.timeout(30):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


class Gate(ScriptedCore):
    """Its calls wait until they are released, and continue the text from before their cancellation."""

    def __init__(self, text="once upon a time"):
        super().__init__(Gate.answer)
        self.open, self.text, self.reported = asyncio.Event(), text, {}

    async def answer(self, call, on_delta):
        node = len(self.asked)
        begun = self.reported.setdefault(call.call, 0)
        for at in range(begun, min(begun + 4, len(self.text))):
            on_delta(ChatDelta(session=call.session, call=call.call, offset=at, text=self.text[at]))
            self.reported[call.call] = at + 1
        await self.open.wait()
        return reply(self.text, node=node)


async def asked_and_left(core, client, body=HI, headers=None, *, times=1):
    """Send the request, and break the connection when the core has it."""
    asking = [asyncio.create_task(client.post(CHAT, json=body, headers=headers)) for _ in range(times)]
    before = len(core.asked)
    await until(lambda: len(core.asked) == before + times, "asked")
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_retry_joins_its_running_call_and_an_equal_request_does_not():
    gate = Gate()
    async with http_client(gate) as (served, client):
        await asked_and_left(gate, client)
        retry = asyncio.create_task(client.post(CHAT, json=HI, headers=RETRY))
        await until(lambda: served.counts["joined"] == 1, "joined")
        other = {"model": "m", "messages": [{"role": "user", "content": "Ho"}]}
        fresh = [
            asyncio.create_task(client.post(CHAT, json=body, headers=headers))
            for body, headers in ((HI, {}), (other, RETRY), (HI, RETRY | {"Authorization": f"Bearer {OTHER_KEY}"}))
        ]
        await until(lambda: len(gate.asked) == 4, "three more samples")
        gate.open.set()
        answered = await retry
        assert answered.json()["id"] == "chatcmpl-1"
        ids = [(await task).json()["id"] for task in fresh]
        assert set(ids) == {"chatcmpl-2", "chatcmpl-3", "chatcmpl-4"}
        # The last answer is given again, to its own client only.
        assert (await client.post(CHAT, json=HI, headers=RETRY)).json()["id"] == ids[0]
        assert (await client.post(CHAT, json=HI)).json()["id"] == "chatcmpl-5"
        assert (served.counts["joined"], served.counts["replayed"]) == (1, 1)
        key = {"Idempotency-Key": "a"}
        one = {(await client.post(CHAT, json=HI, headers=key)).json()["id"] for _ in range(3)}
        assert one == {"chatcmpl-6"}, "such a key makes one sample of many requests"
    assert len({(call.session, call.call) for call in gate.asked}) == 6


async def test_a_retry_continues_its_interrupted_call():
    gate, body = Gate(), HI | {"stream": True}
    async with http_client(gate, grace_s=0.1) as (served, client):
        for at in range(3):
            await asked_and_left(gate, client, body, RETRY if at else None)
            await until(lambda: len(gate.cancelled) == at + 1, "given up")  # noqa: B023
        assert gate.reported == {"http-0": 12}
        gate.open.set()
        done = await client.post(CHAT, json=body, headers=RETRY)
    events = [json.loads(line[6:]) for line in done.text.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events) == gate.text
    assert [call.call for call in gate.asked] == ["http-0"] * 4
    assert served.counts["resumed"] == 3


async def test_a_retry_during_the_cancellation_of_its_call_starts_it_again():
    ending = asyncio.Event()

    async def ends_slowly(core, call, on_delta):
        if len(core.asked) > 1:
            return reply("again")
        try:
            await asyncio.Event().wait()
        finally:
            core.cancelled.append("begun")
            await ending.wait()

    core = ScriptedCore(ends_slowly)
    async with http_client(core, grace_s=0.1) as (served, client):
        await asked_and_left(core, client)
        await until(lambda: core.cancelled, "it is being given up")
        retry = asyncio.create_task(client.post(CHAT, json=HI, headers=RETRY))
        await until(lambda: served.counts["joined"] == 1, "joined")
        assert len(core.asked) == 1
        ending.set()
        assert (await retry).json()["choices"][0]["message"]["content"] == "again"
    assert [call.call for call in core.asked] == ["http-0", "http-0"]


async def test_a_session_has_a_limited_number_of_calls(monkeypatch):
    monkeypatch.setattr("asyncrl.episodes.http.calls.MOST_OPEN", 3)
    gate = Gate()
    async with http_client(gate) as (_, client):
        waiting = [asyncio.create_task(client.post(CHAT, json=HI)) for _ in range(3)]
        await until(lambda: len(gate.asked) == 3, "asked")
        refused = await client.post(CHAT, json=HI)
        elsewhere = asyncio.create_task(client.post(CHAT, json=HI, headers={"Authorization": f"Bearer {OTHER_KEY}"}))
        await until(lambda: len(gate.asked) == 4, "another session is free")
        gate.open.set()
        assert {(await each).status_code for each in (*waiting, elsewhere)} == {200}
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_calls")


async def test_a_program_cannot_grow_the_counters_without_limit(monkeypatch):
    monkeypatch.setattr("asyncrl.episodes.http.endpoint.MOST_COUNTED", 16)
    async with http_client(ScriptedCore()) as (served, client):
        for at in range(20):
            refused = await client.post(CHAT, json=HI | {f"field {at} " + "x" * 1000: 1})
            assert refused.status_code == 400 and len(refused.content) < 1000
    assert len(served.counts) <= 17 and sum(served.counts.values()) == 40
    assert len(served.notices) <= 17


async def test_an_answer_that_differs_from_the_streamed_text_is_an_error():
    heard = asyncio.Event()

    async def changes_its_mind(core, call, on_delta):
        on_delta(ChatDelta(session=call.session, call=call.call, offset=0, text="Yes"))
        await heard.wait()
        return reply("No")

    async with (
        http_client(ScriptedCore(changes_its_mind)) as (_, client),
        client.stream("POST", CHAT, json=HI | {"stream": True}) as stream,
    ):
        reported = ""
        async for text in stream.aiter_text():
            reported += text
            heard.set()
    assert '"Yes"' in reported and '"error"' in reported and "[DONE]" not in reported


async def test_unknown_paths_and_methods_are_refused():
    requests = {
        404: ["POST /v1/embeddings", "GET /", "GET /v1/%ff%fe"],
        405: ["GET /v1/chat/completions", "POST /v1/models"],
        200: ["GET /v1/models?limit=5"],
        400: ["POST /v1/messages?beta=true"],
    }
    async with http_client(ScriptedCore()) as (served, client):
        for status, each in requests.items():
            for method, path in map(str.split, each):
                response = await client.request(method, path, json={} if method == "POST" else None)
                assert (response.status_code, "error" in response.json()) == (status, status != 200), path
        # An answer to HEAD has no body.
        head = f"HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n"
        sent = f"HEAD /v1/models {head}\r\nGET /v1/models {head}Connection: close\r\n\r\n".encode()
        async with socket_to(served, sent) as (reader, _):
            first, _, rest = (await closed(reader)).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 405") and rest.startswith(b"HTTP/1.1 200 OK")


async def test_a_body_that_is_not_a_json_object_is_refused():
    bodies = [b"{", b"", b"[]", b"\xff\xfe", b'{"messages": NaN}', b'{"messages": "\\ud800"}']
    bodies += [b'{"messages":' + b"[" * 100_000]
    # Long ones are read in another way.
    bodies += [b" " * (256 << 10) + body for body in (b"[]", b'{"messages": [{]}', b'{"messages": [' + b"[" * 100_000)]
    core = ScriptedCore()
    async with http_client(core) as (_, client):
        for sent in bodies:
            response = await client.post(CHAT, content=sent)
            assert (response.status_code, core.asked) == (400, []), sent[-50:]
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await client.post(CHAT, json=HI)).status_code == 200


async def test_a_body_over_the_limit_is_refused_in_any_encoding():
    core = ScriptedCore()
    long = json.dumps(HI | {"user": "x" * 20_000}).encode()

    async def in_chunks():
        for at in range(0, len(long), 1000):
            yield long[at : at + 1000]

    async with http_client(core, max_request_bytes=10_000) as (served, client):
        for body, packed in ((long, {}), (in_chunks(), {}), (gzip.compress(long), {"Content-Encoding": "gzip"})):
            response = await client.post(CHAT, content=body, headers=packed)
            assert response.status_code == 413
            assert "episode.max_request_bytes" in response.json()["error"]["message"]
        assert served.counts["too_large"] == 3 and core.asked == []
        # A client that asks first gets the answer before it sends its body.
        for length, reported in ((500, b"HTTP/1.1 100"), (50_000, b"HTTP/1.1 413")):
            asks = request(length=length)[:-2] + b"Expect: 100-continue\r\n\r\n"
            async with socket_to(served, asks) as (reader, writer):
                assert (await reader.readline()).startswith(reported)
                if length == 500:
                    writer.write(json.dumps(HI).encode().ljust(length))
                    assert [await reader.readline() for _ in range(2)] == [b"\r\n", b"HTTP/1.1 200 OK\r\n"]


async def test_a_long_body_is_read_as_a_short_one_is():
    core = ScriptedCore()
    # With everything that JSON has, and blanks where they are allowed.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, -2.5e3, None, True, {}, []]}}}
    body = {"messages": [{"role": "user", "content": "ü" * (1 << 18)}, *HI["messages"]], "tools": [tool], "user": None}
    body["metadata"] = {"a": "b"}
    async with http_client(core, max_request_bytes=4 << 20) as (_, client):
        written = json.dumps(body, indent=3)
        first = await client.post(CHAT, content=written)
        again = await client.post(CHAT, content=written, headers=RETRY)
    assert first.json() == again.json()
    assert (core.asked[0].messages, core.asked[0].tools) == (body["messages"], body["tools"])
    assert len(core.asked) == 1


async def test_a_client_that_does_not_send_is_closed():
    partly = [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthor", request(b"{", length=100)]

    async with serving(ScriptedCore(), client_timeout_s=0.3) as served:
        for sent in partly:
            async with socket_to(served, sent) as (reader, _):
                assert await closed(reader) == b""
        assert served.counts["cut/slow sender"] == 1
        async with socket_to(served, request(b"{", length=100_000)) as (reader, writer):

            def dripped():
                if served.counts["cut/slow sender"] == 2:
                    return True
                writer.write(b" ")
                return False

            await until(dripped, "cut although it sends a little")
            assert await closed(reader) == b""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_closed(stream):
    async def long(core, call, on_delta):
        return reply("x" * LARGE)

    async with serving(ScriptedCore(long), client_timeout_s=0.3) as served:
        sent = request(json.dumps(HI | {"stream": stream}).encode())
        async with socket_to(served, sent, limit=1024) as (_, writer):
            writer.transport.pause_reading()
            await until(lambda: served.counts["cut/slow reader"] == 1, "cut")
            await until(lambda: not served.connections, "closed")
            writer.transport.abort()


async def test_broken_connections_leave_nothing():
    gate = Gate()
    async with http_client(gate, grace_s=0.1, kept_s=0.1, keep_alive_s=0.05) as (served, client):
        await asked_and_left(gate, client, times=10)
        for _ in range(10):
            async with socket_to(served, request(json.dumps(HI | {"stream": True}).encode())) as (_, writer):
                await writer.drain()
                writer.transport.abort()
        gate.keys.clear()
        await until(lambda: not served.connections, "closed")
        await until(lambda: served.endpoint.calls.held == (0, 0), "forgotten")
        assert len(gate.cancelled) == len(gate.asked) >= 10


async def test_no_log_contains_a_key(capfd, caplog):
    async def fails(core, call, on_delta):
        raise OSError("gone")

    configure_logging("debug")
    asyncio.get_running_loop().set_debug(True)
    wrong = f"POST / HTTP/1.1\r\nAuthorization Bearer {KEY}\r\n\r\n".encode()
    async with http_client(ScriptedCore(fails)) as (served, client):
        for headers in ({}, {"x-api-key": KEY}, {"x-api-key": KEY + "0"}):
            for body in (HI, {"input": KEY}, [KEY]):
                for path in (CHAT, "/v1/responses", "/v1/messages", "/asyncrl/reward"):
                    await client.post(path, json=body, headers=headers)
        async with socket_to(served, wrong) as (reader, _):
            await closed(reader)
    said = capfd.readouterr()
    assert "a call of an episode failed" in said.err and "gone" in said.err
    assert KEY not in said.err + said.out + caplog.text
