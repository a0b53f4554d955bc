"""The folder of compiled graphs: chosen, lasting, or temporary."""

import os

from asyncrl.core.compile_cache import compile_cache


def test_compiled_graphs_outlive_a_run_unless_the_user_chose_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", "/temporary")
    assert compile_cache() == str(tmp_path / ".cache/asyncrl/torchinductor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    assert compile_cache() == f"/temporary/torchinductor_{os.getuid()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    assert compile_cache() == "/chosen"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    # A user without a home folder.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compile_cache() == f"/temporary/torchinductor_{os.getuid()}"
