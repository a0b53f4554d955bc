"""Text to token ids and back, without torch.

A Hugging Face folder is read through ``tokenizers`` and its chat template rendered with jinja2, as transformers does
it; only a folder without tokenizer.json needs transformers itself. Without a folder, for simulated runs, tokens are
bytes. Everything heavy is imported by ``load_tokenizer`` and at the first chat prompt, because every simulated
rollouter imports this module.

Fails with ConfigError (naming model.path) when the folder holds no tokenizer, with ValueError on a prompt that the
template refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from asyncrl.errors import ConfigError

Template = Literal["plain", "chat"]
Prompt = str | Sequence[dict[str, Any]]
"""Text, or chat messages with role and content."""

_LONGEST_PIECE = 40
"""Characters of a text that an error shows."""
_BYTES = 256
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "sentencepiece*",
    "tokenization_*.py",
)
"""One of these is in every folder that holds a tokenizer."""


class Tokenizer(Protocol):
    """What every tokenizer can do. Its methods may be called from any thread, but from one at a time."""

    eos_ids: set[int]
    """Ids that end a response; may be empty."""
    special_ids: dict[str, int]
    """Ids of the special tokens, which ``decode`` leaves out, by their text."""
    vocabulary: int
    """Ids are below it; those of the model, which may have more than its tokenizer."""

    def encode_prompt(self, prompt: Prompt, template: Template, system: str | None) -> tuple[list[int], str]:
        """The ids of a prompt and its text as the model sees it.

        ``plain``: the text as it stands, with the special tokens that the tokenizer puts in front. ``chat``: through
        the chat template, up to where the assistant answers; text is one user message; ``system`` goes in front
        unless the messages bring their own. Raises ValueError when the prompt does not fit the template.
        """

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""


def load_tokenizer(path: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder, or bytes when there is none. Raises ConfigError."""
    if path is None:
        return ByteTokenizer()
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError([f"model.path: {path} is not a folder"])
    if (folder / "tokenizer.json").is_file():
        return _FileTokenizer(folder)
    if not any(file.name != "tokenizer_config.json" for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise ConfigError([f"model.path: {folder} holds no tokenizer: no tokenizer.json, tokenizer.model or vocab.*"])
    return _TransformersTokenizer(folder, trust_remote_code)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and one id that ends a response."""

    eos_ids: set[int]
    special_ids: dict[str, int]
    vocabulary = _BYTES + 1

    def __init__(self) -> None:
        self.eos_ids, self.special_ids = {_BYTES}, {}

    def encode_prompt(self, prompt: Prompt, template: Template, system: str | None) -> tuple[list[int], str]:
        """See Tokenizer. A chat is one line a message."""
        if template == "chat":
            lines = [f"{m['role']}: {m['content']}" for m in _messages(prompt, system)]
            text = "\n".join([*lines, "assistant:"])
        else:
            text = _plain(prompt)
        return self.encode(text), text

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. Bytes that are no UTF-8 become U+FFFD."""
        return bytes(id for id in ids if 0 <= id < _BYTES).decode(errors="replace")


class _HuggingFace:
    """What the two ways to a Hugging Face tokenizer have in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = _read_json(folder / "tokenizer_config.json")
        self.eos_ids: set[int] = set()
        model = _read_json(folder / "config.json")
        text_model = model.get("text_config") or {}
        self.special_ids: dict[str, int] = {}
        self.vocabulary = int(text_model.get("vocab_size") or model.get("vocab_size") or 0)
        for source in (_read_json(folder / "generation_config.json"), model, text_model):
            ids = source.get("eos_token_id")
            self.eos_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, as text."""
        merged = _read_json(self._folder / "special_tokens_map.json") | self._config
        named = {name: _text(value) for name, value in merged.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text is not None}

    def _render(self, prompt: Prompt, system: str | None) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._chat_template.render(
                    messages=_messages(prompt, system), add_generation_prompt=True, **self._special_tokens
                )
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the prompt: {error}") from None

    @cached_property
    def _chat_template(self) -> Any:
        file = self._folder / "chat_template.jinja"
        source = file.read_text("utf-8-sig") if file.is_file() else self._config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise ConfigError([f'data.template: {self._folder} has no chat template; set data.template = "plain"'])
        return _compile(source)


class _FileTokenizer(_HuggingFace):
    """Through tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise ConfigError(["model.path: needs tokenizers: pip install 'asyncrl[train]'"]) from None
        try:
            self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            # tokenizers raises nothing more precise.
            raise ConfigError([f"model.path: {folder}/tokenizer.json cannot be read: {error}"]) from None
        self._backend.no_padding()
        self._backend.no_truncation()
        eos = self._backend.token_to_id(self._special_tokens.get("eos_token", ""))
        self.eos_ids.update([] if eos is None else [eos])
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = {token.content: id for id, token in added.items() if token.special}
        self.vocabulary = self.vocabulary or self._backend.get_vocab_size()

    def encode_prompt(self, prompt: Prompt, template: Template, system: str | None) -> tuple[list[int], str]:
        """See Tokenizer."""
        if template == "chat":
            text = self._render(prompt, system)
            return self.encode(text), text
        text = _plain(prompt)
        encoding = self._encode(text, add_special_tokens=True)
        ids: list[int] = encoding.ids
        # What a post-processor puts behind the text, an end-of-sequence token say, would end the prompt. What goes in
        # front is its word alone: transformers too ignores add_bos_token where there is a tokenizer.json.
        while ids and encoding.special_tokens_mask[len(ids) - 1]:
            ids.pop()
        return ids, text

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            # tokenizers raises nothing more precise, as for a word outside the vocabulary where there is no UNK.
            told = f"{self._folder}/tokenizer.json cannot encode {_in_context(self._piece_refused(text), text)}"
            if "unk" in str(error).lower():
                told += ", which its vocabulary lacks; for such text it needs an unk_token that is in the vocabulary"
            else:
                told += f": {error}"
            raise ValueError(told) from None

    def _piece_refused(self, text: str) -> str:
        """The first part of a text that cannot be encoded by itself; all of it where there is none."""
        backend, special = self._backend, "|".join(map(re.escape, self.special_ids))
        for part in re.split(special, text) if special else [text]:
            normal = backend.normalizer.normalize_str(part) if backend.normalizer is not None else part
            splitter = backend.pre_tokenizer
            for piece, _ in splitter.pre_tokenize_str(normal) if splitter is not None else [(normal, None)]:
                try:
                    backend.model.tokenize(piece)
                except Exception:
                    return str(piece)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


class _TransformersTokenizer(_HuggingFace):
    """Through transformers, for formats that only it can read."""

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        super().__init__(folder)
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(["model.path: needs transformers: pip install 'asyncrl[train]'"]) from None
        try:
            self._backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError([f"model.path: {folder} holds no tokenizer: {error}"]) from None
        if len(self._backend) <= len(set(self._backend.all_special_ids)):
            # Some classes of transformers make an empty one where their files are missing.
            raise ConfigError([f"model.path: the tokenizer in {folder} has no tokens; its vocabulary is missing"])
        if self._backend.eos_token_id is not None:
            self.eos_ids.add(self._backend.eos_token_id)
        self.special_ids = dict(zip(self._backend.all_special_tokens, self._backend.all_special_ids, strict=True))
        self.vocabulary = self.vocabulary or len(self._backend)

    def encode_prompt(self, prompt: Prompt, template: Template, system: str | None) -> tuple[list[int], str]:
        """See Tokenizer."""
        if template == "chat":
            text = self._render(prompt, system)
            return self.encode(text), text
        text = _plain(prompt)
        ids: list[int] = self._backend.encode(text)
        eos = self._backend.eos_token_id
        return (ids[:-1] if ids[-1:] == [eos] and self.encode(text)[-1:] != [eos] else ids), text

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _in_context(piece: str, text: str) -> str:
    """Short literals of a piece of text and of what is around it."""
    around = text[max(0, text.find(piece) - _LONGEST_PIECE // 2) :]
    shown = [part if len(part) <= _LONGEST_PIECE else f"{part[:_LONGEST_PIECE]}..." for part in (piece, around)]
    return " in ".join(map(repr, dict.fromkeys(shown)))


def _plain(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ValueError('chat messages need template = "chat"')
    return prompt


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _compile(source: str) -> Any:
    """A chat template in the environment that transformers gives it (transformers/utils/chat_template_utils.py)."""
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.ext import loopcontrols as loop_controls
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words; its content is rendered as it stands."""

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
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError([f"data.template: the chat template cannot be compiled: {error}"]) from None


def _text(token: Any) -> str | None:
    """A special token is text, or a table that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} cannot be read: {error}"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"model.path: {path} is not a JSON object"])
    return value
