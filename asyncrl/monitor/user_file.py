"""Writing a file that a user has named, as a whole or not at all.

A link is followed. A target that is no regular file, as a device or a folder, is left alone. Beside the file there is
another one while it is written, under a name that nobody else has; after any failure it is taken away again. Fails
with UsageError where no file can be, and OSError, of which ``filename`` is what the user named.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from asyncrl.errors import UsageError
from asyncrl.files import replace_file


def check_writable(path: Path) -> None:
    """Require that a file may be put there at all. Raises UsageError."""
    _mode(path)


def write_user_file(path: Path, text: str) -> None:
    """Put ``text`` (UTF-8) there, with the rights of a file that it replaces. Raises UsageError and OSError."""
    mode = _mode(path)
    target = Path(os.path.realpath(path))
    try:
        # A name of the run may hold bytes that are no text.
        data = text.encode("utf-8", "backslashreplace")
        replace_file(target, data, mode=mode, aside=target.with_name(f".{secrets.token_hex(8)}.new"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _mode(path: Path) -> int | None:
    """The rights of the file that is there; None if there is none."""
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise UsageError(f"{path}: there is no folder {folder}") from None
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no file can be there ({getattr(error, 'strerror', error)})") from None
    if stat.S_ISDIR(found):
        raise UsageError(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(found):
        raise UsageError(f"{path} is no regular file, and is left alone")
    return stat.S_IMODE(found)
