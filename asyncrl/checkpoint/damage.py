"""Damage to a checkpoint, told apart from everything else that can keep it from being read.

A file that is not there, has another size or another checksum than was noted when it was written, or that the disk
cannot give back, is damaged: DamagedCheckpoint. A disk that is away, a file that this user may not read, or a lack of
memory or descriptors says nothing of the checkpoint: CheckpointError. Both name the file.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from asyncrl.disk import full_errno
from asyncrl.errors import CheckpointError, DamagedCheckpoint, DataError
from asyncrl.files import Digest, difference

DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})
"""Numbers of reading errors that are of the file itself."""


def refused(path: Path, error: OSError) -> CheckpointError:
    """Error of a checkpoint that the operating system refuses, naming the file of ``error``, or ``path``."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    return CheckpointError(where, error.strerror or str(error), full=full_errno(error))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context around reading a file of a checkpoint. Raises DamagedCheckpoint or CheckpointError, naming the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        kind = DamagedCheckpoint if error.errno in DAMAGE else CheckpointError
        raise kind(str(path), f"cannot be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        # A damaged file looks otherwise: its checksum was right before anybody decodes it.
        reason = f"cannot be read, as if another version of asyncrl had written it: {error}"
        raise CheckpointError(str(path), reason) from error
    except (msgspec.DecodeError, UnicodeDecodeError, DataError) as error:
        raise DamagedCheckpoint(str(path), f"cannot be read: {error}") from error


def check_file(path: Path, written: Digest) -> None:
    """Hold a file against its size and checksum. Raises DamagedCheckpoint or CheckpointError."""
    with reading(path):
        problem = difference(path, written)
    if problem is not None:
        raise DamagedCheckpoint(str(path), problem)


def check_files(folder: Path, files: Mapping[str, Digest], limit_bytes: int | None) -> None:
    """Hold the files of a folder against their sizes, and against their checksums from the smallest on, as far as
    ``limit_bytes`` of reading go (None: all). Raises DamagedCheckpoint or CheckpointError.
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
