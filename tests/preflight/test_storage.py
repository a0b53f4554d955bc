"""Folders that can be written to, and have room."""

from disks import fill, small_disk

from asyncrl.config.load import validate_config
from asyncrl.disk import free_bytes, nearest_folder
from asyncrl.preflight import part as part_module
from asyncrl.preflight.needs import ModelSize, Need
from asyncrl.preflight.part import Part
from asyncrl.preflight.room import check_folder, same_disk


def test_room_and_rights(tmp_path):
    here = tmp_path / "not" / "there" / "yet"
    assert nearest_folder(here) == tmp_path and same_disk(here, tmp_path)
    free = free_bytes(here)
    for least, wanted, result in ((1, 1, "ok"), (1, free * 2, "warn"), (free * 2, free * 2, "fail")):
        assert check_folder("run_dir", "run.dir", here, Need(least=least, wanted=wanted)).result == result
    (tmp_path / "file").write_text("")
    for path, said in ((tmp_path / "file" / "x", "is not a folder"), ("/proc/1/x", "cannot be written to")):
        found = check_folder("run_dir", "run.dir", type(tmp_path)(path), Need(least=0, wanted=0))
        assert found.result == "fail" and said in found.detail and "run.dir" in found.fix
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]


def test_a_full_disk_is_told_as_such(tmp_path):
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        fill(disk)
        found = check_folder("run_dir", "run.dir", disk / "runs", Need(least=0, wanted=0))
    assert found.result == "fail" and f"no space left on {disk}" in found.detail and "make room" in found.fix


def test_a_disk_that_is_short_of_room_is_told_once_with_what_takes_it(tmp_path):
    tree = {"model": {"path": "/m"}, "data": {"source": "synthetic"}, "learner": {"backend": "fsdp2"}}
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        part = Part(config=validate_config(tree), actors=["learner/0"], address="127.0.0.1", run=disk / "runs" / "mine")
        (found,) = part_module._check_folders(part, ModelSize(parameters=1000, bytes=4000))
    assert (found.check, found.result) == ("checkpoint_dir", "warn")
    taken = "11.7 KiB for each of 3 checkpoints, 1.0 GiB for logs, metrics and samples of a long run, 3.9 KiB for the"
    assert taken in found.detail, found.detail
