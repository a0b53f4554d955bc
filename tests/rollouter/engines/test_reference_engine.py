"""The reference engine: the same in every bit (I8), log-probs and versions of the weights that sampled (I3, I4)."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import pytest
import torch
from published_weights import stage
from rollouter.engines import engine_cases
from rollouter.engines.engine_cases import PROMPT, Answer, broadcast, broken_off, collect, in_parts, load, until, worst
from tiny_models import EOS, Publisher, logprobs_of, make_model, parameters_of, save_model

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.errors import BroadcastFailed, ConfigError, EngineDied, WeightsCorrupt
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.reference.engine import ReferenceEngine
from asyncrl.rollouter.engines.reference.model import choose
from asyncrl.rollouter.engines.reference.noise import uniform
from asyncrl.weights.collective.sender import Sender

TOLERANCE = 1e-5


def config_for(folder: str, **rollout: Any) -> Config:
    defaults: dict[str, Any] = {"max_tokens": 512, "stream_interval": 8, "engine_timeout_s": 60.0}
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": 256},
            "rollout": {"engine": "reference", "gpus_per_replica": 0, **defaults, **rollout},
        }
    )


ask = partial(engine_cases.ask, seed=7)


@pytest.fixture(scope="module")
def models():
    return [make_model(seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), make_model(0))


@pytest.fixture
def publisher():
    made = Publisher()
    yield made
    made.close()


@asynccontextmanager
async def started(folder: str, **rollout: Any) -> AsyncIterator[ReferenceEngine]:
    engine = make_engine(config_for(folder, **rollout), "rollouter/0")
    assert isinstance(engine, ReferenceEngine)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
    assert not any(thread.name.startswith("model") for thread in threading.enumerate())


@pytest.fixture
def serving(folder, models, publisher):
    """Engines that serve the first model as version 0."""

    @asynccontextmanager
    async def serving(**rollout: Any) -> AsyncIterator[ReferenceEngine]:
        async with started(folder, **rollout) as engine:
            await load(engine, publisher.publish_model(0, models[0]))
            yield engine

    return serving


# --- tokens and log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
async def test_i3_i4_logprobs_are_those_of_a_full_forward_after_each_load(tmp_path, publisher, tied):
    folder = save_model(tmp_path / "model", make_model(0, tied=tied))
    async with started(folder) as engine:
        reasons = set()
        for version, seed in enumerate((1, 2)):
            model = make_model(seed, tied=tied)
            await load(engine, publisher.publish_model(version, model))
            assert worst(await engine.score(PROMPT), logprobs_of(model, PROMPT)) < TOLERANCE
            for sample, temperature in enumerate((0.7, 1.0, 0.0)):
                answer = await collect(engine, ask(seed=sample, temperature=temperature, max_tokens=100))
                reasons.add(answer.reason)
                with torch.no_grad():
                    logits = model(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
                scores = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
                expected = scores[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)].tolist()
                assert worst(answer.logprobs, expected) < TOLERANCE
                assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]
                if temperature == 0.0:
                    assert answer.tokens == logits.argmax(-1).tolist()
                if answer.reason == "stop":
                    assert answer.tokens.index(EOS) == len(answer.tokens) - 1
                else:
                    assert len(answer.tokens) == 100 and EOS not in answer.tokens
        # A tied model hardly ever ends by itself.
        assert reasons == ({"length"} if tied else {"stop", "length"})


async def test_half_precision_is_loaded_as_it_is(folder, models, publisher):
    halves = {name: tensor.bfloat16() for name, tensor in parameters_of(models[0]).items()}
    rounded = make_model(1)
    rounded.load_state_dict({name: tensor.float() for name, tensor in halves.items()}, strict=False)
    async with started(folder) as engine:
        await load(engine, publisher.publish(0, halves))
        assert worst(await engine.score(PROMPT), logprobs_of(rounded, PROMPT)) < TOLERANCE


async def test_a_response_ends_with_its_first_stop_token(serving):
    async with serving() as engine:
        whole = await collect(engine, ask(id="whole"))
        stop = whole.tokens[20]
        first = whole.tokens.index(stop)
        cut = await collect(engine, ask(id="cut", stop_token_ids=[stop]))
        assert (cut.tokens, cut.reason) == (whole.tokens[: first + 1], "stop")
        assert cut.logprobs == whole.logprobs[: first + 1]
        again = await collect(engine, ask(id="again"))
        assert again.tokens == whole.tokens, "it is the request's alone"
        answers = [await collect(engine, ask(id=id, seed=None)) for id in ("a", "b", "a")]
        assert answers[0] == answers[2] and answers[0].tokens != answers[1].tokens, "by its name where it has no seed"


def test_i8_nothing_else_changes_a_bit_of_a_response(folder, models, publisher):
    manifest = publisher.publish_model(0, models[0])
    prompts = [[(3 * i + n) % 90 for i in range(5 + 9 * n)] for n in range(8)]

    async def alone():
        async with started(folder, stream_interval=64) as engine:
            await load(engine, manifest)
            return [await collect(engine, ask(id=f"{n}", prompt=p, seed=n % 3)) for n, p in enumerate(prompts)]

    async def crowded():
        async with started(folder, stream_interval=3) as engine:
            await load(engine, manifest)
            async with asyncio.TaskGroup() as tasks:
                found = {}
                for n in (5, 2, 7, 0, 1, 6, 4, 3):
                    request = ask(id=f"x{n}", prompt=prompts[n], seed=n % 3, priority=n % 2)
                    found[n] = tasks.create_task(collect(engine, request))
                    await engine.score(PROMPT)
            return [found[n].result() for n in range(8)]

    expected = asyncio.run(alone())
    assert asyncio.run(crowded()) == expected
    assert len({tuple(answer.tokens) for answer in expected}) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_i8_abort_and_resume_under_unchanged_weights_changes_not_a_bit(serving, temperature):
    async with serving(stream_interval=4) as engine:
        whole, seed = Answer(), 0
        while len(whole.tokens) < 100:
            seed += 1
            whole = await collect(engine, ask(max_tokens=120, temperature=temperature, seed=seed))
        parts, submissions = await in_parts(engine, 120, 20, temperature=temperature, seed=seed)
        assert submissions > 1
        assert (parts.tokens, parts.logprobs, parts.reason) == (whole.tokens, whole.logprobs, whole.reason)


def test_noise_is_uniform_and_the_choice_has_the_right_shares():
    noise = [uniform(seed, position) for seed in range(20) for position in range(400)]
    assert all(0.0 <= u < 1.0 for u in noise) and len(set(noise)) == len(noise)
    logits = torch.tensor([0.0, -math.inf, 2.0, 1.0, -math.inf])
    for temperature in (0.5, 1.0):
        shares = torch.softmax(logits.double() / temperature, -1).tolist()
        chosen = Counter(choose(logits, temperature, u)[0] for u in noise)
        for token, share in enumerate(shares):
            # Five standard deviations.
            assert abs(chosen[token] / len(noise) - share) <= 5 * math.sqrt(share * (1 - share) / len(noise))
    # Never what has no probability, not even at the edges.
    assert [choose(logits, 1.0, u)[0] for u in (0.0, 1 - 2**-52)] == [0, 3]


async def test_the_more_urgent_come_first(serving):
    async with serving() as engine:
        await engine.pause("keep")
        ended = []

        async def one(id, priority):
            await collect(engine, ask(id=id, priority=priority))
            ended.append(id)

        async with asyncio.TaskGroup() as tasks:
            for id, priority in (("late", 1), ("first", 0), ("second", 0)):
                tasks.create_task(one(id, priority))
            await asyncio.sleep(0)
            await engine.resume()
        assert ended == ["first", "second", "late"]


# --- pauses and updates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute_kv", [True, False])
async def test_i3_kept_requests_go_on_under_the_new_weights(serving, models, publisher, recompute_kv):
    async with serving(stream_interval=4) as engine:
        begun, waiting = Answer(), Answer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(engine, ask(id="begun", temperature=0.0, max_tokens=200), begun))
            tasks.create_task(collect(engine, ask(id="waiting", max_tokens=20), waiting))
            await until(lambda: len(begun.tokens) > 50)
            manifest = publisher.publish_model(3, models[1])
            await load(engine, manifest, mode="keep", recompute_kv=recompute_kv)
        split = begun.spans[0].end
        assert 50 < split < 200
        assert begun.spans == [VersionSpan(0, 0, split), VersionSpan(3, split, 200, not recompute_kv)]
        before, after = (logprobs_of(model, PROMPT + begun.tokens)[len(PROMPT) - 1 :] for model in models)
        assert worst(begun.logprobs[:split], before[:split]) < TOLERANCE
        if recompute_kv:
            assert worst(begun.logprobs[split:], after[split:]) < TOLERANCE
        else:
            assert worst(begun.logprobs[split:], after[split:]) > 0.1
        # It had no keys and values yet, so nothing is mixed.
        assert waiting.spans == [VersionSpan(3, 0, len(waiting.tokens))]


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_paused_engine_samples_nothing_and_goes_on_where_it_was(serving, mode):
    async with serving(stream_interval=4) as engine:
        expected = [await collect(engine, ask(id=id, max_tokens=90, temperature=0.0)) for id in "ab"]
        answers = [Answer(), Answer()]
        async with asyncio.TaskGroup() as tasks:
            for id, answer in zip("ab", answers, strict=True):
                tasks.create_task(collect(engine, ask(id=id, max_tokens=90, temperature=0.0), answer))
            await until(lambda: len(answers[0].tokens) > 8)
            await engine.pause(mode)
            await asyncio.sleep(0)
            held, fed = [len(answer.tokens) for answer in answers], engine._fed
            # Of what was begun everything is there under "wait", and of the others nothing ever is.
            assert (answers[0].reason is not None) == (mode == "wait")
            assert held[1] == 0
            await asyncio.sleep(0.05)
            assert engine._fed == fed
            assert [len(answer.tokens) for answer in answers] == held
            await engine.resume()
        assert answers == expected


async def test_an_aborting_pause_ends_all_with_what_they_have(serving):
    async with serving(stream_interval=512) as engine:
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(collect(engine, ask(id=id, max_tokens=512, temperature=0.0))) for id in "abc"]
            await until(lambda: engine._fed > 20)
            await engine.pause("abort")
        begun, *waiting = (stream.result() for stream in streams)
        assert begun.reason == "abort" and 10 < len(begun.tokens) < 512
        assert begun.spans == [VersionSpan(0, 0, len(begun.tokens))]
        assert waiting == [Answer(reason="abort"), Answer(reason="abort")]
        assert not engine._flights


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), "missing"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(3)}), "unknown|unexpected"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}), "have changed|mismatch|size"),
    ],
)
async def test_i4_all_of_the_weights_or_nothing(folder, models, publisher, change, words):
    tensors = parameters_of(models[1])
    change(tensors)
    async with started(folder) as engine:
        with closing(stage(publisher.publish(0, tensors))) as wrong, pytest.raises(WeightsCorrupt, match=words):
            await engine.accept(wrong)
        await load(engine, publisher.publish_model(0, models[0]))
        with closing(stage(publisher.publish(1, tensors))) as wrong:
            with pytest.raises(WeightsCorrupt, match=words):
                await engine.accept(wrong)
            await engine.pause("abort")
            with pytest.raises(WeightsCorrupt, match=words):
                await engine.load(wrong, recompute_kv=True)
        assert await engine.score(PROMPT) == pytest.approx(logprobs_of(models[0], PROMPT), abs=TOLERANCE)
        await load(engine, publisher.publish_model(2, models[1]))
        assert await engine.score(PROMPT) == pytest.approx(logprobs_of(models[1], PROMPT), abs=TOLERANCE)


def test_i4_checksums_agree_exactly_where_weights_do(folder, models, publisher):
    async def sums(*versions):
        async with started(folder) as engine:
            found = []
            for number, model in enumerate(versions):
                await load(engine, publisher.publish_model(number, model))
                found.append(await engine.checksum())
            return found

    first, second = asyncio.run(sums(*models))
    assert asyncio.run(sums(models[1], models[0])) == [second, first]
    assert first != second


def test_broadcasts_are_received_verified_and_survived(folder, models, publisher):
    sender = Sender("gloo", "127.0.0.1", 60.0)

    async def go():
        async with started(folder) as engine:
            for version, model in enumerate(models):
                manifest = publisher.publish_model(version, model)
                await engine.pause("abort")
                assert await broadcast(engine, sender, manifest) == [None, None]
                await engine.resume()
                assert worst(await engine.score(PROMPT), logprobs_of(model, PROMPT)) < TOLERANCE
            manifest = publisher.publish_model(2, models[0])
            await engine.pause("abort")
            for failed in await broadcast(engine, sender, manifest, broken_off(sender, manifest)):
                assert isinstance(failed, BroadcastFailed)
            assert worst(await engine.score(PROMPT), logprobs_of(models[1], PROMPT)) < TOLERANCE
            await load(engine, manifest)
            assert worst(await engine.score(PROMPT), logprobs_of(models[0], PROMPT)) < TOLERANCE

    try:
        asyncio.run(go())
    finally:
        sender.close()


# --- errors and ends ----------------------------------------------------------------------------------------


async def test_impossible_requests_are_value_errors(serving):
    async with serving() as engine:
        for prompt in ([], [1] * 1024, [96], [-1]):
            with pytest.raises(ValueError, match="request a"):
                await collect(engine, ask(prompt, id="a"))
        # It fits, but not all that it may sample does.
        near = await collect(engine, ask([1] * 1020, max_tokens=64, temperature=0.0))
        assert near.reason == "length" and len(near.tokens) == 4
        assert await engine.score([1]) == []


def test_what_it_cannot_run_is_a_config_error(folder, tmp_path):
    async def problem(**rollout):
        with pytest.raises(ConfigError) as raised:
            async with started(rollout.pop("folder", folder), **rollout):
                pass
        return str(raised.value)

    assert "takes 1024 tokens" in asyncio.run(problem(max_tokens=1000))
    assert "holds no config.json" in asyncio.run(problem(folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="computes on the CPU"):
        config_for(folder, gpus_per_replica=1)


async def test_the_event_loop_never_waits_for_the_model(serving):
    async with serving() as engine:
        entered, go_on = threading.Event(), threading.Event()
        advance = engine._model.advance

        def slow(*arguments):
            entered.set()
            assert go_on.wait(30)
            return advance(*arguments)

        engine._model.advance = slow
        stream = asyncio.create_task(collect(engine, ask(max_tokens=4)))
        await until(entered.is_set)
        # The model computes, and everything else goes on.
        pausing = asyncio.create_task(engine.pause("keep"))
        await asyncio.sleep(0.01)
        assert not pausing.done()
        go_on.set()
        await pausing
        await engine.resume()
        assert len((await stream).tokens) == 4


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_i5_an_engine_that_does_not_compute_is_dead(serving, how):
    released = threading.Event()

    def broken(*_):
        if how == "hangs":
            released.wait(30)
        raise RuntimeError("out of order")

    async with serving(engine_timeout_s=0.3) as engine:
        engine._model.advance = broken
        streams = [asyncio.create_task(collect(engine, ask(id=id))) for id in "ab"]
        words = "did nothing for request a for 0.3 s" if how == "hangs" else "out of order"
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(outcome, EngineDied) and words in str(outcome)
        for late in (engine.pause("abort"), engine.score(PROMPT), collect(engine, ask()), engine.checksum()):
            with pytest.raises(EngineDied, match=words):
                await late
        released.set()


async def test_i7_closing_ends_everything_at_once(serving):
    async with serving() as engine:
        answer = Answer()
        stream = asyncio.create_task(collect(engine, ask(max_tokens=500, temperature=0.0), answer))
        await until(lambda: len(answer.tokens) > 8)
        began = time.monotonic()
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await stream
        assert time.monotonic() - began < 10
        await engine.close()


async def test_a_cancelled_reader_leaves_nothing_behind(serving):
    async with serving(stream_interval=4) as engine:
        answer = Answer()
        streams = [
            asyncio.create_task(collect(engine, ask(id="a", max_tokens=512, temperature=0.0), answer)),
            asyncio.create_task(collect(engine, ask(id="b"))),
        ]
        await until(lambda: len(answer.tokens) > 8)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        # A pause that waits for requests to finish would find them.
        await engine.pause("wait")
        assert not engine._flights and engine._current is None
        await engine.resume()
        assert (await collect(engine, ask(id="b", max_tokens=3))).reason in ("stop", "length")
