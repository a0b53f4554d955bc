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
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouter.engines.engine_cases import LONG_S, ask, load, part_of
from tiny_models import Publisher
from virtual import run_virtual

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.config.rollout import SimEngineConfig
from asyncrl.core.errors import EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import Engine, GenerationRequest, TokenDelta
from asyncrl.rollouter.engines.sim_model import BLOCK, Batch, PrefixCache, content, response_length
from asyncrl.weights.broadcast import Sender
from tools.waiting import wait_until

RUN = run_virtual
STEP = {"prefill_tokens_per_s": 1000.0, "decode_step_s": 1.0, "decode_step_per_request_s": 0.5}


def request(id: str, prompt: int | list[int] = 10, max_tokens: int = 10_000, **fields: Any) -> GenerationRequest:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    return ask(ids, id=id, max_tokens=max_tokens, **fields)


def sim(**fields: Any) -> SimEngineConfig:
    return SimEngineConfig.model_validate(STEP | {"length": "constant", "length_median": 20} | fields)


def batch(interval: int = 4, **fields: Any) -> Batch:
    made = Batch(sim(**fields), 0, interval, None)
    made.freeze(0.0)
    update(made, 0.0, 0, recompute_kv=False)
    return made


def update(made: Batch, now: float, version: int, *, recompute_kv: bool) -> None:
    made.load(version, recompute_kv=recompute_kv)
    made.thaw(now)


