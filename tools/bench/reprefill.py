"""``python -m tools.bench reprefill``: the ways to treat the requests in flight at an update, and what each costs.

One real vLLM engine on CPU generates the same long responses again and again, under ``abort_resume``, under ``keep``
with the KV cache recomputed and stale, and without updates, in turn; every second it gets new weights. All lengths are
fixed beforehand (lognormal) and no response ends by itself, so each pass samples as many tokens. The ratios are of
tokens/s against ``abort_resume`` of the same round.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.messages.groups import Lease
from asyncrl.rollouter.actor import Rollouter
from asyncrl.telemetry.logging import configure_logging
from asyncrl.tokenizer import load_tokenizer
from asyncrl.trajectories import sampled_tokens
from tools.bench.counterparts import Exchange
from tools.bench.paired import REST_S, compare
from tools.bench.report import Report
from tools.bench.rollout import config, living, make_leases
from tools.bench.tiny_model import make_model, publish

CONCURRENCY = 64
GROUPS, SAMPLES = 24, 4
MEDIAN, SIGMA, LONGEST = 450, 0.5, 960
"""Lengths of responses: median (tokens), sigma of the lognormal, and longest (tokens)."""
UPDATE_S = 1.0
PASS_S = 600.0
NONE = "no updates"
MODES = {
    "abort_resume": ("abort_resume", "recompute"),
    "keep, recompute": ("keep", "recompute"),
    "keep, stale": ("keep", "stale"),
    NONE: ("abort_resume", "recompute"),
}


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the prompts."""

    tokens_per_s: float
    updates: int
    stall_s: float
    """Median of an update."""
    reprefill_tokens: float
    """Mean of an update."""


async def measure(report: Report, *, rounds: int, batched_tokens: int | None) -> None:
    """Fill the report."""
    report.settings |= {
        "responses": GROUPS * SAMPLES,
        "length": {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST},
        "concurrency": CONCURRENCY,
        "update_s": UPDATE_S,
        "rounds": rounds,
        "max_num_batched_tokens": batched_tokens,
    }
    configure_logging("warning")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        await asyncio.to_thread(make_model, folder / "model")
        _without_end(folder / "model")
        settings = _settings(folder / "model", batched_tokens)
        leases = _leases(settings)
        with publish(folder / "model") as publication:
            exchange = Exchange(publication.manifest)
            async with living(settings, folder, exchange) as rollouter:
                engine: Any = rollouter._host._engine
                engine._eos_token_ids = []
                found = await _rounds(
                    {mode: partial(_generate, rollouter, exchange, settings, leases, mode) for mode in MODES}, rounds
                )
    for mode, passes in found.items():
        _tell(report, mode, passes, found["abort_resume"])


def _without_end(model: Path) -> None:
    """Leave the end-of-sequence token out of what vLLM reads: all passes are to sample the same number of tokens."""
    for path in (model / "config.json", model / "generation_config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


def _settings(model: Path, batched_tokens: int | None) -> Config:
    tree = config(model).model_dump(mode="json")
    extra = {} if batched_tokens is None else {"max_num_batched_tokens": batched_tokens}
    tree["rollout"] |= {"concurrency": CONCURRENCY, "max_tokens": LONGEST, "samples_per_prompt": SAMPLES}
    tree["rollout"]["vllm"] |= {"cpu_kv_cache_bytes": 512 << 20, "extra": extra}
    return Config.model_validate(tree)


def _leases(settings: Config) -> list[Lease]:
    """Different prompts, of which all samples are as long."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, GROUPS)
    leases = make_leases(settings, load_tokenizer(settings.model.path))[:GROUPS]
    return [
        msgspec.structs.replace(lease, samples=SAMPLES, max_tokens=int(min(LONGEST, length)))
        for lease, length in zip(leases, lengths, strict=True)
    ]


async def _rounds(modes: dict[str, Callable[[], Awaitable[Pass]]], rounds: int) -> dict[str, list[Pass]]:
    """Each mode once in every round after a round that does not count; a round begins with another mode each time."""
    found: dict[str, list[Pass]] = {mode: [] for mode in modes}
    names = list(modes)
    for number in range(rounds + 1):
        first = number % len(names)
        for mode in names[first:] + names[:first]:
            await asyncio.sleep(REST_S)
            done = await modes[mode]()
            if number:
                found[mode].append(done)
    return found


async def _generate(rollouter: Rollouter, exchange: Exchange, settings: Config, leases: list[Lease], mode: str) -> Pass:
    on_update, keep_kv = MODES[mode]
    host = rollouter._host
    rollout = settings.rollout.model_copy(update={"on_update": on_update, "keep_kv": keep_kv})
    # One engine serves all modes; between two passes nothing is in it.
    host._config = settings.model_copy(update={"rollout": rollout})
    before, version, exchange.updates = host.reprefill.tokens, exchange.manifest.version, []
    async with _updates(exchange, every_s=None if mode == NONE else UPDATE_S):
        began = time.perf_counter()
        groups = await exchange.generate(leases, PASS_S)
        seconds = time.perf_counter() - began
    tokens = sum(sampled_tokens(trajectory) for group in groups for trajectory in group.trajectories)
    assert tokens == SAMPLES * sum(lease.max_tokens for lease in leases)
    updates = exchange.manifest.version - version
    stalls = [times.stall_s for times in exchange.updates]
    return Pass(
        tokens_per_s=tokens / seconds,
        updates=updates,
        stall_s=median(stalls) if stalls else 0.0,
        reprefill_tokens=(host.reprefill.tokens - before) / max(1, updates),
    )


@asynccontextmanager
async def _updates(exchange: Exchange, *, every_s: float | None) -> AsyncIterator[None]:
    """A new version now and then, and none under way at the end."""

    async def publish_on() -> None:
        while every_s is not None:
            await asyncio.sleep(every_s)
            await exchange.update(PASS_S)

    publishing = asyncio.create_task(publish_on())
    try:
        yield
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])
        await exchange.served(PASS_S)


def _tell(report: Report, mode: str, passes: list[Pass], reference: list[Pass]) -> None:
    stall = median(each.stall_s for each in passes)
    again = median(each.reprefill_tokens for each in passes)
    name = mode.replace(", ", "_").replace(" ", "_")
    found = compare([(one.tokens_per_s, other.tokens_per_s) for one, other in zip(passes, reference, strict=True)])
    report.comparison(name, found, unit="tokens/s", sides=(mode, "abort_resume"))
    report.figures[name] |= {"stall_s": stall, "reprefill_tokens": again, "updates": sum(p.updates for p in passes)}
    report.ratios[f"{name}_vs_abort_resume"] = found.ratio.median
    report.say(f"{'':24} stall {stall:.3f} s, {again:.0f} tokens computed again, an update")
