"""Sessions: calls of agents, over a real chat template and engine manager."""

import asyncio
import time

import pytest
from chat_models import FAMILIES, write_chat_model
from harness import replace
from rollouter.serving.managed_engine import Turns
from session_cases import TOOL, World, call_of, echoed, result, user

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.text.stops import Stops


async def test_i3_turns_extend_sampled_tokens_exactly(tmp_path):
    """The tokens of a conversation are the engine's inputs and samples, each under its version."""
    async with World(tmp_path, say=lambda prompt: "One." if "go on" not in prompt else "And two.") as world:
        session = world.open()
        first = await world.chat(session.key, [user("hi")])
        await world.update()
        second = await world.chat(session.key, [user("hi"), echoed(first), user("go on")])
        (sequence,) = session.conversation.sequences()
        whole = [*sequence.prompt_ids.tolist(), *sequence.tokens.tolist()]
        prompt, held, _ = world.submitted[1]
        assert (held, whole[: len(prompt)]) == (0, prompt)
        answers = [world.tokenizer.encode(reply.content) for reply in (first, second)]
        assert len(sequence.logprobs) == sum(len(ids) + 1 for ids in answers)
        assert [(s.version, s.role) for s in sequence.spans] == [(0, "sampled"), (-1, "context"), (1, "sampled")]
        assert set(sequence.logprobs[len(answers[0]) + 1 :]) == {-1.0}
        assert sequence.routes.ravel().tolist() == whole[:-1]
        assert second.prompt_tokens == len(prompt)
        held = [(call.prompt, call.response) for call in session.calls.values()]
        assert held == [(None, None)] * 2, "answered calls hold no history"
        messages = [user("hi"), echoed(first), user("go on"), echoed(second)]
        rendered = world.tokenizer.render_chat(messages, (), {}, generate=False)
        assert world.tokenizer.decode(whole, keep_special=True) == rendered.rstrip("\n")


async def test_tool_calls_are_recognised_by_their_ids_even_if_the_agent_changed_them(tmp_path):
    async with World(
        tmp_path, say=lambda prompt: "A key." if "a key" in prompt else call_of("look", at="door")
    ) as world:
        session = world.open()
        ask = await world.chat(session.key, [user("find")], tools=[TOOL])
        assert [(c.name, c.id) for c in ask.tool_calls] == [("look", "call_0_0")]
        assert (ask.finish_reason, session.stages.state) == ("tool_calls", "tool look")
        back = echoed(ask)
        back["content"] = None
        back["tool_calls"][0]["function"]["arguments"] = '{ "at" :"door"}'
        await world.chat(session.key, [user("find"), back, result(ask, "a key")], tools=[TOOL])
        assert session.conversation.counts().forks == {}
        assert len(session.conversation.sequences()) == 1


async def test_shared_tokens_count_as_computed_again_only_in_the_first_turn_after_a_sleep(tmp_path):
    async with World(tmp_path, slices=Turns()) as world:
        session, messages, counted, lengths = world.open(), [], [], []
        for turn in range(5):
            if turn in (0, 2):
                await world.manager.sleep()
                await world.update()
            messages.append(user("go on"))
            reply = await world.chat(session.key, messages)
            messages.append(echoed(reply))
            counted.append(world.manager.reprefill.tokens)
            lengths.append(reply.prompt_tokens + reply.completion_tokens)
    # Of the second turn's tokens, only the third turn finds that they are lost.
    assert counted == [0, 0, lengths[1], lengths[1], lengths[1]]


