"""Messages between the episode host and its workers over a socket pair.

The host sends EpisodeSetup and the worker Ready (workers/user_code.py). Then each Play is answered by one Ended, in any
order. In between the worker sends the episode's calls (Asked) and rewards (Rewarded). Alive shows that its event loop
runs. ``session`` is the key of an episode's session, and ``call`` the name of a call within the session.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.episodes.playing.client import Task
from asyncrl.messages.episodes import Chat, ChatReply

SMALL_BYTES = 1 << 20
"""Largest size of a frame, not counting the messages of a chat (bytes)."""


class EpisodeSetup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """The code that the worker plays, as in the configuration, and the address of the policy."""

    kind: str
    code: list[str]
    options: dict[str, Any]
    model: str
    base_url: str
    alive_s: float
    """Seconds between two Alive messages."""
    close_timeout_s: float
    """Seconds in which tasks that an episode has left behind may end."""
    max_output_bytes: int
    max_request_bytes: int


class Play(msgspec.Struct, frozen=True, array_like=True, tag="play"):
    """Begin an episode."""

    session: str
    task: Task


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answer to an Asked."""

    session: str
    call: str
    reply: ChatReply


class Denied(msgspec.Struct, frozen=True, array_like=True, tag="denied"):
    """Refusal of an Asked. The cause is the end of the episode (``over``), an invalid ``field``, or else an unreachable
    policy."""

    session: str
    call: str
    reason: str
    over: bool = False
    field: str = ""


class StopEpisode(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End an episode; it is answered by Ended."""

    session: str


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A call of the policy."""

    chat: Chat


class GaveUp(msgspec.Struct, frozen=True, array_like=True, tag="gave_up"):
    """An Asked was cancelled; no answer is sent to it."""

    session: str
    call: str


class Rewarded(msgspec.Struct, frozen=True, array_like=True, tag="rewarded"):
    """The user's code gives a turn the reward ``value``; ``node`` is the number of its answer, None for the newest."""

    session: str
    node: int | None
    value: float


class Printed(msgspec.Struct, frozen=True, array_like=True, tag="printed"):
    """Output of an episode, and the number of bytes that were dropped since its last Printed."""

    session: str
    text: str
    dropped: int = 0


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """A tool was called. ``error`` is empty if the call succeeded; ``mistaken``: the policy has called it wrongly."""

    session: str
    tool: str
    error: str = ""
    kind: str = ""
    mistaken: bool = False


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """An episode has ended; ``error`` is empty if it succeeded. Errors of the same ``kind`` are counted together."""

    session: str
    reward: float | None = None
    components: dict[str, float] = {}
    error: str = ""
    kind: str = ""
    left: int = 0
    """Number of asyncio tasks of the episode that still run although they were cancelled."""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The event loop of the worker runs."""


ToWorker = EpisodeSetup | Play | Answered | Denied | StopEpisode
ToHost = Asked | GaveUp | Rewarded | Printed | Noted | Ended | Alive
