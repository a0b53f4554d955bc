"""Sessions: calls of agents, over a real chat template and engine host."""

import asyncio
import time

import pytest
from harness import replace
from session_cases import TOOL, World, call_of, result, said, user

from asyncrl.errors import ChatRefused, EpisodeOver
from asyncrl.stops import Stops

WAIT_S = 20.0


async def until(state):
    while not state():
        await asyncio.sleep(0.005)


def whole(sequence):
    return [*sequence.prompt_ids.tolist(), *sequence.tokens.tolist()]


async def test_turns_extend_what_was_sampled_token_by_token(tmp_path):
    """I3: the tokens of a conversation are those that the engine was given and sampled, each under its version."""
    async with World(tmp_path, say=lambda prompt: "One." if "go on" not in prompt else "And two.") as world:
        session = world.open()
        first = await world.chat(session.key, [user("hi")])
        await world.update()
        second = await world.chat(session.key, [user("hi"), said(first), user("go on")])
        (sequence,) = session.conversation.sequences()
        prompt, held, _ = world.submitted[1]
        assert held == 0
        assert whole(sequence)[: len(prompt)] == prompt
        answers = [world.tokenizer.encode(reply.content) for reply in (first, second)]
        assert len(sequence.logprobs) == sum(len(ids) + 1 for ids in answers)
        assert [(s.version, s.role) for s in sequence.spans] == [(0, "sampled"), (-1, "context"), (1, "sampled")]
        assert set(sequence.logprobs[len(answers[0]) + 1 :]) == {-1.0}
        assert second.prompt_tokens == len(prompt)
        held = [(call.prompt, call.response) for call in session.calls.values()]
        assert held == [(None, None)] * 2, "answered calls hold no history"
        text = world.tokenizer.decode(whole(sequence), keep_special=True)
        assert text == world.tokenizer.render_chat(
            [user("hi"), said(first), user("go on"), said(second)], (), {}, generate=False
        ).rstrip("\n")


async def test_calls_of_tools_are_recognised_by_their_ids_whatever_the_agent_made_of_them(tmp_path):
    async with World(
        tmp_path, say=lambda prompt: "A key." if "a key" in prompt else call_of("look", at="door")
    ) as world:
        session = world.open()
        ask = await world.chat(session.key, [user("find")], tools=[TOOL])
        assert [(c.name, c.id) for c in ask.tool_calls] == [("look", "call_0_0")]
        assert ask.finish_reason == "tool_calls"
        assert session.stages.state == "tool look"
        back = said(ask)
        back["content"] = None
        back["tool_calls"][0]["function"]["arguments"] = '{ "at" :"door"}'
        await world.chat(session.key, [user("find"), back, result(ask, "a key")], tools=[TOOL])
        assert session.conversation.counts().forks == {}
        assert len(session.conversation.sequences()) == 1


