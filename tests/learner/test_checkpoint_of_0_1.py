"""Checkpoints of asyncrl 0.1, whose groups had no sequences, are gone on from."""

from __future__ import annotations

from test_checkpoint_writer import make_state, same_groups
from test_group_file import of_0_1
from test_messages import make_group

from asyncrl.checkpoint.contents import GROUPS, STATE, read_contents, write_contents


def test_a_checkpoint_of_an_earlier_release_is_read(tmp_path) -> None:
    groups = [make_group(f"0-{index}") for index in range(3)]
    write_contents(tmp_path, make_state(), groups[:2], groups[2:])
    path = tmp_path / STATE
    path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":1'))
    (tmp_path / GROUPS).write_bytes(b"".join(map(of_0_1, groups)))
    found = read_contents(tmp_path)
    assert (found.state.format, len(found.buffered)) == (1, 2)
    assert same_groups([*found.buffered, *found.filtered], groups)
