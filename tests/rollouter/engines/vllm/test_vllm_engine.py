"""The vLLM engine on CPU: log-probs, interruption, versions and weight updates against Hugging Face models."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drifting import Learner, check_alarm, random_prompts
from published_weights import stage
from rollouter.engines.changing import (
    EPISODES,
    LEAVES_CONTEXTS,
    LONG_PROMPTS,
    MAX_TOKENS,
    PROMPTS,
    TOLERANCE,
    Changing,
    Letters,
    check,
    config_for,
)
from rollouter.engines.engine_cases import (
    PROMPT,
    Answer,
    ask,
    broadcast,
    broken_off,
    collect,
    in_parts,
    load,
    until,
    worst,
)
from test_vllm_lifecycle import children
from tiny_models import EOS, VOCAB, Publisher, logprobs_of, make_model, parameters_of, save_model, sharp_model

from asyncrl.errors import BroadcastFailed, EngineDied, WeightsCorrupt
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.engines.vllm import adapter
from asyncrl.rollouter.engines.vllm.adapter import submission_seed
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving import generation
from asyncrl.rollouter.serving.drift import ROUNDING
from asyncrl.weights.collective.sender import Sender

pytestmark = LEAVES_CONTEXTS

RUNNER = asyncio.Runner()
"""On whose loop the engine lives."""
RUN = RUNNER.run


@dataclass
class Served:
    """An engine, and what it was given."""

    engine: VllmEngine
    publisher: Publisher
    versions: Iterator[int]

    async def load(self, model, *, mode: str = "abort", recompute_kv: bool = True) -> int:
        manifest = self.publisher.publish_model(next(self.versions), model)
        return await load(self.engine, manifest, mode=mode, recompute_kv=recompute_kv)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), make_model(0))
    before = children()
    engine, publisher = VllmEngine(config_for(folder, concurrency="auto"), "rollouter/0"), Publisher()
    try:
        RUN(engine.start())
        yield Served(engine, publisher, iter(range(10**6)))
    finally:
        RUN(engine.close())
        RUNNER.close()
        assert not children() - before
        publisher.close()
        gc.collect()


@pytest.fixture(scope="module")
def models():
    return [make_model(seed) for seed in (1, 2)]


async def test_logprobs_are_the_models_at_the_temperature(served, models):
    version = await served.load(models[0])
    requests = [ask(PROMPT[: 8 + i], seed=i, temperature=t) for i in range(6) for t in (0.5, 1.0)]
    answers = await asyncio.gather(*(collect(served.engine, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        prompt = list(request.prompt_ids)
        with torch.no_grad():
            logits = models[0](torch.tensor([prompt + answer.tokens])).logits[0].double() / request.temperature
        scores = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        expected = scores[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)].tolist()
        assert worst(answer.logprobs, expected) < TOLERANCE
        assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]
        if answer.reason == "stop":
            assert answer.tokens.index(EOS) == len(answer.tokens) - 1
        else:
            assert len(answer.tokens) == 64
            assert EOS not in answer.tokens
    assert {answer.reason for answer in answers} == {"stop", "length"}


async def test_its_load_is_told(served, models):
    """32 of 40 requests run at a time."""
    await served.load(models[0])
    engine = served.engine
    answers = [asyncio.ensure_future(collect(engine, ask(seed=i, max_tokens=128))) for i in range(40)]
    seen = []
    while not all(answer.done() for answer in answers):
        await asyncio.sleep(0.002)
        seen += [engine.load_now] if engine.load_now is not None else []
    await asyncio.gather(*answers)
    assert max(load.queued for load in seen) >= 8
    assert 0 < max(load.kv_use for load in seen) < 1
    assert {load.preemptions for load in seen} == {0}


def test_requests_that_vllm_puts_back_are_counted():
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from asyncrl.rollouter.engines.vllm.adapter import LoadLogger

    logger, step = LoadLogger(), IterationStats()
    assert logger.load is None
    step.num_preempted_reqs = 2
    for _ in range(3):
        logger.record(SchedulerStats(num_waiting_reqs=4, num_skipped_waiting_reqs=1, kv_cache_usage=0.5), step)
        logger.record(None, None)
    assert logger.load == EngineLoad(kv_use=0.5, queued=5, preemptions=6)


@pytest.mark.parametrize(
    ("device", "gib", "extra", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79, {}, 16384),
        ("NVIDIA L4", 22, {}, 8192),
        ("NVIDIA H100 80GB HBM3", 79, {"max_num_batched_tokens": 4096}, 4096),
    ],
)
def test_a_step_on_a_gpu_takes_as_many_tokens_as_one_of_whole_batches(monkeypatch, device, gib, extra, expected):
    """By vLLM's own table; an AsyncLLM without a context would get 2,048."""
    from vllm.engine import arg_utils

    gpu = SimpleNamespace(
        get_device_total_memory=lambda: gib << 30,
        get_device_name=lambda: device,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
        device_type="cuda",
    )
    found = []

    def from_engine_args(arguments, **options):
        monkeypatch.setattr(arg_utils, "current_platform", gpu)
        model = SimpleNamespace(max_model_len=arguments.max_model_len, is_multimodal_model=False)
        arguments._set_default_max_num_seqs_and_batched_tokens_args(
            options["usage_context"], model, SimpleNamespace(use_batched_dp_moe=False)
        )
        found.append(arguments.max_num_batched_tokens)

    monkeypatch.setattr(adapter, "current_platform", gpu)
    monkeypatch.setattr(adapter.AsyncLLM, "from_engine_args", from_engine_args)
    config = config_for("/models/m", gpus_per_replica=1, vllm={"extra": extra})
    adapter.launch(config, "rollouter/0", {"num_attention_heads": 2, "hidden_size": 64}, "/tmp", None)
    assert found == [expected]


