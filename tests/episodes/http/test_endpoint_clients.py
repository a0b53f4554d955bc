"""The endpoint as the clients of OpenAI and Anthropic meet it."""

import asyncio
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest
from scripted_core import KEY, WEATHER, ScriptedCore, played, reply, serving, until

from asyncrl.errors import ChatRefused
from asyncrl.messages.episodes import ChatDelta

RUN = played
HI = [{"role": "user", "content": "Hi"}]
PIECES = ["Hel", "lo, ", "wörld", "."]


@asynccontextmanager
async def openai_client(core, *, read_s=30.0, retries=2, key=KEY, **options):
    async with serving(core, **options) as served:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=key, timeout=httpx.Timeout(30.0, read=read_s), max_retries=retries
        )
        async with client:
            yield served, client


@asynccontextmanager
async def anthropic_client(core, **options):
    async with serving(core, **options) as served, anthropic.AsyncAnthropic(base_url=served.url, api_key=KEY) as client:
        yield served, client


async def long_pause(core, call, on_delta):
    """Longer than any client here waits for a byte."""
    await asyncio.sleep(1.5)
    return reply("At last.")


async def told_in_pieces(core, call, on_delta):
    """Pieces, one of which is lost, and the last of which is only in the reply."""
    assert call.stream
    offset = 0
    for at, piece in enumerate(PIECES[:-1]):
        if at != 1:
            on_delta(ChatDelta(session=call.session, call=call.call, offset=offset, text=piece))
        offset += len(piece)
        await asyncio.sleep(0.05)
    return reply("".join(PIECES))


async def calls_a_tool(core, call, on_delta):
    assert not call.stream
    return reply("Let me see.", reasoning="Which city?", calls=[("weather", '{"city":"Bern"}'), ("weather", "{}")])


async def test_a_chat_completion_is_answered():
    core = ScriptedCore()
    async with openai_client(core) as (served, client):
        done = await client.chat.completions.create(model="gpt-99", messages=HI, max_tokens=5, stop="\n")
    assert (done.id, done.model) == ("chatcmpl-1", "policy")
    assert done.choices[0].message.content == "Hello." and done.choices[0].finish_reason == "stop"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (11, 3, 14)
    (asked,) = core.asked
    assert (asked.messages, asked.max_tokens, asked.stop, asked.stream) == (HI, 5, ["\n"], False)
    assert served.notices == {}


async def test_text_is_streamed_as_it_comes_and_what_is_lost_comes_with_the_reply():
    heard = asyncio.Event()

    async def waits_to_be_heard(core, call, on_delta):
        on_delta(ChatDelta(session=call.session, call=call.call, offset=0, text="Hel"))
        await heard.wait()
        on_delta(ChatDelta(session=call.session, call=call.call, offset=9, text="lost before it"))
        return reply("Hello, world.")

    core = ScriptedCore(waits_to_be_heard)
    async with openai_client(core) as (_, client):
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content == "Hel":
                heard.set()
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "Hel", "lo, world.", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 14 and chunks[-1].choices == []


async def test_calls_of_tools_are_streamed_whole():
    async with openai_client(ScriptedCore(calls_a_tool)) as (_, client):
        async with client.chat.completions.stream(model="m", messages=HI, tools=[WEATHER]) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        whole = await client.chat.completions.create(model="m", messages=HI, tools=[WEATHER])
    assert message.content == "Let me see." and message.reasoning_content == "Which city?"
    named = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert named == [("call_7_0", "weather", '{"city":"Bern"}'), ("call_7_1", "weather", "{}")]
    assert [call.model_dump() for call in whole.choices[0].message.tool_calls] == [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in named
    ]
    assert whole.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_waits_half_a_second_outlives_a_long_pause(stream):
    core = ScriptedCore(long_pause)
    async with openai_client(core, read_s=0.5, retries=0) as (_, client):
        got = await client.chat.completions.create(model="m", messages=HI, stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in got])
        else:
            text = got.choices[0].message.content
    assert text == "At last."
    assert len(core.asked) == 1


