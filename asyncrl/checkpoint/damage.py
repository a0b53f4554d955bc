"""Errors of reading a checkpoint: damage to its files, and everything else.

A file is damaged, DamagedCheckpoint, if it is missing, cannot be read by the disk or decoded, or differs from its
recorded size or checksum. A lost network disk, a file that this user may not read, and a lack of memory or descriptors
are no damage: CheckpointError. Nor is a file of another version of asyncrl. Both name the file. After DamagedCheckpoint
an older checkpoint is tried; any other CheckpointError ends the search.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from asyncrl.core.disk import full_errno
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import Digest, difference

DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})
"""Error numbers that mean damage to the file itself."""


def refused(path: Path, error: OSError) -> CheckpointError:
    """Turn an error of the operating system into a CheckpointError that names the error's file, or else ``path``."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    return CheckpointError(where, error.strerror or str(error), full=full_errno(error))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context around reading the file ``path`` of a checkpoint.

    Turns errors of reading and decoding into DamagedCheckpoint or CheckpointError, which name the file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        kind = DamagedCheckpoint if error.errno in DAMAGE else CheckpointError
        raise kind(str(path), f"cannot be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        # No damage: the file decodes, but does not match the types of this asyncrl.
        reason = f"cannot be read, as if another version of asyncrl had written it: {error}"
        raise CheckpointError(str(path), reason) from error
    except (msgspec.DecodeError, UnicodeDecodeError, struct.error) as error:
        raise DamagedCheckpoint(str(path), f"cannot be read: {error}") from error


def check_file(path: Path, written: Digest) -> None:
    """Check the size and checksum of a file. Raises DamagedCheckpoint or CheckpointError."""
    with reading(path):
        problem = difference(path, written)
    if problem is not None:
        raise DamagedCheckpoint(str(path), problem)


def check_files(folder: Path, files: Mapping[str, Digest], limit_bytes: int | None) -> None:
    """Check the sizes of all ``files`` in a folder, then their checksums, the smallest file first.

    Stops before it would read more than ``limit_bytes`` for checksums (None: no limit). Raises DamagedCheckpoint or
    CheckpointError.
    """
    for name, written in files.items():
        path = folder / name
        with reading(path):
            size = path.stat().st_size
        if size != written.bytes:
            raise DamagedCheckpoint(str(path), f"has {size} bytes instead of {written.bytes}")
    left = limit_bytes
    for name, written in sorted(files.items(), key=lambda item: item[1].bytes):
        if left is not None:
            left -= written.bytes
            if left < 0:
                return
        check_file(folder / name, written)