class Taken:
    """Deltas that a batch has handed over, joined by request; ``last`` is in the order of their ends."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[float]] = defaultdict(list)
        self.last: dict[str, TokenDelta] = {}
        self.now = 0.0

    def follow(self, made: Batch, until: float = 1e9) -> Taken:
        """Take the deltas handed over until a time; ``now`` is that of the last event."""
        while (due := made.next_event()) is not None and due <= until:
            self.now = due
            made.advance(due)
            self.take(made)
        self.take(made)
        return self

    def take(self, made: Batch) -> None:
        for id, delta in made.take():
            assert id not in self.last
            assert len(delta.tokens) == len(delta.logprobs)
            self.tokens[id] += delta.tokens
            self.logprobs[id] += delta.logprobs
            if delta.finish_reason:
                self.last[id] = delta


def test_the_context_of_an_earlier_turn_is_not_prefilled_again():
    made, question = batch(), [3] * 500

    def seconds(id, prompt, salt=""):
        began = taken.now
        made.submit(began, request(id, prompt, cache_salt=salt, key=id))
        return taken.follow(made).now - began

    taken = Taken()
    seconds("a", question)
    grown = [*question, *taken.tokens["a"], *[4] * 100]
    # 520 tokens are known, 512 of them in whole blocks.
    assert seconds("b", grown) == pytest.approx((620 - 512) / 1000 + 20)
    assert seconds("c", grown, "v1") == pytest.approx(620 / 1000 + 20)
    # One token of a known context is computed all the same, and blocks are whole.
    assert seconds("d", grown, "v1") == pytest.approx((620 - 608) / 1000 + 20)
    made.freeze(taken.now)
    update(made, taken.now, 1, recompute_kv=True)
    assert seconds("e", grown, "v1") == pytest.approx(620 / 1000 + 20)


def test_the_prefix_cache_keeps_the_latest_prefixes():
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
        made.submit(0.0, request(f"{id}", [id] * 500))
    taken = Taken().follow(made)
    assert taken.now == pytest.approx(running * 0.5 + 20 * (1.0 + (running - 1) * 0.5))
    assert taken.last["0"].finish_reason == "stop"


def test_requests_queue_for_the_cache_by_priority():
    made = batch(kv_tokens=65)
    for id, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        made.submit(0.0, request(id, priority=priority))
    assert (made.running, made.waiting) == (2, 3)
    assert list(Taken().follow(made).last) == ["a", "b", "e", "d", "c"]


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_frozen_requests_stop_and_have_both_versions(recompute_kv):
    made = batch(kv_tokens=1035)
    for id in "ab":
        made.submit(0.0, request(id, 1000))
    made.advance(6.2)
    made.freeze(6.2)
    assert made.next_event() is None
    update(made, 100.0, 3, recompute_kv=recompute_kv)
    taken = Taken().follow(made, 116.5)
    # Five tokens after a second of prefill; then prompt and tokens are processed again, where their cache was dropped.
    assert taken.now == pytest.approx(115.0 + 1.005 * recompute_kv)
    assert taken.last["a"].spans == [VersionSpan(0, 0, 5), VersionSpan(3, 5, 20, not recompute_kv)]
    assert taken.follow(made).last["b"].spans == [VersionSpan(3, 0, 20)]


def test_lengths_are_lognormal():
    config = sim(length="lognormal", length_median=100.0, length_sigma=1.0)
    lengths = [response_length(config, 1, f"u{i}/0") for i in range(4000)]
    assert median(lengths) == pytest.approx(100, rel=0.1)
    assert sum(lengths) / len(lengths) == pytest.approx(100 * 2.718281828**0.5, rel=0.1)
    assert lengths != [response_length(config, 2, f"u{i}/0") for i in range(4000)]


@given(
    cuts=st.lists(st.floats(0.05, 30.0), max_size=6),
    keys=st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True),
    interval=st.integers(1, 20),
    kv_tokens=st.integers(40, 400),
    sigma=st.floats(0.0, 1.5),
    stops=st.lists(st.integers(33, 126), max_size=4),
)
@settings(max_examples=examples(100), deadline=None)
def test_i8_interruptions_do_not_change_a_response(cuts, keys, interval, kv_tokens, sigma, stops):
    """Tokens, log-probs and length are a function of seed, key and stop tokens, however often it was aborted."""
    lengths = {"length": "lognormal", "length_median": 15, "length_sigma": sigma}
    made, taken, now = batch(interval, kv_tokens=kv_tokens, **lengths), Taken(), 0.0
    over: dict[str, str | None] = {}
    names = [f"{key}" for key in keys]
    for cut in [*cuts, 1e9]:
        for name in names:
            if name not in over:
                held = len(taken.tokens[name])
                fields = {"key": name, "held": held, "stop_token_ids": stops}
                made.submit(now, request(name, 10 + held, 300 - held, **fields))
        taken.follow(made, now + cut)
        now += cut
        made.abort(now, made.ids())
        taken.take(made)
        for name, last in taken.last.items():
            assert [span.version for span in last.spans] == [0] * bool(last.spans)
            if last.finish_reason != "abort":
                over[name] = last.finish_reason
        taken.last.clear()
    for name in names:
        length = response_length(sim(**lengths), 0, name)
        total = min(300, length)
        end = next((at for at, token in enumerate(content(0, name, 0, total)[0], 1) if token in stops), None)
        assert (taken.tokens[name], taken.logprobs[name]) == content(0, name, 0, end or total)
        assert over[name] == ("stop" if end is not None or length <= 300 else "length")
    assert made.running == made.waiting == 0


# --- the engine ---------------------------------------------------------------------------------------------


def config_for(**fields: Any) -> Config:
    simulated = {"length": "constant", "length_median": 40, "load_s": 0.5} | fields
    rollout = {"engine": "sim", "stream_interval": 8, "sim": simulated}
    return validate_config({"data": {"source": "synthetic"}, "learner": {"backend": "sim"}, "rollout": rollout})


async def collect(engine: Engine, asked: GenerationRequest) -> tuple[list[int], TokenDelta]:
    tokens: list[int] = []
    async for delta in engine.generate(asked):
        tokens += delta.tokens
    return tokens, delta


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[tuple[Engine, Any]]:
    """An engine that serves version 0, and a source of others."""
    engine = make_engine(config_for(**fields), "rollouter/0")
    with closing(Publisher()) as publisher:

        async def load_version(version: int, mode: str = "abort", *, recompute_kv: bool = True) -> None:
            manifest = publisher.publish(version, {"w": torch.full((64,), version)})
            await load(engine, manifest, mode=mode, recompute_kv=recompute_kv)

        try:
            await engine.start()
            await load_version(0)
            yield engine, load_version
        finally:
            await engine.close()


async def test_updates_abort_keep_and_wait():
    ended = []
    async with serving() as (engine, load_version):
        for version, mode in enumerate(("abort", "keep", "wait"), start=1):
            stream = asyncio.ensure_future(collect(engine, request(f"r{version}", key="same")))
            await asyncio.sleep(0.3)
            await load_version(version, mode, recompute_kv=version == 1)
            ended.append(await stream)
    (cut, aborted), (kept, switched), (waited, old) = ended
    assert aborted.finish_reason == "abort"
    # Its steps take 0.02 s.
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
        await asyncio.wait([stream])
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


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_close_ends_a_broadcast_without_a_sender(after_s):
    async def go():
        engine, manifest = make_engine(config_for(), "rollouter/0"), publisher.publish(1, {"v": torch.zeros(3)})
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
        # They look for the end every 0.1 s. The learner's store is still open.
        wait_until(lambda: threading.active_count() == threads, "the end of the threads", LONG_S / 2)
