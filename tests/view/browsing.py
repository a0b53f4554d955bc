"""A headless Chromium, driven over the DevTools protocol."""

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import time

import aiohttp
import pytest

from tools.view_pictures import BROWSERS

WAIT_S = 60.0


class Browser:
    """One page of the browser. ``complaints`` are the errors and blocked loads that its console shows."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session = None
        self.complaints = []

    async def call(self, method, **parameters):
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **session})
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("method") == "Runtime.exceptionThrown":
                    self.complaints.append(message["params"]["exceptionDetails"])
                if message.get("method") == "Log.entryAdded":
                    self.complaints.append(message["params"]["entry"])
                if message.get("id") == number:
                    if "navigated" in message.get("error", {}).get("message", ""):
                        # The page was left meanwhile.
                        return {"result": {}}
                    assert "error" not in message, message
                    return message["result"]

    async def open(self, url):
        self._session = None
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script):
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script):
        """Wait until the expression is true."""
        until = time.monotonic() + WAIT_S
        while not (met := await self.run(f"Boolean({script})")) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert met, f"{script}\n{await self.run('document.body.innerText')}\n{self.complaints}"

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))


@contextlib.asynccontextmanager
async def browser(folder):
    """A browser with its profile in ``folder``; skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
    process = await asyncio.create_subprocess_exec(
        program, *flags, f"--user-data-dir={folder}", "about:blank", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "the browser ended at its start"
        url = line.decode().split()[-1]
        # Its later output must not fill the pipe.
        reading = asyncio.ensure_future(process.stderr.read())
        async with aiohttp.ClientSession() as client, client.ws_connect(url, max_msg_size=0) as socket:
            driven = Browser(socket)
            yield driven
            driven._session = None
            with contextlib.suppress(Exception):
                await driven.call("Browser.close")
        async with asyncio.timeout(WAIT_S):
            await process.wait()
            await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
