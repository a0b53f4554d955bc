"""Weights change again and again under running episodes, on the real vLLM, in each mode.

Whatever the mode: the version spans say which weights sampled each token, and its log-prob is what those weights give
it over the whole context before it; also where prompts and prefixes are shared, so that a cached block of other weights
would show.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from published_weights import stage
from test_messages import make_group
from test_vllm_engine import TOLERANCE, VllmEngine, config_for
from tiny_models import VOCAB, Publisher, logprobs_of, make_model, save_model

from asyncrl.messages.groups import Ticket
from asyncrl.messages.weights import Manifest
from asyncrl.monitor.states import StateLedger
from asyncrl.rollouter import generation
from asyncrl.rollouter.account import SampleAccount
from asyncrl.rollouter.engine_host import EngineHost
from asyncrl.rollouter.generation import PolicyCall
from asyncrl.rollouter.response import Response
from asyncrl.runtime.awaits import Awaits
from asyncrl.runtime.clock import LoopClock
from asyncrl.stops import resolve_stops

pytestmark = [
    # vLLM leaves its ZeroMQ contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]

EPISODES = 12
UPDATES = 5
MAX_TOKENS = 160
PROMPTS = [[(7 * i + 3) % 90 for i in range(40)], [(5 * i + 1) % 90 for i in range(33)]]
LONG_PROMPTS = [[(7 * i + 3) % 89 for i in range(104)], [(5 * i + 1) % 89 for i in range(97)]]
"""Three blocks of the KV cache and a part of one."""


class Letters:
    """A tokenizer of one character an id."""

    eos_ids: set[int] = set()
    special_ids: dict[str, int] = {}
    vocabulary = VOCAB

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + id) for id in ids)


class Borrowed:
    """A running engine that its host neither starts nor ends; it writes down when it is given requests."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.changing = False
        self.submitted_while_changing = 0
        self.resumed: list[int] = []
        """Tokens that each resume begins with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def generate(self, request: Any) -> Any:
        self.submitted_while_changing += self.changing
        if request.held:
            self.resumed.append(len(request.prompt_ids))
        return self._engine.generate(request)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(runner, tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), make_model(0))
    engine = VllmEngine(config_for(folder), "rollouter/0")
    try:
        runner.run(engine.start())
        yield engine
    finally:
        runner.run(engine.close())
        gc.collect()


@pytest.fixture(scope="module")
def versions():
    """Numbers that grow over all tests, as one engine sees them."""
    return itertools.count()


class Changing:
    """A host whose weights change between two models."""

    def __init__(self, engine: VllmEngine, versions: Iterator[int], **rollout: Any) -> None:
        self.config = config_for("unused", **rollout)
        self.borrowed = Borrowed(engine)
        self.stops = resolve_stops(self.config.rollout, Letters())
        clock = LoopClock()
        states = StateLedger(clock.now, "engine")
        self.host = EngineHost(self.config, lambda: self.borrowed, clock, states, Awaits(clock.now))  # type: ignore
        self.models = [make_model(seed) for seed in (1, 2)]
        self.prompts = PROMPTS
        self.of: dict[int, Any] = {}
        self._versions, self.publisher = versions, Publisher()

    async def update(self) -> None:
        """As the update follower does it."""
        version = next(self._versions)
        model = self.of[version] = self.models[version % 2]
        staged = await asyncio.to_thread(stage, self.publish(version, model))
        try:
            await self.host.accept(staged)
            assert await self.host.quiesced(60.0)
            self.borrowed.changing = True
            await self.host.pause(version)
            await self.host.load(staged)
            self.borrowed.changing = False
            await self.host.commit()
        finally:
            staged.close()

    def publish(self, version: int, model: Any) -> Manifest:
        return self.publisher.publish_model(version, model)

    async def episode(self, number: int, max_tokens: int = MAX_TOKENS) -> Response:
        prompt = self.prompts[number % len(self.prompts)]
        ticket: Ticket = msgspec.structs.replace(
            make_group().ticket,
            uid=f"0-{number}",
            prompt_ids=np.array(prompt, np.int32),
            temperature=1.0,
            max_tokens=max_tokens,
        )
        account = SampleAccount(ticket.uid, number, LoopClock().now)
        response = Response(max_tokens=max_tokens, stops=self.stops)
        call = PolicyCall(self.host, Letters(), self.config, ticket, account.call())  # type: ignore
        await call.generate(prompt, response, f"{ticket.uid}/{number}/1")
        return response

    async def run(self, episodes: int = EPISODES, updates: int = UPDATES) -> list[Response]:
        """All episodes at once, and the updates while they run."""
        await self.host.start()
        await self.update()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.episode(number)) for number in range(episodes)]
            for _ in range(updates):
                before = self.host.sampled_tokens
                while self.host.sampled_tokens < before + 200 and not all(task.done() for task in running):
                    await asyncio.sleep(0.002)
                await self.update()
        self.publisher.close()
        return [task.result() for task in running]

    async def run_over_versions(self, updates: int, episodes: int, max_tokens: int) -> list[Response]:
        """After each update the same episodes again; the next comes while they run."""
        await self.host.start()
        tasks: list[asyncio.Task[Response]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(updates):
                await self.update()
                enough = self.host.sampled_tokens + episodes * max_tokens / 4
                numbers = range(len(tasks), len(tasks) + episodes)
                tasks += [group.create_task(self.episode(number, max_tokens)) for number in numbers]
                while self.host.sampled_tokens < enough and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.002)
        self.publisher.close()
        return [task.result() for task in tasks]

    def worst(self, found: list[Response]) -> float:
        """The largest distance of a log-prob from what its version's own model gives it, where it promises to be none.

        ``found`` is from ``run_over_versions``.
        """
        worst = 0.0
        for number, generated in enumerate(found):
            prompt = self.prompts[number % len(self.prompts)]
            for span in generated.spans:
                if not span.mixed_kv:
                    truth = logprobs_of(self.of[span.version], prompt + generated.tokens)[len(prompt) - 1 :]
                    off = np.array(generated.logprobs) - truth
                    worst = max(worst, float(np.abs(off[span.start : span.end]).max()))
        return worst


def check(changing: Changing, found: list[Response], *, stale: bool = False) -> int:
    """Everything that holds in every mode; returns how many responses met an update."""
    assert changing.borrowed.submitted_while_changing == 0
    mixed = 0
    for number, generated in enumerate(found):
        prompt = PROMPTS[number % len(PROMPTS)]
        assert len(generated.tokens) == len(generated.logprobs) <= MAX_TOKENS
        ends = [0, *(span.end for span in generated.spans)]
        assert [span.start for span in generated.spans] == ends[:-1]
        assert ends[-1] == len(generated.tokens)
        versions = [span.version for span in generated.spans]
        assert versions == sorted(set(versions)), "a span each version, in order"
        mixed += len(versions) > 1
        truth = {id(model): logprobs_of(model, prompt + generated.tokens) for model in changing.models}
        for position, span in enumerate(generated.spans):
            assert span.mixed_kv == (stale and position > 0)
            if not span.mixed_kv:
                expected = truth[id(changing.of[span.version])][len(prompt) - 1 :][span.start : span.end]
                assert np.abs(np.array(generated.logprobs[span.start : span.end]) - expected).max() < TOLERANCE
    return mixed


@pytest.mark.parametrize(
    ("on_update", "keep_kv"), [("abort_resume", "recompute"), ("keep", "recompute"), ("keep", "stale")]
)
def test_tokens_on_both_sides_of_each_update_are_those_of_their_own_weights(
    runner, engine, versions, on_update, keep_kv
):
    """I3: each token carries the log-prob and the version of the weights that sampled it."""

    async def main():
        changing = Changing(engine, versions, on_update=on_update, keep_kv=keep_kv)
        found = await changing.run()
        assert check(changing, found, stale=keep_kv == "stale") >= EPISODES / 2
        assert any(len(generated.spans) > 2 for generated in found)
        check_reprefill(changing, keep_kv if on_update == "keep" else "")

    runner.run(main())


def check_reprefill(changing: Changing, kept: str) -> None:
    """What was aborted counts without what a sibling has brought into the cache, and what was kept as a whole."""
    again, resumed = changing.host.reprefill.tokens, changing.borrowed.resumed
    if kept == "stale":
        assert (again, resumed) == (0, [])
    elif kept:
        assert again >= len(PROMPTS[0]) and not resumed
    else:
        # A block of 32 tokens is the most that two of these prompts share.
        assert sum(resumed) - 32 * len(resumed) <= again <= sum(resumed) - 32


def _without_the_salt(monkeypatch: pytest.MonkeyPatch, _engine: VllmEngine) -> None:
    request = generation.GenerationRequest
    monkeypatch.setattr(
        generation, "GenerationRequest", lambda **fields: request(**(fields | {"cache_salt": "of all versions"}))
    )


def _without_the_drop(monkeypatch: pytest.MonkeyPatch, engine: VllmEngine) -> None:
    async def nothing(**_: Any) -> bool:
        return True

    monkeypatch.setattr(engine._llm, "reset_prefix_cache", nothing)


GUARDS = {"salt": _without_the_salt, "drop": _without_the_drop}


@pytest.mark.parametrize(
    ("mode", "without", "exact"),
    [
        (("abort_resume", "recompute"), [], True),
        (("abort_resume", "recompute"), ["salt"], True),
        (("abort_resume", "recompute"), ["drop"], True),
        (("abort_resume", "recompute"), ["salt", "drop"], False),
        (("keep", "recompute"), ["salt"], True),
        # What is kept would go on over keys and values of the old weights.
        (("keep", "recompute"), ["drop"], False),
        (("keep", "stale"), [], True),
        # Nothing is dropped there, and what begins after the update must not find what is left.
        (("keep", "stale"), ["salt"], False),
    ],
    ids=str,
)
def test_no_token_is_sampled_over_keys_and_values_of_older_weights(
    runner, engine, versions, monkeypatch, mode, without, exact
):
    """Prompts of several blocks come again under each version. Of the two guards each mode needs one: the drop of the
    cache in a load, and the salt of the version; without it the test sees old blocks."""
    for guard in without:
        GUARDS[guard](monkeypatch, engine)

    async def main():
        changing = Changing(engine, versions, on_update=mode[0], keep_kv=mode[1])
        changing.prompts = LONG_PROMPTS
        found = await changing.run_over_versions(updates=5, episodes=4, max_tokens=80)
        assert any(len(generated.spans) > 1 for generated in found), "updates meet episodes that run"
        worst = changing.worst(found)
        assert worst < TOLERANCE if exact else worst > 0.1

    runner.run(main())


def test_drained_responses_meet_no_update(runner, engine, versions):
    async def main():
        changing = Changing(engine, versions, on_update="drain")
        assert check(changing, await changing.run(updates=2)) == 0

    runner.run(main())


def test_responses_end_at_their_limit_and_at_stop_strings_over_any_number_of_resumes(runner, engine, versions):
    async def main():
        plain = Changing(engine, versions)
        texts = [Letters().decode(generated.tokens) for generated in await plain.run(updates=0)]
        # Strings that do occur, of two characters, so that updates fall into some of them.
        stops = sorted({text[at : at + 2] for text in texts for at in range(20, min(len(text) - 2, 140), 40)})[:24]
        changing = Changing(engine, versions, stop=stops)
        found = await changing.run(episodes=24, updates=8)
        assert check(changing, found) > 0
        assert max(generated.submissions for generated in found) >= 3
        stopped = 0
        for generated in found:
            text = Letters().decode(generated.tokens)
            first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
            if first is None:
                assert len(generated.tokens) == MAX_TOKENS or generated.tokens[-1] == 95
            else:
                stopped += 1
                assert len(text) == first + 2, "nothing comes after a stop string, and none is missed"
                assert generated.finish_reason == "stop"
        assert stopped > 0

    runner.run(main())
