"""Files that are written whole, or stay unchanged."""

import os
from functools import partial

import pytest
from disks import room_for

from asyncrl.core.files import KeptWrites, append_whole, replace_file


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "report.html"
    for text in ("–" * 10, "shorter"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_only_its_owner_can_read_a_private_file(tmp_path):
    mask = os.umask(0o022)
    try:
        for name, mode, found in (("open", None, 0o644), ("private", 0o600, 0o600)):
            replace_file(tmp_path / name, "x", mode=mode)
            assert (tmp_path / name).stat().st_mode & 0o777 == found
    finally:
        os.umask(mask)


@pytest.mark.parametrize("before", [None, "as it was"])
def test_a_full_disk_or_an_undecodable_text_leaves_the_file_unchanged(tmp_path, before):
    path = tmp_path / "prometheus.json"
    if before is not None:
        path.write_text(before)
    with room_for(10), pytest.raises(OSError, match="too large"):
        replace_file(path, "x" * 100)
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\udcff")
    assert [(found, found.read_text()) for found in tmp_path.iterdir()] == ([(path, before)] if before else [])


def test_a_line_that_a_full_disk_takes_in_part_is_removed_again(tmp_path):
    path = tmp_path / "lines"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        append_whole(descriptor, b"first\n")
        with room_for(10), pytest.raises(OSError, match="too large"):
            append_whole(descriptor, b"second, and long\n")
        assert path.read_bytes() == b"first\n"
        append_whole(descriptor, b"third\n")
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"first\nthird\n"


@pytest.mark.parametrize("is_full", [False, True], ids=["there is room", "the disk is full"])
def test_a_record_that_arrives_during_a_write_is_written_after_it(is_full):
    """As from a signal handler that logs while its thread writes a line."""
    kept, written, full = KeptWrites(100), [], [is_full]

    def write(name):
        if name == "outer":
            kept.add(lambda: write("inner"), 10)
            kept.retry()
        if full[0]:
            raise OSError(28, "No space left on device")
        written.append(name)

    kept.add(lambda: write("outer"), 10)
    if is_full:
        assert (written, kept.records, kept.error.errno) == ([], 2, 28)
        full[0] = False
        kept.add(lambda: write("last"), 10)
    assert written == (["outer", "inner", "last", "inner"] if is_full else ["outer", "inner"])
    assert (kept.records, kept.lost, kept.error) == (0, 0, None)


def test_records_that_arrive_during_a_write_are_bounded():
    kept, written = KeptWrites(100), []

    def write():
        for number in range(20):
            kept.add(partial(written.append, number), 10)
        raise OSError(28, "No space left on device")

    kept.add(write, 10)
    assert (kept.records, kept.lost, written) == (10, 11, [])
    kept.give_up()
    assert (kept.records, kept.lost) == (0, 21)
