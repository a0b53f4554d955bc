"""Folders that can be written to, and have room."""

from disks import fill, small_disk

from asyncrl.disk import free_bytes, nearest_folder
from asyncrl.preflight.needs import Need
from asyncrl.preflight.storage import check_folder, same_disk


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
