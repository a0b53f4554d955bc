"""A retry finds its call, deltas add up, and old calls are forgotten."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_core import KEY, reply

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.episodes.http.calls import MOST_KEPT, Call, CallBook
from asyncrl.messages.episodes import ChatDelta

A, B = b"a", b"b"


def in_state(book, state, identity=A):
    call = book.new(identity, choices=1, created=0)
    call.running = state in ("heard", "unheard")
    if state == "heard":
        call.listeners.add(asyncio.Event())
    if state in ("undelivered", "delivered"):
        call.outcome = [reply()]
    call.delivered = state == "delivered"
    return call


@pytest.mark.parametrize(
    ("states", "taken"),
    [
        ("", None),
        ("heard", 0),
        ("cut", 0),
        ("heard cut", 1),
        ("delivered unheard", 1),
        ("unheard delivered heard", 0),
        ("unheard unheard", 0),
        ("delivered heard", 0),
        ("delivered delivered", 1),
        ("delivered undelivered", 1),
        ("heard heard", 1),
    ],
)
def test_a_retry_is_the_call_whose_connection_broke(states, taken):
    book = CallBook()
    calls = [in_state(book, state) for state in states.split()]
    other = in_state(book, "unheard", B)
    assert book.retried(A) is (None if taken is None else calls[taken])
    assert book.retried(B) is other


@pytest.mark.parametrize(
    ("outcome", "settled"),
    [
        (None, False),
        ([reply()], True),
        (EpisodeOver("time"), True),
        (ChatRefused("messages", "x"), True),
        (OSError(), False),
    ],
)
def test_only_final_outcomes_are_returned_to_a_retry(outcome, settled):
    assert Call(number=0, identity=A, created=0, texts=[""], outcome=outcome).settled == settled


@given(st.text(min_size=1), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_the_text_of_a_call_is_always_a_prefix_of_its_answer(text, cuts):
    call = Call(number=0, identity=A, created=0, texts=["", ""])
    best = 0
    for start, end in cuts:
        start, end = min(start, len(text)), min(max(start, end), len(text))
        call.hear(1, ChatDelta(session=KEY, call="c", offset=start, text=text[start:end]))
        best = max(best, end) if start <= best else best
        assert call.texts == ["", text[:best]]


def test_ended_calls_are_kept_within_limits_and_no_call_number_is_reused():
    book = CallBook()
    heard, unheard = in_state(book, "heard"), in_state(book, "unheard")
    ended = [in_state(book, state) for state in ["delivered", "undelivered", "cut"] * MOST_KEPT]
    for at, call in enumerate(ended):
        call.left = float(at)
    book.forget(0.0, kept_s=1000.0)
    assert book.calls == [heard, unheard, *ended[-MOST_KEPT:]]
    book.forget(float(len(ended) - 3) + 5.0, kept_s=5.0)
    assert book.calls == [heard, unheard, *ended[-2:]]
    assert book.open() == 2
    assert list(book.given_up(4.9, grace_s=5.0)) == [] and list(book.given_up(5.0, grace_s=5.0)) == [unheard]
    assert in_state(book, "cut").number == 2 + len(ended)
