"""Full disks are recognised behind the errors of other libraries, and described in words."""

import errno
import os

import pytest
from disks import fill, small_disk

from asyncrl.core.disk import free_bytes, full_errno, in_words, no_room


def raised(error, cause=None, context=None):
    error.__cause__, error.__context__ = cause, context
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")
QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")
TORN = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (FULL, errno.ENOSPC),
        (QUOTA, errno.EDQUOT),
        (OSError(errno.EIO, "Input/output error"), 0),
        (raised(RuntimeError("torn"), cause=FULL), errno.ENOSPC),
        (raised(RuntimeError("torn"), context=raised(KeyError("x"), cause=QUOTA)), errno.EDQUOT),
        (ExceptionGroup("both", [ValueError("x"), FULL]), errno.ENOSPC),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("I/O error: (os error 122)"), errno.EDQUOT),
        (RuntimeError("I/O error: (os error 2)"), 0),
        (TORN, 0),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_cause_of_an_error_shows_a_full_disk(error, found):
    assert full_errno(error) == found


def test_an_error_that_is_its_own_cause_is_checked_once():
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__, other.__context__ = other, one
    assert full_errno(one) == 0


def test_a_full_disk_is_recognised_behind_torchs_error(tmp_path):
    """From the cause of the error, or without one from the disk."""
    torch = pytest.importorskip("torch")
    with small_disk(tmp_path / "disk", 1 << 18) as disk:
        assert full_errno(TORN, disk) == 0
        with pytest.raises(RuntimeError, match="unexpected pos") as caught, (disk / "tensor").open("wb") as file:
            torch.save(torch.zeros(1 << 18), file)
        assert full_errno(caught.value) == errno.ENOSPC
        assert full_errno(TORN, disk / "further" / "down") == errno.ENOSPC
        (disk / "tensor").unlink()
        with pytest.raises(RuntimeError) as caught:
            torch.save(torch.zeros(1 << 18), disk / "tensor")
        assert full_errno(caught.value, disk) == errno.ENOSPC


def test_the_error_names_the_disk_its_free_space_and_the_space_needed(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        fill(disk, left=8192)
        assert free_bytes(disk / "not" / "there") == 8192
        assert no_room(disk, needed=3 << 19) == f"no space left on {disk}: 8.0 KiB free, about 1.5 MiB needed"
        assert no_room(disk, errno.EDQUOT) == f"the disk quota is used up on {disk}: 8.0 KiB free"
        assert in_words(FULL, disk) == f"no space left on {disk}: 8.0 KiB free"
        named = OSError(errno.EIO, os.strerror(errno.EIO), str(disk / "file"))
        assert in_words(named, disk) == f"{disk / 'file'}: Input/output error"