async def test_what_agents_choose_is_ignored_or_relaxed_aloud():
    async with openai_client(ScriptedCore()) as (served, client):
        raw = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=HI,
            tools=[WEATHER],
            tool_choice="required",
            response_format={"type": "json_object"},
            temperature=0.1,
            top_p=1,
            seed=3,
        )
    assert raw.headers["x-asyncrl-relaxed"] == "response_format, tool_choice"
    assert raw.headers["x-asyncrl-ignored"] == "seed, temperature"
    assert served.counts["relaxed/tool_choice"] == 1 and served.counts["ignored/temperature"] == 1
    assert list(served.notices) == [
        "agents: ignored/seed",
        "agents: ignored/temperature",
        "agents: relaxed/response_format",
        "agents: relaxed/tool_choice",
    ]


async def test_what_cannot_be_had_is_refused_by_its_name():
    core = ScriptedCore()
    async with openai_client(core) as (served, client):
        for at in (1, 2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=HI, logit_bias={"5": 1})
            assert refused.value.param == "logit_bias" and refused.value.code == "chat_refused"
            text, count = served.notices["agents: refused/logit_bias"]
            assert "logit_bias" in text and count == served.counts["refused/logit_bias"] == at
    assert core.asked == []


async def test_an_answer_is_left_untrained_where_its_request_says_so():
    core = ScriptedCore()
    async with openai_client(core) as (_, client):
        for headers in ({}, {"x-asyncrl-untrained": "true"}, {"x-asyncrl-untrained": "0"}):
            await client.chat.completions.create(model="m", messages=HI, extra_headers=headers)
    assert [call.untrained for call in core.asked] == [False, True, False]


async def test_several_choices_are_several_calls():
    async def numbered(core, call, on_delta):
        return reply(f"Answer {call.call}", node=len(core.asked))

    core = ScriptedCore(numbered)
    async with openai_client(core) as (_, client):
        done = await client.chat.completions.create(model="m", messages=HI, n=3)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert [choice.message.content for choice in done.choices] == [f"Answer http-0.{at}" for at in range(3)]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (11, 9)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_that_is_over_is_not_tried_again(late, stream):
    async def ends(core, call, on_delta):
        await asyncio.sleep(0.5 if late else 0.0)
        core.over = "its 32 turns are used up"
        return await core.chat(call.session, call, on_delta)

    core = ScriptedCore(ends)
    async with openai_client(core) as (served, client):

        async def ask():
            got = await client.chat.completions.create(model="m", messages=HI, stream=stream)
            assert stream and late
            return [chunk async for chunk in got]

        with pytest.raises(openai.APIError) as over:
            await ask()
    assert over.value.code == "episode_over" and "32 turns" in over.value.message
    # A body of JSON that had begun could only break off: the client asks again, and is told with a status.
    assert served.counts["/v1/chat/completions"] == (2 if late and not stream else 1)
    assert served.counts["replayed"] == (1 if late and not stream else 0)
    assert (type(over.value) is openai.BadRequestError) == (not (late and stream))


async def test_a_refusal_of_the_rollouter_is_a_bad_request():
    async def refuses(core, call, on_delta):
        raise ChatRefused("messages[3].tool_calls", "names no tool")

    async with openai_client(ScriptedCore(refuses)) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HI)
    assert refused.value.param == "messages[3].tool_calls"


async def test_an_unknown_key_is_refused():
    wrong = "a" * 32
    async with openai_client(ScriptedCore(), key=wrong) as (served, client):
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=HI)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=wrong) as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(model="m", max_tokens=5, messages=HI)
    assert served.counts["unauthorized"] == 2


async def test_turns_are_rewarded_by_the_id_of_their_answer():
    core = ScriptedCore()
    async with openai_client(core) as (_, client):

        async def give(**body):
            return await client.post("/asyncrl/reward", body=body, cast_to=object)

        done = await client.chat.completions.create(model="m", messages=HI)
        assert (await give(value=1.5, completion=done.id))["node"] == 1
        core.script = told_in_pieces
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        ids = {chunk.id async for chunk in stream}
        await give(value=0.5, completion=ids.pop())
        await give(value=0.25)
        for wrong in (
            {"value": "1"},
            {"value": True},
            {"value": 10**400},
            {"valeu": 1},
            {"value": 1, "completion": "call99"},
            {"value": 1, "completion": "chatcmpl-100"},
        ):
            with pytest.raises(openai.BadRequestError):
                await give(**wrong)
    assert core.rewards == [(KEY, 1, 1.5), (KEY, 7, 0.5), (KEY, None, 0.25)]