async def test_a_repeat_joins_its_call_and_is_given_its_answer(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")], call="same")) for _ in range(3)]
        await until(lambda: world.submitted)
        world.speaks.set()
        replies = [await task for task in asked]
        assert replies[0] is replies[1] is replies[2] is await world.chat(session.key, [user("hi")], call="same")
        assert len(world.submitted) == 1
        assert session.stages.turns == 1
        # The same words under another name are another sample.
        await world.chat(session.key, [user("hi")], call="other")
        assert len(world.submitted) == 2


async def test_a_call_that_was_cancelled_goes_on_from_its_tokens(tmp_path):
    async with World(tmp_path, say=lambda prompt: "A long answer of many words.") as world:
        session = world.open()
        world.pause_after = 3
        asked = asyncio.create_task(world.chat(session.key, [user("hi")], call="cut"))
        await until(lambda: world.spoken == 3 and not world.speaks.is_set())
        asked.cancel()
        await asyncio.wait({asked})
        world.speaks.set()
        await world.update()
        reply = await world.chat(session.key, [user("hi")], call="cut")
        assert reply.content == "A long answer of many words."
        assert [held for _, held, _ in world.submitted] == [0, 3]
        (sequence,) = session.conversation.sequences()
        assert next((s.version, s.start, s.end) for s in sequence.spans) == (0, 0, 3)
        assert sequence.spans[1].version == 1


async def test_parallel_calls_have_noise_that_their_order_does_not_change(tmp_path):
    async def keys(world, order):
        session = world.open()
        for text in order:
            await world.chat(session.key, [user(text)])
        return {text: call.key.split("/", 3)[3] for text, call in zip(order, session.calls.values(), strict=True)}

    async with World(tmp_path) as world:
        first = await keys(world, ["a", "b"])
        world.account.attempts = 0
        assert await keys(world, ["b", "a"]) == first
        assert first["a"] != first["b"]


async def test_calls_that_ask_the_same_are_told_apart_by_their_arrival(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        render, pauses = world.renderer.render, iter([0.1, 0.0])

        def slower_at_first(*asked):
            time.sleep(next(pauses))
            return render(*asked)

        world.renderer.render = slower_at_first
        await asyncio.gather(*(world.chat(session.key, [user("hi")], call=name) for name in ("first", "second")))
        assert [session.calls[name].key.rpartition("/")[2] for name in ("first", "second")] == ["1", "2"]


async def test_a_full_context_ends_it_and_answers_are_cut_where_it_is_full(tmp_path):
    async with World(tmp_path, say=lambda prompt: "words " * 100, episode={"max_context_tokens": 40}) as world:
        session = world.open()
        prompt = len(world.renderer.render([user("hi")], [], {}))
        reply = await world.chat(session.key, [user("hi")])
        assert world.submitted[0][2] == 40 - prompt
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 40 - prompt)
        assert session.cut
        with pytest.raises(EpisodeOver, match=r"episode.max_context_tokens"):
            await world.chat(session.key, [user("hi"), said(reply), user("more")])
        assert session.stages.outcome == "length"


@pytest.mark.parametrize("own", [False, True])
async def test_a_stop_string_ends_an_answer_and_is_not_told(tmp_path, own):
    """Nothing is streamed where the run has stops of its own."""
    stops = {"stops": Stops(strings=("Observation:",))} if own else {}
    async with World(tmp_path, say=lambda prompt: "Act. Observation: made up.", **stops) as world:
        session = world.open()
        asked = {"stream": True} if own else {"stop": ["Observation:"]}
        reply = await world.chat(session.key, [user("hi")], **asked)
        assert (reply.content, reply.finish_reason, world.deltas) == ("Act. ", "stop", [])
        (sequence,) = session.conversation.sequences()
        assert "Observation:" in world.tokenizer.decode(sequence.tokens.tolist())


async def test_nobody_reaches_a_session_but_its_host_and_only_while_it_is_open(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        with pytest.raises(EpisodeOver):
            await world.chat(session.key, [user("hi")], host="episodes/1")
        with pytest.raises(EpisodeOver):
            await world.chat("0" * 32, [user("hi")])
        world.sessions.seal(session, "it has ended")
        with pytest.raises(EpisodeOver):
            await world.chat(session.key, [user("hi")])
        assert len(world.sessions) == 0
        assert not world.submitted


async def test_an_episode_that_ends_under_a_call_adds_nothing(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        world.speaks.clear()
        asked = asyncio.create_task(world.chat(session.key, [user("hi")]))
        await until(lambda: world.submitted)
        world.sessions.seal(session, "it has ended")
        world.speaks.set()
        with pytest.raises(EpisodeOver):
            await asked
        assert session.conversation.nodes == []


async def test_calls_that_cannot_be_asked_are_refused_and_hold_no_place(tmp_path):
    async with World(tmp_path, rollout={"concurrency": 2}) as world:
        session = world.open()
        with pytest.raises(ChatRefused, match=r"messages\[0\]\.role"):
            await world.chat(session.key, [{"role": "wizard", "content": "hi"}])
        assert session.stages.turns == 0
        reply = await world.chat(session.key, [user("hi")], max_tokens=2)
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 2)
        assert not session.cut, "the agent asked for less, and that cuts no trajectory"


async def test_text_is_told_as_it_is_sampled(tmp_path):
    async with World(tmp_path, say=lambda prompt: "Grüße, 世界!") as world:
        session = world.open()
        reply = await world.chat(session.key, [user("hi")], stream=True)
        assert reply.content == "Grüße, 世界!"
        told = ""
        for offset, text in world.deltas:
            assert offset == len(told)
            told += text
        assert reply.content.startswith(told)
        assert len(world.deltas) > 1


async def test_slots_are_taken_by_calls_and_not_by_episodes(tmp_path):
    async with World(tmp_path, rollout={"concurrency": 2}) as world:
        sessions = [world.open() for _ in range(6)]
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")])) for session in sessions]
        await until(lambda: len(world.submitted) == 2)
        assert sorted(session.stages.state for session in sessions) == ["engine"] * 2 + ["queue"] * 4
        world.speaks.set()
        assert {reply.content for reply in [await task for task in asked]} == {"Hello."}
        assert world.sessions.gauges()["rollout/episodes_at/user"] == 6


async def test_an_evaluation_has_limits_of_its_own(tmp_path):

    held = {"data": {"source": "synthetic", "max_prompt_tokens": 500}, "max_tokens": 300}
    async with World(tmp_path, eval={"held": held}, data={"max_prompt_tokens": 32}) as world:
        world.ticket = replace(world.ticket, purpose="eval/held", max_tokens=300)
        session = world.open()
        await world.chat(session.key, [user("hi")])
        assert world.submitted[0][2] == 300
