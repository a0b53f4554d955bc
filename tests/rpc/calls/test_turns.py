"""The send queue: credit, the budget of bytes, and the order."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rpc.calls.call import BUDGET_BYTES, LARGE_BYTES, SendQueue

SIZES = st.one_of(st.integers(0, LARGE_BYTES), st.integers(LARGE_BYTES, 2 * BUDGET_BYTES))
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "next", "arrived", "remove", "abandon", "begin"]), SIZES), max_size=60
)


@given(st.integers(0, 6), STEPS)
def test_credit_budget_and_order_hold_in_any_history(credit, steps):
    turns, waiting, out, abandoned = SendQueue(), {}, {}, {}
    turns.begin(credit)
    for at, (step, size) in enumerate(steps):
        if step == "add":
            turns.add(at, size)
            waiting[at] = size
        elif step == "next":
            id = turns.next()
            small = [id for id, size in waiting.items() if size < LARGE_BYTES]
            large = [id for id, size in waiting.items() if size >= LARGE_BYTES]
            may = small[:1] or [id for id in large[:1] if may_add([*out.values(), *abandoned.values()], waiting[id])]
            assert id == (may[0] if may and len(out) < credit else None)
            if id is not None:
                size = waiting.pop(id)
                out[id] = size if size >= LARGE_BYTES else 0
        elif step == "arrived" and (out or abandoned):
            known = [*out, *abandoned]
            id = known[size % len(known)]
            turns.arrived(id)
            if abandoned.pop(id, None) is None:
                out[id] = 0
        elif step == "abandon" and (out or waiting):
            known = [*out, *waiting]
            id = known[size % len(known)]
            turns.abandon(id)
            waiting.pop(id, None)
            if under_way := out.pop(id, 0):
                abandoned[id] = under_way
        elif step == "remove" and (out or waiting):
            known = [*out, *waiting]
            id = known[size % len(known)]
            turns.remove(id)
            out.pop(id, None)
            waiting.pop(id, None)
        elif step == "begin" and size % 4 == 0:
            turns.begin(credit)
            for calls in (waiting, out, abandoned):
                calls.clear()
        assert turns.under_way == sum(out.values()) + sum(abandoned.values())
        assert turns.abandoned == list(abandoned)
        assert len(out) <= credit
        assert turns.under_way <= BUDGET_BYTES or len([s for s in (out | abandoned).values() if s]) == 1
        assert all(id in turns for id in out) and not any(id in turns for id in waiting)


def may_add(sizes, size):
    return not sum(sizes) or sum(sizes) + size <= BUDGET_BYTES
