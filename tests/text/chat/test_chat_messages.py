"""Messages and tools of requests, brought into one form or refused with the field's name."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.messages import normalise_messages, normalise_tools

USER = {"role": "user", "content": "hi"}


def call(id="c", name="f", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def test_text_parts_are_joined_and_developers_are_systems():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = normalise_messages([{"role": "developer", "content": parts}, USER | {"name": "Ann", "cache_control": {}}])
    assert found == [{"role": "system", "content": "a\nb"}, USER | {"name": "Ann"}]


def test_what_the_policy_answered_may_come_back_as_clients_send_it():
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
def test_templates_get_arguments_as_objects_where_they_are_json(arguments, expected):
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
def test_what_the_policy_cannot_be_asked_is_refused_by_its_field(messages, field):
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
def test_nothing_that_is_sent_fails_in_another_way(messages):
    try:
        found = normalise_messages(messages)
    except ChatRefused:
        return
    assert normalise_messages(found) == found
