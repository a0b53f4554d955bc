"""A judge's server for tests: aiohttp on loopback, which answers by a script and knows what it was asked."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

from aiohttp import web

TRAJECTORY = re.compile(r"=== trajectory (\w+) begins ===\n(.*?)\n=== trajectory \1 ends ===", re.DOTALL)
CRITERION = re.compile(r"^\* ([\w.-]+): ", re.MULTILINE)


def shown(body):
    """The trajectories of a request by their ids, in the order in which they stand."""
    return dict(TRAJECTORY.findall(body["messages"][1]["content"]))


def worth(text):
    """The score that this judge has for a text: the number in it."""
    return float(re.search(r"worth (\S+)", text)[1])


def scores(body):
    return [{"id": id, "explanation": "so", "score": worth(text)} for id, text in shown(body).items()]


def told(entries, name="scores"):
    return json.dumps({name: entries})


def right(body):
    return told(scores(body))


def chat(text, status=200, **headers):
    reply = {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }
    return web.json_response(reply, status=status, headers=headers)


class JudgeServer:
    """``script`` holds what is done with each request in turn, the last one for all that come after: a function of the
    request's body that gives the text of the answer, or a coroutine function that gives a response."""

    def __init__(self, *script):
        self.script = list(script)
        self.bodies = []
        self.headers = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        action = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if asyncio.iscoroutinefunction(action):
                return await action(request, body)
            return chat(action(body))
        finally:
            self.at_once -= 1


@asynccontextmanager
async def judge_server(*script):
    server = JudgeServer(*script)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


def status(code, text="busy", **headers):
    async def answer(request, body):
        return web.Response(status=code, text=text, headers={key.replace("_", "-"): v for key, v in headers.items()})

    return answer


async def hang(request, body):
    await asyncio.sleep(1000)


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
