"""The numbers of versions: durable before they are used, and never given twice."""

import errno
import os

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core import files
from asyncrl.core.errors import ConfigError
from asyncrl.learner.publishing import version_numbers
from asyncrl.learner.publishing.version_numbers import FILE, Used, VersionNumbers, find_used


@settings(max_examples=examples(25))
@given(starts=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_no_version_number_is_used_twice_over_any_restarts(starts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    given_out = [mark.advance() for count in starts for mark in [VersionNumbers(folder)] for _ in range(count)]
    assert given_out == list(range(sum(starts)))
    assert VersionNumbers(folder).version == sum(starts) - 1
    assert {path.name for path in folder.iterdir()} <= {FILE}


@pytest.mark.parametrize("call", ["open", "sync"])
def test_a_version_number_that_cannot_be_written_is_not_used(tmp_path, monkeypatch, call):
    mark = VersionNumbers(tmp_path)
    mark.advance()
    with monkeypatch.context() as patch:

        def full(*_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(files if call == "sync" else os, call, full)
        with pytest.raises(OSError, match="No space left") as caught:
            mark.advance()
        assert caught.value.filename == str(tmp_path / FILE)
    assert mark.version == 0
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert mark.advance() == 1
    assert VersionNumbers(tmp_path).version == 1


def test_a_version_number_is_on_disk_before_it_is_used(tmp_path, monkeypatch):
    """File, then name: a crash at any moment leaves the old mark or the new one."""
    done = []
    real = os.fsync

    def fsync(descriptor):
        done.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / FILE).exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    VersionNumbers(tmp_path).advance()
    assert done == [(str(tmp_path / "version_mark.json.new"), False), (str(tmp_path), True)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not there"),
        (b'{"version": -2}', "is damaged: it holds version -2"),
        (b"\xff\xff", "is damaged"),
        (b'{"version": 12, "start": 2}', "is older than the run: it holds version 12"),
        (b'{"version": 40, "start": 1}', "is older than the run: it holds version 40"),
        (b'{"version": 40, "start": 2}', ""),
    ],
)
def test_a_lost_older_or_damaged_mark_starts_above_all_known_versions(tmp_path, content, problem):
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    mark = VersionNumbers(tmp_path, Used(40, 2))
    assert mark.problem.startswith(problem) and bool(mark.problem) == bool(problem)
    assert mark.begin() >= 3
    assert mark.advance() >= 41
    again = VersionNumbers(tmp_path, Used(40, 2))
    assert (again.version, again.start, again.problem) == (mark.version, mark.start, "")


def test_a_missing_mark_is_no_problem_of_a_new_run(tmp_path):
    assert VersionNumbers(tmp_path, find_used(tmp_path, tmp_path / "checkpoints")).problem == ""
    (tmp_path / FILE).write_bytes(b"{")
    assert VersionNumbers(tmp_path).problem.startswith("is damaged")


def test_an_unreadable_mark_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def refused(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(version_numbers.Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match=f"{FILE}: cannot be read, .*: Permission denied; make it readable"):
        VersionNumbers(tmp_path)


@pytest.mark.parametrize(
    ("names", "metrics", "used"),
    [
        ([], None, Used()),
        (["v00000040", "abandoned-v00000061"], b'{"kind":"train","weights/version":44,"start":2}\n', Used(61, 2)),
        (["v00000040"], b'{"weights/version":44,"start":2}\n{"start":3}\n{"weights/version":null}\n', Used(44, 3)),
        # A torn line, and one that is no JSON.
        ([], b'{"weights/version":7,"start":1}\nnonsense\n{"weights/version":8,"st', Used(7, 1)),
    ],
)
def test_numbers_are_known_from_the_checkpoints_and_the_metrics(tmp_path, names, metrics, used):
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
    assert find_used(tmp_path, tmp_path / "checkpoints") == used


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(version_numbers, "TAIL_BYTES", 100)
    lines = [b'{"weights/version":%d,"start":1}\n' % version for version in range(1000)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    assert find_used(tmp_path, tmp_path / "checkpoints") == Used(999, 1)
