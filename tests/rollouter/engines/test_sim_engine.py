"""The simulated engine: its timing model by itself, and the engine on a virtual clock."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouter.engines.engine_cases import LONG_S, load, part_of
from tiny_models import Publisher
from virtual import run_virtual

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.config.rollout import SimEngineConfig
from asyncrl.errors import EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import Engine, GenerationRequest, TokenDelta
from asyncrl.rollouter.engines.sim_model import BLOCK, Batch, PrefixCache, content, response_length
from asyncrl.weights.collective.sender import Sender

RUN = run_virtual


def request(id: str, *, prompt: int | list[int] = 10, max_tokens: int = 10_000, **fields: Any) -> GenerationRequest:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    return GenerationRequest(id=id, prompt_ids=ids, max_tokens=max_tokens, temperature=1.0, seed=None, **fields)


def sim(**fields: Any) -> SimEngineConfig:
    defaults = {
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 1.0,
        "decode_step_per_request_s": 0.5,
        "length": "constant",
        "length_median": 20,
    }
    return SimEngineConfig.model_validate(defaults | fields)


def batch(interval: int = 4, crash_after: int | None = None, **fields: Any) -> Batch:
    made = Batch(sim(**fields), 0, interval, crash_after)
    made.freeze(0.0)
    made.load(0, recompute_kv=False)
    made.thaw(0.0)
    return made


class Taken:
    """Deltas that a batch has handed over, joined by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[float]] = defaultdict(list)
        self.last: dict[str, TokenDelta] = {}

    def take(self, made: Batch) -> None:
        for id, delta in made.take():
            assert id not in self.last
            assert len(delta.tokens) == len(delta.logprobs)
            self.tokens[id] += delta.tokens
            self.logprobs[id] += delta.logprobs
            if delta.finish_reason:
                self.last[id] = delta


def run(made: Batch, until: float = 1e9) -> tuple[Taken, float]:
    """Follow its events; returns what it handed over and the time of the last event."""
    taken, now = Taken(), 0.0
    while (due := made.next_event()) is not None and due <= until:
        now = due
        made.advance(now)
        taken.take(made)
    taken.take(made)
    return taken, now


def test_what_an_earlier_turn_left_is_not_prefilled_again():
    made = batch()
    question = [3] * 500
    made.submit(0.0, request("a", prompt=question, key="first"))
    taken, now = run(made)
    grown = [*question, *taken.tokens["a"], *[4] * 100]
    made.submit(now, request("b", prompt=grown, key="second"))
    # 520 tokens are known, 512 of them in whole blocks.
    assert run(made)[1] - now == pytest.approx((620 - 512) / 1000 + 20)
    for salt, id in (("v1", "c"), ("v1", "d")):
        now = now + 1000
        made.submit(now, request(id, prompt=grown, cache_salt=salt))
        # Of a context that is all known one token is computed all the same, and blocks are whole.
        assert run(made)[1] - now == pytest.approx((620 if id == "c" else 620 - 608) / 1000 + 20)
    made.freeze(now + 100)
    made.load(1, recompute_kv=True)
    made.thaw(now + 100)
    made.submit(now + 100, request("e", prompt=grown, cache_salt="v1"))
    assert run(made)[1] - now == pytest.approx(100 + 620 / 1000 + 20)


def test_the_prefix_cache_keeps_what_was_used_last():
    cache = PrefixCache(10 * BLOCK)
    contexts = [cache.blocks("", [number] * 6 * BLOCK) for number in range(3)]
    for blocks in contexts[:2]:
        cache.put(blocks)
    assert [cache.held(blocks) for blocks in contexts] == [4 * BLOCK, 6 * BLOCK, 0]
    cache.put(contexts[0])
    assert [cache.held(blocks) for blocks in contexts] == [6 * BLOCK, 4 * BLOCK, 0]
    assert cache.blocks("", [0] * (6 * BLOCK + 5)) == contexts[0] != cache.blocks("v1", [0] * 6 * BLOCK)


@pytest.mark.parametrize("running", [1, 3])
def test_requests_take_their_prefill_and_steps_that_grow_with_the_number_running(running):
    made = batch()
    for id in range(running):
        made.submit(0.0, request(f"{id}", prompt=[id] * 500))
    taken, now = run(made)
    assert now == pytest.approx(running * 0.5 + 20 * (1.0 + (running - 1) * 0.5))
    assert taken.last["0"].finish_reason == "stop"
    assert taken.last["0"].spans == [VersionSpan(0, 0, 20)]


