"""Requests to a real engine and what comes of them, versions that it loads, broadcasts to it alone; and what must hold
of every engine that computes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
import torch
from published_weights import stage
from tiny_models import EOS, Publisher, logprobs_of, parameters_of

from asyncrl.core.errors import BroadcastFailed, WeightsCorrupt
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Bucket, Manifest
from asyncrl.rollouter.engines.base import Engine, GenerationRequest
from asyncrl.weights.broadcast import Sender

PROMPT = [(7 * i + 3) % 90 for i in range(40)]
LONG_S = 60.0
until = partial(harness.until, within_s=LONG_S)

_numbers = itertools.count()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0
    sets: list[list[int]] = field(default_factory=list)


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
        if delta.sets is not None:
            assert len(delta.sets.sizes) == len(delta.tokens)
            answer.sets += (part.tolist() for part in np.split(delta.sets.ids, np.cumsum(delta.sets.sizes)[:-1]))
        answer.reason = delta.finish_reason
        answer.spans = delta.spans
        answer.cached = delta.cached_tokens
    assert answer.reason is not None
    return answer


async def in_parts(engine: Engine, length: int, each: int, **fields: Any) -> tuple[Answer, int]:
    """A response that is aborted repeatedly after some ``each`` tokens, and the number of its submissions."""
    whole = Answer(reason="abort")
    for submissions in itertools.count(1):
        held = len(whole.tokens)
        request = ask([*PROMPT, *whole.tokens], held=held, max_tokens=length - held, **fields)
        part = Answer()
        async with asyncio.TaskGroup() as tasks:
            stream = tasks.create_task(collect(engine, request, part))
            await until(lambda: stream.done() or len(part.tokens) > each)  # noqa: B023
            await engine.abort([request.id])
        sets = whole.sets + part.sets
        whole = Answer(whole.tokens + part.tokens, whole.logprobs + part.logprobs, reason=part.reason, sets=sets)
        if part.reason != "abort":
            return whole, submissions
    raise AssertionError("unreachable")


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
    settings = {"backend": "gloo", "epoch": epoch, "world_size": 2, "host": sender.host, "port": sender.port} | group
    return BroadcastPart(manifest=manifest, group=BroadcastGroup(**settings), first_rank=1, timeout_s=timeout_s)


def buckets_of(manifest: Manifest) -> Iterator[tuple[Bucket, int]]:
    """Buckets with the descriptors of their memory."""
    return ((bucket, int(bucket.path.rpartition("/")[2])) for bucket in manifest.buckets)


def broken_off(sender: Sender, manifest: Manifest) -> Iterator[tuple[Bucket, int]]:
    buckets = buckets_of(manifest)
    yield next(buckets)
    sender.abort("enough")
    yield from buckets


def send(sender: Sender, weights: BroadcastPart, buckets: Iterator[tuple[Bucket, int]]) -> None:
    sender.send(weights.group, weights.version, buckets)


async def broadcast(
    engine: Engine,
    sender: Sender,
    manifest: Manifest,
    buckets: Iterator[tuple[Bucket, int]] | None = None,
    *,
    epoch: int = 1,
) -> list[BaseException | None]:
    """Send a version, or ``buckets`` in its place, to a paused engine. Returns the outcomes of sending and loading."""
    weights = part_of(sender, manifest, epoch=epoch)
    return await asyncio.gather(
        asyncio.to_thread(send, sender, weights, buckets or buckets_of(manifest)),
        engine.load(weights, recompute_kv=True),
        return_exceptions=True,
    )


# --- what must hold of every engine -------------------------------------------------------------------------


@dataclass
class Served:
    """An engine, its inputs, and the largest distance of its log-probs from those of the models."""

    engine: Engine
    publisher: Publisher
    versions: Iterator[int]
    models: list[Any]
    tolerance: float

    async def load(self, number: int, *, mode: str = "abort", recompute_kv: bool = True) -> int:
        manifest = self.publisher.publish_model(next(self.versions), self.models[number])
        return await load(self.engine, manifest, mode=mode, recompute_kv=recompute_kv)

    async def check_scores(self, number: int) -> None:
        assert worst(await self.engine.score(PROMPT), logprobs_of(self.models[number], PROMPT)) < self.tolerance


async def check_logprobs_and_ends(served: Served) -> None:
    """Each token has the log-prob of a full forward; a response ends with its first stop token, or at its limit."""
    version = await served.load(0)
    requests = [ask(PROMPT[: 8 + i], seed=i, temperature=t) for i in range(4) for t in (0.5, 1.0, 0.0)]
    answers = await asyncio.gather(*(collect(served.engine, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        prompt, tokens = list(request.prompt_ids), torch.tensor(answer.tokens)
        with torch.no_grad():
            logits = served.models[0](torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1].double()
        scores = torch.log_softmax(logits / (request.temperature or 1.0), -1)
        assert worst(answer.logprobs, scores[torch.arange(len(tokens)), tokens].tolist()) < served.tolerance
        assert request.temperature or answer.tokens == logits.argmax(-1).tolist()
        assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]
        ends = [at for at, token in enumerate(answer.tokens, 1) if token == EOS]
        assert (answer.reason, len(answer.tokens)) == (("stop", *ends) if ends else ("length", 64))
    assert {answer.reason for answer in answers} == {"stop", "length"}
    whole = answers[1]
    stop = whole.tokens[len(whole.tokens) // 2]
    cut = await collect(served.engine, ask(PROMPT[:8], seed=0, stop_token_ids=[stop, EOS - 1], max_tokens=63))
    first = min(whole.tokens.index(token) for token in (stop, EOS - 1) if token in whole.tokens)
    assert (cut.tokens, cut.reason) == (whole.tokens[: first + 1], "stop")


async def check_refusals(served: Served) -> None:
    """An impossible request is a ValueError, and nothing is left of an unread stream."""
    await served.load(0)
    with pytest.raises(ValueError, match="request t"):
        await collect(served.engine, ask([1] * 5000))
    answer = Answer()
    stream = asyncio.create_task(collect(served.engine, ask(max_tokens=512, temperature=0.0), answer))
    await until(lambda: len(answer.tokens) > 8)
    stream.cancel()
    await asyncio.wait([stream])
    # A pause that waits for requests to finish would find it.
    await served.engine.pause("wait")
    assert not served.engine.kv_use
    await served.engine.resume()
    assert (await collect(served.engine, ask(max_tokens=3))).reason in ("stop", "length")
    assert await served.engine.score(PROMPT[:1]) == []


async def check_i4_all_of_the_weights_or_nothing(
    served: Served, change: Callable[[dict[str, Any]], Any], reported: str, in_load: str
) -> None:
    """Other weights than the model's are refused before a load, and in it until they are whole."""
    await served.load(0)
    engine, version = served.engine, next(served.versions)
    tensors = parameters_of(served.models[1])
    complete = stage(served.publisher.publish(version, tensors))
    change(tensors)
    wrong = stage(served.publisher.publish(version, tensors))
    with closing(complete), closing(wrong):
        with pytest.raises(WeightsCorrupt, match=reported):
            await engine.accept(wrong)
        await served.check_scores(0)
        await engine.pause("abort")
        for _ in range(2):
            with pytest.raises(WeightsCorrupt, match=in_load):
                await engine.load(wrong, recompute_kv=True)
        await engine.load(complete, recompute_kv=True)
        await engine.resume()
        await served.check_scores(1)


async def check_broadcasts(served: Served, sender: Sender) -> None:
    """A broadcast brings the weights, again over the same group; a broken one is made good from shared memory."""
    engine = served.engine
    for number in (0, 1):
        manifest = served.publisher.publish_model(next(served.versions), served.models[number])
        await engine.pause("abort")
        assert await broadcast(engine, sender, manifest) == [None, None]
        await engine.resume()
        await served.check_scores(number)
        answer = await collect(engine, ask(max_tokens=4))
        assert answer.spans == [VersionSpan(manifest.version, 0, len(answer.tokens))]
    manifest = served.publisher.publish_model(next(served.versions), served.models[0])
    await engine.pause("abort")
    held = await engine.checksum()
    for failed in await broadcast(engine, sender, manifest, broken_off(sender, manifest)):
        assert isinstance(failed, BroadcastFailed) and "enough" in str(failed)
    # I4: all is received and verified before the load begins.
    assert await engine.checksum() == held
    with closing(stage(manifest)) as staged:
        await engine.load(staged, recompute_kv=True)
    await engine.resume()
    await served.check_scores(0)
