"""The interface by which the HTTP endpoint asks the actor around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply


class Core(Protocol):
    """The policy, for all sessions of this host."""

    model: str
    """The name under which the policy answers, under any name that it is asked by."""

    def knows(self, key: str) -> bool:
        """Whether there is such a session. It stays known for a while after its end, so that calls are told why.

        A key is 128 random bits and is looked up by its hash: the time it takes tells nothing of another.
        """

    async def chat(self, key: str, call: Chat, on_delta: Callable[[ChatDelta], None]) -> ChatReply:
        """The next message of the assistant; it waits for as long as that takes.

        The same call again goes on from its sampled tokens. Raises EpisodeOver, ChatRefused.
        """

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        """Credit a node, or the one answered last; returns the node. Raises EpisodeOver, ChatRefused."""
