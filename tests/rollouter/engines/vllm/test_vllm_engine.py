"""The vLLM engine on CPU, its head tied to its embeddings, against Hugging Face models; its start, death and end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import closing
from itertools import count
from pathlib import Path

import psutil
import pytest
from drifting import Learner, check_alarm
from learner.learner_cases import changed
from published_weights import stage
from rollouter.engines.changing import LEAVES_CONTEXTS, LONG_PROMPTS, TOLERANCE, Changing, config_for
from rollouter.engines.engine_cases import (
    PROMPT,
    Answer,
    Served,
    ask,
    broadcast,
    check_broadcasts,
    check_i4_all_of_the_weights_or_nothing,
    check_logprobs_and_ends,
    check_refusals,
    collect,
    in_parts,
    until,
    worst,
)
from tiny_models import Publisher, logprobs_of, make_model, parameters_of, save_model, sharp_model

from asyncrl.core.errors import BroadcastFailed, ConfigError, EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.engines.vllm.engine import VllmEngine, submission_seed
from asyncrl.rollouter.engines.vllm.launch import AsyncLLM, LoadLogger
from asyncrl.rollouter.serving import generation
from asyncrl.rollouter.serving.drift import ROUNDING
from asyncrl.weights.broadcast import Sender
from tools.live_run import engine_cores, lives, title

pytestmark = LEAVES_CONTEXTS

RUNNER = asyncio.Runner()
"""The event loop of the engine."""
RUN = RUNNER.run
TENSORS = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight")
"""One that vLLM fuses with others, and one that it loads unchanged."""


def children() -> set[int]:
    """Live processes below this one, except Python's own resource tracker.

    Processes that other tests have left, such as the workers of torch's compiler, differ only in being there before.
    """
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in title(process) and lives(process)
    }


@pytest.fixture(scope="module")
def models():
    return [make_model(seed, tied=True) for seed in (1, 2)]


@pytest.fixture(scope="module")
def served(tmp_path_factory, models):
    """Closed, it leaves neither temporary files nor processes."""
    folder = save_model(tmp_path_factory.mktemp("model"), make_model(0, tied=True))
    before = children()
    # Not below pytest's own folders: the path of a socket must be short.
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(prefix="ae-") as temporary:
        patched.setattr(tempfile, "tempdir", temporary)
        # torch keeps what it has compiled, and would continue to do so there.
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        engine, publisher = VllmEngine(config_for(folder, concurrency="auto"), "rollouter/7"), Publisher()
        try:
            RUN(engine.start())
            yield Served(engine, publisher, count(), models, TOLERANCE)
        finally:
            for _ in range(2):
                RUN(engine.close())
            RUNNER.close()
            publisher.close()
        assert not children() - before
        assert list(Path(temporary).iterdir()) == []


# --- requests -----------------------------------------------------------------------------------------------


async def test_logprobs_match_the_model_and_a_response_ends_at_its_first_stop_token(served):
    await check_logprobs_and_ends(served)


async def test_impossible_and_unread_requests_leave_nothing_behind(served):
    await check_refusals(served)


async def test_seeds_repeat_and_differ_and_salts_separate_the_prefix_cache(served, models):
    await served.load(0)
    # More prompt tokens at once than one step processes, none of them shared.
    prompts = [[(seed * j + j // 7 + seed) % 90 for j in range(250)] for seed in range(20)]
    requests = [ask(prompt, seed=seed, cache_salt=copy) for copy in "ab" for seed, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(collect(served.engine, request) for request in requests))
    assert [a.tokens for a in answers[:20]] == [a.tokens for a in answers[20:]]
    assert len({tuple(a.tokens) for a in answers[:20]}) > 10
    answers = [await collect(served.engine, ask(cache_salt=salt)) for salt in ("v1", "v1", "v2")]
    assert [answer.cached for answer in answers] == [0, 32, 0]


def test_a_resume_replays_no_noise_of_the_response():
    seeds = [submission_seed(ask(seed=5, held=held)) for held in (0, 1, 2, 1)]
    assert seeds[0] == 5 and seeds[1] == seeds[3] and len(set(seeds)) == 3
    assert submission_seed(ask(seed=None, held=3)) is None


async def test_i8_abort_and_resume_changes_nothing(served, models):
    await served.load(0)
    whole = await collect(served.engine, ask(max_tokens=700, temperature=0.0))
    parts, submissions = await in_parts(served.engine, 700, 30, temperature=0.0)
    assert parts.tokens == whole.tokens
    assert submissions > 2


def test_the_load_is_the_schedulers_and_counts_requests_that_were_put_back():
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    logger, step = LoadLogger(), IterationStats()
    assert logger.load is None
    step.num_preempted_reqs = 2
    for _ in range(3):
        logger.record(SchedulerStats(num_waiting_reqs=4, num_skipped_waiting_reqs=1, kv_cache_usage=0.5), step)
        logger.record(None, None)
    assert logger.load == EngineLoad(kv_use=0.5, queued=5, preemptions=6)


# --- updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_pause_returns_the_tokens_that_the_scheduler_holds(served, models, mode, monkeypatch):
    monkeypatch.setattr(served.engine, "_stream_interval", 1024)
    old = await served.load(0)
    answer = Answer()
    new = next(served.versions)
    with closing(stage(served.publisher.publish_model(new, models[1]))) as staged:
        await served.engine.accept(staged)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(served.engine, ask(max_tokens=700, temperature=0.0), answer))
            # Its prompt and a good part of the response are in the KV cache of 64 MiB, 512 bytes a token.
            await until(lambda: (load := served.engine.load_now) is not None and load.kv_use * (128 << 10) > 95)
            early = len(answer.tokens)
            await served.engine.pause(mode)
            await served.engine.load(staged, recompute_kv=True)
            await served.engine.resume()
    assert early == 0, "the interval is longer than the response"
    split = answer.spans[0].end
    assert 16 < split < 700
    kept = [VersionSpan(new, split, 700)] if mode == "keep" else []
    assert answer.spans == [VersionSpan(old, 0, split), *kept]
    assert len(answer.tokens) == (700 if mode == "keep" else split)
    before = logprobs_of(models[0], PROMPT + answer.tokens)[len(PROMPT) - 1 :]
    assert worst(answer.logprobs[:split], before[:split]) < TOLERANCE


@pytest.mark.parametrize("name", TENSORS)
async def test_i4_an_incomplete_set_of_weights_is_refused_before_and_during_the_load(served, name):
    await check_i4_all_of_the_weights_or_nothing(
        served, lambda tensors: tensors.pop(name), "are missing", "incomplete weights"
    )


async def test_a_broadcast_delivers_the_weights_and_shared_memory_replaces_a_broken_one(served, models):
    with closing(Sender("gloo", "127.0.0.1", 60.0)) as sender:
        await check_broadcasts(served, sender)
        # Whole and verified, but not all of the model: the worker finds it when half of it is loaded.
        tensors = parameters_of(models[1])
        del tensors[TENSORS[0]]
        partial = served.publisher.publish(next(served.versions), tensors)
        await served.engine.pause("abort")
        sent, failed = await broadcast(served.engine, sender, partial, epoch=2)
    assert sent is None and isinstance(failed, BroadcastFailed) and "incomplete weights" in str(failed)
    await served.load(1)
    await served.check_scores(1)


@pytest.mark.parametrize(
    ("on_update", "keep_kv"), [("abort_resume", "recompute"), ("keep", "recompute"), ("keep", "stale")]
)
async def test_i3_tokens_before_and_after_each_update_match_their_weights(served, models, on_update, keep_kv):
    changing = Changing(served.engine, served.versions, models, on_update=on_update, keep_kv=keep_kv)
    found = await changing.run(12, 0, 0, 0, 0, 0)
    assert changing.check(found, stale=keep_kv == "stale") >= 6
    assert any(len(generated.spans) > 2 for generated in found)


def _without_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    request = generation.GenerationRequest
    monkeypatch.setattr(
        generation, "GenerationRequest", lambda **fields: request(**(fields | {"cache_salt": "of all versions"}))
    )


def _without_the_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> bool:
        return True

    monkeypatch.setattr(AsyncLLM, "reset_prefix_cache", nothing)


@pytest.mark.parametrize(
    ("on_update", "keep_kv", "without"),
    [
        ("abort_resume", "recompute", _without_the_drop),
        # Kept requests would continue over keys and values of the old weights.
        ("keep", "recompute", _without_the_salt),
        # Nothing is dropped there, and what begins after the update must not find what is left.
        ("keep", "stale", lambda *_: None),
    ],
)
async def test_no_token_is_sampled_over_keys_and_values_of_older_weights(
    served, models, monkeypatch, on_update, keep_kv, without
):
    """Prompts of several blocks come again under each version. Each of two guards is enough: the drop of the cache in a
    load, and the salt of the version."""
    without(monkeypatch)
    changing = Changing(served.engine, served.versions, models, on_update=on_update, keep_kv=keep_kv)
    changing.prompts = LONG_PROMPTS
    found = await changing.run(4, 4, 4, 4, 4, max_tokens=400, apart=80)
    assert changing.check(found, stale=keep_kv == "stale") > 0, "updates meet episodes that run"


async def test_the_drift_alarm_ignores_rounding_and_reports_drift(served, tmp_path, monkeypatch):
    folder = save_model(tmp_path, sharp_model(0, tied=True))
    with closing(Learner(config_for(folder, learner={"dtype": "float32", "device": "cpu"}))) as learner:
        await check_alarm(served.engine, learner, served.versions, ROUNDING[True], monkeypatch)


# --- starts, and the end ------------------------------------------------------------------------------------


async def test_a_failed_start_gives_the_reason_and_a_cancelled_one_leaves_nothing(served, tmp_path):
    folder = save_model(tmp_path, make_model(1))
    for config, words in (
        (config_for(str(tmp_path / "absent")), "model.path: .* is no folder"),
        (config_for(folder, vllm={"cpu_kv_cache_bytes": 1000}), "cpu_kv_cache_bytes: is 1000"),
        (config_for(folder, gpus_per_replica=1), "rollout.gpus_per_replica"),
        (config_for(folder, max_tokens=4096, vllm={"max_model_len": 8192}), "vLLM refuses"),
        (config_for(folder, vllm={"extra": {"no_such_argument": 1}}), "no_such_argument"),
        # The check of the configuration refuses it before.
        (changed(config_for(folder), rollout={"top_k": 20}), r"rollout\.top_k: vLLM refuses (?s:.*)Model Runner V2"),
    ):
        engine = make_engine(config, "rollouter/7")
        with pytest.raises(ConfigError, match=words):
            await engine.start()
        await engine.close()
    before = children()
    engine = VllmEngine(config_for(folder), "rollouter/8")
    start = asyncio.ensure_future(engine.start())
    await until(lambda: bool(children() - before), within_s=120.0)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    async with asyncio.timeout(30):
        await engine.close()
    assert not children() - before


async def test_i5_a_killed_core_is_noticed_everywhere(served, models):
    """The last test of the engine."""
    engine, answers = served.engine, [Answer() for _ in range(3)]
    [core] = engine_cores(os.getpid())
    await served.load(0)
    streams = [
        asyncio.ensure_future(collect(engine, ask(max_tokens=700, temperature=0.0), answer)) for answer in answers
    ]
    await until(lambda: all(answer.tokens for answer in answers))
    # A call in flight when the core dies: it cannot be answered.
    os.kill(core, signal.SIGSTOP)
    call = asyncio.ensure_future(engine.pause("wait"))
    await asyncio.sleep(0)
    os.kill(core, signal.SIGKILL)
    async with asyncio.timeout(30):
        for outcome in await asyncio.gather(*streams, call, return_exceptions=True):
            assert isinstance(outcome, EngineDied)
            assert outcome.engine == "rollouter/7"
        late = collect(engine, ask())
        for action in (engine.checksum(), engine.resume(), engine.abort(["s0"]), engine.score(PROMPT), late):
            with pytest.raises(EngineDied, match="engine core ended"):
                await action
