"""The timeline of an actor: bounded, the newest kept, one thing at a time on a track."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import WALL, make_trace

from asyncrl.messages.monitor import TraceSpan
from asyncrl.observe.trace import SPANS_IN_PART, SPANS_KEPT, SPANS_OF_RUN, span_events, spans_kept


def read(trace):
    return [span for part in trace.parts() for span in part]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "add"]), st.integers(0, 2), st.floats(0.0, 3.0)), max_size=80
)


@settings(deadline=None)
@given(ACTIONS, st.sampled_from([4.0, 50.0]), st.integers(1, 12))
def test_the_trace_is_bounded_keeps_the_newest_spans_and_no_track_overlaps(actions, window_s, kept):
    time, trace = make_trace(window_s, kept)
    ended, running, last = [], {}, defaultdict(lambda: -1.0)

    def end(at):
        if at in running:
            name, began = running.pop(at)
            ended.append((str(at), name, began, time.seconds))
            last[at] = time.seconds

    for number, (action, at, seconds) in enumerate(actions):
        time.seconds += seconds
        track, name = trace.track(str(at), at), f"{number}"
        if action == "enter":
            end(at)
            running[at] = (name, time.seconds)
            track.enter(name)
        elif action == "leave":
            end(at)
            track.leave()
        elif at not in running:
            began = min(time.seconds, max(last[at], time.seconds - 1.0))
            running[at] = (name, began)
            end(at)
            track.add(name, time.seconds - 1.0)
    spans = read(trace)
    closed = [span for span in spans if span.seconds >= 0]
    expected = [item for item in ended if item[3] >= time.seconds - window_s][-kept:]
    assert [(span.track, span.name) for span in closed] == [item[:2] for item in expected]
    for span, (_, _, began, finished) in zip(closed, expected, strict=True):
        assert span.began == pytest.approx(WALL + began, abs=1e-6)
        assert span.began + span.seconds == pytest.approx(WALL + finished, abs=1e-6)
    assert {span.track: span.name for span in spans if span.seconds < 0} == {
        str(at): name for at, (name, _) in running.items()
    }
    by_track = defaultdict(list)
    for event in span_events(1, spans):
        by_track[event["tid"]].append((event["ts"], event["ts"] + event.get("dur", 0)))
    for times in by_track.values():
        assert all(one[1] <= other[0] for one, other in zip(times, times[1:], strict=False))


def test_a_span_has_the_facts_of_its_start_and_its_end():
    time, trace = make_trace()
    track = trace.track("slot 0", 100)
    track.enter("generate v3", uid="0-1", version=3)
    assert read(trace)[0].facts == {"uid": "0-1", "version": 3}
    time.seconds += 2
    track.leave(tokens=7)
    (span,) = read(trace)
    assert span == TraceSpan("slot 0", 100, "generate v3", span.began, 2.0, {"uid": "0-1", "version": 3, "tokens": 7})


def test_a_trace_is_handed_over_in_parts_while_tracks_continue():
    _, trace = make_trace(kept=3 * SPANS_IN_PART)
    track = trace.track("a", 1)
    for number in range(2 * SPANS_IN_PART + 5):
        track.enter(str(number))
    parts = trace.parts()
    first = next(parts)
    track.enter("later")
    rest = list(parts)
    assert [len(part) for part in (first, *rest)] == [SPANS_IN_PART, SPANS_IN_PART, 4, 1]
    assert [span.name for part in (first, *rest) for span in part] == [str(n) for n in range(2 * SPANS_IN_PART + 5)]


def test_a_trace_of_many_actors_is_no_larger_than_one_of_few():
    assert spans_kept(1) == spans_kept(16) == SPANS_KEPT
    for actors in (17, 100, 1000):
        assert 0.9 * SPANS_OF_RUN < actors * spans_kept(actors) <= SPANS_OF_RUN
    assert spans_kept(100_000) > 0, "the newest is always kept"
