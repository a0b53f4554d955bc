"""Conversations by example: what is recognised, what extends, what forks and why, and what is trained of it."""

import itertools

import numpy as np
import pytest
from conversation_cases import (
    ChatML,
    CutIsTheEnd,
    NoEnd,
    Player,
    StripsThinking,
    by_character,
    echo,
    reserialised,
    tool,
    user,
)

from asyncrl.errors import ChatRefused, InvalidRequest
from asyncrl.messages.groups import Turn, VersionSpan
from asyncrl.rollouter.episode.conversation import Conversation
from asyncrl.rollouter.episode.message_tree import message_digest

SEARCH = [("search", '{"q": "ab",  "k":3}')]


@pytest.fixture
def player():
    return Player(Conversation(), ChatML())


HI = [user("hi")]


def forks(player):
    return player.conversation.counts().forks


def test_a_linear_conversation_is_one_sequence_of_exactly_what_was_submitted_and_sampled(player):
    first = player.chat([user("hi")], "ab", versions=(3, 4))
    second = player.chat([user("hi"), echo(first), user("more")], "ba")
    assert not player.conversation.sequences()[0].prompt_ids.flags.writeable
    assert second.cause == "extend" and second.parent is first
    [sequence] = player.conversation.sequences()
    whole = [*player.calls[1].submitted, *player.calls[1].tokens]
    prompt = len(player.calls[0].submitted)
    assert sequence.prompt_ids.tolist() == player.calls[0].submitted
    assert sequence.tokens.tolist() == whole[prompt:]
    assert sequence.tokens.dtype == np.int32 and sequence.logprobs.dtype == np.float32
    context = len(player.calls[1].submitted) - prompt
    assert sequence.spans == [
        VersionSpan(3, 0, 1),
        VersionSpan(4, 1, 2),
        VersionSpan(-1, 2, context, role="context"),
        VersionSpan(3, context, context + 2),
    ]
    assert sequence.turns == [Turn(0, 2), Turn(context, context + 2)]
    assert sequence.logprobs.tolist() == [*player.calls[0].logprobs, *player.calls[1].logprobs]


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("calls", [(), SEARCH])
def test_an_answer_is_recognised_without_its_reasoning_and_with_other_json(player, calls, strip):
    first = player.chat([user("hi")], " ab\n", reasoning="b b", calls=calls)
    back = echo(first, arguments=reserialised, strip=strip)
    tail = [tool(back["tool_calls"][0]["id"], "x")] if calls else [user("x")]
    resolved = player.conversation.resolve([user("hi"), back, *tail], [], {})
    assert resolved.parent is first and resolved.tail == tail and resolved.extends


def test_the_order_of_keys_and_a_field_of_none_are_no_part_of_a_message(player):
    first = player.chat([{"role": "user", "content": "hi"}], "ab", [{"name": "t", "strict": True}])
    turned = [{"name": None, "content": "hi", "role": "user"}, echo(first), user("x")]
    assert player.conversation.resolve(turned, [{"strict": True, "name": "t"}], {}).parent is first
    assert player.conversation.resolve(turned, [{"strict": False, "name": "t"}], {}).parent is None


def test_calls_are_named_by_their_node_and_may_come_back_in_part(player):
    player.chat([user("x")], "ab")
    node = player.chat([user("hi")], "", calls=[("search", "{}"), ("add", "{}")])
    back = echo(node)
    assert [call["id"] for call in back["tool_calls"]] == ["call_1_0", "call_1_1"]
    del back["tool_calls"][0]
    assert player.conversation.resolve([user("hi"), back, tool("call_1_1", "3")], [], {}).parent is node
    foreign = echo(node)
    foreign["tool_calls"][0]["function"]["name"] = "delete"
    assert player.ask([user("hi"), foreign, tool("call_1_0", "3")]).cause == "fork:assistant"
    mixed = {**back, "tool_calls": [*back["tool_calls"], {"id": "call_9_9", "function": {"name": "add"}}]}
    assert player.conversation.resolve([user("hi"), mixed, tool("call_1_1", "3")], [], {}).parent is None


