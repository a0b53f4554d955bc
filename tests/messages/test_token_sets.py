"""Token sets in their ragged form: cut, chosen, joined, sent, and checked against the sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.truncation import LARGEST_SET
from asyncrl.messages.token_sets import TokenSets, join_sets, make_sets, problem_of
from asyncrl.rpc.wire.codec import Codec

SETS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=6, unique=True), max_size=12)


def nested(sets: TokenSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(sets.ids, np.cumsum(sets.sizes)[:-1])] if len(sets.sizes) else []


def arrays(sets: list[list[int]], sizes: list[int] | None = None) -> TokenSets:
    made = make_sets(sets)
    return made if sizes is None else TokenSets(ids=made.ids, sizes=np.array(sizes, np.int32))


@given(SETS, st.data())
def test_cut_chosen_and_joined_sets_are_those_of_the_same_tokens(sets, data):
    made, count = make_sets(sets), data.draw(st.integers(0, len(sets) + 2))
    assert (made.ids.dtype, made.sizes.dtype) == (np.int32, np.int32)
    assert nested(made) == sets
    assert nested(made.first(count)) == sets[:count]
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, len(sets) - 1)))) if sets else [], np.int64)
    assert nested(made.chosen(kept)) == [sets[i] for i in kept]
    joined = join_sets([None, made.first(count), make_sets(sets[count:])])
    assert joined is not None
    assert nested(joined) == sets
    assert join_sets([]) is None
    assert join_sets([None, None]) is None


@given(SETS)
def test_sets_arrive_as_they_were_sent(sets):
    codec = Codec()
    body, *buffers = codec.encode(make_sets(sets))
    found = codec.decode(TokenSets, body, buffers)
    assert nested(found) == sets
    assert (found.ids.dtype, found.sizes.dtype) == (np.int32, np.int32)


@given(SETS)
def test_sets_with_their_tokens_pass_the_check(sets):
    assert problem_of(make_sets(sets), np.array([each[-1] for each in sets], np.int32)) is None


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (arrays([[1, 2], [3]]), "2 sampled tokens, 1 token sets|is not in its token set"),
        (arrays([[1, 2]]), "2 sampled tokens, 1 token sets"),
        (arrays([[2, 3], [2]]), "sampled token 0 is not in its token set"),
        (arrays([[1], [3, 4]]), "sampled token 1 is not in its token set"),
        (arrays([[1, 2, 3]], [3, 0]), "members are not those of its 2 token sets"),
        (arrays([[1, 2, 3]], [4, -1]), "members are not those of its 2 token sets"),
        (arrays([[1, 2, 3]], [1, 1]), "members are not those of its 2 token sets"),
        (arrays([[1], list(range(4 * LARGEST_SET))]), "or too many"),
        (TokenSets(ids=np.ones(2, np.int64), sizes=np.ones(2, np.int32)), "int32"),
        (TokenSets(ids=np.ones((2, 1), np.int32), sizes=np.ones(2, np.int32)), "int32"),
        (TokenSets(ids=np.ones(2, np.int32), sizes=np.ones(2, np.float32)), "int32"),
    ],
)
def test_other_sets_are_refused(sets, words):
    assert problem_of(arrays([[1], [2]]), np.array([1, 2], np.int32)) is None
    problem = problem_of(sets, np.array([1, 2], np.int32))
    assert problem is not None
    assert any(word in problem for word in words.split("|"))
