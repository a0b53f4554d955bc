"""The endpoint against clients that break off, dawdle, send nonsense or too much, and against their retries."""

import asyncio
import gzip
import json
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import httpx
import pytest
from scripted_core import KEY, OTHER_KEY, ScriptedCore, played, reply, serving, until

from asyncrl.messages.episodes import ChatDelta

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


def request(body=b"", *, length=None, key=KEY, path=CHAT):
    head = (
        f"POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\nContent-Length: {length or len(body)}\r\n"
    )
    return f"{head}\r\n".encode() + body


def content(response):
    return response.json()["choices"][0]["message"]["content"]


class Gate:
    """A core whose calls wait until they are let through, and go on from what they told before they were cancelled."""

    def __init__(self, text="once upon a time"):
        self.open = asyncio.Event()
        self.text = text
        self.told = {}
        self.core = ScriptedCore(self._chat)

    async def _chat(self, core, call, on_delta):
        node = len(core.asked)
        begun = self.told.setdefault(call.call, 0)
        for at in range(begun, min(begun + 4, len(self.text))):
            on_delta(ChatDelta(session=call.session, call=call.call, offset=at, text=self.text[at]))
            self.told[call.call] = at + 1
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


def unheard(served):
    """Calls under way that nobody listens to."""
    books = served.endpoint.calls._books.values()
    return sum(1 for book in books for call in book.calls if call.running and not call.listeners)


async def test_a_retry_joins_what_is_under_way_and_an_equal_body_does_not():
    gate = Gate()
    async with http_client(gate.core) as (served, client):
        await asked_and_left(gate.core, client)
        await until(lambda: unheard(served) == 1, "the server has seen it")
        retry = asyncio.create_task(client.post(CHAT, json=HI, headers=RETRY))
        await until(lambda: served.counts["joined"] == 1, "joined")
        fresh = asyncio.create_task(client.post(CHAT, json=HI))
        other = {"model": "m", "messages": [{"role": "user", "content": "Ho"}]}
        of_another = asyncio.create_task(client.post(CHAT, json=other, headers=RETRY))
        mine = {"Authorization": f"Bearer {OTHER_KEY}"}
        of_another_key = asyncio.create_task(client.post(CHAT, json=HI, headers=RETRY | mine))
        await until(lambda: len(gate.core.asked) == 4, "three more samples")
        gate.open.set()
        assert (await retry).json()["id"] == "chatcmpl-1"
        ids = {(await task).json()["id"] for task in (fresh, of_another, of_another_key)}
    assert ids == {"chatcmpl-2", "chatcmpl-3", "chatcmpl-4"}
    assert served.counts["joined"] == 1
    assert len({(call.session, call.call) for call in gate.core.asked}) == 4


async def test_a_retry_is_given_what_was_answered_meanwhile():
    gate = Gate()
    async with http_client(gate.core) as (served, client):
        await asked_and_left(gate.core, client)
        await until(lambda: unheard(served) == 1, "the server has seen it")
        gate.open.set()
        await until(lambda: unheard(served) == 0, "answered")
        first = await client.post(CHAT, json=HI, headers=RETRY)
        again = await client.post(CHAT, json=HI, headers=RETRY)
        fresh = await client.post(CHAT, json=HI)
    assert first.json() == again.json() and first.json()["id"] == "chatcmpl-1"
    assert fresh.json()["id"] == "chatcmpl-2"
    assert served.counts["replayed"] == 2


async def test_a_retry_goes_on_where_its_call_was_cut_off():
    gate = Gate()
    body = HI | {"stream": True}
    async with http_client(gate.core, grace_s=0.1) as (served, client):
        for at in range(3):
            await asked_and_left(gate.core, client, body, RETRY if at else None)
            await until(lambda: len(gate.core.cancelled) == at + 1, "given up")  # noqa: B023
        assert gate.told == {"http-0": 12}
        gate.open.set()
        done = await client.post(CHAT, json=body, headers=RETRY)
    events = [json.loads(line[6:]) for line in done.text.splitlines() if line.startswith("data: {")]
    texts = [each["choices"][0]["delta"].get("content", "") for each in events]
    assert "".join(texts) == gate.text
    assert [call.call for call in gate.core.asked] == ["http-0"] * 4
    assert served.counts["resumed"] == 3


async def test_a_retry_that_comes_while_its_call_is_given_up_has_it_called_again():
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
        assert content(await retry) == "again"
    assert [call.call for call in core.asked] == ["http-0", "http-0"]


async def test_an_idempotency_key_makes_one_sample_of_many_requests():
    core = ScriptedCore()
    async with http_client(core) as (_, client):
        one = [await client.post(CHAT, json=HI, headers={"Idempotency-Key": "a"}) for _ in range(3)]
        two = await client.post(CHAT, json=HI, headers={"Idempotency-Key": "b"})
    assert {answer.json()["id"] for answer in one} == {"chatcmpl-1"} and two.json()["id"] == "chatcmpl-2"


