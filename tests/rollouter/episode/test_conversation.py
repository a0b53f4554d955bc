"""Conversations by example: what is recognised, why prompts fork, and what is trained and credited."""

import itertools

import pytest
from conversation_cases import (
    ChatML,
    CutIsTheEnd,
    NoEnd,
    Player,
    StripsThinking,
    by_character,
    echo,
    tool,
    user,
)

from asyncrl.core.errors import ChatRefused, InvalidRequest
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.episode.conversation import Conversation
from asyncrl.rollouter.episode.message_tree import message_digest

SEARCH = [("search", '{"q": "ab",  "k":3}')]
HI = [user("hi")]


@pytest.fixture
def player():
    return Player(Conversation(), ChatML())


def parent_of(player, messages, tools=()):
    return player.conversation.resolve(messages, list(tools), {}).parent


def test_the_order_of_keys_and_a_field_of_none_do_not_distinguish_messages(player):
    first = player.chat([{"role": "user", "content": "hi"}], "ab", [{"name": "t", "strict": True}])
    turned = [{"name": None, "content": "hi", "role": "user"}, echo(first), user("x")]
    assert parent_of(player, turned, [{"strict": True, "name": "t"}]) is first
    assert parent_of(player, turned, [{"strict": False, "name": "t"}]) is None


def test_calls_are_named_by_their_node_and_may_come_back_in_part(player):
    player.chat([user("x")], "ab")
    node = player.chat(HI, "", calls=[("search", "{}"), ("add", "{}")])
    back = echo(node)
    assert [call["id"] for call in back["tool_calls"]] == ["call_1_0", "call_1_1"]
    del back["tool_calls"][0]
    assert parent_of(player, [*HI, back, tool("call_1_1", "3")]) is node
    foreign = echo(node)
    foreign["tool_calls"][0]["function"]["name"] = "delete"
    assert player.ask([*HI, foreign, tool("call_1_0", "3")]).cause == "fork:assistant"
    mixed = {**back, "tool_calls": [*back["tool_calls"], {"id": "call_9_9", "function": {"name": "add"}}]}
    assert parent_of(player, [*HI, mixed, tool("call_1_1", "3")]) is None


def test_the_best_of_several_equal_answers_is_recognised(player):
    """In order: the one continued in the same way, a trained one, the one with the same blanks, the newest."""
    one = player.chat(HI, "ab")
    below = player.chat([*HI, echo(one), user("p")], "b")
    other = player.chat(HI, "ab")
    player.chat(HI, "ab", untrained=True)
    blank = player.chat(HI, "ab ")
    assert parent_of(player, [*HI, echo(one), user("p"), echo(below), user("q")]) is below
    assert parent_of(player, [*HI, echo(one), user("q")]) is other
    assert parent_of(player, [*HI, echo(blank), user("q")]) is blank


