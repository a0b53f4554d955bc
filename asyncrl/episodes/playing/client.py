"""The arguments of an episode: its task, and the client of the policy.

The client takes messages and gives the assistant's next message; it also takes rewards of turns.

After the end of an episode each ``chat`` raises EpisodeOver. An episode that ends with this error has ended well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from asyncrl.core.errors import ChatRefused
from asyncrl.messages.episodes import Chat, ChatReply, ToolCall
from asyncrl.messages.reward import read_number

Message = Mapping[str, Any]
"""Message as in OpenAI's chat completions: role, content, tool_calls, tool_call_id, name."""
SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "top_logprobs", "logit_bias", "stream"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "tool_choice", "model"),
    }
)
"""Arguments of other clients that ``chat`` refuses; otherwise they would go to the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one sample. All samples of a prompt have the same task, except for ``sample`` and ``attempt``."""

    prompt: str
    """Text of the prompt, through the chat template where data.template says so."""
    messages: list[dict[str, Any]]
    """The prompt as the messages that a conversation about it begins with."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools of the row (data.tools_key), as ``client.chat`` takes them."""
    row: dict[str, Any]
    """The dataset row."""
    seed: int
    """Seed of the task, the same for all samples of a prompt and in every attempt."""
    uid: str
    """Uid of the prompt."""
    sample: int
    """Number of the sample within the group of its prompt, from 0."""
    attempt: int
    """Number of the attempt at this sample, from 0."""
    purpose: str = "train"
    """Purpose: train, or eval/NAME."""

    @property
    def episode_id(self) -> str:
        """Id that is the same in every attempt, so that code can recognise side effects of an earlier attempt."""
        return f"{self.uid}/{self.sample}"


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer."""

    content: str
    reasoning: str | None
    tool_calls: list[ToolCall]
    """Calls of tools, each with id, name and arguments (JSON text of an object)."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to be appended to those of the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.in_message() for call in self.tool_calls]
        return message


class PolicyHandler(Protocol):
    """The receiver of a client's calls."""

    async def chat(self, chat: Chat) -> ChatReply:
        """Ask the policy for the next message. Raises EpisodeOver, ChatRefused or ConnectionError."""
        ...

    def reward(self, node: int | None, value: float) -> None:
        """Give the turn whose answer has the number ``node`` the reward ``value``; ignored after the episode's end."""
        ...


class Client:
    """The policy, for one episode. Calls may be made at the same time."""

    def __init__(self, policy: PolicyHandler, *, session: str, model: str, base_url: str) -> None:
        self._policy, self._session = policy, session
        self._calls = 0
        """Number of calls so far, which names the newest call."""
        self._node: int | None = None
        """Number of the newest answer that is trained, which ``reward`` is for; None before the first."""
        self.model = model
        """Name to give to an OpenAI client."""
        self.base_url = base_url
        """URL for any OpenAI client, with ``api_key``: the same conversation, by HTTP."""
        self.api_key = session

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        untrained: bool = False,
        **template_options: Any,
    ) -> Reply:
        """Ask the policy for the message that follows ``messages``, the whole conversation from its beginning.

        ``tools`` are as in OpenAI's chat completions; nothing that is sampled for an ``untrained`` call is trained;
        ``template_options`` go to the chat template. Raises EpisodeOver, ChatRefused for an invalid call, and
        ConnectionError if the policy cannot be asked.
        """
        if sampling := SAMPLING.intersection(template_options):
            raise ChatRefused(min(sampling), "cannot be set by an episode; the run's own sampling holds")
        self._calls += 1
        chat = Chat(
            session=self._session,
            call=f"client-{self._calls}",
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in tools or ()],
            template_options=template_options,
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else list(stop or ()),
            untrained=untrained,
        )
        reply = await self._policy.chat(chat)
        if not untrained:
            # ``reward`` goes to this answer.
            self._node = reply.node
        return Reply(
            content=reply.content,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )

    def reward(self, value: float) -> None:
        """Set the reward of the newest turn, not counting untrained calls; a second value replaces the first.

        Raises ValueError before the first turn, and BadOutcome for an invalid value.
        """
        if self._node is None:
            raise ValueError("there is no turn to reward yet: the policy has not answered")
        self._policy.reward(self._node, read_number(value, "gave the turn reward"))

    def blocking(self) -> BlockingClient:
        """The same client for code in a thread. To be called in the event loop."""
        return BlockingClient(self, asyncio.get_running_loop())


class BlockingClient:
    """The policy for an episode that is a plain function: its calls wait for the answer."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop
        self.model, self.base_url, self.api_key = client.model, client.base_url, client.api_key

    def chat(self, messages: Sequence[Message], *args: Any, **kwargs: Any) -> Any:
        """Ask the policy, as Client.chat. Returns a Reply; on the worker's event loop it returns an awaitable of one.

        That happens if a plain function, such as a decorator, returns a coroutine, which then runs on the loop.
        """
        asked = self._client.chat(messages, *args, **kwargs)
        if _running_loop() is self._loop:
            return asked
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    def reward(self, value: float) -> None:
        """Set the reward of the newest turn, as Client.reward."""
        self._client.reward(value)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
