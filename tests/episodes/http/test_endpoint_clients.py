"""The endpoint as the clients of OpenAI and Anthropic meet it.

The client of Anthropic is imported late, because its import takes as long as many tests.
"""

import asyncio
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from scripted_core import KEY, WEATHER, ScriptedCore, played, reply, serving

from asyncrl.core.errors import ChatRefused
from asyncrl.messages.episodes import ChatDelta

RUN = played
HI = [{"role": "user", "content": "Hi"}]
ASKED = {"model": "m", "messages": HI}
PIECES = ["Hel", "lo, ", "wörld", "."]


@asynccontextmanager
async def openai_client(script=None, *, read_s=30.0, retries=2, key=KEY, **options):
    core = ScriptedCore(script)
    async with serving(core, **options) as served:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key=key,
            timeout=httpx.Timeout(30.0, read=read_s),
            max_retries=retries,
            http_client=signalling_transport(core, openai),
        )
        async with client:
            yield core, served, client


def signalling_transport(core, sdk):
    """The transport of a client, which sets ``core.heard`` when an answer begins."""
    core.heard = asyncio.Event()

    async def hear(_response):
        core.heard.set()

    return sdk.DefaultAsyncHttpxClient(event_hooks={"response": [hear]})


@asynccontextmanager
async def anthropic_client(script, **options):
    import anthropic

    core = ScriptedCore(script)
    async with (
        serving(core, **options) as served,
        anthropic.AsyncAnthropic(
            base_url=served.url, api_key=KEY, http_client=signalling_transport(core, anthropic)
        ) as client,
    ):
        yield core, served, client


async def answer_in_pieces(core, call, on_delta):
    """Pieces: the first is heard before the others, one is lost, and the last is only in the reply."""
    core.heard.clear()
    offset = 0
    for at, piece in enumerate(PIECES[:-1]):
        if at != 1:
            on_delta(ChatDelta(session=call.session, call=call.call, offset=offset, text=piece))
        await core.heard.wait()
        offset += len(piece)
    return reply("".join(PIECES))


async def calls_a_tool(core, call, on_delta):
    assert not call.stream
    return reply("Let me see.", reasoning="Which city?", calls=[("weather", '{"city":"Bern"}'), ("weather", "{}")])


def ends(late):
    """The episode is over, at once or behind the first sign of life."""

    async def script(core, call, on_delta):
        if late:
            await core.heard.wait()
        core.over = "its 32 turns are used up"
        return await core.chat(call.session, call, on_delta)

    return script


async def test_a_chat_completion_is_answered():
    async with openai_client() as (core, served, client):
        create = client.chat.completions.create
        done = await create(**ASKED | {"model": "gpt-99"}, max_tokens=5, stop="\n")
        assert (done.id, done.model) == ("chatcmpl-1", "policy")
        assert done.choices[0].message.content == "Hello." and done.choices[0].finish_reason == "stop"
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (11, 3, 14)
        (asked,) = core.asked
        assert (asked.messages, asked.max_tokens, asked.stop, asked.stream) == (HI, 5, ["\n"], False)
        assert served.notices == {}
        several = await create(**ASKED, n=3)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        assert [call.call for call in core.asked[1:]] == [f"http-1.{at}" for at in range(3)]
        assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (11, 9)
        for header, untrained in (("true", True), ("0", False)):
            await create(**ASKED, extra_headers={"x-asyncrl-untrained": header})
            assert core.asked[-1].untrained is untrained


async def test_text_is_streamed_as_it_is_sampled_and_lost_text_comes_with_the_reply():
    heard = asyncio.Event()

    async def waits_to_be_heard(core, call, on_delta):
        on_delta(ChatDelta(session=call.session, call=call.call, offset=0, text="Hel"))
        await heard.wait()
        on_delta(ChatDelta(session=call.session, call=call.call, offset=9, text="lost before it"))
        return reply("Hello, world.")

    async with openai_client(waits_to_be_heard) as (_, _, client):
        stream = await client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content == "Hel":
                heard.set()
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "Hel", "lo, world.", None]
    assert chunks[-1].usage.total_tokens == 14 and chunks[-1].choices == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_waits_two_seconds_outlives_a_long_pause(stream):
    async def long_pause(core, call, on_delta):
        await asyncio.sleep(3.0)
        return reply("At last.")

    async with openai_client(long_pause, read_s=2.0, retries=0) as (core, _, client):
        got = await client.chat.completions.create(**ASKED, stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in got])
        else:
            text = got.choices[0].message.content
    assert (text, len(core.asked)) == ("At last.", 1)