async def test_a_response_is_answered_whole_and_streamed():
    core = ScriptedCore(calls_a_tool)
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    async with openai_client(core) as (_, client):
        whole = await client.responses.create(model="m", input="Hi", instructions="Be brief.", tools=[tool])
        async with client.responses.stream(model="m", input="Hi", instructions="Be brief.", tools=[tool]) as told:
            kinds = [event.type async for event in told]
            streamed = await told.get_final_response()
        core.script = None
        cut = await client.responses.create(model="m", input=[*whole.output, *HI], max_output_tokens=3)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me see." and whole.output[2].call_id == "call_7_0"
    # What the client has parsed of it besides.
    parsed = {"parsed_arguments": True, "content": {"__all__": {"parsed"}}}
    assert [item.model_dump(exclude=parsed) for item in streamed.output] == [item.model_dump() for item in whole.output]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert core.asked[0].messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert core.asked[2].messages[0]["tool_calls"][0]["id"] == "call_7_0"
    assert (cut.status, cut.usage.input_tokens) == ("completed", 11)


async def test_a_message_of_anthropic_is_answered_whole_and_streamed():
    core = ScriptedCore(calls_a_tool)
    tool = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
    asked = {"model": "m", "max_tokens": 50, "system": "Be brief.", "messages": HI, "tools": [tool]}
    asked["stop_sequences"] = ["END"]
    async with anthropic_client(core) as (_, client):
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as told:
            streamed = await told.get_final_message()
        core.script = told_in_pieces
        async with client.messages.stream(model="m", max_tokens=50, messages=HI) as told:
            texts = [text async for text in told.text_stream]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].input == {"city": "Bern"} and whole.stop_reason == "tool_use"
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert streamed.usage.input_tokens == 11 and streamed.usage.output_tokens == 3
    assert len(texts) >= 2 and "".join(texts) == "".join(PIECES)
    assert core.asked[0].messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert (core.asked[0].max_tokens, core.asked[0].stop) == (50, ["END"])


@pytest.mark.parametrize("late", [False, True])
async def test_the_end_of_an_episode_is_told_to_a_stream_of_anthropic(late):
    async def ends(core, call, on_delta):
        await asyncio.sleep(0.5 if late else 0.0)
        core.over = "its time is up"
        return await core.chat(call.session, call, on_delta)

    async with anthropic_client(ScriptedCore(ends)) as (served, client):
        with pytest.raises(anthropic.APIStatusError, match="its time is up"):
            async with client.messages.stream(model="m", max_tokens=5, messages=HI) as told:
                await told.get_final_message()
        assert served.counts["/v1/messages"] == 1


async def test_a_call_that_fails_is_tried_again_by_the_same_name():
    async def fails_once(core, call, on_delta):
        if len(core.asked) == 1:
            raise ConnectionError("the rollouter went away")
        return reply()

    core = ScriptedCore(fails_once)
    async with openai_client(core) as (served, client):
        done = await client.chat.completions.create(model="m", messages=HI)
    assert done.choices[0].message.content == "Hello."
    assert [call.call for call in core.asked] == ["http-0", "http-0"]
    assert served.counts["failed"] == served.counts["resumed"] == 1


async def test_a_client_that_goes_away_is_waited_for_and_then_given_up():
    async def waits(core, call, on_delta):
        await asyncio.Event().wait()

    core = ScriptedCore(waits)
    async with openai_client(core, grace_s=0.1, kept_s=0.4, keep_alive_s=30.0) as (served, client):
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
        await until(lambda: core.asked, "asked")
        asking.cancel()
        await until(lambda: core.cancelled == ["http-0"], "given up")
        assert served.endpoint.calls.held == (1, 1)
        core.keys.clear()
        await until(lambda: served.endpoint.calls.held == (0, 0), "forgotten")
