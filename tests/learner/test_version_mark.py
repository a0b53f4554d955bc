"""The numbers of versions: durable before they are used, and never given twice."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learner import version_mark
from asyncrl.learner.version_mark import FILE, VersionMark


def test_a_fresh_run_begins_with_0_and_the_next_start_after_the_mark(tmp_path):
    mark = VersionMark(tmp_path)
    assert mark.version == -1
    assert [mark.advance() for _ in range(3)] == [0, 1, 2]
    again = VersionMark(tmp_path)
    assert again.version == 2
    assert again.advance() == 3
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@given(starts=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_no_number_is_given_twice_whatever_becomes_of_those_who_took_it(starts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    given_out = [mark.advance() for count in starts for mark in [VersionMark(folder)] for _ in range(count)]
    assert given_out == list(range(sum(starts)))


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "sync_folder"])
def test_a_number_that_cannot_be_made_durable_is_not_given(tmp_path, monkeypatch, call):
    mark = VersionMark(tmp_path)
    mark.advance()
    with monkeypatch.context() as patch:

        def full(*_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        targets = {"open": (version_mark.Path, "open"), "replace": (version_mark.Path, "replace")}
        owner, name = targets.get(call, (version_mark, "_sync_folder"))
        patch.setattr(*((os, "fsync") if call == "fsync" else (owner, name)), full)
        with pytest.raises(OSError, match="No space left") as caught:
            mark.advance()
        assert caught.value.filename == str(tmp_path / FILE)
    assert mark.version == 0
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert mark.advance() == 1
    assert VersionMark(tmp_path).version == 1


def test_it_is_on_disk_before_it_is_given(tmp_path, monkeypatch):
    """File, then name: a crash at any moment leaves the old mark or the new one."""
    done = []
    real = os.fsync

    def fsync(descriptor):
        done.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / FILE).exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    VersionMark(tmp_path).advance()
    assert done == [(str(tmp_path / "version_mark.new"), False), (str(tmp_path), True)]


@pytest.mark.parametrize("content", [b"", b"7", b'{"version": "7"}', b'{"version": -2}', b'{"version": 7', b"\xff\xff"])
def test_a_mark_that_cannot_be_read_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path / FILE}: the version mark cannot be read"):
        VersionMark(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content
