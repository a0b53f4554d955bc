"""The terminal of asyncrl-top without a terminal: what stands on it, as text."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import zstandard

from asyncrl.top.app import Top
from asyncrl.top.view import History

SIZES = {"80x24": (80, 24), "200x50": (200, 50)}


def known(snapshots):
    """Their history."""
    history = History()
    for snapshot in snapshots:
        history.add(snapshot)
    return history


def text_of(app):
    """The text on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


@asynccontextmanager
async def shown(source, size="80x24"):
    """The app with what drives it."""
    app = Top(source)
    async with app.run_test(size=SIZES[size], notifications=True) as pilot:
        await settled(pilot)
        yield app, pilot


async def settled(pilot):
    """Until two looks show the same."""
    before = None
    for _ in range(40):
        await pilot.pause(0.05)
        text = text_of(pilot.app)
        if text == before:
            return
        before = text


async def until(pilot, text, within=10.0):
    """Until this stands on the screen."""
    async with asyncio.timeout(within):
        while text not in text_of(pilot.app):
            await pilot.pause(0.05)


def recording(run, seconds):
    """A replay's snapshots, one each second."""
    compress = zstandard.ZstdCompressor().compress
    return [
        (snapshot.wall, compress(msgspec.msgpack.encode(snapshot)))
        for snapshot in (run.at(10.0 + second) for second in range(seconds))
    ]
