"""Episodes in the plain loop (synchronous.py): the user's function plays in this process, each call answered by itself.

A call continues the answer that its messages repeat; the tokens of that answer are not encoded again. Each answer
without a continuation makes one sequence, in the order of the calls. There are no limits of turns, context or time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.episodes.playing.client import Reply, Task
from asyncrl.episodes.playing.players import Player, resolve
from asyncrl.messages.groups import Lease, Trajectory, Turn, VersionSpan
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.reward import read_outcome
from asyncrl.messages.token_sets import TokenSets, join_sets
from asyncrl.rollouter.episode.player import first_messages, task_seed
from asyncrl.rollouter.serving.generation import Response
from asyncrl.text.chat.renderer import Renderer, make_renderer
from asyncrl.text.tokenizer import Tokenizer

Ask = Callable[[str, list[int]], Awaitable[Response]]
"""Samples a continuation of token ids, with the noise of a key."""


@dataclass(eq=False)
class Answer:
    """A call of the policy, and what it answered."""

    path: list[Answer]
    """The answers before it, and itself."""
    number: int
    context: list[int] = field(default_factory=list)
    """Tokens behind the answer before."""
    response: Response | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages it was asked with, and its own."""

    def ids(self) -> list[int]:
        """Token ids up to its end."""
        return [id for each in self.path for id in (*each.context, *(each.response.tokens if each.response else ()))]


class Play:
    """The client of one episode."""

    def __init__(self, renderer: Renderer, ask: Ask) -> None:
        self.answers: list[Answer] = []
        self._renderer, self._ask = renderer, ask
        self._asked: Counter[str] = Counter()

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> Reply:
        """Answer a call, as Client does."""
        asked = [dict(message) for message in messages]
        known = [each for each in self.answers if each.messages and asked[: len(each.messages)] == each.messages]
        last = max(known, key=lambda each: len(each.messages), default=None)
        answer = Answer([], len(self.answers))
        if last is not None and last.response is not None:
            tail = asked[len(last.messages) :]
            context = self._renderer.extension(tail, (), {}, last_ids=last.response.tokens)
            assert context is not None, "the template allows it"
            answer.path, answer.context = [*last.path, answer], context
        else:
            answer.path, answer.context = [answer], self._renderer.render(asked, (), {})
        self.answers.append(answer)
        prompt = answer.ids()
        digest = hashlib.blake2b(np.array(prompt, np.int32).tobytes(), digest_size=8).hexdigest()
        self._asked[digest] += 1
        answer.response = response = await self._ask(f"{digest}/{self._asked[digest]}", prompt)
        content = self._renderer.parse(response.tokens, ()).content
        answer.messages = [*asked, {"role": "assistant", "content": content}]
        return Reply(content, None, [], "stop", len(prompt), len(response.tokens))

    def sequences(self) -> list[TokenSequence]:
        """The sequences to train: each answer once, in the first sequence that has it."""
        inner = {above for each in self.answers for above in each.path[:-1]}
        leaves = [each for each in self.answers if each not in inner]
        leaves.sort(key=lambda leaf: [(np.array(each.context, np.int32).tobytes(), each.number) for each in leaf.path])
        held: set[Answer] = set()
        found = []
        for leaf in leaves:
            tokens: list[int] = []
            logprobs: list[float] = []
            sets: list[TokenSets | None] = []
            spans: list[VersionSpan] = []
            turns: list[Turn] = []
            for each in leaf.path:
                assert each.response is not None
                if each is not leaf.path[0]:
                    spans.append(VersionSpan(-1, len(tokens), len(tokens) + len(each.context), role="context"))
                    tokens += each.context
                begin = len(tokens)
                tokens += each.response.tokens
                if each in held:
                    spans.append(VersionSpan(-1, begin, len(tokens), role="repeated"))
                    continue
                held.add(each)
                logprobs += each.response.logprobs
                sets.append(each.response.sets)
                spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in each.response.spans]
                turns.append(Turn(begin, len(tokens), 0.0))
            arrays = {"tokens": np.array(tokens, np.int32), "logprobs": np.array(logprobs, np.float32)}
            prompt_ids = np.array(leaf.path[0].context, np.int32)
            made = TokenSequence(prompt_ids=prompt_ids, spans=spans, turns=turns, sets=join_sets(sets), **arrays)
            found.append(made)
        return found


def make_episode(config: Config, tokenizer: Tokenizer) -> Callable[[Ask, Lease, int], Coroutine[Any, Any, Trajectory]]:
    """Plays a sample of a lease."""
    player = resolve("function", [config.episode.function or ""], config.episode.options, lambda *_: None)
    return partial(play, player, make_renderer(config, tokenizer), config)


async def play(player: Player, renderer: Renderer, config: Config, ask: Ask, lease: Lease, sample: int) -> Trajectory:
    """An episode and its reward."""
    seed, where = task_seed(config.run.seed, lease.uid), f"{lease.uid}/{sample}/0"
    messages, tools = first_messages(config, lease)
    said: Any = {"prompt": lease.prompt, "messages": messages, "tools": tools, "row": lease.row}
    task = Task(**said, seed=seed, uid=lease.uid, sample=sample, attempt=0)
    client: Any = Play(renderer, lambda key, ids: ask(f"{where}/{key}", ids))
    reward, components = read_outcome(await player(task, client))
    last = client.answers[-1]
    return Trajectory(
        sample=sample,
        sequences=client.sequences(),
        messages=last.messages,
        finish_reason="length" if last.response.finish_reason == "length" else "stop",
        text=last.messages[-1]["content"],
        reward=reward,
        components=components,
    )