async def test_what_the_prefix_cache_has_is_told(served, models):
    """By whole blocks, to whoever has the same salt, and with each delta."""
    await served.load(models[0])
    answers = [await collect(served.engine, ask(cache_salt=salt)) for salt in ("v1", "v1", "v2")]
    assert [answer.cached for answer in answers] == [0, 32, 0]


async def test_a_response_ends_with_its_first_stop_token(served, models):
    await served.load(models[0])
    whole = await collect(served.engine, ask(seed=5))
    stop = whole.tokens[20]
    first = whole.tokens.index(stop)
    cut = await collect(served.engine, ask(seed=5, stop_token_ids=[stop, VOCAB - 2]))
    assert (cut.tokens, cut.reason) == (whole.tokens[: first + 1], "stop")
    assert cut.spans[-1].end == len(cut.logprobs) == first + 1


def test_a_resume_replays_no_noise_of_the_response():
    seeds = [submission_seed(ask(seed=5, held=held)) for held in (0, 1, 2, 1)]
    assert seeds[0] == 5 and seeds[1] == seeds[3] and len(set(seeds)) == 3
    assert submission_seed(ask(seed=None, held=3)) is None


async def test_seeds_repeat_and_differ(served, models):
    await served.load(models[0])
    # More prompt tokens at once than one step processes, none of them shared.
    prompts = [[(seed * j + j // 7 + seed) % 90 for j in range(250)] for seed in range(20)]
    requests = [ask(prompt, seed=seed, cache_salt=copy) for copy in "ab" for seed, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(collect(served.engine, request) for request in requests))
    assert [a.tokens for a in answers[:20]] == [a.tokens for a in answers[20:]]
    assert len({tuple(a.tokens) for a in answers[:20]}) > 10


async def test_score_follows_the_weights(served, models):
    for model, other in (models, models[::-1]):
        await served.load(model)
        scores = await served.engine.score(PROMPT)
        assert worst(scores, logprobs_of(model, PROMPT)) < TOLERANCE
        assert worst(scores, logprobs_of(other, PROMPT)) > 0.1
    assert await served.engine.score(PROMPT[:1]) == []


async def test_i8_abort_and_resume_changes_nothing(served, models):
    await served.load(models[0])
    whole = await collect(served.engine, ask(max_tokens=200, temperature=0.0))
    parts, submissions = await in_parts(served.engine, 200, 30, temperature=0.0)
    assert parts.tokens == whole.tokens
    assert submissions > 2


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_pause_brings_what_the_scheduler_holds(served, models, mode, monkeypatch):
    monkeypatch.setattr(served.engine, "_stream_interval", 512)
    old = await served.load(models[0])
    kv_tokens = served.engine._kv_tokens
    answer = Answer()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(collect(served.engine, ask(max_tokens=300, temperature=0.0), answer))
        # Its prompt and a good part of the response are in the KV cache.
        await until(lambda: (load := served.engine.load_now) is not None and load.kv_use * kv_tokens > 95)
        early = len(answer.tokens)
        new = await served.load(models[1], mode=mode)
    assert early == 0, "the interval is longer than the response"
    split = answer.spans[0].end
    assert 16 < split < 300
    kept = [VersionSpan(new, split, 300)] if mode == "keep" else []
    assert answer.spans == [VersionSpan(old, 0, split), *kept]
    assert len(answer.tokens) == (300 if mode == "keep" else split)
    before = logprobs_of(models[0], PROMPT + answer.tokens)[len(PROMPT) - 1 :]
    assert worst(answer.logprobs[:split], before[:split]) < TOLERANCE


async def test_a_set_without_a_tensor_is_refused_before_the_load(served, models):
    await served.load(models[0])
    tensors = parameters_of(models[1])
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    staged = stage(served.publisher.publish(next(served.versions), tensors))
    with closing(staged), pytest.raises(WeightsCorrupt, match="are missing"):
        await served.engine.accept(staged)
    assert worst(await served.engine.score(PROMPT), logprobs_of(models[0], PROMPT)) < TOLERANCE


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"])
async def test_failed_load_is_repeated_whole(served, models, missing):
    await served.load(models[0])
    engine, version = served.engine, next(served.versions)
    tensors = parameters_of(models[1])
    complete = stage(served.publisher.publish(version, tensors))
    del tensors[missing]
    # Past the check that stands before every load, to the one in the worker.
    partial = stage(served.publisher.publish(version, tensors))
    with closing(complete), closing(partial):
        await engine.pause("abort")
        for _ in range(2):
            with pytest.raises(WeightsCorrupt, match="incomplete weights"):
                await engine.load(partial, recompute_kv=True)
        await engine.load(complete, recompute_kv=True)
        await engine.resume()
        assert worst(await engine.score(PROMPT), logprobs_of(models[1], PROMPT)) < TOLERANCE


# --- by broadcast -------------------------------------------------------------------------------------------


@pytest.fixture
def sender():
    made = Sender("gloo", "127.0.0.1", 60.0)
    yield made
    made.close()


async def test_broadcast_brings_the_new_weights(served, models, sender):
    await served.load(models[1])
    # Twice over the same group.
    for model in models:
        manifest = served.publisher.publish_model(next(served.versions), model)
        await served.engine.pause("abort")
        assert await broadcast(served.engine, sender, manifest) == [None, None]
        await served.engine.resume()
        answer = await collect(served.engine, ask(seed=5))
        assert answer.spans == [VersionSpan(manifest.version, 0, len(answer.tokens))]
        expected = logprobs_of(model, PROMPT + answer.tokens)[len(PROMPT) - 1 :]
        assert worst(answer.logprobs, expected) < TOLERANCE


async def test_broken_broadcast_is_made_good_from_shared_memory(served, models, sender):
    await served.load(models[0])
    engine, manifest = served.engine, served.publisher.publish_model(next(served.versions), models[1])
    tensors = parameters_of(models[1])
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    partial = served.publisher.publish(manifest.version, tensors)
    await engine.pause("abort")
    for failed in await broadcast(engine, sender, manifest, broken_off(sender, manifest)):
        assert isinstance(failed, BroadcastFailed)
        assert "enough" in str(failed)
    # Whole and verified, but not all of the model: the worker finds it when half of it is loaded.
    sent, failed = await broadcast(engine, sender, partial, epoch=2)
    assert sent is None
    assert isinstance(failed, BroadcastFailed)
    assert "incomplete weights" in str(failed)
    with closing(stage(manifest)) as staged:
        await engine.load(staged, recompute_kv=True)
    await engine.resume()
    assert worst(await engine.score(PROMPT), logprobs_of(models[1], PROMPT)) < TOLERANCE


# --- requests -----------------------------------------------------------------------------------------------


async def test_impossible_requests_are_value_errors(served, models):
    await served.load(models[0])
    with pytest.raises(ValueError, match="request t"):
        await collect(served.engine, ask([1] * 5000))
    assert (await collect(served.engine, ask(max_tokens=3))).reason in ("stop", "length")


async def test_cancelled_stream_leaves_nothing_behind(served, models):
    await served.load(models[0])
    answer = Answer()
    stream = asyncio.create_task(collect(served.engine, ask(max_tokens=512, temperature=0.0), answer))
    await until(lambda: len(answer.tokens) > 10)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert stream.cancelled()
    # A pause that waits for requests to finish would find it.
    await served.engine.pause("wait")
    await served.engine.resume()
    assert not served.engine._flights


# --- updates again and again under running episodes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("on_update", "keep_kv"), [("abort_resume", "recompute"), ("keep", "recompute"), ("keep", "stale")]
)
async def test_tokens_on_both_sides_of_each_update_are_those_of_their_own_weights(served, on_update, keep_kv):
    """I3: each token carries the log-prob and the version of the weights that sampled it."""
    changing = Changing(served.engine, served.versions, on_update=on_update, keep_kv=keep_kv)
    found = await changing.run()
    assert check(changing, found, stale=keep_kv == "stale") >= EPISODES / 2
    assert any(len(generated.spans) > 2 for generated in found)
    check_reprefill(changing, keep_kv if on_update == "keep" else "")


def check_reprefill(changing: Changing, kept: str) -> None:
    """Aborted requests count without what a sibling has brought into the cache, and kept ones as a whole."""
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
        (("abort_resume", "recompute"), ["drop"], True),
        (("abort_resume", "recompute"), ["salt", "drop"], False),
        # What is kept would else go on over keys and values of the old weights.
        (("keep", "recompute"), ["salt"], True),
        # Nothing is dropped there, and what begins after the update must not find what is left.
        (("keep", "stale"), [], True),
    ],
    ids=str,
)
async def test_no_token_is_sampled_over_keys_and_values_of_older_weights(served, monkeypatch, mode, without, exact):
    """Prompts of several blocks come again under each version. Each of two guards is enough: the drop of the cache in a
    load, and the salt of the version; without both the test sees old blocks."""
    for guard in without:
        GUARDS[guard](monkeypatch, served.engine)
    changing = Changing(served.engine, served.versions, on_update=mode[0], keep_kv=mode[1])
    changing.prompts = LONG_PROMPTS
    found = await changing.run_over_versions(updates=5, episodes=4, max_tokens=80)
    assert any(len(generated.spans) > 1 for generated in found), "updates meet episodes that run"
    worst = changing.worst(found)
    assert worst < TOLERANCE if exact else worst > 0.1


