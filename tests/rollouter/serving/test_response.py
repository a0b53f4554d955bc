"""Responses put together from many submissions: I3, limits, and stop strings over the cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.serving.response import Response
from asyncrl.stops import Stops

ALPHABET = "abcdefgh"


def decode(tokens):
    return "".join(ALPHABET[token] for token in tokens)


def versions_of(response):
    return [span.version for span in response.spans for _ in range(span.start, span.end)]


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 10), max_size=4), st.booleans()), max_size=12),
)
def test_every_token_keeps_its_logprob_and_version_over_any_number_of_resumes(max_tokens, submissions):
    response = Response(max_tokens=max_tokens)
    expected = []
    for version, deltas, died in submissions:
        if response.finish_reason is not None:
            break
        response.submitted(version)
        sampled = 0
        for size in deltas:
            size = min(size, response.remaining)
            logprobs = [-float(version) - 0.01 * i for i in range(size)]
            response.extend([1] * size, logprobs, decode)
            expected += [(version, logprob) for logprob in logprobs]
            sampled += size
        length = response.remaining == 0
        spans = [] if died else [VersionSpan(version, 0, sampled)]
        response.end_submission("length" if length else "abort", spans)
    assert len(response.tokens) <= max_tokens
    assert list(zip(versions_of(response), response.logprobs, strict=True)) == expected
    ends = [0, *(span.end for span in response.spans)]
    assert all(span.start == end for span, end in zip(response.spans, ends, strict=False))


def test_a_switch_within_one_submission_is_kept_where_it_happened():
    response = Response(max_tokens=10)
    response.submitted(1)
    response.extend([0, 1, 2, 3], [0.0] * 4, decode)
    response.end_submission("abort", [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4, True)])
    response.submitted(2)
    response.extend([4, 5], [0.0] * 2, decode)
    response.end_submission("stop", [VersionSpan(2, 0, 2)])
    assert response.spans == [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4, True), VersionSpan(2, 4, 6)]
    assert response.finish_reason == "stop"


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_string_that_straddles_the_cut_still_stops(cut):
    """I3 and the stop: tokens after it are dropped with their log-probs, whatever the submissions were."""
    tokens = [0, 1, 2, 3, 4, 5]  # abcdef, stop at "cd"
    response = Response(max_tokens=10, stops=Stops(strings=("cd",)))
    stopped, sent = False, 0
    for version, part in ((1, tokens[:cut]), (2, tokens[cut:])):
        if response.finish_reason or stopped:
            break
        response.submitted(version)
        stopped = response.extend(part, [float(-t) for t in part], decode)
        sent += len(part)
        response.end_submission("abort")
    assert stopped
    assert decode(response.tokens) == "abcd"
    assert response.logprobs == [0.0, -1.0, -2.0, -3.0]
    assert response.finish_reason == "stop"
    assert response.spans[-1].end == 4


PIECES = ["", "a", "b", " b", "ab", "bab", ".", " .", "aaa", b"\xe4", b"\xbd", b"\xa0", b"\xc3", b"\xa9"]


def decode_pieces(tokens):
    """Text as tokenizers make it: bytes are joined, a leading space is dropped, and a space before a full stop."""
    text = b"".join(p if isinstance(p := PIECES[token], bytes) else p.encode() for token in tokens)
    return text.decode(errors="replace").removeprefix(" ").replace(" .", ".")


@given(
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12), max_size=20),
    st.lists(st.sampled_from(["ab.", "bb", "aaab", "\u4f60", "a\u00e9", "b b"]), min_size=1, max_size=2),
    st.integers(0, 80),
)
def test_a_stop_string_is_found_as_in_the_text_of_the_whole(parts, strings, lead):
    """``lead``: tokens without an end of theirs before them."""
    response = Response(max_tokens=10_000, stops=Stops(strings=tuple(strings)))
    response.submitted(1)
    sent = [5, 0] * (lead // 2)
    parts = [[5, 0]] * (lead // 2) + parts if not any(stop in decode_pieces(sent) for stop in strings) else parts
    whole = []
    for part in parts:
        whole += part
        stopped = response.extend(part, [0.0] * len(part), decode_pieces)
        ends = [n for n in range(1, len(whole) + 1) if any(stop in decode_pieces(whole[:n]) for stop in strings)]
        assert stopped == bool(ends)
        if stopped:
            assert response.tokens == whole[: ends[0]]
            return


def test_tokens_without_a_text_hide_no_stop_string():
    response = Response(max_tokens=1000, stops=Stops(strings=("ab.",)))
    response.submitted(1)
    for token in (2, 4, *[0] * 500):
        assert not response.extend([token], [0.0], decode_pieces)
    assert response.extend([6, 1], [0.0] * 2, decode_pieces)
    assert response.tokens == [2, 4, *[0] * 500, 6]


def test_looking_for_a_stop_string_does_not_get_longer_with_the_response():
    decoded = []

    def counted(tokens):
        decoded[-1] += len(tokens)
        return decode(tokens)

    response = Response(max_tokens=5000, stops=Stops(strings=("hhhh",)))
    response.submitted(1)
    for _ in range(500):
        decoded.append(0)
        assert not response.extend([0, 1, 2, 3], [0.0] * 4, counted)
    assert max(decoded) < 50


def test_the_death_of_an_engine_costs_only_what_nobody_can_date():
    response = Response(max_tokens=10)
    response.submitted(1)
    response.extend([1, 2], [0.0, 0.0], decode)
    response.cut_submission(known=2)
    assert (response.tokens, response.spans) == ([1, 2], [VersionSpan(1, 0, 2)])
    response.submitted(2)
    response.extend([3], [0.0], decode)
    response.extend([4], [0.0], decode)
    response.cut_submission(known=3)
    assert response.tokens == [1, 2, 3]
    assert response.logprobs == [0.0] * 3
    assert response.spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)]
    assert response.finish_reason is None


@pytest.mark.parametrize(
    ("known", "reason", "tokens"), [(3, "stop", [0, 2, 3]), (2, None, [0, 2])], ids=["handed over", "forgotten"]
)
def test_a_response_that_was_over_when_its_engine_died_stays_so_by_what_is_kept(known, reason, tokens):
    response = Response(max_tokens=9, stops=Stops(strings=("cd",)))
    response.submitted(1)
    assert response.extend([0, 2, 3], [0.0] * 3, decode)
    response.cut_submission(known=known)
    assert (response.finish_reason, response.tokens) == (reason, tokens)
    if reason is None:
        response.submitted(2)
        assert response.extend([3], [0.0], decode)
        response.end_submission("abort")
        assert response.spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)]
