"""``python -m tools.bench rollout``: tokens/s through the rollouter against a bare AsyncLLM loop.

One vLLM engine serves both sides in turn, and both generate the same responses: the same prompts, seeds, sampling
parameters, output kind, stream interval, cache salt and concurrency. The rollouter is the real actor: it leases
leases, runs episodes, has each trajectory scored and delivers each group; what it talks to is in this process
(counterparts.py). The bare loop keeps the same fields: tokens, log-probs, version and the text, decoded once at
the end.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.learner.fsdp.weights.assembly import publish
from asyncrl.messages.groups import Group, Lease, sampled_tokens, versions_of
from asyncrl.observe.logging import configure_logging
from asyncrl.rollouter.actor import Rollouter
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.engines.vllm.engine import sampling
from asyncrl.rollouter.serving.generation import request_seed
from asyncrl.rpc.actor import ActorContext
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.text.tokenizer import Tokenizer, load_tokenizer
from tools.bench.counterparts import Exchange, make_lease, serving_rollouter
from tools.bench.processes import actor_context
from tools.bench.report import Report, Target
from tools.bench.tiny_model import make_model
from tools.memory_transport import MemoryNetwork

GROUPS = 48
SAMPLES = 4
MAX_TOKENS = 64
CONCURRENCY = 32
STREAM_INTERVAL = 16
PASS_S = 300.0
"""Longest that one pass over the prompts may take."""


def config(model: Path) -> Config:
    """One engine on CPU."""
    return validate_config(
        {
            "model": {"path": str(model)},
            "data": {"source": "synthetic", "max_prompt_tokens": 32},
            "rollout": {
                "engine": "vllm",
                "gpus_per_replica": 0,
                "samples_per_prompt": SAMPLES,
                "concurrency": CONCURRENCY,
                "max_tokens": MAX_TOKENS,
                "stream_interval": STREAM_INTERVAL,
                "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1},
            },
            # No heartbeats in this process.
            "supervision": {"silence_s": 1e6},
            "log": {"level": "warning"},
        }
    )


async def measure(report: Report, *, pairs: int = 30) -> None:
    report.settings |= {
        "prompt_groups": GROUPS,
        "samples_per_prompt": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "concurrency": CONCURRENCY,
        "stream_interval": STREAM_INTERVAL,
        "transport": "memory",
    }
    configure_logging("warning")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        await asyncio.to_thread(make_model, folder / "model")
        settings = config(folder / "model")
        tokenizer = load_tokenizer(settings.model.path)
        leases = make_leases(settings, tokenizer)
        with publish(iter([load_file(folder / "model" / "model.safetensors")]), 0) as publication:
            exchange = Exchange(publication.manifest)
            network, credentials = MemoryNetwork(), Credentials("bench", "bench")
            (folder / "run" / "private").mkdir(parents=True)

            def context(name: str, controller: str | None) -> ActorContext:
                transport = network.transport()
                return actor_context(
                    settings, name, folder / "run", credentials, transport=transport, controller=controller
                )

            async with serving_rollouter(context, exchange, PASS_S) as rollouter:
                bare = Bare(rollouter, settings, tokenizer, leases)

                async def tokens_per_s() -> float:
                    began = time.perf_counter()
                    groups = await exchange.generate(leases, PASS_S)
                    seconds = time.perf_counter() - began
                    return sum(sampled_tokens(t) for group in groups for t in group.trajectories) / seconds

                sides = {"rollouter": tokens_per_s, "bare AsyncLLM": bare.tokens_per_s}
                await report.measure("rollout", sides, pairs, unit="tokens/s", target=Target(">=", 0.97))
                check_same(exchange.groups, bare)


def make_leases(settings: Config, tokenizer: Tokenizer) -> list[Lease]:
    """Different prompts; the same in each pass."""
    texts = [f"What is {index} + {3 * index}? " for index in range(GROUPS)]
    return [make_lease(settings, index, text, tokenizer.encode_prompt(text)) for index, text in enumerate(texts)]


def check_same(groups: list[Group], bare: Bare) -> None:
    """Assert that both sides have done the same work."""
    mine = {
        (group.lease.uid, t.sample): (sampled_tokens(t), versions_of(t)[0])
        for group in groups
        for t in group.trajectories
    }
    theirs = {key: (len(tokens), int(version)) for key, (tokens, _, version, _) in bare.kept.items()}
    # Sums in another order may tip a close choice of the sampler, so equality is not to the last token.
    assert mine.keys() == theirs.keys()
    total, other = sum(n for n, _ in mine.values()), sum(n for n, _ in theirs.values())
    assert abs(total - other) <= 0.1 * total, (total, other)
    assert {version for _, version in mine.values()} == {version for _, version in theirs.values()}


class Bare:
    """vLLM's AsyncLLM, the one of the rollouter's engine, in a loop as short as can be."""

    def __init__(self, rollouter: Rollouter, settings: Config, tokenizer: Tokenizer, leases: list[Lease]) -> None:
        engine: Any = rollouter._manager._engine
        self._llm, self._vllm, self._stops = engine._llm, engine._vllm, engine._eos_token_ids
        self._settings, self._tokenizer, self._leases = settings, tokenizer, leases
        self.kept: dict[tuple[str, int], tuple[list[int], list[float], str, str]] = {}

    async def tokens_per_s(self) -> float:
        began = time.perf_counter()
        places = asyncio.Semaphore(CONCURRENCY)
        async with asyncio.TaskGroup() as tasks:
            for lease in self._leases:
                for sample in range(SAMPLES):
                    tasks.create_task(self._one(lease, sample, places))
        seconds = time.perf_counter() - began
        return sum(len(tokens) for tokens, *_ in self.kept.values()) / seconds

    async def _one(self, lease: Lease, sample: int, places: asyncio.Semaphore) -> None:
        vllm = self._vllm
        key = f"{lease.uid}/{sample}/1"
        request = GenerationRequest(
            id=f"{key}/1",
            prompt_ids=lease.prompt_ids.tolist(),
            max_tokens=MAX_TOKENS,
            temperature=lease.temperature,
            seed=request_seed(self._settings.run.seed, key),
            cache_salt="v0",
        )
        async with places:
            tokens: list[int] = []
            logprobs: list[float] = []
            versions: Any = None
            async for output in self._llm.generate(
                vllm.tokens_input(request.prompt_ids, cache_salt=request.cache_salt),
                sampling(vllm, request, self._stops, STREAM_INTERVAL),
                request.id,
            ):
                done = output.outputs[0]
                tokens.extend(done.token_ids)
                logprobs.extend(done.logprobs.logprobs)
                versions = done.weight_versions
            text = self._tokenizer.decode(tokens)
        self.kept[lease.uid, sample] = (tokens, logprobs, versions[0].version, text)
