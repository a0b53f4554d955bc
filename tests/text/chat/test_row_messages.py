"""Conversations and tools of a dataset's rows, as datasets write them."""

import json

import pytest

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import read_conversation, read_tools, without_nulls

USER = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "-3 C", "name": "weather", "tool_call_id": "c1"}
SCHEMA = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}


def read(*messages, **more):
    return read_conversation(list(messages), "prompt", **more)


def test_all_that_messages_hold_is_kept():
    answer = {"role": "assistant", "content": "Cold.", "reasoning_content": "-3 is cold.", "name": "Bot"}
    asked = USER | {"name": "Ann"}
    assert read(asked, CALLS, RESULT, answer) == [asked, CALLS, RESULT, answer]


@pytest.mark.parametrize(
    "given",
    [
        CALLS | {"content": None},
        {"role": "assistant", "tool_calls": [CALL]},
        CALLS | {"content": []},
        CALLS | {"tool_calls": json.dumps([CALL])},
        CALLS | {"tool_calls": [CALL | {"index": 0}]},
        CALLS | {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        CALLS | {"tool_calls": [{"id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}]},
        CALLS | {"name": None, "reasoning_content": "", "tool_call_id": None, "annotations": [], "weight": None},
    ],
    ids=["null", "missing", "empty list", "JSON text", "index", "JSON arguments", "bare call", "nulls of a table"],
)
def test_a_call_has_many_forms_and_one_meaning(given):
    assert read(USER, given, RESULT) == [USER, CALLS, RESULT]


def test_ids_that_a_dataset_leaves_out_follow_from_names_and_order():
    bare = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "b")]
    results = [{"role": "tool", "name": "b", "content": "1"}, {"role": "tool", "content": "2"}]
    found = read(USER, {"role": "assistant", "content": None, "tool_calls": bare}, *results)
    assert [call["id"] for call in found[1]["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message["tool_call_id"] for message in found[2:]] == ["call_1_1", "call_1_0"]


def test_developer_is_system_and_reasoning_has_one_name():
    for key in ("reasoning_content", "reasoning", "thinking"):
        found = read({"role": "developer", "content": "x"}, USER, {"role": "assistant", "content": "a", key: "r"})
        assert found[0] == {"role": "system", "content": "x"}
        assert found[2] == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    same = {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}
    assert read(USER, same)[1]["reasoning_content"] == "r"


def test_fields_that_the_caller_reads_are_its_own():
    assert read(USER | {"weight": 0}, also=("weight",)) == [USER]


REFUSED = [
    (["hi"], "prompt[0]", "must be an object"),
    ([{"from": "human", "value": "x"}], "prompt[0].from", "write role and content"),
    ([USER | {"weight": 0}], "prompt[0].weight", "known are role, content, name"),
    ([USER | {"reasoning_content": "r"}], "prompt[0].reasoning_content", "role 'user' has no such field"),
    ([USER | {"tool_call_id": "c"}], "prompt[0].tool_call_id", "role 'user' has no such field"),
    ([USER, {"role": "assistant", "content": None}], "prompt[1].content", "is null or missing"),
    ([USER, CALLS, RESULT | {"content": None}], "prompt[2].content", "is null or missing"),
    ([USER, CALLS, RESULT | {"tool_call_id": "c2"}], "prompt[2].tool_call_id", "no call"),
    ([USER, CALLS, RESULT, {"role": "tool", "content": "x"}], "prompt[3]", "answers no call"),
    ([USER, CALLS, {"role": "tool", "content": "x", "name": "f"}], "prompt[2]", "no call of 'f'"),
    ([USER, CALLS | {"tool_calls": "[{"}], "prompt[1].tool_calls", "must be a list of calls"),
    ([USER, CALLS | {"tool_calls": [CALL | {"cost": 1}]}], "prompt[1].tool_calls[0].cost", "cannot be shown"),
    (
        [USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": [1]}}]}],
        "prompt[1].tool_calls[0].function.arguments",
        "must be text",
    ),
    (
        [USER, {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "s"}],
        "prompt[1].reasoning",
        "differs from reasoning_content",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}],
        "prompt[0].content[0].cache_control",
        "cannot be shown",
    ),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "prompt[0].content[0].type", "image_url"),
]


@pytest.mark.parametrize(("messages", "field", "problem"), REFUSED, ids=[field for _, field, _ in REFUSED])
def test_a_field_that_would_be_lost_is_refused_by_name(messages, field, problem):
    with pytest.raises(ChatRefused) as caught:
        read(*messages)
    assert caught.value.field == field and problem in caught.value.problem


@pytest.mark.parametrize(
    "given",
    [[TOOL], json.dumps([TOOL]), [SCHEMA], [SCHEMA | {"type": "function"}], [TOOL | {"strict": None}]],
    ids=["OpenAI", "JSON text", "bare", "Responses", "null"],
)
def test_tools_have_one_form(given):
    assert read_tools(given, "tools") == [TOOL]


def test_further_fields_of_a_function_are_kept_and_a_row_need_not_have_tools():
    returns = {"type": "string"}
    assert read_tools([SCHEMA | {"return": returns}], "tools")[0]["function"] == SCHEMA | {"return": returns}
    assert [read_tools(given, "tools") for given in (None, [], "", "[]")] == [[]] * 4


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (5, "tools"),
        ({"a": 1}, "tools"),
        ("search", "tools"),
        (["search"], "tools[0]"),
        ([TOOL | {"cost": 1}], "tools[0].cost"),
        ([{"type": "web_search"}], "tools[0].function"),
    ],
)
def test_tools_of_another_form_are_refused_by_name(given, field):
    with pytest.raises(ChatRefused) as caught:
        read_tools(given, field.partition("[")[0])
    assert caught.value.field == field


def test_nulls_of_a_typed_table_are_left_out_at_any_depth():
    assert without_nulls([{"a": None, "b": [{"c": None, "d": 0}]}]) == [{"b": [{"d": 0}]}]
