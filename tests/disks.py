"""Disks that are full, and files that a disk has damaged."""

import contextlib
import os
import resource
import subprocess

import pytest

from asyncrl.core.disk import free_bytes


@contextlib.contextmanager
def room_for(size):
    """No file may grow beyond this. Bytes that were truncated may be written again, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def small_disk(folder, size):
    """``folder`` is a disk of its own of this many bytes. Skips the test if none can be mounted."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # An error that is examined may still hold a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, left=0):
    """Fill a small disk except for ``left`` bytes. Returns the file that fills it, which can be removed."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while (room := free_bytes(folder) or 0) > left:
            with contextlib.suppress(OSError):
                file.write(bytes(room - left))
    return ballast


def flip(path):
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tear(path):
    """Cut off the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)
