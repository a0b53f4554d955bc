"""Metrics of episodes: how they end, fail and fork, where their time goes, and what is computed again."""

import asyncio
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_settings import sim_config
from session_cases import TOOL, call_of, echoed, played, result, user

from asyncrl.messages.episodes import EpisodeDone
from asyncrl.observe.catalogue import Counters, Histograms, find
from asyncrl.rollouter.episode.conversation import ConversationCounts
from asyncrl.rollouter.episode.episode_metrics import MOST_TOOLS, OTHER_TOOLS, EpisodeFaults, EpisodeMetrics, by_kind
from asyncrl.rollouter.episode.player import EpisodeFailed

STATES = st.sampled_from(["start", "queue", "engine", "paused", "user", "close", *(f"tool t{n}" for n in range(30))])


@given(st.lists(STATES, max_size=60), st.lists(STATES, max_size=60))
@example([f"tool t{n}" for n in range(30)], ["tool t29"])
def test_every_open_episode_is_at_one_stage_and_names_are_bounded(before, now):
    counters = Counters()
    metrics = EpisodeMetrics(counters, Histograms())
    first, second = metrics.gauges(before, 1.0), metrics.gauges(now, 2.0)
    at = {name: value for name, value in second.items() if name.startswith("rollout/episodes_at/")}
    assert sum(at.values()) == second["rollout/episodes"] == len(now)
    # A stage is reported from its first time on; otherwise it would seem to stay.
    assert set(first) <= set(second)
    tools = {name.removeprefix("rollout/episodes_at/") for name in at if "/tool " in name}
    assert len(tools - {OTHER_TOOLS}) <= MOST_TOOLS
    assert all(find(name) is not None for name in second)
    # The times of all stages add up.
    seconds = dict.fromkeys(now, 1.5)
    metrics.spent(seconds)
    assert sum(counters.values()) == sum(by_kind(seconds).values()) == sum(seconds.values())
    assert not any(state.startswith("tool ") for state in by_kind(seconds))


def test_an_episode_is_counted_with_its_turns_forks_and_time(tmp_path):
    seen = []

    async def agent(world, key):
        first = await world.chat(key, [user("hi")], tools=[TOOL])
        seen.append(world.sessions.gauges())
        await world.chat(key, [user("hi"), echoed(first), result(first, "nothing")], tools=[TOOL])
        await world.chat(key, [user("hi, in other words"), echoed(first), result(first, "x")], tools=[TOOL])
        return EpisodeDone(reward=1.0)

    answers = iter([call_of("look"), "<tool_call>\n{no JSON}\n</tool_call>", "Well."])
    trajectory, world = played(tmp_path, agent, say=lambda prompt: next(answers))
    assert seen[0]["rollout/episodes_at/tool look"] == 1 and seen[0]["rollout/episodes_oldest_s"] > 0
    assert world.sessions.metrics.gauges([], 0.0)["rollout/episodes_at/tool look"] == 0
    counters, histograms = world.counters, world.histograms.taken()
    names = ("malformed_calls", "episodes_ended/stop", "forks/edited")
    assert [counters[f"rollout/{name}"] for name in names] == [1, 1, 1]
    assert (trajectory.turns, trajectory.forks, histograms["rollout/turns"].sum) == (3, {"edited": 1}, 3)
    assert histograms["rollout/prompt_tokens"].sum == sum(len(prompt) for prompt, _, _ in world.submitted)
    spent = {name.rpartition("/")[2]: each for name, each in counters.items() if "/episode_s/" in name}
    assert set(spent) == {"start", "queue", "engine", "tool look", "user"} and trajectory.stage_s["tool"] > 0
    assert sum(trajectory.stage_s.values()) == pytest.approx(sum(spent.values()), abs=0.05)