def test_requests_queue_for_the_cache_by_priority():
    made = batch(kv_tokens=65)
    for id, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        made.submit(0.0, request(id, priority=priority))
    assert (made.running, made.waiting) == (2, 3)
    order = []
    while (due := made.next_event()) is not None:
        made.advance(due)
        order += [id for id, delta in made.take() if delta.finish_reason]
    assert order == ["a", "b", "e", "d", "c"]


def test_frozen_requests_stand_still_and_carry_both_versions():
    made = batch()
    made.submit(0.0, request("a", prompt=1000))
    made.advance(6.2)
    made.freeze(6.2)
    assert made.next_event() is None
    made.load(3, recompute_kv=True)
    made.thaw(100.0)
    taken, now = run(made)
    # Five tokens after a second of prefill; then prompt and tokens are processed again.
    assert taken.last["a"].spans == [VersionSpan(0, 0, 5), VersionSpan(3, 5, 20)]
    assert now == pytest.approx(100.0 + 1.005 + 15)


def test_stale_cache_marks_the_spans_of_those_who_kept_it():
    made = batch(kv_tokens=45)
    made.submit(0.0, request("a"))
    made.submit(0.0, request("b"))
    made.advance(5.5)
    made.freeze(5.5)
    made.load(1, recompute_kv=False)
    made.thaw(5.5)
    taken, _ = run(made)
    assert taken.last["a"].spans == [VersionSpan(0, 0, 5), VersionSpan(1, 5, 20, True)]
    assert taken.last["b"].spans == [VersionSpan(1, 0, 20)]


def test_crash_comes_after_its_steps():
    made = batch(crash_after=6)
    made.submit(0.0, request("a"))
    assert run(made)[1] == pytest.approx(0.01 + 6)
    assert made.crashed
    assert made.next_event() is None


def test_lengths_are_lognormal():
    config = sim(length="lognormal", length_median=100.0, length_sigma=1.0)
    lengths = [response_length(config, 1, f"u{i}/0") for i in range(4000)]
    assert median(lengths) == pytest.approx(100, rel=0.1)
    assert sum(lengths) / len(lengths) == pytest.approx(100 * 2.718281828**0.5, rel=0.1)
    assert lengths == [response_length(config, 1, f"u{i}/0") for i in range(4000)]
    assert lengths != [response_length(config, 2, f"u{i}/0") for i in range(4000)]


