"""Stages of an episode: the next deadline, the late party, and the time of each stage."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.episode import EpisodeConfig
from asyncrl.core.errors import EpisodeOver
from asyncrl.rollouter.episode.stages import Stages

CONFIG = EpisodeConfig(
    function="m:f", max_turns=3, start_timeout_s=10, turn_timeout_s=20, timeout_s=50, close_timeout_s=5
)
POLICY = {"queue", "engine", "paused"}


def played(*events):
    """Stages after events (time, method, arguments), and the states before each of them, from time 0."""
    stages, states = Stages(CONFIG, 0.0), []
    stages.begin(0.0)
    for now, method, *arguments in events:
        states.append(stages.state)
        if method == "tools":
            stages.answered(arguments[0], now, tools=arguments[1])
        else:
            getattr(stages, method)(*arguments, now=now)
    return stages, states


def answered(call, start, end, *tools):
    return (start, "call", call), (start, "enter", call, "engine"), (end, "tools", call, tools)


AFTER = r"turn: .* within 20 s of an answer \(state: {}\); raise episode\.turn_timeout_s"
TIME = r"it took 50 s without its calls of the policy \(episode\.timeout_s\)"
CLOSE = r"close: .* 5 s after it was over \(too long\); raise episode\.close_timeout_s"
DEADLINES = {
    "it starts": ([], 10.0, None, r"start: .* within 10 s; raise episode\.start_timeout_s"),
    "after an answer": (answered("a", 8, 30, "search", "add"), 50.0, None, AFTER.format("tool search")),
    "after a call without answer": ([(8, "call", "a"), (9, "dropped", "a")], 29.0, None, AFTER.format("user")),
    "after both": ([(8, "call", "b"), *answered("a", 8, 30), (33, "answered", "b")], 53.0, None, AFTER.format("user")),
    # 8 s before the first call and 15 s after it, so 27 are left.
    "the episode ends before the turn does": (
        [*answered("a", 8, 100), *answered("b", 115, 200), *answered("c", 215, 300)],
        312.0,
        "time",
        TIME,
    ),
    "it is over with a call under way": (
        [(8, "call", "a"), (31, "end_by", "length", "too long")],
        36.0,
        "length",
        CLOSE,
    ),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_a_deadline_passes_on_time_and_names_the_seconds_and_the_key(name):
    events, due, outcome, text = DEADLINES[name]
    stages, _ = played(*events)
    assert stages.next_deadline == due
    assert stages.expire(due - 0.001) is None
    expired = stages.expire(due)
    assert expired.outcome == outcome
    assert re.match(text, expired.text), expired.text
    with pytest.raises(EpisodeOver):
        stages.call("late", due)
    if expired.stage == "episode":
        assert (stages.state, stages.outcome, stages.next_deadline) == ("close", "time", due + 5)
    else:
        assert (stages.state, stages.next_deadline, stages.expire(due + 1000)) == ("ended", None, None)


def test_only_the_turn_past_the_limit_is_refused_and_the_first_limit_stays():
    stages, _ = played(*answered("a", 1, 2), (3, "call", "b"), (3, "call", "c"))
    assert stages.all_turns_asked, "a call that comes now has to wait"
    stages.dropped("c", 4)
    assert not stages.all_turns_asked
    stages.call("d", 4)
    stages.answered("b", 4)
    stages.answered("d", 4)
    assert (stages.all_turns_asked, stages.outcome) == (False, "stop")
    for late in ("e", "a"):
        with pytest.raises(EpisodeOver, match=r"it has had its 3 turns \(episode.max_turns\)"):
            stages.call(late, 4)
    stages.end_by("time", "late", 5)
    assert (stages.outcome, stages.state, stages.next_deadline) == ("turns", "close", 9)


def test_calls_in_flight_at_a_limit_are_answered():
    stages, _ = played((1, "call", "a"), (1, "call", "b"), (2, "end_by", "length", "full"))
    assert (stages.state, stages.next_deadline, stages.all_turns_asked) == ("close", 7, False)
    stages.answered("a", 3)
    stages.answered("b", 4)
    assert stages.turns == 2 and stages.next_deadline == 7


def test_states_are_shown():
    stages, shown = played(
        (1, "call", "a"),
        (2, "enter", "a", "engine"),
        (3, "call", "b"),
        (4, "enter", "a", "paused"),
        (5, "tools", "a", ["search"]),
        (6, "enter", "b", "engine"),
        (7, "dropped", "b"),
        (8, "call", "c"),
        (9, "answered", "c"),
        (10, "end_by", "time", "late"),
        (12, "end"),
        (13, "answered", "c"),
    )
    assert shown == [
        *("start", "queue", "engine", "engine", "paused", "queue", "engine"),
        *("tool search", "queue", "user", "close", "ended"),
    ]
    spent = {"start": 1, "queue": 3, "engine": 3, "paused": 1, "tool search": 1, "user": 1, "close": 2}
    assert (stages.seconds(100), stages.turns) == (spent, 2)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "queue", "engine", "paused", "answered", "dropped", "expire", "over", "end"]),
        st.integers(0, 3),
        st.floats(-1, 30, allow_nan=False),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([3, 100]))
def test_fractions_add_up_to_the_lifetime_and_policy_time_is_counted_separately(steps, turns):
    """Against a second clock."""
    config = CONFIG.model_copy(update={"max_turns": turns})
    stages, now, users, calls = Stages(config, 0.0), 0.0, 0.0, set()
    stages.begin(0.0)
    over, end = False, None
    for what, number, wait in steps:
        call, ended = f"c{number}", False
        if not calls and not over:
            users += max(wait, 0.0)
        now += max(wait, 0.0)
        at = now + min(wait, 0.0)
        before = stages.next_deadline
        if what == "call":
            try:
                if (call not in calls and not stages.all_turns_asked) or over:
                    stages.call(call, at)
                    assert not over
                    calls.add(call)
            except EpisodeOver:
                over = True
        elif what in ("answered", "dropped"):
            getattr(stages, what)(call, at)
            calls.discard(call)
        elif what == "expire":
            expired = stages.expire(at)
            assert (expired is not None) == (before is not None and before <= now)
            if expired:
                assert expired.stage != "episode" or users >= config.timeout_s - 1e-6
                assert (expired.outcome is None) == (expired.stage in ("start", "turn"))
                over, ended = True, expired.stage != "episode"
        elif what == "over":
            stages.end_by("length", "full", at)
            over = True
        elif what == "end":
            stages.end(at)
            over = ended = True
        else:
            stages.enter(call, what, at)
        if ended:
            calls.clear()
            end = now if end is None else end
        seconds = stages.seconds(at)
        assert sum(seconds.values()) == pytest.approx(now if end is None else end)
        if not over:
            assert (stages.state in POLICY) == bool(calls) == (stages.next_deadline is None)
            assert sum(s for state, s in seconds.items() if state not in POLICY) == pytest.approx(users)
    assert end is None or stages.state == "ended"


def test_time_before_the_host_reports_the_start_does_not_count_for_the_agent():
    config = EpisodeConfig(function="p:f", start_timeout_s=1.0, timeout_s=5.0)
    stages = Stages(config, 0.0)
    assert stages.next_deadline == 5.0
    stages.begin(4.0)
    assert stages.next_deadline == 5.0, "the start's, counted from the beginning"
    stages.call("a", 4.5)
    stages.answered("a", 6.0)
    assert stages.next_deadline == 6.0 + 4.5, "the episode's, less half a second of the start"
    assert sum(stages.seconds(7.0).values()) == 7.0
    found = Stages(config, 0.0).expire(5.0)
    assert (found.stage, found.outcome) == ("host", None)
    assert "episode.timeout_s" in found.text