@pytest.mark.parametrize(
    ("failure", "reason", "options"),
    [
        ("user", "ValueError: no", {}),
        ("answer", "without an answer", {}),
        ("reward", "no reward", {"reward": {"function": "episode"}}),
        ("start", "start: .*episode.start_timeout_s", {"episode": {"start_timeout_s": 0.05}}),
        ("turn", "turn: .*episode.turn_timeout_s", {"episode": {"turn_timeout_s": 0.05}}),
    ],
)
def test_failed_attempts_report_the_reason_and_are_counted_by_cause(tmp_path, failure, reason, options):
    async def agent(world, key):
        if failure not in ("answer", "start"):
            await world.chat(key, [user("hi")])
        if failure in ("start", "turn"):
            await asyncio.Event().wait()
        return EpisodeDone(error="ValueError: no" if failure == "user" else "")

    found, world = played(tmp_path, agent, **options)
    assert isinstance(found, EpisodeFailed) and re.search(reason, str(found)) and world.events.attempts == 1
    failed = {name: each for name, each in world.counters.items() if "episodes_failed" in name}
    assert failed == {f"rollout/episodes_failed/{failure}": 1}
    assert world.failures == [(failure, str(found), "0-1")]


def test_tokens_that_engines_compute_again_after_an_update(tmp_path):
    async def agent(world, key):
        first = await world.chat(key, [user("hi")])
        assert world.manager.reprefill.tokens == 0
        await world.update()
        shared = len(world.submitted[0][0]) + world.spoken
        await world.chat(key, [user("hi"), echoed(first), user("more")])
        # The tokens of the earlier call, and not the new ones.
        assert world.manager.reprefill.tokens == shared < len(world.submitted[1][0])
        world.pause_after = world.spoken + 1
        call = asyncio.create_task(world.chat(key, [user("another")]))
        await world.until(lambda: not world.speaks.is_set())
        await world.update()
        world.speaks.set()
        await call
        prompt, held, _ = world.submitted[-1]
        assert held == 1
        assert world.manager.reprefill.tokens == shared + len(prompt) + held
        return EpisodeDone(reward=1.0)

    trajectory, _ = played(tmp_path, agent)
    assert trajectory.resumes == 1


@pytest.mark.parametrize(("reward", "state"), [("relative_judge", "judge"), ("exact", "score")])
def test_episodes_that_are_scored_are_open_and_the_cost_factor_is_over_all_tokens(reward, state):
    counters = Counters()
    metrics = EpisodeMetrics(counters, Histograms(), reward)
    for context in (100, 900):
        counts = {"sampled_tokens": 0, "context_tokens": context, "linear_tokens": 100}
        metrics.ended("stop", ConversationCounts(turns=1, forks={}, **counts))
    gauges = metrics.gauges(["user"], 1.0, scoring=3)
    assert (gauges["rollout/episodes"], gauges[f"rollout/episodes_at/{state}"]) == (4, 3)
    assert gauges["rollout/cost_factor"] == 5.0
    metrics.scored(2.0)
    assert counters[f"rollout/episode_s/{state}"] == 2.0


@pytest.mark.parametrize(
    ("failed", "then"),
    [("quarantine_group", "its group is quarantined"), ("drop", "it is left out of its group")],
)
def test_the_first_fault_of_each_cause_is_reported_and_later_ones_are_counted(failed, then):
    rollout = {"max_attempts": 3, "on_failed_trajectory": failed}
    notices = []
    config = sim_config(rollout=rollout, episode={"function": "pkg:play"})
    faults = EpisodeFaults(config, lambda key, text, count: notices.append((key, text, count)))
    faults.add("turn", "turn: it took too long", "0-1")
    [(key, text, count)] = notices
    assert (key, count) == ("episode: turn", 1)
    for words in ("function = pkg:play", "it took too long (prompt 0-1)", f"tried 3 times, then {then}"):
        assert words in text
    faults.add("turn", "turn: it took too long again", "0-2")
    faults.add("start", "start: it never began", "0-3")
    # The episode host reports errors of the user's code.
    faults.add("user", "text", "0-1")
    assert notices[1] == (key, text, 2)
    assert [count for _, _, count in notices] == [1, 2, 1]
