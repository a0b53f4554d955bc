from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl.learner.fsdp.gang.parcels import pack_parcel, unpack_parcel

ARRAYS = st.lists(
    arrays.arrays(st.sampled_from(["i4", "f4", "u1", "f8"]), arrays.array_shapes(min_dims=1, max_dims=2, min_side=0)),
    max_size=4,
)


@given(st.binary(max_size=40), ARRAYS)
def test_a_parcel_holds_what_was_put_in(body: bytes, values: list[np.ndarray]) -> None:
    found, copies = unpack_parcel(pack_parcel(body, values))
    assert found == body
    assert [c.dtype for c in copies] == [v.dtype for v in values]
    assert all(np.array_equal(c, v, equal_nan=True) for c, v in zip(copies, values, strict=True))