NEXT, RESULT, NO = user("x"), tool("call_0_0", "x"), {"role": "assistant", "content": "no"}
CHARACTERS = {"encode": by_character}
CAUSES = {
    "goes on": ("extend", ChatML, lambda a: [*HI, a, RESULT], {}),
    "continues without end token": ("extend", NoEnd, lambda a: [*HI, a, NEXT], {}),
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
def test_a_fork_has_its_reason(name):
    cause, renderer, second, how = CAUSES[name]
    player = Player(Conversation(history=how.get("history", "sampled")), renderer())
    answer = {key: how[key] for key in ("cut", "calls", "encode") if key in how}
    node = player.chat(HI, "ab", reasoning="b", **{"calls": SEARCH, **answer})
    messages, tools = second(echo(node, reasoning=True)), how.get("tools", [])
    if "twice" in how:
        player.chat(messages, "b", tools)
    assert player.ask(messages, tools).cause == cause


@pytest.mark.parametrize("arguments", ["", "[1]", "[" * 100_000, '{"q": "\\ud800"}', SEARCH[0][1]])
def test_arguments_are_an_object_for_the_template_if_they_parse_as_one(player, arguments):
    node = player.chat(HI, "", calls=[("search", arguments)])
    shown = node.for_template()["tool_calls"][0]["function"]["arguments"]
    assert shown == ({"q": "ab", "k": 3} if arguments == SEARCH[0][1] else arguments)
    assert player.ask([*HI, echo(node), RESULT]).parent is node


def test_half_of_a_surrogate_pair_is_distinguished_and_endless_nesting_refused(player):
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


def test_an_untrained_answer_is_context_for_later_turns_and_never_sampled(player):
    first = player.chat(HI, "ab", reasoning="why", untrained=True)
    second = player.chat([*HI, echo(first), user("x")], "b")
    player.chat([*HI, echo(first), user("x"), echo(second), user("y")], "a", untrained=True)
    player.chat([user("a title for this")], "ba", untrained=True)
    [sequence] = player.conversation.sequences()
    assert [span.role for span in sequence.spans] == ["repeated", "context", "sampled"]
    assert len(sequence.tokens) == second.length - len(sequence.prompt_ids)
    # The main line keeps the reasoning that the agent dropped.
    assert player.conversation.messages() == [*HI, first.message, user("x"), second.message]
    assert first.message["reasoning_content"] == "why"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_sequences_does_not_depend_on_which_call_was_answered_first(player, order):
    asked = [(player.ask(HI), "ab"), (player.ask(HI), "ba"), (player.ask([user("a")]), "b")]
    for call in order:
        player.answer(*asked[call])
    ids = {node.message["content"]: node.ids.tolist() for node in player.conversation.nodes}
    sequences = player.conversation.sequences()
    assert [sequence.tokens.tolist() for sequence in sequences] == [ids["b"], ids["ab"], ids["ba"]]
    assert [message["content"] for message in player.conversation.messages()] == ["a", "b"]


def test_a_reworded_answer_is_still_credited_with_later_rewards(player):
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
    for value in (float("nan"), 1e300):
        with pytest.raises(InvalidRequest, match="finite number up to 1e.18"):
            conversation.reward(None, value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [], "logprobs": [], "spans": []},
        {"logprobs": [-1.0]},
        {"spans": [VersionSpan(3, 0, 1), VersionSpan(4, 0, 2)]},
        {"spans": [VersionSpan(-1, 0, 2)]},
        {"prompt": "changed on its way"},
    ],
)
def test_an_answer_that_is_not_covered_is_not_kept(player, wrong):
    prompt = player.ask([*HI, echo(player.chat(HI, "ab")), user("x")])
    if wrong.pop("prompt", None):
        prompt.ids[0] += 1
    answer = {"tokens": [65, 66], "logprobs": [-1.0, -2.0], "spans": [VersionSpan(3, 0, 2)]} | wrong
    with pytest.raises(AssertionError):
        player.conversation.commit(prompt, finish="stop", content="ab", **answer)
    assert len(player.conversation.nodes) == 1


def test_spans_record_that_a_token_was_sampled_over_older_keys(player):
    spans = [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2, True)]
    answer = {"tokens": [65, 66], "logprobs": [-1.0, -2.0], "finish": "stop", "content": "AB"}
    player.conversation.commit(player.ask(HI), spans=spans, **answer)
    assert player.conversation.sequences()[0].spans == spans


def test_two_first_calls_at_once_are_one_root_and_one_branch(player):
    prompts = [player.ask([user(text)]) for text in ("p", "q")]
    assert [prompt.cause for prompt in prompts] == ["root", "root"]
    assert [player.answer(prompt, "a").cause for prompt in prompts] == ["root", "fork:branch"]
    assert player.conversation.counts().forks == {"branch": 1}


def test_a_fork_continues_the_recognised_one_of_answers_with_equal_tokens():
    player = Player(Conversation(), CutIsTheEnd())
    _, newest = (player.chat(HI, "ab", cut=True) for _ in range(2))
    prompt = player.ask([*HI, echo(newest), user("x")])
    assert prompt.cause == "extend" and prompt.parent is prompt.resolved.parent is newest


def test_cost_factor_distinguishes_forks_from_a_linear_conversation(player):
    messages = [*HI]
    for _ in range(6):
        player.chat(messages, "ab ab")
        messages = [*messages, user("I called a tool"), user("it said x")]
    assert player.conversation.counts().forks == {"branch": 5}
    # Tokens that it shares by chance are not prefilled again.
    assert 1.0 < player.conversation.counts().cost_factor < 2.0