def test_of_answers_in_the_same_words_one_is_meant(player):
    """That which went on so, one that is trained, the one with the same blanks, the newest."""
    one = player.chat(HI, "ab")
    below = player.chat([*HI, echo(one), user("p")], "b")
    other = player.chat(HI, "ab")
    player.chat(HI, "ab", untrained=True)
    blank = player.chat(HI, "ab ")
    for messages, meant in (
        ([*HI, echo(one), user("p"), echo(below), user("q")], below),
        ([*HI, echo(one), user("q")], other),
        ([*HI, echo(blank), user("q")], blank),
    ):
        assert player.conversation.resolve(messages, [], {}).parent is meant


def test_an_answer_counts_only_behind_what_it_was_asked_with(player):
    first = player.chat([user("hi")], "ab", calls=SEARCH)
    messages = [user("other"), echo(first), tool("call_0_0", "x")]
    assert player.ask(messages).cause == "fork:edited"
    player.chat([user("other")], "b")
    assert player.conversation.resolve(messages, [], {}).parent is None
    assert player.ask(messages).cause == "fork:edited"


NEXT, RESULT, NO = user("x"), tool("call_0_0", "x"), {"role": "assistant", "content": "no"}
CHARACTERS = {"encode": by_character}
CAUSES = {
    "goes on": ("extend", ChatML, lambda a: [*HI, a, RESULT], {}),
    "goes on without end token": ("extend", NoEnd, lambda a: [*HI, a, NEXT], {}),
    "a cut that the template mends": ("extend", ChatML, lambda a: [*HI, a, NEXT], {"cut": True}),
    "a cut that a rendering mends": ("extend", CutIsTheEnd, lambda a: [*HI, a, NEXT], {"cut": True, "calls": ()}),
    "a cut that nothing mends": ("fork:cut", CutIsTheEnd, lambda a: [*HI, a, NEXT], {"cut": True} | CHARACTERS),
    "the same again": ("fork:branch", ChatML, lambda a: HI, {}),
    "a summary": ("fork:branch", ChatML, lambda a: [user("so far")], {}),
    "other tools": ("fork:root", ChatML, lambda a: [*HI, a, NEXT], {"tools": [{"name": "t"}]}),
    "a stranger's answer": ("fork:assistant", ChatML, lambda a: [*HI, NO, NEXT], {}),
    "the same again behind an answer": ("extend", ChatML, lambda a: [*HI, a, NEXT], {"twice": True}),
    "a stranger's behind ours": ("fork:assistant", ChatML, lambda a: [*HI, a, RESULT, NO, NEXT], {}),
    "that, again": ("fork:assistant", ChatML, lambda a: [*HI, a, RESULT, NO, NEXT], {"twice": True} | CHARACTERS),
    "changed before an answer": ("fork:edited", ChatML, lambda a: [user("ho"), a, NEXT], {}),
    "thinking stripped": ("fork:no-extension", StripsThinking, lambda a: [*HI, a, NEXT], {}),
    "thinking kept for a tool": ("extend", StripsThinking, lambda a: [*HI, a, RESULT], {}),
    "as the template has it": ("extend", StripsThinking, lambda a: [*HI, a, RESULT], {"history": "template"}),
    "not as the template has it": ("fork:history", StripsThinking, lambda a: [*HI, a, NEXT], {"history": "template"}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_why_a_prompt_forks(name):
    cause, renderer, second, how = CAUSES[name]
    player = Player(Conversation(history=how.get("history", "sampled")), renderer())
    answer = {key: how[key] for key in ("cut", "calls", "encode") if key in how}
    node = player.chat(HI, "ab", reasoning="b", **{"calls": SEARCH, **answer})
    messages, tools = second(echo(node, reasoning=True)), how.get("tools", [])
    if "twice" in how:
        player.chat(messages, "b", tools)
    assert player.ask(messages, tools).cause == cause


def test_a_rendering_has_our_answers_as_they_were_given():
    player = Player(Conversation(), CutIsTheEnd())
    first = player.chat(HI, "ab ", reasoning="b", calls=SEARCH, cut=True, encode=by_character)
    prompt = player.ask([*HI, echo(first, arguments=reserialised, strip=True), tool("call_0_0", "x"), user("y")])
    assert prompt.cause == "fork:cut"
    function = {"name": "search", "arguments": {"q": "ab", "k": 3}}
    assert prompt.resolved.messages == [
        *HI,
        {
            "role": "assistant",
            "content": "ab ",
            "reasoning_content": "b",
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": function}],
        },
        tool("call_0_0", "x"),
        user("y"),
    ]


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "[" * 100_000, '{"q": "\\ud800"}', '{"q": "\ud800"}'])
def test_arguments_that_are_no_object_stay_text(player, arguments):
    node = player.chat(HI, "", calls=[("search", arguments)])
    assert node.for_template() == node.message
    assert player.ask([*HI, echo(node), tool("call_0_0", "x")]).parent is node