async def test_responses_end_at_their_limit_and_at_stop_strings_over_any_number_of_resumes(served):
    plain = Changing(served.engine, served.versions)
    texts = [Letters().decode(generated.tokens) for generated in await plain.run(updates=0)]
    # Strings that do occur, of two characters, so that updates fall into some of them.
    stops = sorted({text[at : at + 2] for text in texts for at in range(20, min(len(text) - 2, 140), 40)})[:24]
    changing = Changing(served.engine, served.versions, stop=stops)
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


# --- the drift alarm, and the end ---------------------------------------------------------------------------


async def test_the_drift_alarm_is_silent_under_rounding_and_not_where_it_is_none(served, tmp_path, monkeypatch):
    config = config_for(save_model(tmp_path, sharp_model(0)), learner={"dtype": "float32", "device": "cpu"})
    with closing(Learner(config, random_prompts(0))) as learner:
        await check_alarm(served.engine, learner, served.versions, ROUNDING[True], monkeypatch)


async def test_a_core_that_hangs_counts_as_dead(served, models, monkeypatch):
    """The last of the engine."""
    await served.load(models[0])
    monkeypatch.setattr(served.engine, "_timeout_s", 3.0)
    answer = Answer()
    stream = asyncio.ensure_future(collect(served.engine, ask(max_tokens=512, temperature=0.0), answer))
    await until(lambda: bool(answer.tokens))
    os.kill(served.engine._processes.pids[0], signal.SIGSTOP)
    async with asyncio.timeout(90):
        with pytest.raises(EngineDied, match="sampled nothing"):
            await stream
        with pytest.raises(EngineDied):
            await served.engine.pause("keep")
