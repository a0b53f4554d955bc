"""Stages of an episode: which deadline comes next, who is late, and where its time went."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.episode import EpisodeConfig
from asyncrl.errors import EpisodeOver
from asyncrl.rollouter.serving.stages import Stages

CONFIG = EpisodeConfig(
    function="m:f", max_turns=3, start_timeout_s=10, turn_timeout_s=20, timeout_s=50, close_timeout_s=5
)


def played(*events, config=CONFIG):
    """Stages after events, from time 0."""
    stages = Stages(config, 0.0)
    stages.begin(0.0)
    for event in events:
        happens(stages, *event)
    return stages


def happens(stages, now, method, *arguments):
    """An event; named arguments are a dict at the end."""
    named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    getattr(stages, method)(*arguments[: len(arguments) - bool(named)], now=now, **named)


def answered(call, start, end, *tools):
    return ((start, "call", call), (start, "enter", call, "engine"), (end, "answered", call, {"tools": [*tools]}))


DEADLINES = {
    "it starts": ([], 10.0),
    "it is with the policy": ([(8, "call", "a")], None),
    "it is paused": ([(8, "call", "a"), (9, "enter", "a", "paused")], None),
    "after an answer": (answered("a", 8, 30), 50.0),
    "after a call without answer": ([(8, "call", "a"), (9, "dropped", "a")], 29.0),
    "while another call is under way": ([(8, "call", "b"), *answered("a", 8, 30)], None),
    "after both": ([(8, "call", "b"), *answered("a", 8, 30), (33, "answered", "b")], 53.0),
    # 8 s before the first call and 15 s after it, so 27 are left.
    "the episode ends before the turn does": (
        [*answered("a", 8, 100), *answered("b", 115, 200), *answered("c", 215, 300)],
        312.0,
    ),
    "it is over with a call under way": ([(8, "call", "a"), (31, "end_by", "length", "too long")], 36.0),
    "it has ended": ([(31, "end")], None),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_which_deadline_comes_next(name):
    events, expected = DEADLINES[name]
    stages = played(*events)
    assert stages.next_deadline == expected
    if expected is not None:
        assert stages.expire(expected - 0.001) is None
        assert stages.expire(expected) is not None


EXPIRIES = {
    "start": ([], 10, None, r"start: .* within 10 s; raise episode\.start_timeout_s"),
    "turn": (
        answered("a", 8, 30, "search", "add"),
        50,
        None,
        r"turn: .* within 20 s of an answer \(state: tool search\); raise episode\.turn_timeout_s",
    ),
    "episode": (
        [*answered("a", 8, 30), *answered("b", 48, 60), *answered("c", 78, 90)],
        96,
        "time",
        r"it took 50 s beside its calls of the policy \(episode\.timeout_s\)",
    ),
    "close": (
        [*answered("a", 8, 30), (31, "end_by", "length", "its context is full")],
        36,
        "length",
        r"close: .* 5 s after it was over \(its context is full\); raise episode\.close_timeout_s",
    ),
}


@pytest.mark.parametrize("stage", EXPIRIES)
def test_an_expiry_names_its_stage_the_seconds_and_the_key(stage):
    events, now, outcome, text = EXPIRIES[stage]
    stages = played(*events)
    assert stages.expire(now - 0.01) is None
    expired = stages.expire(now)
    assert (expired.stage, expired.outcome) == (stage, outcome)
    assert re.match(text, expired.text), expired.text
    with pytest.raises(EpisodeOver):
        stages.call("late", now)
    if stage == "episode":
        assert (stages.state, stages.outcome, stages.next_deadline) == ("close", "time", now + 5)
    else:
        assert (stages.state, stages.next_deadline, stages.expire(now + 1000)) == ("ended", None, None)


def test_no_turn_is_refused_but_the_one_past_the_limit_and_the_first_limit_stays():
    stages = played(*answered("a", 1, 2), (3, "call", "b"), (3, "call", "c"))
    assert stages.outcome == "stop"
    for late in ("d", "a"):
        with pytest.raises(EpisodeOver, match=r"it has had its 3 turns \(episode.max_turns\)"):
            stages.call(late, 4)
    stages.end_by("time", "late", 5)
    assert (stages.outcome, stages.state, stages.next_deadline) == ("turns", "close", 9)
    stages.answered("b", 5)
    stages.answered("c", 6)
    assert stages.turns == 3 and stages.next_deadline == 9


def test_news_of_a_call_after_the_end_changes_nothing():
    stages = played((1, "call", "a"), (2, "end"), (3, "enter", "a", "engine"), (4, "answered", "a"))
    stages.dropped("a", 5)
    stages.end_by("time", "late", 5)
    assert (stages.state, stages.turns, stages.outcome) == ("ended", 0, "stop")


def test_states_as_they_are_shown():
    stages = Stages(CONFIG, 0.0)
    stages.begin(0.0)
    shown = []
    for event in [
        (1, "call", "a"),
        (2, "enter", "a", "engine"),
        (3, "call", "b"),
        (4, "enter", "a", "paused"),
        (5, "answered", "a", {"tools": ["search"]}),
        (6, "enter", "b", "engine"),
        (7, "dropped", "b"),
        (8, "call", "c"),
        (9, "answered", "c"),
        (10, "end_by", "time", "late"),
        (12, "end"),
    ]:
        shown.append(stages.state)
        happens(stages, *event)
    assert shown == [
        *("start", "queue", "engine", "engine", "paused", "queue", "engine"),
        *("tool search", "queue", "user", "close"),
    ]
    spent = {"start": 1, "queue": 3, "engine": 3, "paused": 1, "tool search": 1, "user": 1, "close": 2}
    assert stages.seconds(100) == spent


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "queue", "engine", "paused", "answered", "dropped", "expire", "over", "end"]),
        st.integers(0, 3),
        st.floats(-1, 30, allow_nan=False),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([3, 100]))
def test_fractions_add_up_to_its_life_and_policy_time_is_nobody_elses(steps, turns):
    """Against a clock that is kept beside it."""
    config = CONFIG.model_copy(update={"max_turns": turns})
    stages, now, users, calls = Stages(config, 0.0), 0.0, 0.0, {}
    stages.begin(0.0)
    over = ended = False
    end = None
    for what, number, wait in steps:
        call = f"c{number}"
        if not calls and not over:
            users += max(wait, 0.0)
        now += max(wait, 0.0)
        at = now + min(wait, 0.0)
        before = stages.next_deadline
        if what == "call":
            try:
                if call not in calls or over:
                    stages.call(call, at)
                    calls[call] = None
                    assert not over
            except EpisodeOver:
                over = True
        elif what in ("answered", "dropped"):
            getattr(stages, what)(call, at)
            calls.pop(call, None)
        elif what == "expire":
            expired = stages.expire(at)
            assert (expired is not None) == (before is not None and before <= now)
            if expired:
                if expired.stage == "episode":
                    assert users >= config.timeout_s - 1e-6
                assert (expired.outcome is None) == (expired.stage in ("start", "turn"))
                over, ended = True, ended or expired.stage != "episode"
                if ended:
                    calls.clear()
        elif what == "over":
            stages.end_by("length", "full", at)
            over = True
        elif what == "end":
            stages.end(at)
            over = ended = True
            calls.clear()
        else:
            stages.enter(call, what, at)
        end = now if ended and end is None else end
        life = now if end is None else end
        assert sum(stages.seconds(at).values()) == pytest.approx(life)
        if not over:
            policy = {"queue", "engine", "paused"}
            assert (stages.state in policy) == bool(calls)
            assert sum(s for state, s in stages.seconds(at).items() if state not in policy) == pytest.approx(users)
            assert (stages.next_deadline is None) == bool(calls)
    assert end is None or stages.state == "ended"


def test_no_time_is_the_agents_before_its_host_says_that_it_has_begun():
    config = EpisodeConfig(function="p:f", start_timeout_s=1.0, timeout_s=5.0)
    stages = Stages(config, 0.0)
    assert stages.next_deadline == 5.0
    assert stages.expire(4.0) is None
    stages.begin(4.0)
    assert stages.next_deadline == 5.0, "the start's, counted from the beginning"
    stages.call("a", 4.5)
    stages.answered("a", 6.0)
    assert stages.next_deadline == 6.0 + 4.5, "the episode's, less half a second of the start"
    assert sum(stages.seconds(7.0).values()) == 7.0
    found = Stages(config, 0.0).expire(5.0)
    assert (found.stage, found.outcome) == ("host", None)
    assert "episode.timeout_s" in found.text