async def test_a_session_has_so_many_calls_and_no_more(monkeypatch):

    monkeypatch.setattr("asyncrl.episodes.http.calls.MOST_OPEN", 3)
    gate = Gate()
    async with http_client(gate.core) as (_, client):
        waiting = [asyncio.create_task(client.post(CHAT, json=HI)) for _ in range(3)]
        await until(lambda: len(gate.core.asked) == 3, "asked")
        refused = await client.post(CHAT, json=HI)
        elsewhere = asyncio.create_task(client.post(CHAT, json=HI, headers={"Authorization": f"Bearer {OTHER_KEY}"}))
        await until(lambda: len(gate.core.asked) == 4, "another session is free")
        gate.open.set()
        assert {(await each).status_code for each in (*waiting, elsewhere)} == {200}
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_calls")


async def test_a_program_cannot_fill_the_counts():
    async with http_client(ScriptedCore()) as (served, client):
        for at in range(300):
            refused = await client.post(CHAT, json=HI | {f"field {at} " + "x" * 1000: 1})
            assert refused.status_code == 400 and len(refused.content) < 1000
    assert len(served.counts) <= 257 and sum(served.counts.values()) == 600
    assert len(served.notices) <= 257


async def test_a_failure_after_the_first_sign_of_life_breaks_the_connection():
    gate = Gate()

    async def fails(core, call, on_delta):
        await gate.open.wait()
        raise OSError("gone")

    gate.core.script = fails
    async with http_client(gate.core, keep_alive_s=0.05) as (served, client):
        async with client.stream("POST", CHAT, json=HI) as response:
            assert response.status_code == 200
            parts = response.aiter_raw()
            assert await anext(parts) == b" "
            gate.open.set()
            with pytest.raises(httpx.RemoteProtocolError):
                _ = [part async for part in parts]
        assert served.counts["cut/failed late"] == 1 and served.counts["failed"] == 1


async def test_an_answer_that_is_not_what_was_streamed_is_an_error_of_the_stream():
    async def changes_its_mind(core, call, on_delta):
        on_delta(ChatDelta(session=call.session, call=call.call, offset=0, text="Yes"))
        await asyncio.sleep(0.05)
        return reply("No")

    async with http_client(ScriptedCore(changes_its_mind)) as (_, client):
        told = (await client.post(CHAT, json=HI | {"stream": True})).text
    assert '"Yes"' in told and '"error"' in told and "[DONE]" not in told


async def test_only_what_is_served_is_served():
    requests = {
        404: ["POST /v1/embeddings", "POST /v1/messages/count_tokens", "GET /", "GET /v1/%ff%fe"],
        405: ["GET /v1/chat/completions", "POST /v1/models"],
        200: ["GET /v1/models?limit=5"],
        400: ["POST /v1/messages?beta=true"],
    }
    async with http_client(ScriptedCore()) as (_, client):
        for status, each in requests.items():
            for method, path in map(str.split, each):
                response = await client.request(method, path, json={} if method == "POST" else None)
                assert (response.status_code, "error" in response.json()) == (status, status != 200), path


async def test_an_answer_to_head_has_no_body():
    async with serving(ScriptedCore()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"HEAD /v1/models {head}\r\nGET /v1/models {head}Connection: close\r\n\r\n".encode())
        first, _, rest = (await closed(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert first.startswith(b"HTTP/1.1 405") and rest.startswith(b"HTTP/1.1 200 OK")


async def test_what_is_no_json_object_is_refused():
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


async def test_too_long_a_body_is_refused_however_it_is_sent():
    core = ScriptedCore()
    long = json.dumps(HI | {"user": "x" * 20_000}).encode()

    async def in_chunks():
        for at in range(0, len(long), 1000):
            yield long[at : at + 1000]

    async with http_client(core, max_request_bytes=10_000) as (served, client):
        for body in (long, in_chunks(), gzip.compress(long)):
            packed = {"Content-Encoding": "gzip"} if isinstance(body, bytes) and len(body) < 10_000 else {}
            response = await client.post(CHAT, content=body, headers=packed)
            assert response.status_code == 413
            assert "episode.max_request_bytes" in response.json()["error"]["message"]
        assert served.counts["too_large"] == 3 and core.asked == []
        assert (await client.post(CHAT, json=HI)).status_code == 200


async def test_a_long_body_is_read_as_a_short_one_is():
    core = ScriptedCore()
    text = "ü" * LARGE
    # With all that JSON has, and blanks where it may have them.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, -2.5e3, None, True, {}, []]}}}
    body = {"messages": [{"role": "user", "content": text}, *HI["messages"]], "tools": [tool], "user": None}
    body["metadata"] = {"a": "b"}
    async with http_client(core, max_request_bytes=64 << 20) as (_, client):
        written = json.dumps(body, indent=3)
        first = await client.post(CHAT, content=written)
        again = await client.post(CHAT, content=written, headers=RETRY)
    assert first.json() == again.json()
    assert (core.asked[0].messages, core.asked[0].tools) == (body["messages"], body["tools"])
    assert len(core.asked) == 1


async def test_a_client_that_asks_first_is_told_to_send_its_body():
    async with serving(ScriptedCore(), max_request_bytes=1000) as served:
        for length, told in ((500, b"HTTP/1.1 100"), (5000, b"HTTP/1.1 413")):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request(length=length)[:-2] + b"Expect: 100-continue\r\n\r\n")
            assert (await reader.readline()).startswith(told)
            if length == 500:
                body = json.dumps(HI).encode()
                writer.write(body + b" " * (length - len(body)))
                assert await reader.readline() == b"\r\n"
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/chat/comp",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthor",
        request(b"{", length=100),
        request(b"", length=100),
    ],
)
async def test_a_client_that_stops_sending_is_closed(sent):
    async with serving(ScriptedCore(), client_timeout_s=0.3) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sent)
        assert await closed(reader) == b""
        writer.close()
        assert served.counts["cut/slow sender"] == (1 if b"\r\n\r\n" in sent else 0)


