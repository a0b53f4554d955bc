"""Credentials on disk: a failed write names the file."""

import pytest
from credentials import create_credentials
from disks import room_for


@pytest.mark.parametrize("curve", [True, False])
def test_a_file_without_room_on_disk_is_named(tmp_path, curve):
    with room_for(8), pytest.raises(OSError, match="too large") as refused:
        create_credentials(tmp_path / "private", "run-1", ["server/0"], curve=curve)
    assert refused.value.filename == str(tmp_path / "private" / "run.json")
