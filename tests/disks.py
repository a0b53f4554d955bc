"""Disks that are full."""

import contextlib
import resource


@contextlib.contextmanager
def room_for(size):
    """No file may grow beyond this: what is taken off one may be written again, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
