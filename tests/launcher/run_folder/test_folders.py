"""Run folders."""

import fcntl
import json
import os
import stat

import pytest
from run_settings import simulated_run

from asyncrl.config.load import config_from_json
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder, remove_abandoned


def config(tmp_path, **security):
    return simulated_run(run={"name": "trial", "dir": str(tmp_path / "runs")}, security=security)


def test_a_taken_name_makes_way(tmp_path):
    settings = config(tmp_path)
    names = [create_run_folder(settings).path.name for _ in range(3)]
    assert names == ["trial", "trial-2", "trial-3"]
    (tmp_path / "runs" / "trial-4").write_text("a file counts too")
    assert create_run_folder(settings).path.name == "trial-5"


def test_what_is_in_it(tmp_path):
    folder = create_run_folder(config(tmp_path))
    assert config_from_json((folder.path / "config.json").read_text()) == config(tmp_path)
    assert folder.logs == folder.path / "logs" / "attempt_1"
    assert folder.logs.is_dir()


@pytest.mark.parametrize("curve", ["off", "required"])
def test_the_private_folder_is_private_and_goes(tmp_path, curve):
    settings = config(tmp_path, curve=curve)
    folder = create_run_folder(settings)
    with private_folder(folder, settings) as lock:
        assert os.fstat(lock)
        assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.private.iterdir())
        assert json.loads((folder.private / "run.json").read_text())["run_id"] == folder.run_id
    assert not folder.private.exists()
    with pytest.raises(ZeroDivisionError), private_folder(folder, settings):
        raise ZeroDivisionError
    assert not folder.private.exists()


def test_only_what_no_process_holds_is_abandoned(tmp_path):
    settings = config(tmp_path)
    dead, living = create_run_folder(settings), create_run_folder(settings)
    dead.private.mkdir()
    (dead.private / "lock").touch()
    with private_folder(living, settings):
        assert remove_abandoned(tmp_path / "runs") == [dead.private]
        assert not dead.private.exists()
        assert living.private.exists()
    assert remove_abandoned(tmp_path / "nowhere") == []


def test_the_lock_is_held_as_long_as_any_process_holds_it(tmp_path):
    settings = config(tmp_path)
    folder = create_run_folder(settings)
    with private_folder(folder, settings) as lock:
        heir = os.dup(lock)
        os.close(lock)
        try:
            assert remove_abandoned(tmp_path / "runs") == []
        finally:
            # Give the context back what it will close.
            os.dup2(heir, lock)
            os.close(heir)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert remove_abandoned(tmp_path / "runs") == [folder.private]
