"""A start that ended before its first step holds no name; whatever else there is does."""

import json
import shutil
import threading

import pytest
from disks import room_for
from run_settings import simulated_run

from asyncrl.launcher.run_folder import begun
from asyncrl.launcher.run_folder.begun import CONFIG, PART, UNBEGUN, claim, has_begun, leave_name
from asyncrl.launcher.run_folder.folders import RunFolder, create_run_folder, private_folder, remove_abandoned


def config(tmp_path, name="trial", **sections):
    return simulated_run(run={"name": name, "dir": str(tmp_path / "runs")}, **sections)


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


def _file(name, text=""):
    def write(run):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return write


SIGNS = {
    "a step": _file("metrics.jsonl", '{"kind": "update"}\n{"kind": "train", "step": 1}\n'),
    "an evaluation": _file("metrics.jsonl", '{"kind": "eval"}\n'),
    "a torn line": _file("metrics.jsonl", '{"kind": "upd'),
    "a sample": _file("samples/step_000001.jsonl"),
    "a checkpoint": _file("checkpoints/v00000001/COMPLETE"),
    "an unfinished checkpoint": _file("checkpoints/.v00000001.partial-7/state.json"),
    "a checkpoint that was set aside": _file("checkpoints/damaged-v00000001/state.json"),
    "an export": _file("export/config.json"),
    "a part of another host": _file(PART),
    "a configuration that cannot be read": _file(CONFIG, "{"),
    "a configuration of another version": _file(CONFIG, '{"checkpoint": 7}'),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_whatever_came_of_a_run_keeps_its_name(failed, sign):
    assert not has_begun(failed, None)
    SIGNS[sign](failed)
    assert has_begun(failed, None)
    leave_name(failed, None)
    assert not (failed / UNBEGUN).exists()
    # A mark that is there nevertheless, as of an earlier attempt, counts for nothing.
    (failed / UNBEGUN).touch()
    assert not claim(failed, failed)


def test_checkpoints_elsewhere_count(tmp_path, failed):
    for place, working_dir, counts in (
        (str(tmp_path / "big"), None, True),
        ("big", tmp_path, True),
        ("big", tmp_path / "runs", False),
        # Nobody knows what it is relative to.
        ("big", None, True),
        (str(tmp_path / "other"), None, False),
    ):
        (tmp_path / "big" / "trial" / "v00000001").mkdir(parents=True, exist_ok=True)
        (failed / CONFIG).write_text(json.dumps({"checkpoint": {"dir": place}}))
        assert has_begun(failed, working_dir) == counts, (place, working_dir)


def test_the_next_start_of_the_name_goes_on_there_with_logs_of_its_own(tmp_path, failed):
    (failed / "quarantine.jsonl").write_text('{"uid": "0-1"}\n')
    leave_name(failed, None)
    folder = create_run_folder(config(tmp_path))
    assert (folder.path, folder.attempt) == (failed, 2)
    # So do the prompts that it gave up.
    assert (failed / "logs" / "attempt_1" / "quarantine.jsonl").read_text() == '{"uid": "0-1"}\n'
    assert not (failed / "quarantine.jsonl").exists()
    assert (failed / "logs" / "attempt_1" / "reward-0.log").read_text() == "there is no module\n"
    assert (folder.logs.name, list(folder.logs.iterdir())) == ("attempt_2", [])
    assert (failed / "config_attempt_1.json").exists() and not (failed / UNBEGUN).exists()
    assert folder.describe().endswith(f"its logs stay in {failed}/logs/attempt_1")
    # It holds the name from the first moment, before its private folder is there.
    assert create_run_folder(config(tmp_path)).path.name == "trial-2"
    # And gives it back each time.
    with private_folder(folder, config(tmp_path)):
        pass
    assert create_run_folder(config(tmp_path)).attempt == 3


def test_a_folder_that_is_only_just_made_is_not_taken(tmp_path):
    """Nothing came of it either, but its start may be about to hold its private folder."""
    create_run_folder(config(tmp_path))
    assert create_run_folder(config(tmp_path)).path.name == "trial-2"


def test_a_living_run_is_not_taken_whatever_mark_is_there(tmp_path, failed):
    with private_folder(RunFolder(path=failed, run_id="a"), config(tmp_path)):
        (failed / UNBEGUN).touch()
        assert create_run_folder(config(tmp_path)).path.name == "trial-2"


def test_checkpoints_of_the_new_configuration_are_not_come_upon(tmp_path, failed):
    leave_name(failed, None)
    (tmp_path / "big" / "trial" / "v00000001").mkdir(parents=True)
    settings = config(tmp_path, checkpoint={"dir": str(tmp_path / "big")})
    assert create_run_folder(settings).path.name == "trial-2"
    assert (failed / UNBEGUN).exists()


def test_a_folder_of_that_name_which_another_run_was_given_is_not_taken(tmp_path):
    create_run_folder(config(tmp_path))
    named = create_run_folder(config(tmp_path, name="trial-2")).path
    leave_name(named, None)
    assert create_run_folder(config(tmp_path)).path.name == "trial-3"
    assert create_run_folder(config(tmp_path, name="trial-2")).path == named


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


def test_a_start_without_a_guard_gives_its_name_back_at_its_end(tmp_path):
    settings = config(tmp_path)
    folder = create_run_folder(settings)
    with private_folder(folder, settings):
        assert not (folder.path / UNBEGUN).exists()
    assert create_run_folder(settings).path == folder.path
    with private_folder(folder, settings):
        (folder.path / "checkpoints" / "v00000001").mkdir(parents=True)
    assert not (folder.path / UNBEGUN).exists()


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
        SIGNS["a step"](failed)
    remove_abandoned(tmp_path / "runs")
    assert (failed / UNBEGUN).exists() != trained
    assert create_run_folder(config(tmp_path)).path.name == ("trial-2" if trained else "trial")


def test_where_the_mark_cannot_be_written_the_name_is_held(failed):
    (failed / UNBEGUN).mkdir()
    leave_name(failed, None)
    assert not claim(failed, failed)
