"""Run folders: their names, the private folder, and the date that prompts receive."""

import fcntl
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from disks import room_for
from run_settings import simulated_run

from asyncrl.config.load import config_from_json
from asyncrl.core.errors import ConfigError, UsageError
from asyncrl.launcher.run_folder import private
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder, with_date
from asyncrl.launcher.run_folder.private import remove_abandoned


def config(tmp_path, name="trial", **sections):
    return simulated_run(run={"name": name, "dir": str(tmp_path / "runs")}, **sections)


# --- folders ---


def test_a_start_takes_the_next_free_name(tmp_path):
    folder = create_run_folder(config(tmp_path))
    assert config_from_json((folder.path / "config.json").read_text()) == config(tmp_path)
    assert folder.logs == folder.path / "logs" / "attempt_1" and folder.logs.is_dir()
    (tmp_path / "runs" / "trial-2").write_text("a file counts too")
    assert (folder.path.name, create_run_folder(config(tmp_path)).path.name) == ("trial", "trial-3")


def test_simultaneous_starts_get_separate_folders(tmp_path):
    with ThreadPoolExecutor(8) as starts:
        made = list(starts.map(lambda _: create_run_folder(config(tmp_path)).path.name, range(16)))
    assert sorted(made) == sorted(["trial", *(f"trial-{number}" for number in range(2, 17))])


def test_a_start_without_room_for_its_configuration_leaves_the_name_free(tmp_path):
    with room_for(0), pytest.raises(OSError, match="File too large"):
        create_run_folder(config(tmp_path))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("curve", ["off", "required"])
def test_the_private_folder_is_private_and_is_removed(tmp_path, curve):
    settings = config(tmp_path, security={"curve": curve})
    folder = create_run_folder(settings)
    with private_folder(folder, settings) as lock:
        assert os.fstat(lock) and stat.S_IMODE(folder.private.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.private.iterdir())
        assert json.loads((folder.private / "run.json").read_text())["run_id"] == folder.run_id
        if curve == "required":
            key = json.loads((folder.private / "launcher-0.0.json").read_text())["public"]
            assert key in json.loads((folder.private / "peers.json").read_text())["launcher/0"]
    assert not folder.private.exists() and "launcher/0" not in (folder.path / "config.json").read_text()
    with pytest.raises(ZeroDivisionError), private_folder(folder, settings):
        raise ZeroDivisionError
    assert not folder.private.exists()


def test_only_folders_without_a_process_are_abandoned(tmp_path):
    settings = config(tmp_path)
    dead, living = create_run_folder(settings), create_run_folder(settings)
    dead.private.mkdir()
    (dead.private / "lock").touch()
    with private_folder(living, settings) as lock:
        assert remove_abandoned(tmp_path / "runs") == [dead.private]
        assert not dead.private.exists() and living.private.exists()
        # The lock is held as long as any process holds it.
        heir = os.dup(lock)
        os.close(lock)
        try:
            assert remove_abandoned(tmp_path / "runs") == []
        finally:
            # Give the context back what it will close.
            os.dup2(heir, lock)
            os.close(heir)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert remove_abandoned(tmp_path / "runs") == [living.private]
    assert remove_abandoned(tmp_path / "nowhere") == []


def test_a_host_removes_only_its_own_folders_if_it_does_not_see_the_locks_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "are_locks_shared", lambda path: False)
    settings = config(tmp_path)
    here, elsewhere, unknown = (create_run_folder(settings) for _ in range(3))
    for folder in (here, elsewhere, unknown):
        os.close(private.hold_private(folder.private, folder.run_id, {}))
    (elsewhere.private / "host.json").write_text('"another"')
    (unknown.private / "host.json").unlink()
    assert remove_abandoned(tmp_path / "runs") == [here.private]
    assert elsewhere.private.exists() and unknown.private.exists()
    with pytest.raises(
        UsageError, match=f"a run on another is live in it, or was killed; .* remove {elsewhere.private}"
    ):
        private.hold_private(elsewhere.private, elsewhere.run_id, {})
    monkeypatch.undo()
    assert sorted(remove_abandoned(tmp_path / "runs")) == sorted([elsewhere.private, unknown.private])


def test_an_interrupted_removal_is_finished_by_the_next_start(tmp_path, monkeypatch):
    folder = create_run_folder(config(tmp_path))
    os.close(private.hold_private(folder.private, folder.run_id, {"run.json": {}}))
    monkeypatch.setattr(private.shutil, "rmtree", lambda *_, **__: None)
    private.remove_private(folder.private)
    monkeypatch.undo()
    assert [path.name for path in folder.private.iterdir()] == ["lock"]
    assert remove_abandoned(tmp_path / "runs") == [folder.private]
    assert not folder.private.exists()


def test_a_run_keeps_the_date_of_its_first_start_unless_the_user_gives_one(tmp_path):
    dated = config(tmp_path, chat={"date": "2024-02-29"})
    assert with_date(dated, None).chat.date == "2024-02-29" and with_date(config(tmp_path), None).chat.date > "2025"
    run = create_run_folder(dated).path
    assert with_date(config(tmp_path), run).chat.date == "2024-02-29"
    assert with_date(config(tmp_path, chat={"date": "2025-01-01"}), run).chat.date == "2025-01-01"
    (run / "config.json").write_text("{}")
    assert with_date(config(tmp_path), run).chat.date is not None
    for date in ("2024-02-30", "2024-2-3"):
        with pytest.raises(ConfigError, match=r"chat\.date"):
            config(tmp_path, chat={"date": date})
