"""Run folders: names, what is in them, and a start that ended before its first step, which holds no name."""

import fcntl
import json
import os
import shutil
import stat
import threading

import pytest
from disks import room_for
from run_settings import simulated_run

from asyncrl.config.load import config_from_json
from asyncrl.errors import ConfigError
from asyncrl.launcher.run_folder import begun
from asyncrl.launcher.run_folder.begun import CONFIG, PART, UNBEGUN, claim, has_begun, leave_name
from asyncrl.launcher.run_folder.folders import RunFolder, create_run_folder, private_folder, with_date
from asyncrl.launcher.run_folder.private import remove_abandoned


def config(tmp_path, name="trial", **sections):
    return simulated_run(run={"name": name, "dir": str(tmp_path / "runs")}, **sections)


def next_name(tmp_path, **settings):
    return create_run_folder(config(tmp_path, **settings)).path.name


# --- folders ---


def test_a_taken_name_makes_way(tmp_path):
    """Though nothing came of it: a start that has only just made it may be about to hold its private folder."""
    folder = create_run_folder(config(tmp_path))
    assert config_from_json((folder.path / "config.json").read_text()) == config(tmp_path)
    assert folder.logs == folder.path / "logs" / "attempt_1" and folder.logs.is_dir()
    (tmp_path / "runs" / "trial-2").write_text("a file counts too")
    assert (folder.path.name, next_name(tmp_path)) == ("trial", "trial-3")


@pytest.mark.parametrize("curve", ["off", "required"])
def test_the_private_folder_is_private_and_goes(tmp_path, curve):
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


def test_only_what_no_process_holds_is_abandoned(tmp_path):
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


# --- starts before the first step ---


@pytest.fixture
def failed(tmp_path):
    """Traces of a start that came as far as engines with the initial weights."""
    folder = create_run_folder(config(tmp_path))
    (folder.logs / "reward-0.log").write_text("there is no module\n")
    for name in ("checkpoints", "samples", "trace", "monitor"):
        (folder.path / name).mkdir()
    (folder.path / "checkpoints" / "writer.json").write_text("{}")
    (folder.path / "version_mark.json").write_text('{"version": 0, "start": 1}')
    (folder.path / "metrics.jsonl").write_text(json.dumps({"kind": "update", "weights/version": 0}) + "\n")
    return folder.path


SIGNS = {
    "a step": ("metrics.jsonl", '{"kind": "update"}\n{"kind": "train", "step": 1}\n'),
    "an evaluation": ("metrics.jsonl", '{"kind": "eval"}\n'),
    "a torn line": ("metrics.jsonl", '{"kind": "upd'),
    "a sample": ("samples/step_000001.jsonl", ""),
    "a sample of an evaluation": ("samples/eval_held_000000.jsonl", ""),
    "a sample of a filtered group, after a step": ("samples/filtered_000001.jsonl", ""),
    "a checkpoint": ("checkpoints/v00000001/COMPLETE", ""),
    "an unfinished checkpoint": ("checkpoints/.v00000001.partial-7/state.json", ""),
    "a checkpoint that was set aside": ("checkpoints/damaged-v00000001/state.json", ""),
    "an export": ("export/config.json", ""),
    "a part of another host": (PART, ""),
    "a configuration that cannot be read": (CONFIG, "{"),
    "a configuration of another version": (CONFIG, '{"checkpoint": 7}'),
}


def came(run, sign):
    name, text = SIGNS[sign]
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)


@pytest.mark.parametrize("sign", SIGNS)
def test_whatever_came_of_a_run_keeps_its_name(failed, sign):
    assert not has_begun(failed, None)
    came(failed, sign)
    assert has_begun(failed, None)
    leave_name(failed, None)
    assert not (failed / UNBEGUN).exists()
    # A mark that is there nevertheless, as of an earlier attempt, counts for nothing.
    (failed / UNBEGUN).touch()
    assert not claim(failed, failed)


