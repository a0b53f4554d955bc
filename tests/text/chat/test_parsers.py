"""Answers in parts: reasoning, content, calls of tools, and calls that cannot be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.text.chat.chat_messages import read_json
from asyncrl.text.chat.parsers import Both, JsonCallParser, NoParser, Parsed, ThinkParser, write_calls

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HALF = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
"""Half of a surrogate pair is no argument."""
HUGE = '<tool_call>{"name": "f", "arguments": {"a": [-1e999]}}</tool_call>'
"""Nor is more than a float holds, which Python reads as an infinity that JSON does not have."""
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def calls(text, tools=TOOLS):
    parsed = JsonCallParser()(text, tools)
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls], parsed.malformed


@pytest.mark.parametrize(
    ("text", "content", "found", "malformed"),
    [
        ("hello", "hello", [], 0),
        (CALL, "", [("f", '{"a": "é"}')], 0),
        (f"Well.\n{CALL}\n{CALL}", "Well.", [("f", '{"a": "é"}')] * 2, 0),
        (f"{CALL} and {CALL} done", "and  done", [("f", '{"a": "é"}')] * 2, 0),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")], 0),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')], 0),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")], 0),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', [], 1),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', [], 1),
        (
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            [],
            1,
        ),
        (HALF, HALF, [], 1),
        (HUGE, HUGE, [], 1),
        (f"<tool_call>nonsense</tool_call>{CALL}", "<tool_call>nonsense</tool_call>", [("f", '{"a": "é"}')], 1),
    ],
)
def test_calls_are_parsed_if_tools_are_given_and_malformed_ones_stay_content(text, content, found, malformed):
    assert calls(text) == (content, found, malformed)
    assert calls(text, tools=[]) == (text, [], 0)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content", "unfinished"),
    [
        ("<think>\nwell\n</think>\n\nhello", False, "well", "hello", False),
        ("\n<think>well</think>hello", False, "well", "hello", False),
        ("<think>\n\n</think>\n\nhello", False, None, "hello", False),
        ("well\n</think>\n\nhello", True, "well", "hello", False),
        ("<think>well", False, "well", "", True),
        ("well", True, "well", "", True),
        ("hello </think> you", False, None, "hello </think> you", False),
        ("hello <think>no</think>", False, None, "hello <think>no</think>", False),
    ],
)
def test_reasoning_is_separated_from_the_answer(text, thinking, reasoning, content, unfinished):
    assert ThinkParser()(text, TOOLS, thinking=thinking) == Parsed(content, reasoning, unfinished=unfinished)


def test_a_call_quoted_in_reasoning_is_not_a_call():
    both = Both(ThinkParser(), JsonCallParser())
    assert both(f"<think>say {CALL}</think>hello", TOOLS) == Parsed("hello", f"say {CALL}")
    assert both(f"<think>say {CALL}", TOOLS) == Parsed("", f"say {CALL}", unfinished=True)
    assert [call.name for call in both(f"<think>r</think>{CALL}", TOOLS).calls] == ["f"]
    assert both.markers == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert Both(NoParser(), NoParser())(CALL, TOOLS) == Parsed(CALL)


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {}}', "{", "\\ud800", "\n"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join), st.booleans())
def test_no_text_of_a_model_breaks_a_parser_or_is_lost(text, thinking):
    parsed = Both(ThinkParser(), JsonCallParser())(text, TOOLS, thinking=thinking)
    parsed.content.encode("utf-8", "surrogatepass")
    assert all(isinstance(read_json(call.arguments), dict) and call.name for call in parsed.calls)
    assert parsed.malformed <= text.count("<tool_call>")
    left = f"{parsed.reasoning or ''}{parsed.content}"
    assert all(letter in left for letter in text if letter.isalpha() and letter not in "toolcalthinknameargumentsf")


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans(), max_size=3)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), max_size=3))
def test_written_calls_are_parsed_back(made):
    written = write_calls([{"function": {"name": name, "arguments": arguments}} for name, arguments in made])
    if "tool_call>" in written.replace("<tool_call>\n", "").replace("\n</tool_call>", ""):
        return
    assert [(name, json.loads(arguments)) for name, arguments in calls(written)[1]] == made
