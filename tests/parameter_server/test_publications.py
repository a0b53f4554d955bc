"""Which versions make way: never the most senior one's, never what is kept anyway, and no more than must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.parameter_server.publications import outrun

VERSIONS = st.integers(0, 9)


@pytest.mark.parametrize(
    ("kept", "staging", "most", "gone"),
    [
        ({9}, [], 2, set()),
        ({9}, [(1, 1)], 2, set()),
        ({9}, [(1, 1), (2, 2)], 2, {2}),
        ({9}, [(1, 2), (2, 1)], 2, {1}),
        ({9}, [(1, 1), (2, 2), (2, 9)], 3, set()),
        ({9}, [(1, 3), (2, 2), (3, 4), (1, 9)], 3, {3}),
        # Whoever stages the newest holds nothing more.
        ({9}, [(9, 1), (2, 2), (3, 3)], 2, {3}),
        # There is always room for one.
        ({7, 8, 9}, [(1, 1), (2, 2)], 3, {2}),
    ],
)
def test_the_versions_of_the_least_senior_make_way(kept, staging, most, gone):
    assert outrun(kept, staging, most=most) == gone


@given(
    kept=st.sets(VERSIONS, min_size=1, max_size=3),
    staging=st.lists(VERSIONS, max_size=12).map(lambda versions: [(v, i) for i, v in enumerate(versions)]),
    most=st.integers(2, 6),
)
def test_what_stays_is_bounded_and_the_most_senior_stays(kept, staging, most):
    gone = outrun(kept, staging, most=most)
    held = kept | {version for version, _ in staging} - gone
    assert not gone & kept
    assert len(held) <= max(most, len(kept) + 1)
    assert not gone or len(held) == max(most, len(kept) + 1)
    if staging:
        assert staging[0][0] in held