async def test_a_repeat_joins_its_call_and_gets_its_answer(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")], call="same")) for _ in range(3)]
        await world.until(lambda: world.submitted)
        world.speaks.set()
        replies = [await task for task in asked]
        assert replies[0] is replies[1] is replies[2] is await world.chat(session.key, [user("hi")], call="same")
        assert (len(world.submitted), session.stages.turns) == (1, 1)
        # The same words under another name are another sample.
        await world.chat(session.key, [user("hi")], call="other")
        assert len(world.submitted) == 2


async def test_a_cancelled_call_continues_from_its_tokens(tmp_path):
    async with World(tmp_path, say=lambda prompt: "A long answer of many words.") as world:
        session = world.open()
        world.pause_after = 3
        asked = asyncio.create_task(world.chat(session.key, [user("hi")], call="cut"))
        await world.until(lambda: world.spoken == 3 and not world.speaks.is_set())
        asked.cancel()
        await asyncio.wait({asked})
        world.speaks.set()
        await world.update()
        reply = await world.chat(session.key, [user("hi")], call="cut")
        assert reply.content == "A long answer of many words."
        assert [held for _, held, _ in world.submitted] == [0, 3]
        (sequence,) = session.conversation.sequences()
        assert [(s.version, s.start) for s in sequence.spans] == [(0, 0), (1, 3)]


async def test_the_noise_of_a_call_depends_on_its_messages_and_the_order_of_equal_calls(tmp_path):
    async def keys(world, order):
        session = world.open()
        for text in order:
            await world.chat(session.key, [user(text)])
        return {text: call.key.split("/", 3)[3] for text, call in zip(order, session.calls.values(), strict=True)}

    async with World(tmp_path) as world:
        first = await keys(world, ["a", "b"])
        world.events.attempts = 0
        assert await keys(world, ["b", "a"]) == first
        assert first["a"] != first["b"]
        session = world.open()
        render, pauses = world.renderer.render, iter([0.1, 0.0])

        def slower_at_first(*asked):
            time.sleep(next(pauses))
            return render(*asked)

        world.renderer.render = slower_at_first
        await asyncio.gather(*(world.chat(session.key, [user("hi")], call=name) for name in ("first", "second")))
        assert [session.calls[name].key.rpartition("/")[2] for name in ("first", "second")] == ["1", "2"]


async def test_a_full_context_ends_the_episode_and_cuts_the_answer(tmp_path):
    async with World(tmp_path, say=lambda prompt: "words " * 100, episode={"max_context_tokens": 40}) as world:
        session = world.open()
        room = 40 - len(world.renderer.render([user("hi")], [], {}))
        asked_for_less = await world.chat(session.key, [user("hi")], max_tokens=2)
        assert (asked_for_less.finish_reason, asked_for_less.completion_tokens) == ("length", 2)
        assert not session.cut, "the agent asked for less, and that cuts no trajectory"
        reply = await world.chat(session.key, [user("hi")])
        assert world.submitted[1][2] == room
        assert (reply.finish_reason, reply.completion_tokens) == ("length", room)
        assert session.cut
        with pytest.raises(EpisodeOver, match=r"episode.max_context_tokens"):
            await world.chat(session.key, [user("hi"), echoed(reply), user("more")])
        assert session.stages.outcome == "length"
        # Messages that are too long by far are not even rendered.
        for characters, reported in (
            (40 * 256, "its context has"),
            (40 * 256 + 1, "its messages have 10241 characters"),
        ):
            with pytest.raises(EpisodeOver, match=rf"{reported}.*episode.max_context_tokens"):
                await world.chat(world.open().key, [user("x" * characters)])


@pytest.mark.parametrize("own", [False, True])
async def test_a_stop_string_ends_an_answer_and_is_not_part_of_its_text(tmp_path, own):
    """Text is not streamed if the run has stop strings of its own."""
    stops = {"stops": Stops(strings=("Observation:",))} if own else {}
    async with World(tmp_path, say=lambda prompt: "Act. Observation: made up.", **stops) as world:
        session = world.open()
        asked = {"stream": True} if own else {"stop": ["Observation:"]}
        reply = await world.chat(session.key, [user("hi")], **asked)
        assert (reply.content, reply.finish_reason, world.deltas) == ("Act. ", "stop", [])
        assert reply.stop_sequence == ("" if own else "Observation:"), "the run's stop strings are not the agent's"
        (sequence,) = session.conversation.sequences()
        assert "Observation:" in world.tokenizer.decode(sequence.tokens.tolist())


async def test_only_its_host_reaches_a_session_and_only_while_it_is_open(tmp_path):
    async with World(tmp_path) as world:
        session = world.open()
        for key, host in ((session.key, "episodes/1"), ("0" * 32, "episodes/0")):
            with pytest.raises(EpisodeOver):
                await world.chat(key, [user("hi")], host=host)
        with pytest.raises(ChatRefused, match=r"messages\[0\]\.role"):
            await world.chat(session.key, [{"role": "wizard", "content": "hi"}])
        assert (session.stages.turns, world.submitted) == (0, [])
        world.speaks.clear()
        asked = asyncio.create_task(world.chat(session.key, [user("hi")]))
        await world.until(lambda: world.submitted)
        world.sessions.seal(session, "it has ended")
        world.speaks.set()
        for late in (asked, world.chat(session.key, [user("hi")])):
            with pytest.raises(EpisodeOver):
                await late
        assert (session.conversation.nodes, len(world.sessions), len(world.submitted)) == ([], 0, 1)


async def test_a_call_beyond_the_remaining_turns_waits_for_those_in_flight(tmp_path):
    """As in a request for n answers: a sibling that is given up leaves its turn, an answered one ends the episode."""
    async with World(tmp_path, episode={"max_turns": 2}) as world:
        session = world.open()
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")])) for _ in range(4)]
        await world.until(lambda: len(world.submitted) == 2)
        asked[0].cancel()
        await world.until(lambda: len(world.submitted) == 3)
        world.speaks.set()
        assert [(await task).content for task in asked[1:3]] == ["Hello."] * 2
        with pytest.raises(EpisodeOver, match="it has had its 2 turns"):
            await asked[3]
        assert (session.stages.turns, session.stages.outcome, len(session.conversation.nodes)) == (2, "turns", 2)


@pytest.mark.parametrize("ends", ["sealed", "failed"])
async def test_a_call_that_waits_for_a_turn_learns_of_the_end(tmp_path, ends):
    async with World(tmp_path, episode={"max_turns": 1}) as world:
        session = world.open()
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")])) for _ in range(2)]
        await world.until(lambda: world.submitted)
        if ends == "sealed":
            world.sessions.seal(session, "it has ended")
        else:
            session.fail(TrajectoryFailed("no engine"))
        with pytest.raises(EpisodeOver):
            await asked[1]
        asked[0].cancel()
        await asyncio.wait(asked)


async def test_text_is_sent_as_it_is_sampled(tmp_path):
    async with World(tmp_path, say=lambda prompt: "Grüße, 世界!") as world:
        reply = await world.chat(world.open().key, [user("hi")], stream=True)
        assert reply.content == "Grüße, 世界!"
        reported = ""
        for offset, text in world.deltas:
            assert offset == len(reported)
            reported += text
        assert reply.content.startswith(reported) and len(world.deltas) > 1


async def test_a_special_token_that_marks_calls_is_streamed_as_in_the_answer(tmp_path):
    template, eos = FAMILIES["tools first"]
    markers = ("<tool_call>", "</tool_call>")
    model = write_chat_model(tmp_path / "special", template, eos=eos, more_special=markers)
    async with World(tmp_path, say=lambda prompt: f"Look: {call_of('look', at='door')} so.", model=model) as world:
        reply = await world.chat(world.open().key, [user("hi")], stream=True)
        assert all(marker in reply.content for marker in markers), "no tools were given"
        assert reply.content.startswith("".join(text for _, text in world.deltas)) and len(world.deltas) > 1


async def test_slots_are_taken_by_calls_and_not_by_episodes(tmp_path):
    async with World(tmp_path, rollout={"concurrency": 2}) as world:
        sessions = [world.open() for _ in range(6)]
        world.speaks.clear()
        asked = [asyncio.create_task(world.chat(session.key, [user("hi")])) for session in sessions]
        await world.until(lambda: len(world.submitted) == 2)
        assert sorted(session.stages.state for session in sessions) == ["engine"] * 2 + ["queue"] * 4
        world.speaks.set()
        assert {reply.content for reply in [await task for task in asked]} == {"Hello."}
        assert world.sessions.gauges()["rollout/episodes_at/user"] == 6


async def test_an_evaluation_has_limits_of_its_own(tmp_path):
    held = {"data": {"source": "synthetic", "max_prompt_tokens": 500}, "max_tokens": 300}
    async with World(tmp_path, eval={"held": held}, data={"max_prompt_tokens": 32}) as world:
        world.lease = replace(world.lease, purpose="eval/held", max_tokens=300)
        await world.chat(world.open().key, [user("hi")])
        assert world.submitted[0][2] == 300
