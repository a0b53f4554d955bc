"""The folder in which torch keeps compiled graphs, one for learner and engines, so that later runs find them.

It is the user's choice, else lasts in the user's cache, else is temporary. Never fails: a user's cache without room or
rights is not used.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

CACHE_ROOM_BYTES = 1 << 20
"""Bytes that must fit into a folder before compiled graphs are kept there."""


def compile_cache() -> str:
    """Return the folder in which torch keeps compiled graphs, so that later runs find them.

    It is TORCHINDUCTOR_CACHE_DIR if that is set, else a folder in the user's cache. If that cannot be written, it is a
    temporary folder, as torch's own default is.
    """
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "asyncrl", "torchinductor")
    # For a user without a home folder, the path still begins with "~".
    if os.path.isabs(folder):
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            # A folder whose quota is used up looks writable.
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                file.write(bytes(CACHE_ROOM_BYTES))
            return folder
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
