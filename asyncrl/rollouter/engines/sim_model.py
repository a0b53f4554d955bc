"""Timing model of continuous batching. Pure: time is an argument, nothing waits.

Each decode step samples one token for every running request, and takes longer the more requests run. When the batch
admits a request, it processes the prompt, except for the beginning that is in the prefix cache. An earlier turn of the
conversation, or a request with the same prompt, has left that beginning there. A request reserves the KV cache of its
whole final context, so no request is ever preempted. Requests that do not fit wait, lower priority numbers first, then
in order of arrival.

The model computes only at events: a request ends, tokens are due for their readers, or the engine crashes. Call
``advance`` at the time that ``next_event`` returns; earlier calls do no harm. A response and its length depend only on
the seed and the response's key, never on when it was interrupted.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import xxhash

from asyncrl.config.rollout import SimEngineConfig
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines.base import GenerationRequest, TokenDelta

BLOCK = 16
"""Number of tokens in a block of the prefix cache."""
_TABLE = 8192
_random = random.Random(0)
# All responses are cut out of these two tables of _TABLE entries; see ``_content``.
# Printable ASCII: ordinary tokens to every byte-level vocabulary.
_TOKENS = [_random.randrange(33, 127) for _ in range(_TABLE)]
_LOGPROBS = [-_random.expovariate(1.6) for _ in range(_TABLE)]
_NORMAL = NormalDist()


class PrefixCache:
    """The simulated prefix cache: blocks of the contexts computed last, up to ``tokens`` tokens in all.

    The name of a block is a hash of its tokens and of all tokens before it.
    """

    def __init__(self, tokens: int) -> None:
        self._max_blocks = max(1, tokens // BLOCK)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Names of the cached blocks; those used longest ago come first."""

    def blocks(self, salt: str, ids: Sequence[int]) -> list[int]:
        """Return the names of the blocks of a context, in order; an incomplete last block has none."""
        data = np.asarray(ids, np.int32).tobytes()
        size, name = BLOCK * np.int32().itemsize, xxhash.xxh3_64_intdigest(salt.encode())
        names = []
        for end in range(size, len(data) + 1, size):
            name = xxhash.xxh3_64_intdigest(data[end - size : end], seed=name)
            names.append(name)
        return names

    def held(self, blocks: Sequence[int]) -> int:
        """Return how many tokens of a context, from its beginning, are in the cache. ``blocks`` names its blocks."""
        return BLOCK * next((at for at, name in enumerate(blocks) if name not in self._blocks), len(blocks))

    def put(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a context, and drop those used longest ago if the cache is full."""
        # From the last block to the first, so that the last block is dropped first: it has no use without the blocks
        # before it.
        for name in reversed(blocks):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Empty the cache."""
        self._blocks.clear()


@dataclass(slots=True)
class _SimRequest:
    """A request; ``submit`` has decided how many tokens it samples, and from which place of the tables."""

    id: str
    prompt: Sequence[int]
    salt: str
    context: int
    """Number of tokens in the prompt."""
    new: int
    """Number of tokens that it samples unless it is aborted."""
    reserve: int
    """Number of tokens that it reserves in the KV cache."""
    reason: str
    """Finish reason after ``new`` tokens."""
    offset: int
    """Index of its first token in the tables."""
    first_step: int = 0
    """Number of decode steps of the batch before its first one."""
    cached: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    sent: int = 0
    """Number of sampled tokens that are in a delta."""
    over: bool = False
    spans: list[tuple[int, int, bool]] = field(default_factory=list)
    """Spans: version, first token, and whether the KV cache is of older weights."""


def response_length(config: SimEngineConfig, seed: int, key: str) -> int:
    """Return the number of tokens of the response ``key`` in a run with ``seed``; at least 1."""
    if config.length == "constant":
        return max(1, round(config.length_median))
    # 53 bits, as many as a float holds, and never 0 or 1.
    uniform = ((_hash(seed, key) >> 11) + 0.5) / 2**53
    return max(1, round(config.length_median * math.exp(config.length_sigma * _NORMAL.inv_cdf(uniform))))


def content(seed: int, key: str, start: int, count: int) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probs (nats) at positions [start, start + count) of the response ``key``."""
    return _content(_hash(seed, key) + start, count)


def _content(offset: int, count: int) -> tuple[list[int], list[float]]:
    """Return ``count`` entries of both tables from index ``offset`` on; after its end a table begins again."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < count:
        first = (offset + len(tokens)) % _TABLE
        last = min(_TABLE, first + count - len(tokens))
        tokens += _TOKENS[first:last]
        logprobs += _LOGPROBS[first:last]
    return tokens, logprobs


def _hash(seed: int, key: str) -> int:
    """Return 64 bits that decide the length of the response ``key`` and its place in the tables."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{key}".encode())


class Batch:
    """The requests of one engine. All times are seconds on one clock that never goes back."""

    def __init__(self, config: SimEngineConfig, seed: int, stream_interval: int, crash_after: int | None) -> None:
        """``crash_after``: number of decode steps after which the engine crashes; None: never."""
        self._config = config
        self._seed = seed
        self._interval = stream_interval
        self._crash_after = crash_after
        self._running: dict[str, _SimRequest] = {}
        self._waiting: list[tuple[int, int, _SimRequest]] = []
        """Heap: priority, arrival, request."""
        self._ends: list[tuple[int, int, _SimRequest]] = []
        """Heap: decode step at which the request ends, arrival, request. Some were aborted since."""
        self._arrivals = 0
        """Number that orders equal entries of the heaps."""
        self._reserved = 0
        """Number of tokens reserved in the KV cache."""
        self._steps = 0
        """Number of decode steps done."""
        self._next_step_at = 0.0
        """Time when the next decode step begins: the end of the last one, later while prompts are processed."""
        self._prefill_left_s = 0.0
        """Seconds of prompt processing to be done after the pause, before the next decode step."""
        self._deltas: list[tuple[str, TokenDelta]] = []
        """Deltas that ``take`` has not returned yet, each with the id of its request."""
        self._frozen = False
        self._admitting = True
        self._prefixes = PrefixCache(config.kv_tokens)
        self.version = -1
        """The version loaded last; -1 before the first."""

    @property
    def crashed(self) -> bool:
        """Whether the engine has reached the step at which it crashes."""
        return self._crash_after is not None and self._steps >= self._crash_after

    @property
    def running(self) -> int:
        """Number of requests being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that are not admitted yet."""
        return len(self._waiting)

    def ids(self) -> list[str]:
        """Ids of all requests."""
        return [*self._running, *(run.id for _, _, run in self._waiting)]

    # --- requests ---

    def submit(self, now: float, request: GenerationRequest) -> None:
        """Decide how many tokens the request samples, and queue it.

        Raises ValueError for an empty prompt or a request for no token.
        """
        if request.max_tokens < 1 or not len(request.prompt_ids):
            raise ValueError(f"request {request.id}: has an empty prompt or asks for no token")
        self.advance(now)
        key = request.key or request.id
        # Number of tokens that the whole response still has, after those of earlier submissions.
        left = max(1, response_length(self._config, self._seed, key) - request.held)
        new, offset = min(left, request.max_tokens), _hash(self._seed, key) + request.held
        reason = "stop" if left <= request.max_tokens else "length"
        if request.stop_token_ids:
            ends = (at for at, token in enumerate(_content(offset, new)[0], 1) if token in request.stop_token_ids)
            if (end := next(ends, None)) is not None:
                new, reason = end, "stop"
        context = len(request.prompt_ids)
        run = _SimRequest(
            id=request.id,
            prompt=request.prompt_ids,
            salt=request.cache_salt,
            context=context,
            new=new,
            # A request that is larger than the whole cache reserves all of it, and so runs alone.
            reserve=min(context + new, self._config.kv_tokens),
            reason=reason,
            offset=offset,
        )
        self._arrivals += 1
        heapq.heappush(self._waiting, (request.priority, self._arrivals, run))
        self._admit(now)

    def abort(self, now: float, ids: list[str]) -> None:
        """End requests with the tokens that they have sampled."""
        self.advance(now)
        for run in [self._running.pop(id) for id in ids if id in self._running]:
            self._reserved -= run.reserve
            self._end(run, self._steps - run.first_step, "abort")
        gone = set(ids)
        for _, _, run in self._waiting:
            if run.id in gone:
                self._end(run, 0, "abort")
        self._waiting = [(priority, arrival, run) for priority, arrival, run in self._waiting if not run.over]
        heapq.heapify(self._waiting)
        self._admit(now)

    def take(self) -> list[tuple[str, TokenDelta]]:
        """Return the new deltas, each with the id of its request, and forget them."""
        out, self._deltas = self._deltas, []
        return out

    # --- pauses and weights ---

    def stop_admitting(self, now: float) -> None:
        """Admit no request any more; running ones continue to their end."""
        self.advance(now)
        self._admitting = False

    def freeze(self, now: float) -> None:
        """Stop stepping. May be repeated."""
        if self._frozen:
            return
        self.advance(now)
        self._flush()
        self._frozen, self._admitting = True, False
        # Time left for the prompts that are being processed.
        self._prefill_left_s = max(0.0, self._next_step_at - now) if self._running else 0.0

    @property
    def kv_use(self) -> float:
        """Share of the KV cache that is reserved."""
        return self._reserved / self._config.kv_tokens

    def load(self, version: int, *, recompute_kv: bool) -> None:
        """Change the version of the frozen batch; with ``recompute_kv`` all contexts are computed again on ``thaw``."""
        assert self._frozen
        self.version = version
        for run in self._running.values():
            run.spans.append((version, self._steps - run.first_step, not recompute_kv))
        if recompute_kv:
            self._prefixes.clear()
            contexts = sum(run.context + self._steps - run.first_step for run in self._running.values())
            self._prefill_left_s = contexts / self._config.prefill_tokens_per_s

    def thaw(self, now: float) -> None:
        """Continue stepping, after the prompt processing that is left to do, and admit requests again."""
        self._frozen, self._admitting = False, True
        self._next_step_at = now + self._prefill_left_s
        self._prefill_left_s = 0.0
        self._admit(now)

    # --- time ---

    def next_event(self) -> float | None:
        """Return the time of the next event, at which ``advance`` must be called; None while nothing runs."""
        if self._frozen or not self._running or self.crashed:
            return None
        target = min(self._next_end(), self._next_deltas())
        if self._crash_after is not None:
            target = min(target, self._crash_after)
        return self._next_step_at + (target - self._steps) * self._step_s()

    def advance(self, now: float) -> None:
        """Simulate the decode steps up to ``now``: end requests, make deltas every ``stream_interval`` steps, admit.

        Each pass goes to the next step at which a request ends, deltas are due or the engine crashes.
        """
        while self._running and not self._frozen and not self.crashed:
            step_s = self._step_s()
            # 1e-6, because a timer may come slightly early. ``step_s`` is 0 if a single request runs and only further
            # requests cost time; then the request runs to its end at once.
            if step_s > 0:
                passed = math.floor((now - self._next_step_at) / step_s + 1e-6)
            else:
                passed = self._next_end() - self._steps
            due = self._steps + max(0, passed)
            target = min(due, self._next_deltas(), self._next_end())
            if self._crash_after is not None:
                target = min(target, self._crash_after)
            if target == self._steps:
                return
            self._next_step_at += (target - self._steps) * step_s
            self._steps = target
            while self._ends and self._ends[0][0] <= self._steps:
                _, _, run = heapq.heappop(self._ends)
                if not run.over:
                    del self._running[run.id]
                    self._reserved -= run.reserve
                    self._end(run, run.new, run.reason)
            if self._steps % self._interval == 0:
                self._flush()
            self._admit(self._next_step_at)

    def _step_s(self) -> float:
        """Return the seconds of a decode step of the running requests."""
        return self._config.decode_step_s + (len(self._running) - 1) * self._config.decode_step_per_request_s

    def _next_deltas(self) -> int:
        """Return the next step at which deltas are due: the next multiple of ``stream_interval``."""
        return self._steps + self._interval - self._steps % self._interval

    def _next_end(self) -> int:
        """Return the step at which the next running request ends; drops the entries of aborted ones."""
        while self._ends[0][2].over:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _admit(self, now: float) -> None:
        """Begin the waiting requests that fit into the KV cache, in order, and process their prompts."""
        if not self._admitting:
            return
        while self._waiting:
            _, _, run = self._waiting[0]
            if self._reserved + run.reserve > self._config.kv_tokens:
                return
            heapq.heappop(self._waiting)
            if not self._running:
                # An idle batch has done no steps in the meantime.
                self._next_step_at = max(self._next_step_at, now)
            blocks = self._prefixes.blocks(run.salt, run.prompt)
            # At least the last token is computed, because the next one is sampled from its logits.
            run.cached = min(self._prefixes.held(blocks), run.context - 1)
            self._next_step_at += (run.context - run.cached) / self._config.prefill_tokens_per_s
            self._prefixes.put(blocks)
            run.first_step = self._steps
            run.spans.append((self.version, 0, False))
            self._reserved += run.reserve
            self._running[run.id] = run
            heapq.heappush(self._ends, (run.first_step + run.new, self._arrivals, run))
            self._arrivals += 1

    def _flush(self) -> None:
        """Make a delta for each running request that has sampled tokens since its last delta."""
        for run in self._running.values():
            sampled = self._steps - run.first_step
            if sampled > run.sent:
                tokens, logprobs = _content(run.offset + run.sent, sampled - run.sent)
                run.sent = sampled
                self._deltas.append((run.id, TokenDelta(tokens=tokens, logprobs=logprobs, cached_tokens=run.cached)))

    def _end(self, run: _SimRequest, sampled: int, reason: str) -> None:
        """End a request after ``sampled`` tokens: put its context into the prefix cache, and make its last delta."""
        run.over = True
        if sampled:
            whole = [*run.prompt, *_content(run.offset, sampled)[0]]
            self._prefixes.put(self._prefixes.blocks(run.salt, whole))
        tokens, logprobs = _content(run.offset + run.sent, sampled - run.sent)
        starts = [start for _, start, _ in run.spans] + [sampled]
        spans = [
            VersionSpan(version, start, end, mixed)
            for (version, start, mixed), end in zip(run.spans, starts[1:], strict=True)
            if end > start
        ]
        last = TokenDelta(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,  # type: ignore[arg-type]
            spans=spans,
            cached_tokens=run.cached,
        )
        self._deltas.append((run.id, last))
