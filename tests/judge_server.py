"""A judge's server for tests."""

import asyncio
import json
import re

from aiohttp import web
from scripted_server import ScriptedServer

TRAJECTORY = re.compile(r"=== trajectory (\w+) begins ===\n(.*?)\n=== trajectory \1 ends ===", re.DOTALL)
LONG_MIB = 24
CRITERION = re.compile(r"^\* ([\w.-]+): ", re.MULTILINE)


def shown(body):
    """The trajectories of a request by their ids, in their order."""
    return dict(TRAJECTORY.findall(body["messages"][1]["content"]))


def worth(text):
    """The score of a text from this judge: the number in it."""
    return float(re.search(r"worth (\S+)", text)[1])


def scores(body):
    return [{"id": id, "explanation": "so", "score": worth(text)} for id, text in shown(body).items()]


def as_json(entries, name="scores"):
    return json.dumps({name: entries})


def right(body):
    return as_json(scores(body))


def chat(text, status=200, **headers):
    reply = {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }
    return web.json_response(reply, status=status, headers=headers)


class JudgeServer(ScriptedServer):
    """The script has functions of the request's body. They return the text of the answer; coroutine functions return a
    response.
    """

    async def handle(self, request):
        async with self.turn(request) as (body, action):
            if asyncio.iscoroutinefunction(action):
                return await action(request, body)
            return chat(action(body))


def judge_server(*script):
    server = JudgeServer(*script)
    return server.on_loopback(web.post("/v1/chat/completions", server.handle))


def status(code, text="busy", **headers):
    async def answer(request, body):
        return web.Response(status=code, text=text, headers={key.replace("_", "-"): v for key, v in headers.items()})

    return answer


def long(code, written, compressed=False):
    """An answer of LONG_MIB. ``written`` gets an entry for each MiB that was sent."""

    async def answer(request, body):
        response = web.StreamResponse(status=code)
        if compressed:
            response.enable_compression(force=web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(b'{"choices": [{"message": {"content": "')
        for _ in range(LONG_MIB):
            await response.write(b"a" * (1 << 20))
            written.append(1)
        await response.write(b'"}}]}')
        return response

    return answer


async def hang(request, body):
    await asyncio.Event().wait()


async def cut(request, body):
    """Half an answer, then nothing."""
    response = web.StreamResponse(headers={"Content-Length": "5000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def cut_at_once(request, body):
    request.transport.close()
    return web.Response()


def late(seconds):
    async def answer(request, body):
        await asyncio.sleep(seconds)
        return chat(right(body))

    return answer