async def test_ignored_and_relaxed_options_are_named_and_unsupported_ones_refused():
    """Nothing is dropped silently: each option of a request is used, named or refused."""
    async with openai_client() as (core, served, client):
        chosen = {"tool_choice": "required", "response_format": {"type": "json_object"}, "temperature": 0.1, "seed": 3}
        raw = await client.chat.completions.with_raw_response.create(**ASKED, tools=[WEATHER], top_p=1, **chosen)
        assert raw.headers["x-asyncrl-relaxed"] == "response_format, tool_choice"
        assert raw.headers["x-asyncrl-ignored"] == "seed, temperature"
        assert served.counts["relaxed/tool_choice"] == 1 and served.counts["ignored/temperature"] == 1
        assert list(served.notices) == [
            *("agents: ignored/seed", "agents: ignored/temperature"),
            *("agents: relaxed/response_format", "agents: relaxed/tool_choice"),
        ]
        for at in (1, 2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ASKED, logit_bias={"5": 1})
            assert refused.value.param == "logit_bias" and refused.value.code == "chat_refused"
            text, count = served.notices["agents: refused/logit_bias"]
            assert "logit_bias" in text and count == served.counts["refused/logit_bias"] == at
        assert len(core.asked) == 1

        async def refuses(core, call, on_delta):
            raise ChatRefused("messages[3].tool_calls", "names no tool")

        core.script = refuses
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ASKED)
        assert refused.value.param == "messages[3].tool_calls", "the rollouter's refusal is passed on too"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_that_is_over_is_not_tried_again(late, stream):
    async with openai_client(ends(late)) as (_, served, client):

        async def ask():
            got = await client.chat.completions.create(**ASKED, stream=stream)
            return [chunk async for chunk in got]

        with pytest.raises(openai.APIError) as over:
            await ask()
    assert over.value.code == "episode_over" and "32 turns" in over.value.message
    # A JSON body that had begun could only break off: the client retries and receives a status.
    again = late and not stream
    assert (served.counts["/v1/chat/completions"], served.counts["replayed"]) == ((2, 1) if again else (1, 0))
    assert (type(over.value) is openai.BadRequestError) == (not (late and stream))


@pytest.mark.parametrize("late", [False, True])
async def test_a_stream_of_anthropic_ends_with_the_episode(late):
    import anthropic

    async with anthropic_client(ends(late)) as (_, served, client):
        with pytest.raises(anthropic.APIStatusError, match="32 turns"):
            async with client.messages.stream(**ASKED, max_tokens=5) as reported:
                await reported.get_final_message()
        assert served.counts["/v1/messages"] == 1


async def test_an_unknown_key_is_refused():
    import anthropic

    async with openai_client(key="a" * 32) as (_, served, client):
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**ASKED)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="a" * 32) as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(**ASKED, max_tokens=5)
    assert served.counts["unauthorized"] == 2


async def test_turns_are_rewarded_by_the_id_of_their_answer():
    async with openai_client() as (core, _, client):

        async def give(**body):
            return await client.post("/asyncrl/reward", body=body, cast_to=object)

        done = await client.chat.completions.create(**ASKED)
        assert (await give(value=1.5, completion=done.id))["node"] == 1
        core.script = answer_in_pieces
        ids = {chunk.id async for chunk in await client.chat.completions.create(**ASKED, stream=True)}
        await give(value=0.5, completion=ids.pop())
        await give(value=0.25)
        for wrong in (
            *({"value": "1"}, {"value": True}, {"value": 10**400}, {"valeu": 1}),
            *({"value": 1, "completion": "call99"}, {"value": 1, "completion": "chatcmpl-100"}),
        ):
            with pytest.raises(openai.BadRequestError):
                await give(**wrong)
    assert core.rewards == [(KEY, 1, 1.5), (KEY, 7, 0.5), (KEY, None, 0.25)]


async def test_a_response_is_answered_whole_and_streamed():
    async with openai_client(calls_a_tool) as (core, _, client):
        tool = {"type": "function", **WEATHER["function"], "strict": False}
        asked = {"model": "m", "input": "Hi", "instructions": "Be brief.", "tools": [tool]}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as reported:
            kinds = [event.type async for event in reported]
            streamed = await reported.get_final_response()
        core.script = None
        cut = await client.responses.create(model="m", input=[*whole.output, *HI], max_output_tokens=3)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me see." and whole.output[2].call_id == "call_7_0"
    # The fields that the client parsed from it.
    parsed = {"parsed_arguments": True, "content": {"__all__": {"parsed"}}}
    assert [item.model_dump(exclude=parsed) for item in streamed.output] == [item.model_dump() for item in whole.output]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert core.asked[0].messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert core.asked[2].messages[0]["tool_calls"][0]["id"] == "call_7_0"
    assert (cut.status, cut.usage.input_tokens) == ("completed", 11)


async def test_a_message_of_anthropic_is_answered_whole_and_streamed():
    async with anthropic_client(calls_a_tool) as (core, _, client):
        tool = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
        asked = ASKED | {"max_tokens": 50, "system": "Be brief.", "tools": [tool], "stop_sequences": ["END"]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as reported:
            streamed = await reported.get_final_message()
        core.script = answer_in_pieces
        async with client.messages.stream(**ASKED, max_tokens=50) as reported:
            texts = [text async for text in reported.text_stream]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].input == {"city": "Bern"} and whole.stop_reason == "tool_use"
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == (11, 3)
    assert len(texts) >= 2 and "".join(texts) == "".join(PIECES)
    assert core.asked[0].messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert (core.asked[0].max_tokens, core.asked[0].stop) == (50, ["END"])


async def test_a_call_that_fails_is_tried_again_by_the_same_name():
    async def fails_once(core, call, on_delta):
        if len(core.asked) == 1:
            raise ConnectionError("the rollouter went away")
        return reply()

    async with openai_client(fails_once) as (core, served, client):
        done = await client.chat.completions.create(**ASKED)
    assert done.choices[0].message.content == "Hello."
    assert [call.call for call in core.asked] == ["http-0", "http-0"]
    assert served.counts["failed"] == served.counts["resumed"] == 1
