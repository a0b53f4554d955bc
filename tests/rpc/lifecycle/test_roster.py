"""The admitted actors change while sockets are open: real CURVE sockets, and the view of one actor."""

import asyncio

import msgspec
from harness import Net, until

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.messages.actors import ActorRecord, Dead, Resolve, Resolved
from asyncrl.messages.hosts import MemberHost, Members
from asyncrl.rpc.actor import handler
from asyncrl.rpc.calls.server import STRANGERS
from asyncrl.rpc.lifecycle.roster import ABOVE_ALL, Roster
from asyncrl.rpc.wire.keys import Credentials, make_pairs

NAMES = ("dataloader/0", "rollouter/0")
PAIRS = {name: make_pairs(1)[0] for name in (*NAMES, "rollouter/1")}
KEYS = {name: [pair["public"]] for name, pair in PAIRS.items()}


def credentials(name, known=NAMES):
    pair = PAIRS[name]
    peers = {other: KEYS[other] for other in known}
    return Credentials("run-1", "", True, pair["public"].encode(), pair["secret"].encode(), peers)


def members(seen, **changes):
    """The members of this number after ``rollouter/1`` has joined, with ``changes`` of its host."""
    joined = MemberHost(agent="agent/1", host="c", actors=["rollouter/1"], stage="serving", served=True)
    return Members(number=seen, hosts=[msgspec.structs.replace(joined, **changes)])


class Echo:
    @handler
    def resolve(self, request: Resolve, caller) -> Resolved:
        return Resolved(record=ActorRecord(name=caller.name, incarnation=1, address=""))


async def test_i6_a_key_is_admitted_from_joining_to_leaving():
    """Refused keys are counted."""
    async with (
        asyncio.timeout(40),
        Net(credentials=lambda name: credentials(name, KEYS if name == "rollouter/1" else NAMES)) as net,
    ):
        net.serve(Echo(), "dataloader/0")
        endpoint = net.endpoints[0]
        roster = Roster(NAMES, credentials("dataloader/0"), endpoint.transport)

        async def knock(name, within_s=2.0):
            """The owner of the key, as the server reports it; None if it does not answer."""
            peer = net.client("dataloader/0", name, call_timeout_s=within_s)
            try:
                return (await peer.call(Resolve(name="x"))).record.name
            except DeadlineExceeded:
                return None
            finally:
                peer.close()

        assert await knock("rollouter/1") is None
        await until(lambda: endpoint.counters[STRANGERS])
        assert endpoint.counters[STRANGERS] == 1
        joined = {"served": False, "keys": [KEYS["rollouter/0"], KEYS["rollouter/1"]]}
        roster.take_in(members(1, stage="joining", **joined))
        assert "rollouter/1" not in roster.actors
        assert await knock("rollouter/1", within_s=8.0) == "rollouter/1"
        roster.take_in(members(2, stage="left", **joined))
        assert await knock("rollouter/1") is None
        assert await knock("rollouter/0", within_s=8.0) == "rollouter/0"
        await until(lambda: endpoint.counters[STRANGERS] >= 2)


class Admitted:
    def __init__(self):
        self.reported = []

    def admit(self, peers):
        self.reported.append(set(peers))


def test_only_a_newer_roster_counts():
    transport = Admitted()
    roster = Roster(NAMES, credentials("dataloader/0"), transport)
    keys = [["of its agent"], KEYS["rollouter/1"]]
    assert roster.take_in(members(3, keys=keys)) == []
    assert roster.actors == ("dataloader/0", "rollouter/0", "rollouter/1")
    start = {"agent": "agent/0", "actors": ["rollouter/0"], "served": False}
    assert roster.take_in(members(2, stage="left", **start)) == []
    assert roster.take_in(members(4, stage="leaving", **start)) == []
    assert roster.actors == NAMES
    # The agent of a lost host may come back.
    assert roster.take_in(members(5, stage="lost", **start)) == [Dead("rollouter/0", ABOVE_ALL)]
    assert roster.actors == ("dataloader/0",)
    assert roster.take_in(members(6, stage="left", **start)) == [
        Dead("agent/0", ABOVE_ALL),
        Dead("rollouter/0", ABOVE_ALL),
    ]
    assert transport.reported == [{*KEYS, "agent/1"}, set(NAMES), {"dataloader/0"}, {"dataloader/0"}]
    assert roster.peers == {"dataloader/0": KEYS["dataloader/0"]}
    # Without keys there are only names.
    transport = Admitted()
    roster = Roster(NAMES, Credentials("run-1", "s3cret"), transport)
    roster.take_in(members(1))
    assert (roster.actors, transport.reported, roster.peers) == ((*NAMES, "rollouter/1"), [], {})
