"""The story of an episode, from its rollouter to the words of --explain."""

import asyncio
from datetime import UTC, datetime
from typing import get_args

import pytest
from session_cases import TOOL, call_of, played, result, said, user

from asyncrl.errors import ChatRefused, EpisodeOver
from asyncrl.explain.lines import LogLine
from asyncrl.explain.words import FORKS, words_of
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.rollouter.episode.conversation import Cause
from asyncrl.rollouter.serving.group_events import EVENTS_KEPT


def told(folder, agent, **options):
    """Each event of an episode, and what is said of it."""
    account = played(folder, agent, **options)[1].account
    facts = {"since": 0.0, "samples": [account.events], "end": "delivered", "left_out": account.left_out}
    line = LogLine(actor="rollouter/0", event="generated", timestamp=datetime.fromtimestamp(0.0, UTC), **facts)
    return account, [happening.text for happening in words_of(line, "0-1") if happening.sample == 0]


def test_each_turn_is_told_from_its_context_to_its_reward(tmp_path):
    async def agent(world, key):
        reply = await world.chat(key, [user("hi")], tools=[TOOL])
        # A turn that is worth nothing is no event unless it was worth something.
        for value in (0.0, 0.5, 0.5, 0.0):
            world.sessions.credit(key, "episodes/0", None, value)
        await world.chat(key, [user("hi"), said(reply), result(reply, "nothing")], tools=[TOOL])
        return EpisodeDone(reward=1.0)

    answers = iter([call_of("look"), "There is nothing."])
    account, words = told(tmp_path, agent, say=lambda prompt: next(answers))
    assert [event[1] for event in account.events] == [
        *("episode", "asked", "answered", "turn reward", "turn reward", "turn reward", "asked", "answered", "ended")
    ]
    assert words[0] == "episode began at episodes/0"
    assert words[1].startswith("call 0 (the first): ") and " generation began at version 0 after " in words[1]
    assert words[2].startswith("call 0 gave turn 0: ") and words[2].endswith("; it calls look")
    assert words[3:6] == [f"turn 0 is worth {value}" for value in ("0.500", "0.500", "0.000")]
    assert words[6].startswith("call 1 (goes on from turn 0): ")
    tokens, new = account.events[6][7:9]
    assert 0 < new < tokens
    assert words[-1].startswith("episode ended (stop) with 2 turns, reward 1.000; ")


def test_calls_that_are_refused_are_told(tmp_path):
    async def agent(world, key):
        with pytest.raises(ChatRefused):
            await world.chat(key, [{"role": "user"}])
        await world.chat(key, [user("hi")])
        with pytest.raises(EpisodeOver):
            await world.chat(key, [user("more")])
        return EpisodeDone(reward=1.0)

    _, words = told(tmp_path, agent, episode={"max_turns": 1})
    assert words[1].startswith("call 0 was refused: messages[0]")
    assert words[4] == "call 2 was refused: it has had its 1 turns (episode.max_turns)"


def test_a_call_that_is_resumed_has_its_number(tmp_path):
    async def agent(world, key):
        world.pause_after = 1
        call = asyncio.create_task(world.chat(key, [user("hi")]))
        while world.speaks.is_set():
            await asyncio.sleep(0.001)
        await world.update()
        world.speaks.set()
        await call
        return EpisodeDone(reward=1.0)

    _, words = told(tmp_path, agent)
    assert words[2:4] == ["call 0: aborted with 1 tokens", "call 0: resumed at version 1"]
    assert "1 at version 0" in words[4] and "at version 1" in words[4]


def test_long_episodes_keep_their_beginning_and_their_end(tmp_path):
    async def agent(world, key):
        messages = [user("hi")]
        for _ in range(40):
            messages += [said(await world.chat(key, messages)), user("more")]
        return EpisodeDone(reward=1.0)

    account, words = told(tmp_path, agent, episode={"max_turns": 40, "max_context_tokens": 4000})
    assert len(account.events) == EVENTS_KEPT
    assert account.left_out == 1 + 2 * 40 + 1 - EVENTS_KEPT
    assert words[0] == "episode began at episodes/0" and words[-1].startswith("episode ended")


def test_every_cause_of_a_fork_has_words():
    assert {f"fork:{cause}" for cause in FORKS} == {cause for cause in get_args(Cause) if cause.startswith("fork:")}
