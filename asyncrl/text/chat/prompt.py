"""The prompt of a row: read from its columns, and rendered as the model sees it.

Dataloader, dry run and episodes use these functions, so that the prompt whose tokens are counted is the prompt that is
played. Invariant: a prompt passes only if the model reads all of it (``shown.py``). A last message of the assistant
is continued or refused, never answered by a second one.

Fails with ChatRefused, which names the field, and with ConfigError where the model has no chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from asyncrl.config import Config
from asyncrl.config.episode import ChatConfig
from asyncrl.config.training import DataConfig
from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import Message, Tool, kind_of
from asyncrl.text.chat.row_messages import read_conversation
from asyncrl.text.chat.shown import ShownCheck
from asyncrl.text.chat.template import ChatTemplate
from asyncrl.text.tokenizer import Tokenizer

Prompt = str | list[Message]
"""Text, or chat messages in the form of ``normalise_messages``."""
CONTINUED = "qkzcontinued"
"""A word that no template holds; it marks where the last message ends."""


def read_prompt(given: Any, field: str, *, continues: bool) -> Prompt:
    """The prompt in column ``field``; ``continues`` is data.continue_final_message. Raises ChatRefused."""
    if isinstance(given, str):
        if not given.strip():
            raise ChatRefused(field, "is empty")
        return given
    if not isinstance(given, list):
        raise ChatRefused(field, f"must be text or a list of messages, not {kind_of(given)}")
    messages = read_conversation(given, field)
    last = messages[-1]
    if last["role"] != "assistant":
        return messages
    where = f"{field}[{len(messages) - 1}]"
    if last.get("tool_calls"):
        raise ChatRefused(f"{where}.tool_calls", "no result follows; put the messages of the tools behind it")
    if not continues:
        raise ChatRefused(
            where,
            "the last message is the assistant's; remove it, or have the policy continue it with "
            "data.continue_final_message = true",
        )
    return messages


def conversation(prompt: Prompt, system: str | None) -> list[Message]:
    """The messages of a prompt, behind the system message unless the prompt has one (``developer`` is one)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *messages] if _adds_system(messages, system) else messages


def _adds_system(messages: Sequence[Message], system: str | None) -> bool:
    return system is not None and all(message["role"] != "system" for message in messages)


class PromptEncoder:
    """Encodes the prompts of one set of data. May be called from several threads at a time."""

    def __init__(self, tokenizer: Tokenizer, data: DataConfig, config: Config | None = None) -> None:
        self._tokenizer, self._data = tokenizer, data
        self._chat = config.chat if config is not None else ChatConfig()
        self._tools_are_code = config is not None and config.episode.kind == "tools"

    def __call__(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[list[int], str]:
        """The ids of a prompt and its text as the model sees it. Raises ValueError or ConfigError."""
        if tools and self._tools_are_code:
            problem = "an episode with episode.tools shows the tools of its code alone; set"
            raise ChatRefused(self._data.tools_key, f'{problem} data.tools_key = ""')
        if self._data.template == "chat":
            text = self._rendered(prompt, tools)
            return self._tokenizer.encode(text), text
        if not isinstance(prompt, str):
            raise ValueError('chat messages need template = "chat"')
        if tools:
            problem = 'tools are shown under data.template = "chat" alone; if they are not for the model, set'
            raise ChatRefused(self._data.tools_key, f'{problem} data.tools_key = ""')
        return self._tokenizer.encode_prompt(prompt), prompt

    def _rendered(self, prompt: Prompt, tools: Sequence[Tool]) -> str:
        if self._tokenizer.template_text(with_tools=False) is None:
            # It raises the ConfigError that names the model's folder.
            self._tokenizer.render_chat(conversation(prompt, None))
        system = self._data.system
        messages = conversation(prompt, system)
        field, tools_field = self._data.prompt_column, self._data.tools_key
        self._shown.require(
            messages, tools, field=field, tools_field=tools_field, system=len(messages) > _count(prompt)
        )
        if messages[-1]["role"] != "assistant":
            return self._template.text(messages, tools)
        # As transformers does under continue_final_message: the template's text up to the end of the last content.
        *before, last = messages
        marked = last | {"content": last["content"] + CONTINUED}
        text, found, _ = self._template.text([*before, marked], tools, generate=False).rpartition(CONTINUED)
        if not found:
            raise ChatRefused(field, "the chat template does not show the last message, so it cannot be continued")
        return text

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._tokenizer.eos_ids)

    @cached_property
    def _shown(self) -> ShownCheck:
        return ShownCheck.of(self._template, self._chat)


def _count(prompt: Prompt) -> int:
    return 1 if isinstance(prompt, str) else len(prompt)
