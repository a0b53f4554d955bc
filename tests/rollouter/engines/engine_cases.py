"""Requests to a real engine and what comes of them, versions that it loads, and broadcasts to it alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from published_weights import stage

from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.weights import Bucket, BucketLayout, Collective, CollectiveGroup, Manifest
from asyncrl.rollouter.engines.base import Engine, GenerationRequest
from asyncrl.weights.broadcast import BroadcastPart
from asyncrl.weights.collective.sender import Sender

PROMPT = [(7 * i + 3) % 90 for i in range(40)]
LONG_S = 60.0

_numbers = itertools.count()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0


def ask(prompt: list[int] = PROMPT, **fields: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {"id": f"t{next(_numbers)}", "max_tokens": 64, "temperature": 1.0, "seed": None}
    return GenerationRequest(prompt_ids=prompt, **(defaults | fields))


async def collect(engine: Engine, request: GenerationRequest, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async for delta in engine.generate(request):
        assert answer.reason is None
        assert len(delta.tokens) == len(delta.logprobs)
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.reason = delta.finish_reason
        answer.spans = delta.spans
        answer.cached = delta.cached_tokens
    assert answer.reason is not None
    return answer


async def in_parts(engine: Engine, length: int, each: int, **fields: Any) -> tuple[Answer, int]:
    """A response that is aborted after some ``each`` tokens, again and again, and how often it was submitted."""
    whole = Answer(reason="abort")
    for submissions in itertools.count(1):
        held = len(whole.tokens)
        request = ask([*PROMPT, *whole.tokens], held=held, max_tokens=length - held, **fields)
        part = Answer()
        async with asyncio.TaskGroup() as tasks:
            stream = tasks.create_task(collect(engine, request, part))
            await until(lambda: stream.done() or len(part.tokens) > each)  # noqa: B023
            await engine.abort([request.id])
        whole = Answer(whole.tokens + part.tokens, whole.logprobs + part.logprobs, reason=part.reason)
        if part.reason != "abort":
            return whole, submissions
    raise AssertionError("unreachable")


async def until(condition: Callable[[], bool], within_s: float = LONG_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def worst(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


async def load(engine: Engine, manifest: Manifest, *, mode: Any = "abort", recompute_kv: bool = True) -> int:
    """An update from shared memory, as the follower makes it; returns its version."""
    with closing(stage(manifest)) as staged:
        await engine.accept(staged)
        await engine.pause(mode)
        await engine.load(staged, recompute_kv=recompute_kv)
    await engine.resume()
    return manifest.version


def part_of(sender: Sender, manifest: Manifest, *, epoch: int = 1, timeout_s: float = LONG_S, **group: Any) -> Any:
    """The engine's part in a broadcast to it alone."""
    told = {"backend": "gloo", "epoch": epoch, "world_size": 2, "host": sender.host, "port": sender.port} | group
    layouts = [BucketLayout(size=bucket.size, tensors=bucket.tensors) for bucket in manifest.buckets]
    collective = Collective(group=CollectiveGroup(**told), first_rank=1, buckets=layouts)
    return BroadcastPart(version=manifest.version, collective=collective, timeout_s=timeout_s)


def buckets_of(manifest: Manifest) -> Iterator[tuple[Bucket, int]]:
    """Buckets with the descriptors of their memory."""
    return ((bucket, int(bucket.path.rpartition("/")[2])) for bucket in manifest.buckets)


def broken_off(sender: Sender, manifest: Manifest) -> Iterator[tuple[Bucket, int]]:
    buckets = buckets_of(manifest)
    yield next(buckets)
    sender.abort("enough")
    yield from buckets


def send(sender: Sender, weights: BroadcastPart, buckets: Iterator[tuple[Bucket, int]]) -> None:
    sender.send(weights.collective.group, weights.version, weights.collective.buckets, buckets)


async def broadcast(
    engine: Engine,
    sender: Sender,
    manifest: Manifest,
    buckets: Iterator[tuple[Bucket, int]] | None = None,
    *,
    epoch: int = 1,
) -> list[BaseException | None]:
    """Send a version to a paused engine, or ``buckets`` in its place; what became of sending and loading."""
    weights = part_of(sender, manifest, epoch=epoch)
    return await asyncio.gather(
        asyncio.to_thread(send, sender, weights, buckets or buckets_of(manifest)),
        engine.load(weights, recompute_kv=True),
        return_exceptions=True,
    )
