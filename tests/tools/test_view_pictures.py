"""The pictures of asyncrl-view, from the folder of a run."""

import shutil

import pytest
from view.viewed_run import make_run

from tools import view_pictures


def test_pictures_are_taken_of_a_group_with_different_rewards(tmp_path, monkeypatch):
    if not any(map(shutil.which, view_pictures.BROWSERS)):
        pytest.skip("no browser is installed")
    monkeypatch.setattr(view_pictures, "FIGURES", tmp_path)
    assert view_pictures.main([str(make_run(tmp_path))]) == 0
    for name in view_pictures.PICTURES:
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and 5_000 < len(picture) < view_pictures.MOST_BYTES