def test_half_of_a_surrogate_pair_is_told_apart_and_endless_nesting_refused(player):
    node = player.chat(HI, "", calls=[("search", '{"q": "\\ud800"}')])
    back = echo(node)
    back["tool_calls"][0]["function"]["arguments"] = {"q": "\ud800"}
    assert player.ask([*HI, back, tool("call_0_0", "x")]).parent is node
    foreign = [{**user("x"), "name": name} for name in ("\ud800", "\ud801", "\ud800")]
    digests = [message_digest(message, "messages[0]") for message in foreign]
    assert digests[0] != digests[1] and digests[0] == digests[2]
    nested = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(ChatRefused, match=r"messages\[1\]: is nested too deeply"):
        player.ask([*HI, {**user("x"), "extra": nested}])
    with pytest.raises(ChatRefused, match="tools: is nested too deeply"):
        player.ask(HI, [{"parameters": nested}])


def test_an_untrained_answer_is_context_to_come_and_never_sampled(player):
    first = player.chat(HI, "ab", untrained=True)
    second = player.chat([*HI, echo(first), user("x")], "b")
    player.chat([*HI, echo(first), user("x"), echo(second), user("y")], "a", untrained=True)
    player.chat([user("a title for this")], "ba", untrained=True)
    [sequence] = player.conversation.sequences()
    assert [span.role for span in sequence.spans] == ["repeated", "context", "sampled"]
    assert len(sequence.tokens) == second.length - len(sequence.prompt_ids)
    assert [message["content"] for message in player.conversation.messages()] == ["hi", "ab", "x", "b"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_sequences_does_not_tell_who_was_answered_first(player, order):
    asked = [(player.ask(HI), "ab"), (player.ask(HI), "ba"), (player.ask([user("a")]), "b")]
    for call in order:
        player.answer(*asked[call])
    ids = {node.message["content"]: node.ids.tolist() for node in player.conversation.nodes}
    sequences = player.conversation.sequences()
    assert [sequence.tokens.tolist() for sequence in sequences] == [ids["b"], ids["ab"], ids["ba"]]
    assert [message["content"] for message in player.conversation.messages()] == ["a", "b"]


def test_the_main_line_keeps_the_reasoning_that_the_agent_dropped(player):
    first = player.chat(HI, "ab", reasoning="why", calls=SEARCH)
    second = player.chat([*HI, echo(first), tool("call_0_0", "x")], "ba", reasoning="so")
    assert player.conversation.messages() == [*HI, first.message, tool("call_0_0", "x"), second.message]
    assert (first.message["reasoning_content"], second.message["content"]) == ("why", "ba")


def test_an_answer_told_in_other_words_is_still_credited_with_what_came_after_it(player):
    player.chat(HI, "ab", calls=SEARCH)
    second = player.chat([*HI, user("Calling tools: search"), user("Observation: x")], "ba")
    other = player.chat(HI, "b")
    for node in (second, other):
        player.conversation.reward(node.id, 1.0)
    assert [turn.past_reward for s in player.conversation.sequences() for turn in s.turns] == [1.0, 1.0, 1.0]


def test_the_newest_trained_turn_is_credited_unless_another_is_named(player):
    conversation = player.conversation
    with pytest.raises(InvalidRequest, match="before the first answer"):
        conversation.reward(None, 1.0)
    first = player.chat(HI, "ab")
    player.chat([user("title")], "b", untrained=True)
    assert conversation.reward(None, 1.0) == first.id
    assert conversation.reward(first.id, 3.0) == first.id
    assert conversation.rewards == {first.id: 3.0}
    with pytest.raises(InvalidRequest, match="turn 2; the policy has given 2 answers"):
        conversation.reward(2, 1.0)
    with pytest.raises(InvalidRequest, match="finite"):
        conversation.reward(None, float("nan"))
    with pytest.raises(InvalidRequest, match="finite number up to 1e.18"):
        conversation.reward(None, 1e300)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [], "logprobs": [], "spans": []},
        {"logprobs": [-1.0]},
        {"spans": [VersionSpan(3, 0, 1), VersionSpan(4, 0, 2)]},
        {"spans": [VersionSpan(-1, 0, 2)]},
    ],
)
def test_an_answer_that_is_not_covered_is_not_kept(player, wrong):
    prompt = player.ask(HI)
    answer = {"tokens": [65, 66], "logprobs": [-1.0, -2.0], "spans": [VersionSpan(3, 0, 2)]} | wrong
    with pytest.raises(AssertionError):
        player.conversation.commit(prompt, finish="stop", content="ab", **answer)
    assert player.conversation.nodes == []


