"""The words for what cannot be written."""

import errno

import pytest

from asyncrl.learner.checkpoint.failed_writes import version_failed

MARK = "/no/such/folder/version_mark.json"


@pytest.mark.parametrize(
    ("error", "to_do", "waits_for"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", MARK),
            "free space in /no/such/folder, of which a few KiB are enough for this",
            "room on /no/such/folder",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "free memory on this host: a version takes 3.0 GiB of it",
            "memory for the weights",
        ),
        (OSError(errno.EIO, "Input/output error", MARK), "mend what is named", ""),
    ],
)
def test_a_version_that_cannot_be_published_says_what_helps(error, to_do, waits_for):
    told = version_failed(error, 7, 3 << 30, 300.0)
    assert told.text.startswith("no version of the weights after 7 could be published: ")
    assert told.meanwhile.endswith(f"for 300 s (checkpoint.room_wait_s). To do: {to_do}")
    assert told.waits_for == waits_for
