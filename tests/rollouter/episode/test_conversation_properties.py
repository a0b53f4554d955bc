"""Conversations of random agents, compared with the engine's inputs and samples."""

import numpy as np
import pytest
from conversation_cases import TEMPLATES, Player, by_character, echo, encode, reserialised, tool, user
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import EpisodeOver
from asyncrl.rollouter.episode.conversation import Conversation

TOOLS = [[], [], [], [{"name": "search"}]]


class Agent:
    """Threads of messages that grow, branch, shrink and overlap at random."""

    def __init__(self, random, renderer, history):
        self.random = random
        self.player = Player(Conversation(history=history), renderer)
        self.threads = [([user("ab")], [], None)]
        """Messages, tools, and the answer that they end with the echo of."""

    def play(self, rounds):
        for _ in range(rounds):
            asked = [self.ask() for _ in range(self.random.choice([1, 1, 1, 2, 4]))]
            self.random.shuffle(asked)
            for prompt, messages, tools in asked:
                self.answer(prompt, messages, tools)
            for node in self.player.conversation.nodes:
                if self.random.random() < 0.2:
                    self.player.conversation.reward(node.id, self.random.choice([-2.0, 0.0, 1.0, 8.0]))
        return self.player

    def ask(self):
        random = self.random
        messages, tools, last = random.choice(self.threads[-3:])
        kind = random.choice("gggggggarcesf")
        messages = list(messages)
        if kind == "r":
            messages = messages[: random.randrange(1, len(messages) + 1)]
        elif kind == "c":
            messages = [{"role": "system", "content": "s"}, user(self.text())]
        elif kind == "e":
            place = random.randrange(len(messages))
            if messages[place]["role"] != "assistant":
                messages[place] = {**messages[place], "content": self.text()}
        elif kind == "s":
            messages, tools = [user(self.text())], random.choice(TOOLS)
        elif kind == "f":
            messages.append({"role": "assistant", "content": self.text()})
        goes_on, answered = kind in "ga", len(messages)
        if goes_on and last is not None:
            calls = messages[-1].get("tool_calls") or ()
            messages += [tool(call["id"], self.text()) for call in calls] or [user(self.text())]
        elif kind != "r" or messages[-1]["role"] == "assistant":
            messages.append(user(self.text()))
        prompt = self.player.ask(messages, tools)
        if goes_on and last is not None:
            self.must_go_on(prompt, last, len(messages) - answered)
        return prompt, messages, tools

    def must_go_on(self, prompt, last, following):
        """The answer, which ``following`` messages follow, is recognised.

        If several messages have its text after the same messages, any may be: answers, or an answer that the agent made
        up and sent.
        """
        resolved = prompt.resolved
        point = resolved.point
        for _ in range(following - len(resolved.unknown)):
            point = point.parent
        if point.node is not None:
            assert resolved.parent is point.node
        assert point.node is last or (
            not last.tool_calls and point.message["content"].strip() == last.message["content"].strip()
        )

    def answer(self, prompt, messages, tools):
        random = self.random
        node = self.player.answer(
            prompt,
            self.text(),
            reasoning=random.choice([None, None, "b", "ab b"]),
            calls=[("search", '{"q":  1}')] * random.choice([0, 0, 1, 2]),
            versions=random.choice([(0,), (1, 2), (2, 1, 2)]),
            untrained=random.random() < 0.15,
            cut=random.random() < 0.1,
            encode=random.choice([encode, by_character]),
        )
        back = echo(
            node,
            reasoning=random.random() < 0.3,
            arguments=random.choice([str, reserialised]),
            strip=random.random() < 0.5,
        )
        self.threads.append(([*messages, back], tools, node))

    def text(self):
        return self.random.choice(["", "a", "ab", "ba ", " abab", "b"])


@pytest.fixture(params=TEMPLATES, scope="module")
def renderer(request):
    return request.param()


plays = settings(max_examples=examples(40), deadline=None)


@plays
@given(st.randoms(use_true_random=False), st.integers(1, 10), st.sampled_from(["sampled", "sampled", "template"]))
def test_invariants_hold_for_random_agents(renderer, random, rounds, history):
    agent = Agent(random, renderer, history)
    player = agent.play(rounds)
    every_path_holds_the_submitted_and_sampled_tokens(player)
    each_prompt_extends_the_deepest_matching_path(player)
    each_sampled_token_is_trained_once_in_its_context(player)
    past_reward_is_that_of_brute_force(player)
    sealed_is_immutable(agent)


def every_path_holds_the_submitted_and_sampled_tokens(player):
    assert [call.node for call in player.calls] == player.conversation.nodes
    for call in player.calls:
        node, prompt = call.node, call.prompt
        assert node.path_ids().tolist() == [*call.submitted, *call.tokens]
        assert node.parent is prompt.parent and node.length == len(call.submitted) + len(call.tokens)
        messages = prompt.resolved.messages
        for sent, restored in zip(call.messages, messages, strict=True):
            assert sent == restored or any(same_answer(sent, other.node, restored) for other in player.calls)
        parent = prompt.resolved.parent
        if parent is not None:
            asked = player.calls[parent.id].prompt.resolved.messages
            assert messages[: len(asked) + 1] == [*asked, parent.for_template()]
        if call.extension:
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            extension = player.renderer.extension(messages[last + 1 :], call.tools, {}, last_ids=parent.ids.tolist())
            assert call.submitted == [*parent.path_ids().tolist(), *extension]
        else:
            assert call.submitted == player.renderer.render(messages, call.tools, {})


