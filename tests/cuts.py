"""A TCP path between two actors that a test can cut, as a firewall or a broken cable does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Forwarder:
    """Forwards bytes from ``address`` to ``target``. If ``most`` is given, each connection passes that many."""

    def __init__(self, target: str, most: int | None = None) -> None:
        host, _, port = target.removeprefix("tcp://").partition("#")[0].rpartition(":")
        self._target = host, int(port)
        self.most = most
        self.address = ""
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def open(self) -> None:
        """Let connections through, at the same address as before."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self._port}"

    def cut(self) -> None:
        """End all connections, and let none through."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = None
        try:
            source, there = await asyncio.open_connection(*self._target)
            self._open |= {writer, there}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, there, self.most))
                tasks.create_task(_copy(source, writer, None))
        except* OSError:
            pass
        finally:
            for end in filter(None, (writer, there)):
                self._open.discard(end)
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
    """Until either side ends, or this many bytes have passed."""
    left = most
    while piece := await reader.read(65536 if left is None else max(1, left)):
        writer.write(piece)
        await writer.drain()
        if left is not None and (left := left - len(piece)) <= 0:
            break
    raise ConnectionAbortedError


@asynccontextmanager
async def path_to(target: str, most: int | None = None) -> AsyncIterator[Forwarder]:
    """An open path, closed at the end of the test."""
    path = Forwarder(target, most)
    await path.open()
    try:
        yield path
    finally:
        with suppress(AssertionError):
            path.cut()
