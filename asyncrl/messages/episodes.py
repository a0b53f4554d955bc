"""Messages between rollouters and the episode hosts that run users' code: episodes, and their calls of the policy.

An episode is one run of the user's code for one trajectory. A session is one attempt at it; the user's program knows
only the session's key. The messages carry text, and no tokens: ids, log-probs and versions stay with the rollouter, in
the session's conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncrl.messages import EPISODES, ROLLOUTER, Count, Message, Request, Uid

SessionKey = Annotated[str, Meta(min_length=32, max_length=64, pattern="^[0-9a-f]+$")]
"""At least 128 random bits, in hexadecimal. It is a secret, and is not logged."""


class EpisodeDone(Message, frozen=True, kw_only=True):
    """The episode has ended, or its host has ended it. ``error`` is empty if it succeeded."""

    reward: float | None = None
    """Reward of the whole trajectory from the user's code; None if the code gave no reward."""
    components: dict[str, float] = {}
    error: str = ""
    """Reason of the failure, such as the exception and its line of code, or the exit code and last lines of output."""
    blame: Literal["episode", "host"] = "episode"
    """Cause of the error. ``host``: the worker died, was killed or stalled, perhaps because of another episode, or a
    turn's reward did not arrive. Then this does not count as an attempt."""


class RunEpisode(Request, frozen=True, kw_only=True):
    """Rollouter to episode host: run one episode. Cancelling the call ends the episode and its processes.

    It must not be repeated to another incarnation of the host, because the conversation may have begun. A full host of
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
    """The prompt as messages: the conversation begins with them."""
    tools: list[dict[str, Any]] = []
    """Tools of the dataset row, as in OpenAI's chat completions."""
    row: dict[str, Any]
    seed: Count
    """Random seed of the task, the same for all samples of a prompt and all attempts: they get the same task."""


class EpisodeBegan(Message, frozen=True, kw_only=True):
    """Episode host to rollouter, cast: the episode no longer waits for a worker or program, but runs.

    It may be lost: the first Chat of the session also shows that the episode runs.
    """

    senders = EPISODES
    session: SessionKey


class ToolCall(Struct, gc=False, frozen=True, kw_only=True):
    """A call of a tool that the policy requests."""

    id: str
    """Id that the rollouter has made; by it the rollouter recognises that the next Chat continues this answer."""
    name: str
    arguments: str
    """JSON text of an object."""

    def in_message(self) -> dict[str, Any]:
        """Return the call as an entry of ``tool_calls`` in an assistant's message of OpenAI's chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ChatReply(Message, frozen=True, kw_only=True):
    """The policy's answer."""

    node: Count
    """Number of this answer in the conversation; TurnReward names it."""
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: Count
    completion_tokens: Count
    stop_sequence: str = ""
    """String of Chat.stop at which the content ends (without it); empty if none of them was sampled."""


class Chat(Request, frozen=True, kw_only=True):
    """Episode host to rollouter: generate the assistant's next message.

    A repeat of a call waits for the same answer, or gets the answer that was given. A cancelled call keeps its sampled
    tokens, and a repeat continues them. Refused with EpisodeOver if the session is over or unknown, and with
    ChatRefused if the policy cannot serve such a request.
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
    """Further arguments of the chat template, for example enable_thinking."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    stream: bool = False
    """Whether to send ChatDelta casts meanwhile, each a piece of the reply's content; not with tools or stops, or if
    reasoning is parsed."""
    untrained: bool = False
    """Whether to train nothing that is sampled for it: an auxiliary call, for example for a title."""


class ChatDelta(Message, frozen=True, kw_only=True):
    """Rollouter to episode host, cast: a piece of the content of a call under way.

    It may be lost: a host that lacks a piece takes the rest from the reply.
    """

    senders = ROLLOUTER
    session: SessionKey
    call: str
    offset: Count
    """Number of characters of the content before this piece."""
    text: str


class TurnRewarded(Message, frozen=True, kw_only=True):
    """The reward is recorded."""

    node: Count


class TurnReward(Request, frozen=True, kw_only=True):
    """Episode host to rollouter: give a turn a reward. A second value for the same turn replaces the first."""

    reply = TurnRewarded
    senders = EPISODES
    session: SessionKey
    node: Count | None = None
    """ChatReply.node of the turn; None for the newest trained answer, or without one for the newest."""
    value: float