async def test_a_client_that_sends_a_byte_now_and_then_is_closed():
    async with serving(ScriptedCore(), client_timeout_s=0.5) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(b"{", length=100_000))

        async def drip():
            while True:
                await asyncio.sleep(0.02)
                writer.write(b" ")

        dripping = asyncio.create_task(drip())
        assert await closed(reader) == b""
        dripping.cancel()
        writer.close()
        assert served.counts["cut/slow sender"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_closed(stream):
    core = ScriptedCore()

    async def long(core, call, on_delta):
        return reply("x" * LARGE)

    core.script = long
    async with serving(core, client_timeout_s=0.3) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        reader._transport.pause_reading()
        writer.write(request(json.dumps(HI | {"stream": stream}).encode()))
        await until(lambda: served.counts["cut/slow reader"] == 1, "cut")
        await until(lambda: not served.endpoint._runner.server.connections, "closed")
        writer.transport.abort()


async def test_nonsense_is_answered_or_closed_and_the_endpoint_lives():
    head, key = f"POST {CHAT} HTTP/1.1\r\n", f"Authorization: Bearer {KEY}\r\n"
    nonsense = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        f"{head}Authorization Bearer {KEY}\r\n\r\n".encode(),
        f"{head}Content-Length: -1\r\n{key}\r\n".encode(),
        f"{head}Transfer-Encoding: chunked\r\n{key}\r\nzz\r\n".encode(),
        b"POST /" + b"a" * 100_000,
    ]
    async with http_client(ScriptedCore(), client_timeout_s=0.5) as (served, client):
        for sent in nonsense:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(sent)
            answer = await closed(reader)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
            writer.close()
            assert (await client.post(CHAT, json=HI)).status_code == 200


async def test_connections_that_are_cut_leave_nothing():
    gate = Gate()
    async with http_client(gate.core, grace_s=0.1, kept_s=0.1, keep_alive_s=0.05) as (served, client):
        await asked_and_left(gate.core, client, times=20)
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request(json.dumps(HI | {"stream": True}).encode()))
            await writer.drain()
            writer.transport.abort()
        gate.core.keys.clear()
        await until(lambda: not served.endpoint._runner.server.connections, "closed")
        await until(lambda: served.endpoint.calls.held == (0, 0), "forgotten")
        assert len(gate.core.cancelled) == len(gate.core.asked) >= 20
        assert served.endpoint.calls._tasks == {}


LOGGING = """
    import asyncio
    import httpx
    from asyncrl.telemetry.logging import configure_logging
    from scripted_core import KEY, ScriptedCore, played, serving

    configure_logging("debug")

    async def fails(core, call, on_delta):
        key = call.session
        raise OSError("gone")

    async def episode():
        async with serving(ScriptedCore(fails)) as served, httpx.AsyncClient(base_url=served.url) as client:
            asyncio.get_running_loop().set_debug(True)
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"x-api-key": KEY + "0"}):
                for body in ({"messages": [{"role": "user", "content": "Hi"}]}, {"input": KEY}, [KEY]):
                    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/asyncrl/reward"):
                        await client.post(path, json=body, headers=headers)
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(f"POST / HTTP/1.1\\r\\nAuthorization Bearer {KEY}\\r\\n\\r\\n".encode())
            await asyncio.sleep(0.1)
            writer.close()

    played(episode())
"""


def test_no_key_is_in_a_log():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOGGING)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "a call of an episode failed" in ran.stderr and "gone" in ran.stderr
    assert KEY not in ran.stderr + ran.stdout


async def closed(reader):
    """All that is sent until the connection is closed."""
    async with asyncio.timeout(30):
        try:
            return await reader.read()
        except ConnectionError:
            return b""
