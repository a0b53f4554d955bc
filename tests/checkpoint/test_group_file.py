"""Files of records: a round trip keeps every field, and a torn or flipped record is found."""

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_group import make_group

from asyncrl.checkpoint.contents import GROUPS, CheckpointState, pack_group, read_contents, write_contents
from asyncrl.checkpoint.origin import Origin
from asyncrl.core.errors import DamagedCheckpoint
from asyncrl.messages.ledger import LedgerState

STATE = CheckpointState(version=1, step=1, ledger=LedgerState(), fingerprint="f", seed=0, origin=Origin())


def same(left, right):
    """Equal in every field; arrays in type, shape and bytes."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, msgspec.Struct):
        fields = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, f), getattr(right, f)) for f in fields)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.dictionaries(st.text(max_size=4), VALUES), st.integers(0, 9), st.text()), max_size=3))
def test_groups_are_read_as_they_were_written(drawn):
    written = []
    for row, tokens, text in drawn:
        group = make_group(tokens=max(1, tokens))
        group.trajectories[0].messages = [row]
        group.trajectories[1].sequences[0].prompt_ids = np.arange(tokens, dtype=np.int32)
        lease = msgspec.structs.replace(group.lease, row=row, prompt=text)
        written.append(msgspec.structs.replace(group, lease=lease))
    with tempfile.TemporaryDirectory() as folder:
        write_contents(Path(folder), STATE, written, [])
        assert same(written, read_contents(Path(folder)).buffered)


@pytest.mark.parametrize(("kept", "flipped"), [(-1, None), (7, None), (None, 3), (None, 14), (None, -1)])
def test_a_torn_or_flipped_record_is_damage(tmp_path, kept, flipped):
    write_contents(tmp_path, STATE, [make_group(), make_group("0-2")], [])
    data = bytearray((tmp_path / GROUPS).read_bytes())
    if flipped is not None:
        data[flipped] ^= 1
    (tmp_path / GROUPS).write_bytes(data[:kept])
    with pytest.raises(DamagedCheckpoint, match=r"groups\.msgpack"):
        read_contents(tmp_path)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"])])
def test_unsupported_arrays_are_not_written(array):
    group = make_group()
    group.trajectories[0].sequences[0].tokens = array
    with pytest.raises(TypeError, match="cannot be stored"):
        pack_group(group)
