"""The rate of new connections to a server: by tables and properties, and over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest
from harness import Net
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.messages import ANYBODY, Done, Request
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.wire import listening
from asyncrl.rpc.wire.listening import BURST, PER_S, REOPENS_WITH, Door


class Knock(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class House:
    @handler
    def knock(self, request: Knock, caller: Caller) -> Done:
        return Done()


def test_the_door_shuts_after_a_burst_and_admits_several_afterwards() -> None:
    entrance = Door(10.0)
    for _ in range(BURST - 1):
        assert entrance.begin(10.0) == 10.0
    until = entrance.begin(10.0)
    assert until == pytest.approx(10.0 + REOPENS_WITH / PER_S)
    # A connection that was already on its way delays it.
    assert entrance.begin(10.0) > until
    later = 11.0 + REOPENS_WITH / PER_S
    for _ in range(REOPENS_WITH):
        assert entrance.begin(later) == later


@given(spells=st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.01, 1.0, 100.0]), st.integers(1, 40)), max_size=10))
@example(spells=[(100.0, 1), (0.0, 40)])
def test_no_more_connections_start_than_a_burst_and_its_share_of_time(spells: list[tuple[float, int]]) -> None:
    waits = [wait for wait, times in spells for _ in range(times)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "BURST", 20)
        patch.setattr(listening, "PER_S", 10.0)
        patch.setattr(listening, "REOPENS_WITH", 5)
        now = shut_until = 0.0
        entrance = Door(now)
        begun: list[float] = []
        for wait in waits:
            now = max(now + wait, shut_until)
            begun.append(now)
            shut_until = entrance.begin(now)
            assert now <= shut_until <= now + (5 + 1) / 10.0
        for first, start in enumerate(begun):
            for last, end in enumerate(begun[first:], start=1):
                assert last <= 20 + 10.0 * (end - start) + 1e-6


async def test_a_flood_is_refused_while_members_are_served_and_new_ones_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "BURST", 20)
    monkeypatch.setattr(listening, "PER_S", 20.0)
    monkeypatch.setattr(listening, "REOPENS_WITH", 10)
    async with asyncio.timeout(60), Net() as net:
        server = net.serve(House(), "server/0")
        friend = net.client("server/0", "friend/0")
        await friend.call(Knock())
        host, _, port = server.address.removeprefix("tcp://").partition(":")
        flood = [socket.socket() for _ in range(400)]
        try:
            for stranger in flood:
                stranger.setblocking(False)
                stranger.connect_ex((host, int(port)))
                await asyncio.sleep(0.001)
            assert await friend.call(Knock()) == Done(), "admitted clients are not affected"
            begun = sum(_is_connected(stranger) for stranger in flood)
            assert 10 <= begun < 300, "most are outside"
            assert net.counters("server/0")["wire/strangers"] >= 1
        finally:
            for stranger in flood:
                stranger.close()
        assert await net.client("server/0", "other/0").call(Knock()) == Done()


def _is_connected(stranger: socket.socket) -> bool:
    try:
        stranger.getpeername()
    except OSError:
        return False
    return True
