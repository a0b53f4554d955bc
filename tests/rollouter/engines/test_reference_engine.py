"""The reference engine: equal bit for bit (I8), log-probs and versions of the weights that sampled (I3, I4)."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from published_weights import stage
from rollouter.engines import engine_cases
from rollouter.engines.engine_cases import (
    PROMPT,
    Answer,
    Served,
    check_broadcasts,
    check_i4_all_of_the_weights_or_nothing,
    check_logprobs_and_ends,
    check_refusals,
    collect,
    in_parts,
    load,
    until,
    worst,
)
from tiny_models import Publisher, logprobs_of, make_model, parameters_of, save_model

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError, EngineDied, WeightsCorrupt
from asyncrl.core.truncation import Truncation
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.reference import model as model_module
from asyncrl.rollouter.engines.reference.model import Model, choose, truncate, uniform
from asyncrl.weights.broadcast import Sender

TOLERANCE = 1e-5
ask = partial(engine_cases.ask, seed=7)
greedy = partial(ask, temperature=0.0)


def config_for(folder: str, **rollout: Any) -> Config:
    defaults = {"engine": "reference", "gpus_per_replica": 0, "max_tokens": 512, "stream_interval": 4}
    data = {"source": "synthetic", "max_prompt_tokens": 256}
    return validate_config({"model": {"path": folder}, "data": data, "rollout": defaults | rollout})


@pytest.fixture(scope="module")
def models():
    return [make_model(seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), make_model(0))


@asynccontextmanager
async def started(folder: str, **rollout: Any) -> AsyncIterator[Engine]:
    engine = make_engine(config_for(folder, **rollout), "rollouter/0")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
    assert not any(thread.name.startswith("model") for thread in threading.enumerate())


@pytest.fixture
def serving(folder, models):
    """Engines that serve the first model as version 0."""

    @asynccontextmanager
    async def serving(**rollout: Any) -> AsyncIterator[Served]:
        async with started(folder, **rollout) as engine:
            with closing(Publisher()) as publisher:
                served = Served(engine, publisher, itertools.count(), models, TOLERANCE)
                await served.load(0)
                yield served

    return serving


@pytest.fixture
def sampled(monkeypatch):
    """Tokens sampled so far."""
    found: list[int] = []

    def counting(*arguments):
        token, logprob = choose(*arguments)
        found.append(token)
        return token, logprob

    monkeypatch.setattr(model_module, "choose", counting)
    return found


# --- tokens and log-probs -----------------------------------------------------------------------------------


async def test_i3_logprobs_equal_a_full_forward_and_a_response_ends_at_its_first_stop_token(serving):
    async with serving() as served:
        await check_logprobs_and_ends(served)
        answers = [await collect(served.engine, ask(id=id, seed=None)) for id in ("a", "b", "a")]
        assert answers[0] == answers[2] and answers[0].tokens != answers[1].tokens, "by its name where it has no seed"


async def test_half_precision_and_tied_embeddings_are_loaded_as_they_are(tmp_path):
    model = make_model(1, tied=True)
    halves = {name: tensor.bfloat16() for name, tensor in parameters_of(model).items()}
    model.load_state_dict({name: tensor.float() for name, tensor in halves.items()}, strict=False)
    async with started(save_model(tmp_path, make_model(0, tied=True))) as engine:
        with closing(Publisher()) as publisher:
            await load(engine, publisher.publish(0, halves))
        assert worst(await engine.score(PROMPT), logprobs_of(model, PROMPT)) < TOLERANCE


async def test_i8_other_requests_change_no_bit_of_a_response(serving):
    prompts = [[(3 * i + n) % 90 for i in range(5 + 9 * n)] for n in range(8)]
    async with serving(stream_interval=64) as served:
        expected = [
            await collect(served.engine, ask(id=f"{n}", prompt=p, seed=n % 3, max_tokens=40))
            for n, p in enumerate(prompts)
        ]
    async with serving(stream_interval=3) as served, asyncio.TaskGroup() as tasks:
        found = {}
        for n in (5, 2, 7, 0, 1, 6, 4, 3):
            request = ask(id=f"x{n}", prompt=prompts[n], seed=n % 3, priority=n % 2, max_tokens=40)
            found[n] = tasks.create_task(collect(served.engine, request))
            await served.engine.score(PROMPT)
        assert [await found[n] for n in range(8)] == expected
    assert len({tuple(answer.tokens) for answer in expected}) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_i8_abort_and_resume_under_unchanged_weights_changes_not_a_bit(serving, temperature):
    async with serving() as served:
        engine = served.engine
        whole, seed = Answer(), 0
        while len(whole.tokens) < 60:
            seed += 1
            whole = await collect(engine, ask(max_tokens=80, temperature=temperature, seed=seed))
        parts, submissions = await in_parts(engine, 80, 20, temperature=temperature, seed=seed)
        assert submissions > 1
        assert (parts.tokens, parts.logprobs, parts.reason) == (whole.tokens, whole.logprobs, whole.reason)


def test_noise_is_uniform_and_the_choice_has_the_right_shares():
    noise = [uniform(seed, position) for seed in range(20) for position in range(200)]
    assert all(0.0 <= u < 1.0 for u in noise) and len(set(noise)) == len(noise)
    logits = torch.tensor([0.0, -math.inf, 2.0, 1.0, -math.inf])
    for temperature in (0.5, 1.0):
        shares = torch.softmax(logits.double() / temperature, -1).tolist()
        chosen = Counter(choose(logits, temperature, u)[0] for u in noise)
        for token, share in enumerate(shares):
            # Five standard deviations.
            assert abs(chosen[token] / len(noise) - share) <= 5 * math.sqrt(share * (1 - share) / len(noise))
    # A token without probability is never chosen, not even at the edges.
    assert [choose(logits, 1.0, u)[0] for u in (0.0, 1 - 2**-52)] == [0, 3]


@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, -math.inf]), min_size=1, max_size=7),
    st.sampled_from([0.21, 0.53, 0.87, 1.0]),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.5, 1.0]),
)
@example([2.0, 0.5, 0.0, -1.0], 0.77, 2, 0.0, 1.0)
def test_a_truncation_cuts_as_a_plain_loop_does(values, top_p, top_k, min_p, temperature):
    """Many logits are equal. min_p first, then top_k, then top_p of what is left."""
    assume(max(values) > -math.inf)
    logits = torch.tensor(values)
    left = dict(enumerate(torch.softmax(logits.double() / temperature, -1).tolist()))
    left = {token: p for token, p in left.items() if p > 0 and p >= min_p * max(left.values())}
    least = sorted(left.values(), reverse=True)[:top_k][-1]
    left = {token: p for token, p in left.items() if p >= least}
    kept: list[int] = []
    for token in sorted(left, key=lambda token: (-left[token], token)):
        if sum(left[each] for each in kept) / sum(left.values()) < top_p - 1e-12:
            kept.append(token)
    found = truncate(logits, temperature, Truncation(top_p=top_p, top_k=top_k, min_p=min_p))
    assert found.isfinite().nonzero()[:, 0].tolist() == sorted(kept)
    assert found[kept].tolist() == logits[kept].tolist()


@pytest.mark.parametrize(
    "truncation", [Truncation(top_p=0.9), Truncation(top_k=5), Truncation(min_p=0.1), Truncation(top_p=0.8, top_k=20)]
)
async def test_tokens_of_a_truncated_distribution_come_with_their_sets(serving, models, truncation):
    """The log-prob is that within the set, and a resume changes not a bit."""
    async with serving() as served:
        whole, seed = Answer(), 0
        while len(whole.tokens) < 40:
            seed += 1
            how = {"temperature": 0.8, "seed": seed}
            whole = await collect(served.engine, ask(truncation=truncation, max_tokens=60, **how))
        parts, submissions = await in_parts(served.engine, 60, 15, truncation=truncation, **how)
        plain = await collect(served.engine, ask(max_tokens=60, **how))
    assert submissions > 1
    assert (parts.tokens, parts.logprobs, parts.sets) == (whole.tokens, whole.logprobs, whole.sets)
    assert plain.sets == [] and plain.tokens != whole.tokens
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPT + whole.tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert len({len(members) for members in whole.sets}) > 1 or truncation.top_k == 5
    for row, token, logprob, members in zip(logits, whole.tokens, whole.logprobs, whole.sets, strict=True):
        assert members == truncate(row, 0.8, truncation).isfinite().nonzero()[:, 0].tolist()
        within = torch.log_softmax(row[members].double() / 0.8, -1)
        assert abs(logprob - float(within[members.index(token)])) < TOLERANCE


# --- pauses and updates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute_kv", [True, False])
async def test_i3_kept_requests_continue_under_the_new_weights(serving, models, recompute_kv):
    async with serving() as served:
        engine = served.engine
        begun, waiting = Answer(), Answer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(engine, greedy(id="begun", max_tokens=120), begun))
            tasks.create_task(collect(engine, ask(id="waiting", max_tokens=20), waiting))
            await until(lambda: len(begun.tokens) > 50)
            new = await served.load(1, mode="keep", recompute_kv=recompute_kv)
        split = begun.spans[0].end
        assert 50 < split < 120
        assert begun.spans == [VersionSpan(0, 0, split), VersionSpan(new, split, 120, not recompute_kv)]
        before, after = (logprobs_of(model, PROMPT + begun.tokens)[len(PROMPT) - 1 :] for model in models)
        assert worst(begun.logprobs[:split], before[:split]) < TOLERANCE
        off = worst(begun.logprobs[split:], after[split:])
        assert off < TOLERANCE if recompute_kv else off > 0.1
        # It had no keys and values yet, so nothing is mixed.
        assert waiting.spans == [VersionSpan(new, 0, len(waiting.tokens))]


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_paused_engine_samples_nothing_and_resumes_by_priority(serving, sampled, mode):
    async with serving() as served:
        engine = served.engine
        requests = [greedy(id=id, max_tokens=60, priority=at) for at, id in ((0, "a"), (2, "c"), (1, "b"))]
        expected = [await collect(engine, request) for request in requests]
        answers, ended = [Answer() for _ in requests], []

        async def one(request, answer):
            await collect(engine, request, answer)
            ended.append(request.id)

        async with asyncio.TaskGroup() as tasks:
            for request, answer in zip(requests, answers, strict=True):
                tasks.create_task(one(request, answer))
            await until(lambda: len(answers[0].tokens) > 8)
            await engine.pause(mode)
            await asyncio.sleep(0)
            held, before = [len(answer.tokens) for answer in answers], len(sampled)
            # Under "wait" a begun request is complete, and the others have no tokens.
            assert (answers[0].reason is not None) == (mode == "wait")
            assert held[1:] == [0, 0]
            for _ in range(3):
                # It has the time to: it computes.
                await engine.score(PROMPT)
            assert (len(sampled), [len(answer.tokens) for answer in answers]) == (before, held)
            await engine.resume()
        assert answers == expected
        assert ended == ["a", "b", "c"]


async def test_an_aborting_pause_ends_all_requests_with_their_tokens(serving, sampled):
    async with serving(stream_interval=512) as served:
        engine = served.engine
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(collect(engine, greedy(id=id, max_tokens=512))) for id in "abc"]
            await until(lambda: len(sampled) > 20)
            await engine.pause("abort")
        begun, *waiting = (stream.result() for stream in streams)
        assert begun.reason == "abort" and begun.tokens == sampled
        assert begun.spans == [VersionSpan(0, 0, len(begun.tokens))]
        assert waiting == [Answer(reason="abort"), Answer(reason="abort")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), "missing"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(3)}), "unknown|unexpected"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}), "have changed|mismatch|size"),
    ],
)
async def test_i4_weights_load_whole_or_not_at_all_and_equal_weights_have_equal_checksums(serving, change, words):
    async with serving() as served:
        first = await served.engine.checksum()
        await check_i4_all_of_the_weights_or_nothing(served, change, words, words)
        second = await served.engine.checksum()
        await served.load(0)
        assert await served.engine.checksum() == first != second


async def test_a_first_version_is_compared_with_the_files(folder, models):
    tensors = parameters_of(models[1])
    del tensors["model.norm.weight"]
    async with started(folder) as engine:
        with (
            closing(Publisher()) as publisher,
            closing(stage(publisher.publish(1, tensors))) as wrong,
            pytest.raises(WeightsCorrupt, match="missing"),
        ):
            await engine.accept(wrong)


async def test_broadcasts_are_received_verified_and_survived(serving):
    with closing(Sender("gloo", "127.0.0.1", 60.0)) as sender:
        async with serving() as served:
            await check_broadcasts(served, sender)


# --- errors and ends ----------------------------------------------------------------------------------------


async def test_impossible_and_unread_requests_leave_nothing_behind(serving):
    async with serving() as served:
        await check_refusals(served)
        for prompt in ([], [1] * 1024, [96], [-1]):
            with pytest.raises(ValueError, match="request a"):
                await collect(served.engine, ask(prompt, id="a"))
        # The prompt fits, but not the longest response.
        near = await collect(served.engine, greedy([1] * 1020, max_tokens=64))
        assert near.reason == "length" and len(near.tokens) == 4


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"max_tokens": 1000}, "takes 1024 tokens"),
        ({"folder": "/nowhere"}, "is no folder"),
        ({"gpus_per_replica": 1}, "computes on the CPU"),
    ],
)
async def test_a_model_that_it_cannot_run_is_a_config_error(folder, rollout, words):
    with pytest.raises(ConfigError, match=words):
        async with started(rollout.pop("folder", folder), **rollout):
            pass


@pytest.mark.parametrize(
    ("how", "words"),
    [("hangs", "did nothing for request a for 0.3 s"), ("fails", "out of order"), ("is closed", "closed")],
)
async def test_i5_i7_an_engine_that_hangs_counts_as_dead_and_a_closed_one_ends_at_once(
    serving, monkeypatch, how, words
):
    go_on = threading.Event()

    def broken(*_):
        if how != "fails":
            go_on.wait(30)
        raise RuntimeError("out of order")

    async with serving(engine_timeout_s=0.3 if how == "hangs" else 60.0) as served:
        engine = served.engine
        monkeypatch.setattr(Model, "advance", broken)
        streams = [asyncio.create_task(collect(engine, ask(id=id))) for id in "ab"]
        if how == "is closed":
            await asyncio.sleep(0)
            ending = asyncio.create_task(engine.close())
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(outcome, EngineDied) and words in str(outcome)
        for late in (engine.pause("abort"), engine.score(PROMPT), collect(engine, ask()), engine.checksum()):
            with pytest.raises(EngineDied, match=words):
                await late
        go_on.set()
        if how == "is closed":
            await ending