def test_spans_keep_that_a_token_was_sampled_over_older_keys(player):
    prompt = player.ask(HI)
    spans = [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2, True)]
    player.conversation.commit(prompt, tokens=[65, 66], logprobs=[-1.0, -2.0], spans=spans, finish="stop", content="AB")
    assert player.conversation.sequences()[0].spans == spans


def test_two_first_calls_at_once_are_one_root_and_one_branch(player):
    prompts = [player.ask([user(text)]) for text in ("p", "q")]
    assert [prompt.cause for prompt in prompts] == ["root", "root"]
    assert [player.answer(prompt, "a").cause for prompt in prompts] == ["root", "fork:branch"]
    assert forks(player) == {"branch": 1}


def test_of_answers_of_equal_tokens_a_fork_goes_on_from_the_one_that_was_recognised():
    player = Player(Conversation(), CutIsTheEnd())
    _, newest = (player.chat(HI, "ab", cut=True) for _ in range(2))
    prompt = player.ask([*HI, echo(newest), user("x")])
    assert prompt.cause == "extend" and prompt.parent is prompt.resolved.parent is newest


def test_a_prompt_that_was_changed_on_its_way_is_not_kept(player):
    first = player.chat(HI, "ab")
    prompt = player.ask([*HI, echo(first), user("x")])
    prompt.ids[0] += 1
    with pytest.raises(AssertionError, match="submitted"):
        player.answer(prompt, "b")


def test_cost_factor_tells_forks_from_a_linear_conversation(player):
    messages = [*HI]
    for _ in range(6):
        node = player.chat(messages, "ab ab")
        messages = [*messages, echo(node), user("more")]
    counts = player.conversation.counts()
    assert counts.cost_factor == 1.0 and counts.forks == {} and counts.turns == 6
    assert counts.context_tokens + counts.sampled_tokens == node.length

    prose = Player(Conversation(), ChatML())
    messages = [*HI]
    for _ in range(6):
        prose.chat(messages, "ab ab")
        messages = [*messages, user("I called a tool"), user("it said x")]
    assert prose.conversation.counts().forks == {"branch": 5}
    # What it shares by chance is not prefilled again.
    assert prose.conversation.counts().cost_factor > 1.0
