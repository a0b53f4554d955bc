"""A teacher's server for tests: aiohttp on loopback, which scores prompts by a rule, or as a script says."""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web


def logprob_of(ids, place):
    """What this teacher has for a token: a number that tells the token, the one before, and the place."""
    return -(ids[place] + ids[place - 1] / 100 + place / 10_000)


def scored(ids, **changed):
    """A right answer; ``changed`` has other log-probs by place."""
    values = [changed.get(f"at_{place}", logprob_of(ids, place)) for place in range(1, len(ids))]
    found = [None, *({str(id): {"logprob": value, "rank": 1}} for id, value in zip(ids[1:], values, strict=True))]
    return {"choices": [{"text": "x", "prompt_logprobs": found}]}


class TeacherServer:
    """``script`` holds what is done with each request for log-probs in turn, the last one for all that come after: a
    function of its ids that gives the answer's body, or a status, or seconds to wait for."""

    def __init__(self, *script, models=("teacher",), longest=4096, decode=None):
        self.script, self.models, self.longest = list(script) or [scored], models, longest
        self.decode = decode
        self.bodies, self.headers = [], []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        action = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(action if isinstance(action, float) else 0.01)
            if isinstance(action, int):
                return web.json_response({"error": "no"}, status=action)
            if isinstance(action, float):
                action = scored
            answer = action(body["prompt"])
            return web.json_response(text=answer) if isinstance(answer, str) else web.json_response(answer)
        finally:
            self.at_once -= 1

    async def list_models(self, _):
        return web.json_response({"data": [{"id": each, "max_model_len": self.longest} for each in self.models]})

    async def detokenize(self, request):
        return web.json_response({"prompt": self.decode((await request.json())["tokens"])})


@asynccontextmanager
async def served(*script, **settings):
    server = TeacherServer(*script, **settings)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    if server.decode is not None:
        app.router.add_post("/detokenize", server.detokenize)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
