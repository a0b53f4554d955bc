"""Converts text to token ids and back, and renders chats as text, without torch.

``tokenizers`` reads a Hugging Face folder, and jinja2 renders its chat template, as in transformers. Only a folder
without tokenizer.json needs transformers. Without a folder, for simulated runs, tokens are bytes. Heavy modules are
imported by ``load_tokenizer`` and at the first chat prompt, because every simulated rollouter imports this module.

Invariant: the same messages give the same ids during a run, even past midnight. A template that asks for the time gets
the date with which the tokenizer was loaded.

Fails with ConfigError (naming model.path) if the folder holds no tokenizer, and with ValueError for a prompt that the
template refuses.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from datetime import date as Date
from datetime import datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.model_files import eos_token_ids, read_optional, text_config

_LONGEST_QUOTE = 40
"""Most characters of a text that an error quotes."""
_BYTES = 256
"""Number of ids of bytes in ByteTokenizer, and the id of BYTES_END."""
BYTES_END = "<|end|>"
BYTES_CALL = "<tool_call>{}</tool_call>"
BYTES_REASONING = "<think>\n{}\n</think>\n\n"
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "sentencepiece*",
    "tokenization_*.py",
)
"""Patterns of file names; every folder with a tokenizer has a file that matches one."""


class Tokenizer(Protocol):
    """A tokenizer of any kind. Its methods may be called from several threads at a time."""

    eos_ids: set[int]
    """Ids that end a response; may be empty."""
    special_ids: dict[str, int]
    """Ids of the special tokens, which ``decode`` leaves out, by their text."""
    vocabulary: int
    """Exclusive upper bound of all ids: the model's, which may exceed the tokenizer's."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a plain text for the model to continue.

        They begin with the special tokens that the tokenizer adds in front. Prompts of chat messages are rendered first
        (chat/template.py). Raises ValueError.
        """

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generate: bool = True,
    ) -> str:
        """Render a conversation by the chat template. With ``generate`` the text ends where an answer must begin.

        ``options`` are further arguments of the template; they override the tokenizer's own. Raises ValueError if the
        template refuses the conversation, ConfigError without a template.
        """

    def template_text(self, *, with_tools: bool) -> str | None:
        """Return the source of the chat template for chats with or without tools; None without one."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens that the tokenizer adds. Special tokens in it get their ids."""

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids; special tokens are left out unless ``keep_special``."""


def tokenizer_of(config: Config) -> Tokenizer:
    """Load the tokenizer of a run, with the run's options of the chat template. Raises ConfigError."""
    model, chat = config.model, config.chat
    return load_tokenizer(
        model.path,
        trust_remote_code=model.trust_remote_code,
        date=chat.date,
        template_options=chat.template_options,
    )


