"""Messages and tools of requests and of datasets' rows, brought into one form or refused with the field's name."""

import json

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import (
    normalise_messages,
    normalise_tools,
    read_conversation,
    read_tools,
    without_nulls,
)

USER = {"role": "user", "content": "hi"}


def call(id="c", name="f", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def test_text_parts_are_joined_and_developers_are_systems():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = normalise_messages([{"role": "developer", "content": parts}, USER | {"name": "Ann", "cache_control": {}}])
    assert found == [{"role": "system", "content": "a\nb"}, USER | {"name": "Ann"}]


def test_answers_of_the_policy_are_accepted_in_the_form_of_clients():
    echoed = {"audio": None, "function_call": None, "refusal": None, "annotations": [], "tool_calls": None}
    assert normalise_messages([USER, {"role": "assistant", "content": "a"} | echoed])[1] == {
        "role": "assistant",
        "content": "a",
    }
    for key in ("reasoning", "reasoning_content"):
        assert normalise_messages([{"role": "assistant", "content": None, key: "r"}]) == [
            {"role": "assistant", "content": "", "reasoning_content": "r"}
        ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": [1.0, "é"]}', {"b": 1, "a": [1.0, "é"]}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        # Values that messages of the run cannot hold.
        ('{"a": 36893488147419103232}', '{"a": 36893488147419103232}'),
        ({"a": [-(1 << 64)]}, '{"a": [-18446744073709551616]}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ({"a": "\ud800"}, '{"a": "\\ud800"}'),
        ('{"a": 1%s}' % ("0" * 5000), '{"a": 1%s}' % ("0" * 5000)),
    ],
)
def test_templates_get_json_arguments_as_objects(arguments, expected):
    found = normalise_messages([USER, assistant(call(arguments=arguments))])[1]
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"]["arguments"] == expected


def test_results_answer_calls_that_were_made_before():
    result = {"role": "tool", "content": "r", "tool_call_id": "c"}
    again = {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "d"}
    found = normalise_messages([USER, assistant(call("c"), call("d")), again, result])
    assert [message.get("tool_call_id") for message in found[2:]] == ["d", "c"]
    for messages in ([USER, result], [result, assistant(call("c"))]):
        with pytest.raises(ChatRefused, match="no call of a message before has the id 'c'"):
            normalise_messages(messages)


REFUSED = [
    ([], "messages"),
    ([{"content": "a"}], "messages[0].role"),
    ([USER, {"role": "function", "content": "a", "name": "f"}], "messages[1].role"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ([USER | {"name": 3}], "messages[0].name"),
    ([USER | {"tool_calls": [call()]}], "messages[0].tool_calls"),
    ([assistant(audio={"id": "a"})], "messages[0].audio"),
    ([assistant(call() | {"type": "custom"})], "messages[0].tool_calls[0].type"),
    ([assistant(call(id=None))], "messages[0].tool_calls[0].id"),
    ([assistant(call(), call())], "messages[0].tool_calls[1].id"),
    ([assistant(call(arguments=3))], "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("messages", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_unsupported_messages_are_refused_by_field(messages, field):
    with pytest.raises(ChatRefused) as caught:
        normalise_messages(messages)
    assert caught.value.field == field and caught.value.problem


def test_tools_have_one_form():
    tool = {"function": {"strict": True, "parameters": {"type": "object"}, "description": "d", "name": "f"}}
    bare = {"type": "function", "function": {"name": "g", "parameters": None, "description": None}}
    first, second = normalise_tools([tool, bare])
    assert list(first) == ["type", "function"] and list(first["function"]) == ["name", "description", "parameters"]
    assert second == {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "web_search", "function": {"name": "f"}}], "tools[0].type"),
        ([{"function": {}}], "tools[0].function.name"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], "tools[1].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused_by_their_field(tools, field):
    with pytest.raises(ChatRefused) as caught:
        normalise_tools(tools)
    assert caught.value.field == field


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "id"]), inner),
)


@settings(max_examples=examples(25))
@given(st.lists(ANYTHING | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), ANYTHING)))
def test_any_input_is_normalised_or_refused(messages):
    try:
        found = normalise_messages(messages)
    except ChatRefused:
        return
    assert normalise_messages(found) == found


# --- rows, as datasets write them ---