def test_checkpoints_elsewhere_count_and_are_not_come_upon(tmp_path, failed):
    leave_name(failed, None)
    (tmp_path / "big" / "trial" / "v00000001").mkdir(parents=True)
    assert next_name(tmp_path, checkpoint={"dir": str(tmp_path / "big")}) == "trial-2"
    assert (failed / UNBEGUN).exists()
    for place, working_dir, counts in (
        (str(tmp_path / "big"), None, True),
        ("big", tmp_path, True),
        ("big", tmp_path / "runs", False),
        # Nobody knows what it is relative to.
        ("big", None, True),
        (str(tmp_path / "other"), None, False),
    ):
        (failed / CONFIG).write_text(json.dumps({"checkpoint": {"dir": place}}))
        assert has_begun(failed, working_dir) == counts, (place, working_dir)


def test_the_next_start_of_the_name_goes_on_there_with_logs_of_its_own(tmp_path, failed):
    (failed / "quarantine.jsonl").write_text('{"uid": "0-1"}\n')
    (failed / "samples" / "filtered_000000.jsonl").write_text('{"uid": "0-2"}\n')
    leave_name(failed, None)
    folder = create_run_folder(config(tmp_path))
    assert (folder.path, folder.attempt) == (failed, 2)
    # So do the prompts that it gave up.
    assert (failed / "logs" / "attempt_1" / "quarantine.jsonl").read_text() == '{"uid": "0-1"}\n'
    assert not (failed / "quarantine.jsonl").exists()
    assert (failed / "logs" / "attempt_1" / "filtered_000000.jsonl").read_text() == '{"uid": "0-2"}\n'
    assert not list((failed / "samples").iterdir())
    assert (failed / "logs" / "attempt_1" / "reward-0.log").read_text() == "there is no module\n"
    assert (folder.logs.name, list(folder.logs.iterdir())) == ("attempt_2", [])
    assert (failed / "config_attempt_1.json").exists() and not (failed / UNBEGUN).exists()
    assert folder.describe().endswith(f"its logs stay in {failed}/logs/attempt_1")
    # It holds the name from the first moment, before its private folder is there, and gives it back each time.
    assert next_name(tmp_path) == "trial-2"
    with private_folder(folder, config(tmp_path)):
        assert not (failed / UNBEGUN).exists()
    assert create_run_folder(config(tmp_path)).attempt == 3
    with private_folder(folder, config(tmp_path)):
        came(failed, "a checkpoint")
    assert not (failed / UNBEGUN).exists()


def test_names_of_living_runs_and_of_other_names_are_not_taken(tmp_path, failed):
    with private_folder(RunFolder(path=failed, run_id="a"), config(tmp_path)):
        (failed / UNBEGUN).touch()
        named = create_run_folder(config(tmp_path, name="trial-2")).path
        leave_name(named, None)
        assert next_name(tmp_path) == "trial-3"
    assert create_run_folder(config(tmp_path, name="trial-2")).path == named
    (named / UNBEGUN).mkdir()
    # Where the mark cannot be written the name is held.
    leave_name(named, None)
    assert not claim(named, named)


def test_of_two_that_come_at_once_one_gets_it(failed, monkeypatch):
    leave_name(failed, None)
    got, both_have_looked = [], threading.Barrier(2)

    def look(run, working_dir):
        found = has_begun(run, working_dir)
        both_have_looked.wait(30)
        return found

    monkeypatch.setattr(begun, "has_begun", look)
    threads = [threading.Thread(target=lambda: got.append(claim(failed, failed))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [False, True]


def test_a_start_without_room_for_its_configuration_gives_its_name_back(tmp_path, failed):
    leave_name(failed, None)
    for kept in ([failed.name], []):
        with room_for(0), pytest.raises(OSError, match="File too large"):
            create_run_folder(config(tmp_path))
        assert [entry.name for entry in failed.parent.iterdir()] == kept
        if kept:
            assert (failed / UNBEGUN).is_file() and json.loads((failed / CONFIG).read_text())["run"]["name"] == "trial"
            shutil.rmtree(failed)
    assert create_run_folder(config(tmp_path)).path == failed


@pytest.mark.parametrize("trained", [False, True])
def test_a_start_that_was_killed_gives_its_name_back_when_it_is_found(tmp_path, failed, trained):
    (failed / "private").mkdir()
    (failed / "private" / "lock").touch()
    if trained:
        came(failed, "a step")
    remove_abandoned(tmp_path / "runs")
    assert (failed / UNBEGUN).exists() != trained
    assert next_name(tmp_path) == ("trial-2" if trained else "trial")