def load_tokenizer(
    path: str | None,
    *,
    trust_remote_code: bool = False,
    date: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model folder, or of bytes without a folder. Raises ConfigError.

    ``date``, as YYYY-MM-DD, is the date for chat templates, today by default. ``template_options`` are further
    arguments of the template.
    """
    if path is None:
        return ByteTokenizer()
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError([f"model.path: {path} is not a folder"])
    settings = Date.today() if date is None else Date.fromisoformat(date), dict(template_options or {})
    if (folder / "tokenizer.json").is_file():
        return _FileTokenizer(folder, settings)
    # tokenizer_config.json matches a pattern but is no tokenizer.
    if not any(file.name != "tokenizer_config.json" for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise ConfigError([f"model.path: {folder} holds no tokenizer: no tokenizer.json, tokenizer.model or vocab.*"])
    return _TransformersTokenizer(folder, settings, trust_remote_code)


TemplateSettings = tuple[Date, Mapping[str, Any]]
"""The date and the options that every chat template of a run receives with the conversation."""


class ByteTokenizer:
    """Tokenizer whose ids 0 to 255 are UTF-8 bytes; one more id, with the text BYTES_END, ends a response.

    A chat has one line for each message. An assistant's message ends with BYTES_END.
    """

    eos_ids: set[int]
    special_ids: dict[str, int]
    vocabulary = _BYTES + 1

    def __init__(self) -> None:
        self.eos_ids, self.special_ids = {_BYTES}, {BYTES_END: _BYTES}

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generate: bool = True,
    ) -> str:
        """Render a conversation, with calls of tools in the form of Hermes and reasoning in that of Qwen."""
        lines = [f"tools: {json.dumps(list(tools), ensure_ascii=False)}"] if tools else []
        for message in messages:
            content, role = message.get("content") or "", message["role"]
            if role != "assistant":
                name = f" ({message['name']})" if role != "tool" and message.get("name") else ""
                lines.append(f"{role}{name}: {content}")
                continue
            if reasoning := message.get("reasoning_content"):
                content = BYTES_REASONING.format(reasoning) + content
            calls = (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ())
            lines.append(f"assistant:{content}{''.join(map(BYTES_CALL.format, calls))}{BYTES_END}")
        return "\n".join([*lines, "assistant:"] if generate else [*lines, ""])

    def template_text(self, *, with_tools: bool) -> str | None:
        """Return a text that only shows the form of calls."""
        return BYTES_CALL

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(text.split(BYTES_END)):
            ids += [_BYTES] * (number > 0)
            ids += part.encode()
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        if not keep_special:
            return bytes(id for id in ids if 0 <= id < _BYTES).decode(errors="replace")
        end = BYTES_END.encode()
        return b"".join(end if id == _BYTES else bytes((id,)) for id in ids if 0 <= id <= _BYTES).decode(
            errors="replace"
        )


class _HuggingFace:
    """The part that the two kinds of Hugging Face tokenizers share: settings of the folder and chat templates."""

    def __init__(self, folder: Path, settings: TemplateSettings) -> None:
        self._folder = folder
        self._date, self._options = settings
        self._config = read_optional(folder / "tokenizer_config.json")
        self.special_ids: dict[str, int] = {}
        model = read_optional(folder / "config.json")
        self.eos_ids = eos_token_ids(folder, model)
        # 0 if config.json does not say it.
        self.vocabulary = int(text_config(model).get("vocab_size") or model.get("vocab_size") or 0)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """Texts of the named special tokens: bos_token, eos_token and so on."""
        merged = read_optional(self._folder / "special_tokens_map.json") | self._config
        named = {name: _text(value) for name, value in merged.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text is not None}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generate: bool = True,
    ) -> str:
        arguments = {**self._special_tokens, **self._options, **(options or {})}
        arguments |= {"messages": messages, "tools": tools or None, "add_generation_prompt": generate}
        template = self._templates[bool(tools)]
        try:
            return str(template.render(arguments))
        except Exception as error:
            # A template is a program and may raise any error, for example if it adds text to None.
            raise ValueError(f"the chat template refuses the prompt: {error}") from None

    def template_text(self, *, with_tools: bool) -> str | None:
        named = self._named_templates
        return (named.get("tool_use") if with_tools else None) or named.get("default")

    @cached_property
    def _named_templates(self) -> dict[str, str]:
        """Sources of chat templates by name. A single one, and the one in chat_template.jinja, is the default."""
        source = self._config.get("chat_template")
        named: dict[str, Any] = {"default": source}
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
        elif isinstance(source, dict):
            named = dict(source)
        file, others = self._folder / "chat_template.jinja", self._folder / "additional_chat_templates"
        if file.is_file():
            named["default"] = file.read_text("utf-8-sig")
        named |= {other.stem: other.read_text("utf-8-sig") for other in sorted(others.glob("*.jinja"))}
        return {name: text for name, text in named.items() if isinstance(text, str)}

    @cached_property
    def _templates(self) -> tuple[Any, Any]:
        """The compiled templates for chats without tools, and with tools."""
        plain, with_tools = (self.template_text(with_tools=tools) for tools in (False, True))
        if plain is None:
            raise ConfigError([f'data.template: {self._folder} has no chat template; set data.template = "plain"'])
        assert with_tools is not None
        compiled = _compile(plain, self._date)
        return compiled, compiled if with_tools == plain else _compile(with_tools, self._date)


class _FileTokenizer(_HuggingFace):
    """A tokenizer read through tokenizer.json."""

    def __init__(self, folder: Path, settings: TemplateSettings) -> None:
        super().__init__(folder, settings)
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise ConfigError(["model.path: needs tokenizers: pip install 'asyncrl[train]'"]) from None
        try:
            self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            # tokenizers raises nothing more precise.
            raise ConfigError([f"model.path: {folder}/tokenizer.json cannot be read: {error}"]) from None
        # tokenizer.json may hold settings for batches that would pad or cut prompts.
        self._backend.no_padding()
        self._backend.no_truncation()
        eos = self._backend.token_to_id(self._special_tokens.get("eos_token", ""))
        self.eos_ids.update([] if eos is None else [eos])
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = {token.content: id for id, token in added.items() if token.special}
        self.vocabulary = self.vocabulary or self._backend.get_vocab_size()

    def encode_prompt(self, text: str) -> list[int]:
        encoding = self._encode(text, add_special_tokens=True)
        ids: list[int] = encoding.ids
        # Remove tokens that a post-processor adds after the text: end-of-sequence would end the prompt. Keep tokens in
        # front: transformers too ignores add_bos_token if there is a tokenizer.json.
        while ids and encoding.special_tokens_mask[len(ids) - 1]:
            ids.pop()
        return ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Encode a text. Raises ValueError, which quotes the part that cannot be encoded."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            # tokenizers raises nothing more precise, for example for an unknown word in a vocabulary without UNK.
            problem = (
                f"{self._folder}/tokenizer.json cannot encode {_quote_in_context(self._find_unencodable(text), text)}"
            )
            if "unk" in str(error).lower():
                problem += ", which its vocabulary lacks; for such text it needs an unk_token that is in the vocabulary"
            else:
                problem += f": {error}"
            raise ValueError(problem) from None

    def _find_unencodable(self, text: str) -> str:
        """Find the first part of a text that cannot be encoded by itself; without one, return the whole text.

        Normalises and splits the text as the tokenizer does, and tries each part.
        """
        backend, special = self._backend, "|".join(map(re.escape, self.special_ids))
        for part in re.split(special, text) if special else [text]:
            normalised = backend.normalizer.normalize_str(part) if backend.normalizer is not None else part
            splitter = backend.pre_tokenizer
            for piece, _ in splitter.pre_tokenize_str(normalised) if splitter is not None else [(normalised, None)]:
                try:
                    backend.model.tokenize(piece)
                except Exception:
                    return str(piece)
        return text

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=not keep_special))


class _TransformersTokenizer(_HuggingFace):
    """A tokenizer of transformers, for formats that only it can read."""

    def __init__(self, folder: Path, settings: TemplateSettings, trust_remote_code: bool) -> None:
        super().__init__(folder, settings)
        # Tokenizers of transformers change their backend's settings at each call.
        self._one_at_a_time = threading.Lock()
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(["model.path: needs transformers: pip install 'asyncrl[train]'"]) from None
        try:
            self._backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError([f"model.path: {folder} holds no tokenizer: {error}"]) from None
        if len(self._backend) <= len(set(self._backend.all_special_ids)):
            # Some classes of transformers make an empty tokenizer if their files are missing.
            raise ConfigError([f"model.path: the tokenizer in {folder} has no tokens; its vocabulary is missing"])
        if self._backend.eos_token_id is not None:
            self.eos_ids.add(self._backend.eos_token_id)
        self.special_ids = dict(zip(self._backend.all_special_tokens, self._backend.all_special_ids, strict=True))
        self.vocabulary = self.vocabulary or len(self._backend)

    def encode_prompt(self, text: str) -> list[int]:
        with self._one_at_a_time:
            ids: list[int] = self._backend.encode(text)
        # An end-of-sequence token that the tokenizer adds would end the prompt.
        eos = self._backend.eos_token_id
        return ids[:-1] if ids[-1:] == [eos] and self.encode(text)[-1:] != [eos] else ids

    def encode(self, text: str) -> list[int]:
        with self._one_at_a_time:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        with self._one_at_a_time:
            return str(
                self._backend.decode(
                    list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
                )
            )


def _quote_in_context(piece: str, text: str) -> str:
    """Quote a piece of a text, and the text around it, shortened: ``'PIECE' in 'TEXT...'``."""
    around = text[max(0, text.find(piece) - _LONGEST_QUOTE // 2) :]
    shown = [part if len(part) <= _LONGEST_QUOTE else f"{part[:_LONGEST_QUOTE]}..." for part in (piece, around)]
    return " in ".join(map(repr, dict.fromkeys(shown)))


def _compile(source: str, date: Date) -> Any:
    """Compile a chat template in the environment that transformers gives it.

    See transformers/utils/chat_template_utils.py. Its clock shows the beginning of ``date``. Raises ConfigError.
    """
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.ext import loopcontrols as loop_controls
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag ``{% generation %}``, which marks the assistant's words; its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loop_controls]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.combine(date, time()).strftime
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError([f"data.template: the chat template cannot be compiled: {error}"]) from None


def _text(token: Any) -> str | None:
    """Return the text of a special token, which a file gives as text or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
