"""A server for tests: aiohttp on loopback, which answers by a script and records its requests."""

from contextlib import asynccontextmanager

from aiohttp import web


class ScriptedServer:
    """``script`` holds the answer to each request in turn. The last one repeats."""

    def __init__(self, *script):
        self.script = list(script)
        self.bodies, self.headers = [], []
        self.at_once = self.most_at_once = 0
        self.url = ""

    @asynccontextmanager
    async def turn(self, request):
        """The request's body, and the answer to it."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield body, self.script.pop(0) if len(self.script) > 1 else self.script[0]
        finally:
            self.at_once -= 1

    @asynccontextmanager
    async def on_loopback(self, *routes):
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()