@given(
    cuts=st.lists(st.floats(0.05, 30.0), max_size=6),
    keys=st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True),
    interval=st.integers(1, 20),
    kv_tokens=st.integers(40, 400),
    sigma=st.floats(0.0, 1.5),
    stops=st.lists(st.integers(33, 126), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_interruptions_change_nothing_of_a_response(cuts, keys, interval, kv_tokens, sigma, stops):
    """Tokens, log-probs and length are a function of seed, key and stop tokens, however often it was aborted."""
    made = batch(interval, length="lognormal", length_median=15, length_sigma=sigma, kv_tokens=kv_tokens)
    config = sim(length="lognormal", length_median=15, length_sigma=sigma)
    taken, held, now = Taken(), dict.fromkeys(keys, 0), 0.0

    def submit():
        for key, count in held.items():
            if f"{key}/done" not in taken.last:
                fields = {"key": f"{key}", "held": count, "stop_token_ids": stops}
                made.submit(now, request(f"{key}", prompt=10 + count, max_tokens=300 - count, **fields))

    def collect():
        taken.take(made)
        for id in list(taken.last):
            if not id.endswith("/done"):
                last = taken.last.pop(id)
                assert [span.version for span in last.spans] == [0] * bool(last.spans)
                held[int(id)] = len(taken.tokens[id])
                if last.finish_reason != "abort":
                    taken.last[f"{id}/done"] = last

    for cut in [*cuts, 1e9]:
        submit()
        end = now + cut
        while (due := made.next_event()) is not None and due <= end:
            made.advance(due)
            collect()
        now = end
        made.abort(now, made.ids())
        collect()
    for key in keys:
        total = min(300, response_length(config, 0, f"{key}"))
        whole, _ = content(0, f"{key}", 0, total)
        end = next((at for at, token in enumerate(whole, 1) if token in stops), None)
        assert (taken.tokens[f"{key}"], taken.logprobs[f"{key}"]) == content(0, f"{key}", 0, end or total)
        stopped = end is not None or response_length(config, 0, f"{key}") <= 300
        assert taken.last[f"{key}/done"].finish_reason == ("stop" if stopped else "length")
    assert made.running == made.waiting == 0


# --- the engine ---------------------------------------------------------------------------------------------


def config_for(**fields: Any) -> Config:
    defaults = {"length": "constant", "length_median": 40, "load_s": 0.5}
    return validate_config(
        {
            "data": {"source": "synthetic"},
            "learner": {"backend": "sim"},
            "rollout": {"engine": "sim", "stream_interval": 8, "sim": defaults | fields},
        }
    )


class Weights:
    """Publishes versions that an engine loads."""

    def __init__(self, engine: Engine) -> None:
        self.publisher, self._engine = Publisher(), engine

    async def load(self, version: int, mode: str = "abort", *, recompute_kv: bool = True) -> None:
        manifest = self.publisher.publish(version, {"w": torch.full((64,), version)})
        await load(self._engine, manifest, mode=mode, recompute_kv=recompute_kv)


async def collect(engine: Engine, asked: GenerationRequest) -> tuple[list[int], TokenDelta]:
    tokens: list[int] = []
    async for delta in engine.generate(asked):
        tokens += delta.tokens
    return tokens, delta


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[tuple[Engine, Weights]]:
    """An engine that serves version 0."""
    engine = make_engine(config_for(**fields), "rollouter/0")
    weights = Weights(engine)
    try:
        await engine.start()
        await weights.load(0)
        yield engine, weights
    finally:
        await engine.close()
        weights.publisher.close()


async def test_engine_keeps_the_model_times():
    async with serving() as (engine, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(5)))
        assert sum(len(tokens) for tokens, _ in answers) == 200
        assert loop.time() - began == pytest.approx(5 * 10 / 50_000 + 40 * (0.02 + 4 * 0.0002), rel=1e-6)


async def test_updates_abort_keep_and_wait():
    ended = []
    async with serving() as (engine, weights):
        for version, mode in enumerate(("abort", "keep", "wait"), start=1):
            stream = asyncio.ensure_future(collect(engine, request(f"r{version}", key="same")))
            await asyncio.sleep(0.3)
            await weights.load(version, mode, recompute_kv=version == 1)
            ended.append(await stream)
    (cut, aborted), (kept, switched), (waited, old) = ended
    assert aborted.finish_reason == "abort"
    assert len(cut) == 14
    assert kept == waited
    assert kept[:14] == cut
    assert switched.spans == [VersionSpan(1, 0, 14), VersionSpan(2, 14, 40, True)]
    assert old.finish_reason == "stop"
    assert old.spans == [VersionSpan(2, 0, 40)]


async def test_cancelled_reader_frees_its_place():
    async with serving() as (engine, _):
        stream = asyncio.ensure_future(collect(engine, request("a")))
        await asyncio.sleep(0.1)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        began = asyncio.get_running_loop().time()
        await engine.pause("wait")
        assert asyncio.get_running_loop().time() == began


async def test_crash_ends_streams_and_calls():
    async with serving(crash_probability=1.0) as (engine, _):
        outcomes = await asyncio.gather(
            *(collect(engine, request(f"r{i}")) for i in range(3)), engine.pause("wait"), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [EngineDied] * 4
        for call in (engine.checksum(), engine.pause("keep"), engine.resume(), engine.abort(["r0"])):
            with pytest.raises(EngineDied, match="rollouter/0: crashed"):
                await call


# --- the engine in a broadcast ------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_close_ends_a_broadcast_that_nobody_sends(after_s):
    async def go():
        engine, manifest = (
            make_engine(config_for(load_s=0.0), "rollouter/0"),
            publisher.publish(1, {"v": torch.zeros(3)}),
        )
        await engine.start()
        await engine.pause("abort")
        loading = asyncio.create_task(engine.load(part_of(sender, manifest), recompute_kv=False))
        await asyncio.sleep(after_s)
        # Less than the wait for the others would take.
        async with asyncio.timeout(LONG_S / 2):
            await engine.close()
            with pytest.raises(EngineDied, match="it was closed"):
                await loading

    threads = threading.active_count()
    with closing(Publisher()) as publisher, closing(Sender("gloo", "127.0.0.1", LONG_S)) as sender:
        asyncio.run(go())
    assert threading.active_count() == threads
