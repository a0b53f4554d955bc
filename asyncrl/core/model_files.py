"""Reads files of a model's folder without loading the model: JSON files, and the headers of safetensors files.

A header holds the dtype, the shape and the byte range of every tensor, which reveals a file that was cut off.

Fails with Unreadable, which names the file. ``read_optional`` fails with ConfigError, which names model.path.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.core.errors import ConfigError

MOST_HEADER_BYTES = 100 << 20
"""safetensors itself refuses a header of more than 100 MB."""
DOWNLOAD = "copy or download the whole model folder again, readable for this user"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of dtypes in messages, by those in safetensors files."""
COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Names of tensors that old versions of transformers saved, and that every engine computes itself."""
_LENGTH = struct.Struct("<Q")


class Unreadable(ValueError):
    """A file of the model is missing or damaged."""

    fix = DOWNLOAD


class Tensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    """Name in safetensors, for example BF16."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int
    """Number of bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises Unreadable or OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise Unreadable(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name} is not a JSON object")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file does not exist. Raises ConfigError."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, Unreadable) as error:
        raise ConfigError([f"model.path: {path} cannot be read: {error}"]) from None


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Read config.json; empty if it cannot be read, which the check of the model's folder reports."""
    try:
        return read_json(Path(folder) / "config.json")
    except (OSError, Unreadable):
        return {}


def text_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model; multimodal models have it as text_config."""
    nested = settings.get("text_config")
    return nested if isinstance(nested, dict) else settings


def eos_token_ids(folder: Path, settings: dict[str, Any]) -> set[int]:
    """Return the ids of end-of-sequence tokens in ``settings``, which is config.json, and generation_config.json.

    Raises ConfigError.
    """
    found = set[int]()
    for source in (read_optional(folder / "generation_config.json"), settings, text_config(settings)):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return found


def read_header(file: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file and return its tensors by name. Raises Unreadable or OSError.

    The file holds the header's length (8 bytes), the header (JSON) and the tensors, and nothing after them. See
    https://github.com/huggingface/safetensors, Format.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as source:
        prefix = source.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes")
        (length,) = _LENGTH.unpack(prefix)
        if length > MOST_HEADER_BYTES:
            raise Unreadable(f"{file.name} is not a safetensors file (is it a pointer of git-lfs?)")
        if length > file_bytes - _LENGTH.size:
            raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes, and its header alone takes {length}")
        try:
            header = json.loads(source.read(length))
            descriptions = {name: entry for name, entry in header.items() if name != "__metadata__"}
            by_name = {name: _tensor(entry, _LENGTH.size + length) for name, entry in descriptions.items()}
            end = max((tensor.start + tensor.size for tensor in by_name.values()), default=_LENGTH.size + length)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreadable(f"the header of {file.name} cannot be read") from None
    if end > file_bytes:
        raise Unreadable(f"{file.name} is cut off: it has {file_bytes} bytes, and its header describes {end}")
    if end < file_bytes:
        raise Unreadable(f"{file.name} has {file_bytes} bytes, and its header describes {end}")
    return by_name


def _tensor(entry: Mapping[str, Any], start: int) -> Tensor:
    """Parse an entry of a header. Its offsets count from ``start``, the end of the header."""
    begin, end = map(int, entry["data_offsets"])
    return Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, end - begin)
