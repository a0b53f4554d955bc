"""The history of an episode, from its rollouter to the output of --explain."""

import asyncio
from datetime import UTC, datetime

import pytest
from session_cases import TOOL, call_of, echoed, played, result, user

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.observe.explain.lines import LogLine
from asyncrl.observe.explain.words import words_of
from asyncrl.rollouter.serving.group_events import EVENTS_KEPT


def events_and_texts(folder, agent, **options):
    """Each event of an episode, and its text."""
    events = played(folder, agent, **options)[1].events
    facts = {"since": 0.0, "samples": [events.entries], "end": "delivered", "left_out": events.left_out}
    line = LogLine(actor="rollouter/0", event="generated", timestamp=datetime.fromtimestamp(0.0, UTC), **facts)
    return events, [happening.text for happening in words_of(line, "0-1") if happening.sample == 0]


def test_each_turn_is_logged_from_its_context_to_its_reward(tmp_path):
    async def agent(world, key):
        reply = await world.chat(key, [user("hi")], tools=[TOOL])
        # A turn without reward is no event, unless it had one before.
        for value in (0.0, 0.5, 0.5, 0.0):
            world.sessions.credit(key, "episodes/0", None, value)
        with pytest.raises(ChatRefused):
            await world.chat(key, [{"role": "user"}])
        world.pause_after = world.spoken + 1
        call = asyncio.create_task(world.chat(key, [user("hi"), echoed(reply), result(reply, "nothing")], tools=[TOOL]))
        await world.until(lambda: not world.speaks.is_set())
        await world.update()
        world.speaks.set()
        await call
        with pytest.raises(EpisodeOver):
            await world.chat(key, [user("more")])
        return EpisodeDone(reward=1.0)

    answers = {False: call_of("look"), True: "There is nothing."}
    events, words = events_and_texts(
        tmp_path, agent, say=lambda prompt: answers["nothing" in prompt], episode={"max_turns": 2}
    )
    first, asked, answered, *worth, refused, goes_on, aborted, resumed, last, over, ended = words
    assert first == "episode began at episodes/0"
    assert asked.startswith("call 0 (the first): ") and " generation began at version 0 after " in asked
    assert answered.startswith("call 0 gave turn 0: ") and answered.endswith("; it calls look")
    assert worth == [f"turn 0 is worth {value}" for value in ("0.500", "0.500", "0.000")]
    assert refused.startswith("call 1 was refused: messages[0]")
    assert goes_on.startswith("call 2 (continues turn 0): ")
    tokens, new = next(event[7:9] for event in events.entries if event[1:3] == ["asked", 2])
    assert 0 < new < tokens
    assert (aborted, resumed) == ("call 2: aborted with 1 tokens", "call 2: resumed at version 1")
    assert "1 at version 0" in last and "at version 1" in last
    assert over == "call 3 was refused: it has had its 2 turns (episode.max_turns)"
    assert ended.startswith("episode ended (turns) with 2 turns, reward 1.000; ")


def test_long_episodes_keep_their_start_and_their_end(tmp_path):
    async def agent(world, key):
        messages = [user("hi")]
        for _ in range(40):
            messages += [echoed(await world.chat(key, messages)), user("more")]
        return EpisodeDone(reward=1.0)

    events, words = events_and_texts(tmp_path, agent, episode={"max_turns": 40, "max_context_tokens": 4000})
    assert len(events.entries) == EVENTS_KEPT
    assert events.left_out == 1 + 2 * 40 + 1 - EVENTS_KEPT
    assert words[0] == "episode began at episodes/0" and words[-1].startswith("episode ended")