ASKS = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "-3 C", "name": "weather", "tool_call_id": "c1"}
SCHEMA = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}


def read(*messages, **more):
    return read_conversation(list(messages), "prompt", **more)


def test_normalised_messages_keep_all_content():
    answer = {"role": "assistant", "content": "Cold.", "reasoning_content": "-3 is cold.", "name": "Bot"}
    asked = ASKS | {"name": "Ann"}
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
    assert read(ASKS, given, RESULT) == [ASKS, CALLS, RESULT]


def test_ids_that_a_dataset_leaves_out_follow_from_names_and_order():
    bare = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "b")]
    results = [{"role": "tool", "name": "b", "content": "1"}, {"role": "tool", "content": "2"}]
    found = read(ASKS, {"role": "assistant", "content": None, "tool_calls": bare}, *results)
    assert [call["id"] for call in found[1]["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message["tool_call_id"] for message in found[2:]] == ["call_1_1", "call_1_0"]


def test_developer_is_system_and_reasoning_has_one_name():
    for key in ("reasoning_content", "reasoning", "thinking"):
        found = read({"role": "developer", "content": "x"}, ASKS, {"role": "assistant", "content": "a", key: "r"})
        assert found[0] == {"role": "system", "content": "x"}
        assert found[2] == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    same = {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}
    assert read(ASKS, same)[1]["reasoning_content"] == "r"


def test_fields_that_the_caller_reads_are_removed_from_messages():
    assert read(ASKS | {"weight": 0}, also=("weight",)) == [ASKS]


REFUSED_IN_A_ROW = [
    (["hi"], "prompt[0]", "must be an object"),
    ([{"from": "human", "value": "x"}], "prompt[0].from", "write role and content"),
    ([ASKS | {"weight": 0}], "prompt[0].weight", "known are role, content, name"),
    ([ASKS | {"reasoning_content": "r"}], "prompt[0].reasoning_content", "role 'user' has no such field"),
    ([ASKS | {"tool_call_id": "c"}], "prompt[0].tool_call_id", "role 'user' has no such field"),
    ([ASKS, {"role": "assistant", "content": None}], "prompt[1].content", "is null or missing"),
    ([ASKS, CALLS, RESULT | {"content": None}], "prompt[2].content", "is null or missing"),
    ([ASKS, CALLS, RESULT | {"tool_call_id": "c2"}], "prompt[2].tool_call_id", "no call"),
    ([ASKS, CALLS, RESULT, {"role": "tool", "content": "x"}], "prompt[3]", "answers no call"),
    ([ASKS, CALLS, {"role": "tool", "content": "x", "name": "f"}], "prompt[2]", "no call of 'f'"),
    ([ASKS, CALLS | {"tool_calls": "[{"}], "prompt[1].tool_calls", "must be a list of calls"),
    ([ASKS, CALLS | {"tool_calls": [CALL | {"cost": 1}]}], "prompt[1].tool_calls[0].cost", "cannot be shown"),
    ([ASKS, CALLS | {"tool_calls": [CALL | {"value": 1}]}], "prompt[1].tool_calls[0].value", "cannot be shown"),
    ([ASKS, CALLS | {"tool_calls": [CALL | {"name": "f"}]}], "prompt[1].tool_calls[0].name", "cannot be shown"),
    (
        [ASKS, CALLS | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": [1]}}]}],
        "prompt[1].tool_calls[0].function.arguments",
        "must be text",
    ),
    (
        [ASKS, {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "s"}],
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


@pytest.mark.parametrize(
    ("messages", "field", "problem"), REFUSED_IN_A_ROW, ids=[field for _, field, _ in REFUSED_IN_A_ROW]
)
def test_a_field_that_would_be_lost_is_refused_by_name(messages, field, problem):
    with pytest.raises(ChatRefused) as caught:
        read(*messages)
    assert caught.value.field == field and problem in caught.value.problem


@pytest.mark.parametrize(
    "given",
    [[TOOL], json.dumps([TOOL]), [SCHEMA], [SCHEMA | {"type": "function"}], [TOOL | {"strict": None}]],
    ids=["OpenAI", "JSON text", "bare", "Responses", "null"],
)
def test_tools_of_a_row_have_one_form(given):
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
