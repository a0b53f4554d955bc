"""Names of the Hugging Face hub that are given where a path belongs. Only looks at paths.

asyncrl downloads nothing, so that a run reads the same files each time and on each host. An error about a name of the
hub gives the command that downloads it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"(?:hf://|https?://(?:huggingface\.co|hf\.co)/)(?:datasets/)?([^/\s]+/[^/\s?#]+)")
_FILE = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|txt|arrow|gz|zst|safetensors|bin|gguf|pt)$", re.IGNORECASE)


def fetch_command(path: str, *, is_dataset: bool = False) -> str:
    """The command that downloads the hub's repository ``path``; empty if ``path`` does not look like its name.

    A name is OWNER/NAME, or the address of its page. A path that exists, or whose first folder exists, is a path.
    """
    if address := _ADDRESS.match(path):
        name = address[1]
    elif _NAME.fullmatch(path) and not _FILE.search(path) and not Path(path).parent.exists():
        name = path
    else:
        return ""
    kind = "--repo-type dataset " if is_dataset else ""
    return f"hf download {kind}{shlex.quote(name)} --local-dir {shlex.quote(name.rpartition('/')[2])}"


def fetch_advice(path: str, key: str = "the path", *, is_dataset: bool = False) -> str:
    """The way to get what a ``path`` names on the hub; empty if it does not look like a name of the hub."""
    command = fetch_command(path, is_dataset=is_dataset)
    if not command:
        return ""
    folder = command.rpartition(" ")[2]
    return f"run `{command}` (asyncrl downloads nothing) and set {key} to {folder}"
