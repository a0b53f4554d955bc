"""Responses assembled from many submissions: I3, limits, and stop strings across the cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import make_sets
from asyncrl.rollouter.serving.generation import Response
from asyncrl.text.stops import Stops


def decode(tokens):
    return "".join("abcdefgh"[token] for token in tokens)


def response_with(*stops, max_tokens=1000, version=1):
    response = Response(max_tokens=max_tokens, stops=Stops(strings=stops))
    response.submitted(version)
    return response


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 10), max_size=4), st.booleans()), max_size=12),
)
def test_i3_every_token_keeps_its_logprob_and_version_over_any_number_of_resumes(max_tokens, submissions):
    response, expected = Response(max_tokens=max_tokens), []
    for version, deltas, died in submissions:
        if response.finish_reason is not None:
            break
        response.submitted(version)
        start = len(expected)
        for size in deltas:
            logprobs = [-float(version) - 0.01 * i for i in range(min(size, response.remaining))]
            response.extend([1] * len(logprobs), logprobs, decode)
            expected += [(version, logprob) for logprob in logprobs]
        spans = [] if died else [VersionSpan(version, 0, len(expected) - start)]
        response.end_submission("abort" if response.remaining else "length", spans)
    assert len(response.tokens) <= max_tokens
    versions = [span.version for span in response.spans for _ in range(span.start, span.end)]
    assert list(zip(versions, response.logprobs, strict=True)) == expected
    ends = [0, *(span.end for span in response.spans)]
    assert all(span.start == end for span, end in zip(response.spans, ends, strict=False))


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.lists(st.integers(1, 10), max_size=4), st.booleans(), st.integers(0, 9)), max_size=8),
)
def test_every_token_keeps_its_set_over_resumes_limits_and_deaths(max_tokens, submissions):
    """Token n has a set of n % 3 + 1 members that begins with n."""
    response, sampled = Response(max_tokens=max_tokens), 0
    for deltas, died, lost in submissions:
        if response.finish_reason is not None:
            break
        response.submitted(1)
        start = len(response.tokens)
        for size in deltas:
            numbers = range(sampled, sampled + size)
            sampled += size
            sets = make_sets([[number] * (number % 3 + 1) for number in numbers])
            response.extend(numbers, [-1.0] * size, decode, sets)
        if died:
            response.cut_submission(max(start, len(response.tokens) - lost), prompt=0)
        else:
            response.end_submission("abort", [VersionSpan(1, 0, sampled)] if len(response.tokens) > start else [])
    sets = response.sets
    if not response.tokens:
        assert sets is None or not len(sets.sizes)
        return
    assert sets.sizes.tolist() == [token % 3 + 1 for token in response.tokens]
    assert sets.ids.tolist() == [token for token in response.tokens for _ in range(token % 3 + 1)]


def test_i3_a_version_switch_within_a_submission_keeps_its_position():
    response = response_with()
    response.extend([0, 1, 2, 3], [0.0] * 4, decode)
    response.end_submission("abort", [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4, True)])
    response.submitted(2)
    response.extend([4, 5], [0.0] * 2, decode)
    response.end_submission("stop", [VersionSpan(2, 0, 2)])
    assert response.spans == [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4, True), VersionSpan(2, 4, 6)]
    assert response.finish_reason == "stop"


@pytest.mark.parametrize("cut", range(1, 6))
def test_i3_a_stop_string_that_straddles_the_cut_still_stops(cut):
    """Tokens after it are dropped with their log-probs, for any submissions."""
    response, stopped = response_with("cd"), False
    for version, part in ((1, range(cut)), (2, range(cut, 6))):
        if not stopped:
            if version > 1:
                response.submitted(version)
            stopped = response.extend(part, [float(-t) for t in part], decode, make_sets([[t, 9] for t in part]))
            response.end_submission("abort")
    assert (decode(response.tokens), response.logprobs) == ("abcd", [0.0, -1.0, -2.0, -3.0])
    assert (response.sets.ids.tolist(), response.sets.sizes.tolist()) == ([0, 9, 1, 9, 2, 9, 3, 9], [2] * 4)
    assert (response.finish_reason, response.spans[-1].end) == ("stop", 4)


PIECES = ["", "a", "b", " b", "ab", "bab", ".", " .", "aaa", b"\xe4", b"\xbd", b"\xa0", b"\xc3", b"\xa9"]


def decode_pieces(tokens):
    """Text as tokenizers produce it: bytes joined, without a leading space and without a space before a full stop."""
    text = b"".join(p if isinstance(p := PIECES[token], bytes) else p.encode() for token in tokens)
    return text.decode(errors="replace").removeprefix(" ").replace(" .", ".")


@given(
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12), max_size=20),
    st.lists(st.sampled_from(["ab.", "bb", "aaab", "\u4f60", "a\u00e9", "b b"]), min_size=1, max_size=2),
    st.integers(0, 40),
)
def test_a_stop_string_is_found_as_in_the_whole_text(parts, strings, lead):
    """``lead``: pairs of tokens before them; the second has no text."""
    response, whole = response_with(*strings), []
    for part in [[5, 0]] * (0 if "bb" in strings else lead) + parts:
        whole += part
        stopped = response.extend(part, [0.0] * len(part), decode_pieces)
        ends = [n for n in range(1, len(whole) + 1) if any(stop in decode_pieces(whole[:n]) for stop in strings)]
        assert stopped == bool(ends)
        if stopped:
            assert response.tokens == whole[: ends[0]]
            return


def test_tokens_without_a_text_hide_no_stop_string():
    response = response_with("ab.")
    for token in (2, 4, *[0] * 500):
        assert not response.extend([token], [0.0], decode_pieces)
    assert response.extend([6, 1], [0.0] * 2, decode_pieces)
    assert response.tokens == [2, 4, *[0] * 500, 6]


def test_the_search_for_a_stop_string_does_not_grow_with_the_response():
    decoded = []

    def counted(tokens):
        decoded[-1] += len(tokens)
        return decode(tokens)

    response = response_with("hhhh", max_tokens=5000)
    for _ in range(500):
        decoded.append(0)
        assert not response.extend([0, 1, 2, 3], [0.0] * 4, counted)
    assert max(decoded) < 50


@pytest.mark.parametrize(("known", "reason", "tokens"), [(3, "stop", [0, 2, 3]), (2, None, [0, 2])])
def test_the_death_of_an_engine_costs_only_tokens_of_unknown_version(known, reason, tokens):
    """A response that was complete at the death stays so, unless its end is forgotten."""
    response = response_with("cd")
    assert response.extend([0, 2, 3], [0.0] * 3, decode)
    response.computed = 7 + 3
    response.cut_submission(known, prompt=7)
    assert response.computed == 7 + known, "forgotten tokens are not lost twice"
    assert (response.finish_reason, response.tokens, len(response.logprobs)) == (reason, tokens, known)
    assert response.spans == [VersionSpan(1, 0, known)]
    if reason is None:
        response.submitted(2)
        assert response.extend([3], [0.0], decode)
        response.end_submission("abort")
        assert response.spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)]
