"""A teacher's server for tests, which scores prompts by a rule, or as its script says."""

import asyncio

from aiohttp import web
from scripted_server import ScriptedServer


def logprob_of(ids, place):
    """This teacher's value of a token: a number that encodes the token, the one before, and the place."""
    return -(ids[place] + ids[place - 1] / 100 + place / 10_000)


def scored(ids, **changed):
    """A right answer; ``changed`` has other log-probs by place."""
    values = [changed.get(f"at_{place}", logprob_of(ids, place)) for place in range(1, len(ids))]
    found = [None, *({str(id): {"logprob": value, "rank": 1}} for id, value in zip(ids[1:], values, strict=True))]
    return {"choices": [{"text": "x", "prompt_logprobs": found}]}


class TeacherServer(ScriptedServer):
    """The script has one entry for each request: a function of its ids that returns the body, a status, or seconds."""

    def __init__(self, *script, models=("teacher",), longest=4096, decode=None):
        super().__init__(*(script or [scored]))
        self.models, self.longest, self.decode = models, longest, decode

    async def complete(self, request):
        async with self.turn(request) as (body, action):
            await asyncio.sleep(action if isinstance(action, float) else 0.01)
            if isinstance(action, int):
                return web.json_response({"error": "no"}, status=action)
            answer = (scored if isinstance(action, float) else action)(body["prompt"])
            return web.json_response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    async def list_models(self, _):
        return web.json_response({"data": [{"id": each, "max_model_len": self.longest} for each in self.models]})

    async def detokenize(self, request):
        return web.json_response({"prompt": self.decode((await request.json())["tokens"])})


def served(*script, **settings):
    server = TeacherServer(*script, **settings)
    routes = [web.post("/v1/completions", server.complete), web.get("/v1/models", server.list_models)]
    routes += [web.post("/detokenize", server.detokenize)] if server.decode is not None else []
    return server.on_loopback(*routes)
