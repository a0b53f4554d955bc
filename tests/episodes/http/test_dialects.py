"""The translators: which fields do what, what becomes a message, and that an answer sent back is the answer."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from scripted_core import WEATHER, reply

from asyncrl.core.errors import ChatRefused
from asyncrl.episodes.http.anthropic_messages import AnthropicMessages
from asyncrl.episodes.http.chat_completions import ChatCompletions
from asyncrl.episodes.http.dialect import CHAT_COMPLETIONS, MESSAGES, RESPONSES, Failure, Stamp
from asyncrl.episodes.http.responses import Responses

STAMP = Stamp(number="7", model="policy", created=1)
HI = [{"role": "user", "content": "Hi"}]
CHAT = (ChatCompletions(), {"model": "m", "messages": HI})
RESPONSE = (Responses(), {"model": "m", "input": "Hi"})
MESSAGE = (AnthropicMessages(), {"model": "m", "messages": HI, "max_tokens": 9})
TOOLS = {
    CHAT[0]: WEATHER,
    RESPONSE[0]: {"type": "function", **WEATHER["function"]},
    MESSAGE[0]: {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": WEATHER["function"]["parameters"],
    },
}


def parse(dialect_and_body, **more):
    dialect, body = dialect_and_body
    return dialect.parse(body | more)


def one_message(content, role="user"):
    return [{"role": role, "content": content}]


REFUSED = [
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"no_such_field": 1}, "no_such_field"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": one_message("x", "wizard")}, "messages[0].role"),
    (CHAT, {"messages": [*HI, *one_message([{"type": "image_url"}])]}, "messages[1].content[0]"),
    (CHAT, {"messages": one_message([{"type": "text"}])}, "messages[0].content[0].text"),
    (CHAT, {"messages": one_message(5)}, "messages[0].content"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"n": 129}, "n"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (RESPONSE, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSE, {"text": {"colour": "red"}}, "text.colour"),
    (RESPONSE, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSE, {"input": []}, "input"),
    (RESPONSE, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSE, {"input": one_message("x", "tool")}, "input[0].role"),
    (RESPONSE, {"input": one_message([{"type": "input_image"}])}, "input[0].content[0]"),
    (RESPONSE, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    (RESPONSE, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    (MESSAGE, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    (MESSAGE, {"messages": []}, "messages"),
    (MESSAGE, {"messages": [*HI, *one_message("I", "assistant")]}, "messages[1]"),
    (MESSAGE, {"messages": one_message("x", "tool")}, "messages[0].role"),
    (MESSAGE, {"messages": one_message([{"type": "image"}])}, "messages[0].content[0]"),
    (MESSAGE, {"messages": one_message([{"type": "tool_use"}])}, "messages[0].content[0]"),
    (MESSAGE, {"tool_choice": {"type": "auto", "magic": 1}}, "tool_choice.magic"),
    (CHAT, {"max_tokens": 10**20}, "max_tokens"),
]


@pytest.mark.parametrize(("request_of", "more", "field"), REFUSED, ids=[field for _, _, field in REFUSED])
def test_unsupported_fields_are_refused_by_name(request_of, more, field):
    parse(request_of)
    with pytest.raises(ChatRefused) as refused:
        parse(request_of, **more)
    assert refused.value.field == field


FAILED_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
NOTICED = [
    (CHAT, {"temperature": 0, "top_p": 0.9, "frequency_penalty": 0.1}, ["frequency_penalty", "temperature", "top_p"]),
    (CHAT, {"top_p": 1.0, "presence_penalty": 0, "seed": None, "top_k": -1, "user": "u", "store": True}, []),
    (CHAT, {"logprobs": False, "logit_bias": {}, "modalities": ["text"], "functions": None}, []),
    (CHAT, {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}, []),
    (CHAT, {"tool_choice": "required", "parallel_tool_calls": False}, ["parallel_tool_calls", "tool_choice"]),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, ["response_format"]),
    (RESPONSE, {"text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False}, []),
    (RESPONSE, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, ["text.format", "text.verbosity"]),
    (RESPONSE, {"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.effort"]),
    (RESPONSE, {"include": ["reasoning.encrypted_content"], "store": False, "max_tool_calls": 3}, ["max_tool_calls"]),
    (MESSAGE, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, []),
    (MESSAGE, {"tool_choice": {"type": "tool", "name": "f"}}, ["tool_choice.type"]),
    (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 99}, "top_k": 5}, ["thinking", "top_k"]),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, ["tools.strict"]),
    (RESPONSE, {"tools": [{"type": "function", "name": "f", "strict": True}]}, ["tools.strict"]),
    (RESPONSE, {"tools": [{"type": "function", "name": "f", "strict": False}]}, []),
    (MESSAGE, {"tools": [{"name": "f", "input_schema": {}, "strict": True}]}, ["tools.strict"]),
    (MESSAGE, {"messages": one_message([FAILED_RESULT])}, ["messages.is_error"]),
]


@pytest.mark.parametrize(("request_of", "more", "noticed"), NOTICED)
def test_ignored_and_relaxed_fields_are_reported(request_of, more, noticed):
    asked = parse(request_of, **more)
    assert sorted(asked.ignored + asked.relaxed) == noticed


def test_limits_stops_and_tools_are_honoured():
    asked = parse(CHAT, max_tokens=9, max_completion_tokens=5, stop="\n", n=2, stream=True)
    assert (asked.max_tokens, asked.stop, asked.n, asked.stream, asked.include_usage) == (5, ["\n"], 2, True, False)
    assert parse(CHAT, stream=True, stream_options={"include_usage": True}).include_usage
    assert parse(CHAT, chat_template_kwargs={"enable_thinking": False}).template_options == {"enable_thinking": False}
    assert parse(RESPONSE, max_output_tokens=4).max_tokens == 4
    asked = parse(MESSAGE, stop_sequences=["A", "B"])
    assert (asked.max_tokens, asked.stop) == (9, ["A", "B"])
    for request_of, none in ((CHAT, "none"), (RESPONSE, "none"), (MESSAGE, {"type": "none"})):
        tools = [TOOLS[request_of[0]]]
        assert parse(request_of, tools=tools).tools == [WEATHER]
        assert parse(request_of, tools=tools, tool_choice=none).tools == [], "where none may be called none is shown"


CALLS = [("weather", '{"city": "Bern"}'), ("weather", "{}")]
ANSWERS = {
    "text": reply("Hello."),
    "nothing": reply(""),
    "calls": reply("", calls=CALLS),
    "both": reply("Let me see.", calls=CALLS, reasoning="Which city?"),
    "cut": reply("Once upon", cut=True, reasoning="A tale."),
}
answers = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


def as_sampled(answer, *, separators=(", ", ": ")):
    """The message of chat completions that an answer is."""
    message = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
    if answer.tool_calls:
        functions = [
            {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), separators=separators)}
            for call in answer.tool_calls
        ]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(answer.tool_calls, functions, strict=True)
        ]
    return message


@answers
def test_an_answer_sent_back_by_a_client_equals_the_original(answer):
    chat = CHAT[0].reply(parse(CHAT), STAMP, [answer])["choices"][0]["message"]
    assert {name: chat[name] for name in ("role", "content", "tool_calls") if name in chat} == as_sampled(answer)
    assert chat.get("reasoning_content") == answer.reasoning
    output = RESPONSE[0].reply(parse(RESPONSE), STAMP, [answer])["output"]
    assert parse(RESPONSE, input=[*HI, *output, *HI]).messages == [*HI, as_sampled(answer), *HI]
    blocks = MESSAGE[0].reply(parse(MESSAGE), STAMP, [answer])["content"]
    sent_back = parse(MESSAGE, messages=[*HI, *one_message(blocks, "assistant"), *HI])
    assert sent_back.messages == [*HI, as_sampled(answer, separators=(",", ":")), *HI]


def call(id, name, arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_items_of_a_response_become_messages():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    assert parse(RESPONSE, input=items, instructions="You are it.").messages == [
        {"role": "system", "content": "You are it."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "f"), call("c2", "g")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call("c3", "f")]},
    ]


def test_blocks_of_a_message_become_messages():
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1, "ü"]}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]}
    asked = [result, {"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]
    given = [*HI, *one_message(answer, "assistant"), *one_message(asked)]
    assert parse(MESSAGE, messages=given, system=[{"type": "text", "text": "Be brief."}]).messages == [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": "See", "tool_calls": [call("c1", "f", '{"a":[1,"ü"]}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        *one_message("and\nnow?"),
    ]


def streamed(request_of, answer, pieces, **more):
    """The whole stream of an answer whose first letters came in pieces, and the data of each event."""
    events = request_of[0].events(parse(request_of, **more), STAMP)
    sent = [answer.content[at : at + 2] for at in range(0, 2 * pieces, 2)]
    raw = b"".join(events.text(0, piece) for piece in sent if piece) + events.end([answer])
    return raw, [
        json.loads(part.partition(b"data: ")[2]) for part in raw.split(b"\n\n") if part and b"[DONE]" not in part
    ]


in_pieces = pytest.mark.parametrize("pieces", [0, 1, 3])


@answers
@in_pieces
def test_a_stream_of_chunks_adds_up_to_the_answer(answer, pieces):
    raw, chunks = streamed(CHAT, answer, pieces, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer.content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (answer.reasoning or "")
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"] == [deltas[0]["role"]]
    arguments = [""] * len(answer.tool_calls)
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        arguments[part["index"]] += part["function"]["arguments"]
    assert arguments == [call.arguments for call in answer.tool_calls]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["total_tokens"] == 14
    assert chunks[-2]["choices"][0]["finish_reason"] == answer.finish_reason
    assert raw.endswith(b"data: [DONE]\n\n")


@answers
@in_pieces
def test_the_events_of_a_response_add_up_to_it(answer, pieces):
    _, data = streamed(RESPONSE, answer, pieces)
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    done = [each["item"] for each in data if each["type"] == "response.output_item.done"]
    final = data[-1]["response"]
    assert done == final["output"]
    added = [each["output_index"] for each in data if each["type"] == "response.output_item.added"]
    assert added == [*range(len(done))]
    text = "".join(each["delta"] for each in data if each["type"] == "response.output_text.delta")
    assert text == answer.content
    whole = RESPONSE[0].reply(parse(RESPONSE), STAMP, [answer])
    assert sorted(map(json.dumps, whole.pop("output"))) == sorted(map(json.dumps, final.pop("output")))
    assert final == whole
    assert data[-1]["type"] == ("response.incomplete" if answer.finish_reason == "length" else "response.completed")


@answers
@in_pieces
def test_the_events_of_a_message_add_up_to_it(answer, pieces):
    blocks, open_block = [], None
    _, data = streamed(MESSAGE, answer, pieces)
    assert (data[0]["type"], data[-1]["type"]) == ("message_start", "message_stop")
    for each in data:
        if each["type"] == "content_block_start":
            assert open_block is None and each["index"] == len(blocks)
            open_block = each["content_block"]
        elif each["type"] == "content_block_delta":
            kind = each["delta"].pop("type")
            ((name, more),) = each["delta"].items()
            if kind == "input_json_delta":
                open_block["input"] = json.loads(more)
            else:
                open_block[name] += more
        elif each["type"] == "content_block_stop":
            blocks.append(open_block)
            open_block = None
    whole = MESSAGE[0].reply(parse(MESSAGE), STAMP, [answer])
    assert sorted(map(json.dumps, blocks)) == sorted(map(json.dumps, whole["content"]))
    assert data[-2]["delta"]["stop_reason"] == whole["stop_reason"] and data[-2]["usage"] == whole["usage"]


def test_a_message_has_the_stop_sequence_that_ended_it():
    stopped = msgspec.structs.replace(reply("Act. "), stop_sequence="Observation:")
    ended = {"stop_reason": "stop_sequence", "stop_sequence": "Observation:"}
    whole = MESSAGE[0].reply(parse(MESSAGE), STAMP, [stopped])
    assert {name: whole[name] for name in ended} == ended
    _, data = streamed(MESSAGE, stopped, 1)
    assert data[-2]["delta"] == ended


def test_errors_are_in_the_form_of_their_api():
    failure = Failure(status=400, message="the episode is over: time", code="episode_over")
    error = {"message": "the episode is over: time", "type": "invalid_request_error", "code": "episode_over"}
    for dialect in (CHAT[0], RESPONSE[0]):
        assert dialect.failure(failure)["error"] == error | {"param": None}
    assert MESSAGE[0].failure(failure) == {"type": "error", "error": error}


def test_the_table_of_fields_matches_the_documentation():
    documented = (Path(__file__).parents[3] / "docs" / "endpoint.md").read_text()
    rows = [row.split("|")[1:-1] for row in documented.splitlines() if row.startswith("| ")]
    kinds = {"do nothing anywhere": "harmless"}
    found = {}
    for cells in (row for row in rows if len(row) == 4):
        kind = kinds.get(cells[0].strip(), cells[0].strip())
        for dialect, cell in enumerate(cells[1:]):
            same = cells[1].split(", `reasoning_effort`")[0] if "the same" in cell else ""
            found |= {(dialect, name): kind for name in re.findall(r"`([a-z_.]+)`", same + cell)}
    assert found == {
        (dialect, name): field.treatment
        for dialect, table in enumerate((CHAT_COMPLETIONS, RESPONSES, MESSAGES))
        for name, field in table.items()
    }