def same_answer(sent, node, restored):
    ids = [call["id"] for call in sent.get("tool_calls") or ()]
    same = (
        ids == [call.id for call in node.tool_calls]
        if ids
        else sent["content"].strip() == node.message["content"].strip()
    )
    return sent["role"] == "assistant" and same and restored == node.for_template()


def each_prompt_extends_the_deepest_matching_path(player):
    for call in player.calls:
        parent = call.node.parent
        if call.prompt.cause == "extend":
            assert parent is call.prompt.resolved.parent
        else:
            assert (parent.length if parent else 0) == call.longest_path


def each_sampled_token_is_trained_once_in_its_context(player):
    sampled = {
        score: (call, place) for call in player.calls for place, score in enumerate(call.logprobs) if not call.untrained
    }
    trained = []
    for sequence in player.conversation.sequences():
        assert (sequence.tokens.dtype, sequence.logprobs.dtype) == (np.int32, np.float32)
        assert not sequence.prompt_ids.flags.writeable
        whole = [*sequence.prompt_ids.tolist(), *sequence.tokens.tolist()]
        prompt = len(sequence.prompt_ids)
        assert sequence.routes.ravel().tolist() == whole[:-1], "each token has its own route, which is its id here"
        scores = iter(sequence.logprobs.tolist())
        members = iter(np.split(sequence.sets.ids, np.cumsum(sequence.sets.sizes)[:-1]))
        end = 0
        for span in sequence.spans:
            assert span.start == end < span.end
            end = span.end
            assert (span.version >= 0) == (span.role == "sampled")
            for position in range(span.start, span.end) if span.role == "sampled" else ():
                score = next(scores)
                trained.append(score)
                call, place = sampled[score]
                assert whole[: prompt + position] == [*call.submitted, *call.tokens[:place]]
                assert (whole[prompt + position], span.version) == (call.tokens[place], call.versions[place])
                assert next(members).tolist() == [call.tokens[place]] * (1 + place % 2)
        assert end == len(sequence.tokens) and next(scores, None) is None and next(members, None) is None
        assert prompt > 0 and sequence.spans[0].role != "context" and sequence.spans[-1].role == "sampled"
    assert sorted(trained) == sorted(sampled)


def past_reward_is_that_of_brute_force(player):
    conversation = player.conversation
    after = {node.id: {node.id} for node in conversation.nodes}
    for later in conversation.nodes:
        seen, open_nodes = set(), [later]
        while open_nodes:
            node = open_nodes.pop()
            if node.id not in seen:
                seen.add(node.id)
                after[node.id].add(later.id)
                open_nodes += [n for n in (node.parent, *player.calls[node.id].prompt.resolved.before) if n]
    rewards = conversation.rewards
    names = {call.logprobs[0]: call.node.id for call in player.calls}
    for sequence in conversation.sequences():
        scores = iter(sequence.logprobs.tolist())
        for turn in sequence.turns:
            first, *_ = [next(scores) for _ in range(turn.start, turn.end)]
            brought = sum(rewards.get(node, 0.0) for node in after[names[first]])
            assert turn.past_reward == pytest.approx(sum(rewards.values()) - brought)
        assert next(scores, None) is None


def sealed_is_immutable(agent):
    conversation = agent.player.conversation
    late = [agent.ask() for _ in range(2)]

    def state():
        sequences = [(s.prompt_ids.tolist(), s.tokens.tolist(), s.spans, s.turns) for s in conversation.sequences()]
        return sequences, conversation.messages(), conversation.counts(), list(conversation.nodes)

    before = state()
    conversation.seal("time")
    for prompt, messages, tools in late:
        with pytest.raises(EpisodeOver, match="time"):
            agent.answer(prompt, messages, tools)
        with pytest.raises(EpisodeOver, match="time"):
            agent.player.ask(messages, tools)
    with pytest.raises(EpisodeOver, match="time"):
        conversation.reward(0, 1.0)
    assert state() == before


@plays
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_an_agent_that_keeps_the_conversation_makes_one_sequence(random, turns):
    """Reasoning, JSON and blanks may change on the way back."""
    agent = Agent(random, TEMPLATES[0](), "sampled")
    messages, total = [user("ab")], 0.0
    for number in range(turns):
        agent.answer(agent.player.ask(messages), messages, [])
        messages, _, node = agent.threads[-1]
        calls = messages[-1].get("tool_calls") or ()
        messages = [*messages, *([tool(call["id"], agent.text()) for call in calls] or [user(agent.text())])]
        total += agent.player.conversation.rewards.setdefault(node.id, float(number))
    conversation = agent.player.conversation
    counts = conversation.counts()
    assert (counts.forks, counts.cost_factor, counts.turns) == ({}, 1.0, turns)
    assert counts.context_tokens + counts.sampled_tokens == node.length
    last = next((node for node in reversed(conversation.nodes) if node.trained), None)
    sequences = conversation.sequences()
    assert len(sequences) == (last is not None)
    for sequence in sequences:
        assert len(sequence.prompt_ids) + len(sequence.tokens) == last.length
        trained = [node.id for node in conversation.nodes if node.trained]
        assert [turn.past_reward for turn in sequence.turns] == [float(sum(range(node))) for node in trained]
