"""Files that a user has named, and what is left alone."""

import os
import socket
import stat

import pytest

from asyncrl.core.errors import UsageError
from asyncrl.observe.report.report import check_writable, write_user_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_replaced_with_its_rights(tmp_path):
    path = tmp_path / "x.html"
    write_user_file(path, "one")
    assert path.read_text() == "one" and stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask()
    path.chmod(0o640)
    # One that is called as one might call the new one stays, and what is no text is written as escapes.
    (tmp_path / "x.html.new").write_text("mine")
    write_user_file(path, "two\udc9b")
    assert path.read_text() == "two\\udc9b" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["x.html", "x.html.new"] and (tmp_path / "x.html.new").read_text() == "mine"


def mask():
    old = os.umask(0)
    os.umask(old)
    return old


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path, there):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write_user_file(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and names(tmp_path / "far") == ["target"]


def test_only_a_regular_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "round").symlink_to("round")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))

    def seen():
        found = {path.name: path.lstat() for path in tmp_path.iterdir()}
        # To look where a link leads is to access it.
        return {name: (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}

    before = seen()
    for name in ("pipe", "folder", "socket", "round", "", ".", "..", "nowhere/x", "pipe/x", "x" * 300, "a\0b"):
        for attempt in (check_writable, lambda path: write_user_file(path, "text")):
            with pytest.raises(UsageError):
                attempt(tmp_path / name)
    assert seen() == before


@pytest.mark.parametrize("call", ["replace", "fchmod", "fsync"])
def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch, call):
    path = tmp_path / "x.html"
    path.write_text("old")

    def refuse(*words, **more):
        raise OSError(28, "No space left on device", "/somewhere/else")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        write_user_file(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old" and names(tmp_path) == ["x.html"]
