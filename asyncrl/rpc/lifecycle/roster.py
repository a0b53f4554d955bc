"""The members of the run: the actors of its start and those that have joined, without those that have left.

The controller sends ``Members`` messages. Each is complete and is applied to the names and public keys of the start. So
the admitted actors depend only on the newest message, the one with the largest ``Members.number``.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.messages.actors import Dead
from asyncrl.messages.hosts import Members
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.transport import Transport

CONTROLLER = "controller/0"
ABOVE_ALL = 1 << 62
"""Larger than every incarnation."""


class Roster:
    """One actor's view of the members. ``names`` are the actors of the start."""

    def __init__(self, names: Iterable[str], credentials: Credentials, transport: Transport) -> None:
        self._initial = tuple(names)
        self._credentials, self._transport = credentials, transport
        self.actors = self._initial
        """All actors of the run, in the order in which they came."""
        self.number = 0
        """Revision (``Members.number``) of the newest message that was applied; 0 for the members of the start."""
        self.gone = frozenset[str]()
        """Agents and actors that have left for good; connections with their keys are refused."""
        self.peers: dict[str, list[str]] = dict(credentials.peers)
        """Public keys by name, of agents too; none without CURVE."""

    def take_in(self, members: Members) -> list[Dead]:
        """Admit exactly the members of the run. Returns the actors and agents that have left, each dead for good.

        If the message is not newer than the last one, does nothing and returns an empty list.
        """
        if members.number <= self.number:
            return []
        self.number = members.number
        self.gone = members.gone
        self.actors = tuple(name for name in (*self._initial, *members.added) if name not in self.gone)
        if self._credentials.curve:
            known = self._credentials.peers | members.keys
            self.peers = {name: keys for name, keys in known.items() if name not in self.gone}
            self._transport.admit(self.peers)
        return [Dead(name, ABOVE_ALL) for name in sorted(self.gone)]
