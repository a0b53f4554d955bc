"""Messages between rollouters and the episode hosts that run users' code: episodes, and their calls of the policy.

No token is in any of it: ids, log-probs and versions stay with the rollouter, in the conversation of the session.
A session is one attempt at one trajectory, and the user's program holds only its key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncrl.messages import EPISODES, ROLLOUTER, Count, Message, Request, Uid

SessionKey = Annotated[str, Meta(min_length=32, max_length=64, pattern="^[0-9a-f]+$")]
"""128 random bits or more, in hexadecimal. No log line holds it."""


class EpisodeDone(Message, frozen=True, kw_only=True):
    """The episode has ended by itself or by its host. ``error`` is empty if it ended well."""

    reward: float | None = None
    """Reward that the user's code gave the whole trajectory; None where it gave none."""
    components: dict[str, float] = {}
    error: str = ""
    """Reason of the failure: the exception with its place, the exit code with the last lines printed."""
    blame: Literal["episode", "host"] = "episode"
    """Cause of the error. ``host``: the worker died, was killed or stalled, perhaps because of another episode; no
    attempt is counted."""
    user_s: float = 0.0
    """Processor time of the user's code, where it is known."""


class RunEpisode(Request, frozen=True, kw_only=True):
    """Rollouter to episode host: play one task. Cancelling the call ends the episode and its processes.

    Must not be repeated at another incarnation of the host, because the conversation has begun. A full host of
    episode.extra_hosts refuses it with EpisodeHostFull.
    """

    reply = EpisodeDone
    senders = ROLLOUTER
    idempotent = False
    session: SessionKey
    uid: Uid
    sample: Count
    attempt: Count
    """Number of the attempt at this trajectory, from 0."""
    purpose: str
    """Purpose of the lease: train, or eval/NAME."""
    prompt: str
    """The prompt as text."""
    messages: list[dict[str, Any]]
    """The prompt as the messages that a conversation begins with."""
    tools: list[dict[str, Any]] = []
    """Tools of the row, as in OpenAI's chat completions."""
    row: dict[str, Any]
    seed: Count
    """Seed, the same for all samples of a prompt in every attempt: they face the same task."""


class EpisodeBegan(Message, frozen=True, kw_only=True):
    """Episode host to rollouter: a worker or a program has begun with the episode. Until then it has waited for one.

    It may be lost; the first Chat of the session says the same.
    """

    senders = EPISODES
    session: SessionKey


class ToolCall(Struct, gc=False, frozen=True, kw_only=True):
    """A call of a tool that the policy wants made."""

    id: str
    """Minted by the rollouter; the next request is recognised by it."""
    name: str
    arguments: str
    """JSON text of an object."""

    def in_message(self) -> dict[str, Any]:
        """The call in an assistant's message, as in OpenAI's chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ChatReply(Message, frozen=True, kw_only=True):
    """The policy's answer."""

    node: Count
    """Node of the conversation; rewards of turns name it."""
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: Count
    completion_tokens: Count
    stop_sequence: str = ""
    """String of the agent's ``stop`` before which the content ends; empty where none was sampled."""


class Chat(Request, frozen=True, kw_only=True):
    """Episode host to rollouter: the assistant's next message. A repeat of a call joins it, or is given what it gave.

    A cancelled call keeps its sampled tokens, and a repeat continues them. Refused with EpisodeOver when the
    session is over, or is not known; with ChatRefused where the policy cannot be asked so.
    """

    reply = ChatReply
    senders = EPISODES
    session: SessionKey
    call: Annotated[str, Meta(min_length=1, max_length=200)]
    """Names the call within the session."""
    messages: list[dict[str, Any]]
    """Messages as in OpenAI's chat completions: role, content (text or None), tool_calls, tool_call_id, name."""
    tools: list[dict[str, Any]] = []
    """Tools as in OpenAI's chat completions."""
    template_options: dict[str, Any] = {}
    """Further arguments of the chat template, as enable_thinking."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    stream: bool = False
    """Send ChatDelta meanwhile, unless reasoning is parsed: each is a piece of the reply's content."""
    untrained: bool = False
    """Nothing that is sampled for it is trained: an auxiliary call, as for a title."""


class ChatDelta(Message, frozen=True, kw_only=True):
    """Rollouter to episode host: text of a call under way, ``offset`` characters after its beginning.

    It may be lost: a host that lacks some of it takes the rest from the reply.
    """

    senders = ROLLOUTER
    session: SessionKey
    call: str
    offset: Count
    text: str


class TurnRewarded(Message, frozen=True, kw_only=True):
    """The reward is noted."""

    node: Count


class TurnReward(Request, frozen=True, kw_only=True):
    """Episode host to rollouter: credit a turn. A second value for a turn replaces the first."""

    reply = TurnRewarded
    senders = EPISODES
    session: SessionKey
    node: Count | None = None
    """Node of the turn; None: the one that was answered last."""
    value: float
