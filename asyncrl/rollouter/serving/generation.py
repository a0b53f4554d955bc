"""The policy: a slot of the engine, and from token ids to a finished answer. The number of slots may adapt.

    GroupRunner -> SingleTurn | EpisodePlayer -> Sessions -> ServedPolicy -> EngineHost -> Engine

``PolicyCall.generate`` hides that weights change, and that engines are paused and die: it returns a finished piece of
text. A response is put together from one or more submissions to engines.

Invariants: tokens, log-probs and version spans always cover the same positions; every token keeps the log-prob and the
version that sampled it, over aborts, resumes and the death of an engine; there are never more than ``max_tokens``. A
token is given up only if its version is unknown: see ``Response.cut_submission``.

Slots are places in the engine for calls. Places are those of open episodes; several may share a slot. Under
``rollout.concurrency = "auto"`` the limit of slots is raised while all slots are used and the engine has room: first by
a share of itself, and from the first cut on by a constant. It is cut by a share where the engine preempts a request,
which then computes its context again, or where its KV cache is nearly full. After a cut the same pressure cuts nothing
more: not before the calls that run are within the limit. The limit stays within its bounds, is raised by no more than
GROWTH at a time, and only a look that sees pressure cuts it.

Fails with TrajectoryFailed when engines have died of the prompt too often (``after_death``). Any other death counts as
no attempt, and costs no token that was handed over: the next engine samples after those.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from asyncrl.config import Config
from asyncrl.config.rollout import AUTO_START
from asyncrl.core.errors import EngineDied
from asyncrl.messages.groups import Lease, Trajectory, VersionSpan
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.observe.trace import FIRST_SLOT, Trace
from asyncrl.rollouter.engines.base import EngineLoad, GenerationRequest
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.group_events import CallAccount, SampleAccount
from asyncrl.rpc.services import ActorServices
from asyncrl.text.stops import Stops
from asyncrl.text.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]
Phase = Literal["queue", "engine", "paused"]
"""Place of a call: waiting for a slot or in the engine's own queue; being sampled; held while weights change."""
MARGIN = 8
"""Characters at the beginning of a window that may differ from those of the whole text: a tokenizer may drop a space
there, join it with punctuation, or see only the last bytes of a character."""
LOOK_S = 1.0
"""Pause between two looks."""
ROOM, FULL = 0.85, 0.95
"""Shares of the KV cache: below the first there is room for more, from the second on it is as good as full."""
GROWTH = 0.25
"""Share by which it grows before its first cut."""
STEPS = 16
"""Looks, about, in which the limit regains from one cut to the next what was cut."""
CUT = 0.8
"""Share of the limit that a cut leaves."""


@dataclass(slots=True, kw_only=True)
class Response:
    """Tokens held so far."""

    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    submissions: int = 0
    computed: int = 0
    """Tokens, from the first of its prompt on, that the engine has computed; an engine that has died has none."""
    computed_at: int = -1
    """The version under which the engine computed them."""
    _submission_start: int = 0
    _submission_version: int = -1

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self.tokens)

    def lost(self, version: int) -> int:
        """Tokens computed under older weights than those of ``version``."""
        return self.computed if self.computed_at < version else 0

    def submitted(self, version: int) -> None:
        """A new submission, begun under ``version``, samples the next tokens."""
        assert self.finish_reason is None
        assert self.remaining > 0
        self.submissions += 1
        self._submission_start = len(self.tokens)
        self._submission_version = version

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode) -> bool:
        """Take a delta; True when a stop string ends the response within it."""
        assert len(tokens) == len(logprobs)
        before = len(self.tokens)
        room = self.remaining
        self.tokens.extend(tokens[:room])
        self.logprobs.extend(logprobs[:room])
        strings = self.stops.strings
        if not strings:
            return False
        # Over all submissions, so that one that straddles a resume still stops, and no more text than one can reach
        # back over, so that the work does not grow with the response.
        start = self._window(before, decode)
        if not _contains(decode(self.tokens[start:]), strings):
            return False
        # The shortest prefix that holds a stop string; the text grows with the tokens, so it can be bisected.
        low, high = before + 1, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            if _contains(decode(self.tokens[start:middle]), strings):
                high = middle
            else:
                low = middle + 1
        del self.tokens[low:]
        del self.logprobs[low:]
        self.finish_reason = "stop"
        return True

    def _window(self, end: int, decode: Decode) -> int:
        """The first of so many tokens before ``end`` that no stop string which ends behind it begins before them."""
        wanted = max(map(len, self.stops.strings)) + MARGIN
        count = wanted
        while count < end and len(decode(self.tokens[end - count : end])) < wanted:
            # Tokens may be bytes of a character, or have no text.
            count *= 2
        return max(0, end - count)

    def end_submission(
        self, reason: Literal["stop", "length", "abort"] | None, spans: Sequence[VersionSpan] = ()
    ) -> None:
        """The submission is over: ``spans`` count from its first token.

        Without spans the submission was all under the version it began with.
        """
        start, end = self._submission_start, len(self.tokens)
        if not spans:
            spans = [VersionSpan(self._submission_version, 0, end - start)]
        for span in spans:
            # Spans cover every sampled token; what a stop string or the limit has cut off is no part of the response.
            first, last = start + span.start, min(start + span.end, end)
            if first >= last:
                continue
            previous = self.spans[-1] if self.spans else None
            if previous and previous.version == span.version and previous.mixed_kv == span.mixed_kv:
                self.spans[-1] = VersionSpan(span.version, previous.start, last, span.mixed_kv)
            else:
                self.spans.append(VersionSpan(span.version, first, last, span.mixed_kv))
        assert (self.spans[-1].end if self.spans else 0) == end, "spans must cover the response"
        if self.finish_reason is None:
            if reason == "stop":
                self.finish_reason = "stop"
            elif reason == "length" or self.remaining <= 0:
                self.finish_reason = "length"

    def cut_submission(self, known: int) -> None:
        """The submission is over without a last word on its versions: the engine died, or the call was given up.

        The first ``known`` tokens of the response are those that were handed over before the weights changed under it,
        all sampled under the version it began with. Those after them are forgotten: it is unknown whether they were
        sampled before or after the load. They occur only where the engine continues over a load (on_update = keep).
        """
        if known < len(self.tokens):
            self.finish_reason = None
            # They stand at the end of the computed tokens.
            self.computed = max(0, self.computed - (len(self.tokens) - known))
            del self.tokens[known:]
            del self.logprobs[known:]
        self.end_submission("abort")


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


class TrajectoryFailed(Exception):
    """A trajectory failed for good; the text is the reason."""


class PolicyCall:
    """The engine as one call of the policy sees it."""

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Tokenizer,
        config: Config,
        lease: Lease,
        account: CallAccount,
        *,
        entered: Callable[[Phase], None] = lambda phase: None,
        sampled: Callable[[Response], None] = lambda response: None,
        submitted: Callable[[int], None] = lambda version: None,
    ) -> None:
        """``entered`` is called with the place of the call, ``sampled`` with each handover of tokens, ``submitted``
        with the version that a submission begins with.
        """
        self._host = host
        self._tokenizer = tokenizer
        self._config = config
        self._lease = lease
        self._account = account
        self._entered = entered
        self._sampled = sampled
        self._submitted = submitted

    async def generate(self, ids: Sequence[int], response: Response, key: str) -> None:
        """Sample a continuation of ``ids`` into ``response``, until it is finished, from where it stands.

        ``key`` names the call in the whole run; the noise follows from it. Raises TrajectoryFailed. A call that is
        cancelled leaves in the response the tokens that it has sampled, and may be made again.
        """
        lease, stops = self._lease, response.stops
        while response.finish_reason is None:
            self._require_innocent()
            self._entered("queue" if self._host.serves else "paused")
            async with self._host.turn(lease) as version:
                # A sample of the same lease may have had its turn before.
                self._require_innocent()
                self._entered("engine")
                response.submitted(version)
                self._account.submitted(version, len(response.tokens))
                self._submitted(version)
                request = GenerationRequest(
                    id=f"{key}/{response.submissions}",
                    prompt_ids=[*ids, *response.tokens],
                    max_tokens=response.remaining,
                    temperature=lease.temperature,
                    seed=request_seed(self._config.run.seed, key) if self._config.rollout.request_seeds else None,
                    stop_token_ids=stops.token_ids,
                    # A load drops the cache, but under keep_kv = "stale": nothing that begins after it may find blocks
                    # of the weights before.
                    cache_salt=f"v{version}",
                    key=key,
                    held=len(response.tokens),
                )
                died = not await self._submit(request, response)
                self._account.ended(len(response.tokens), response.spans, response.finish_reason, died=died)

    async def _submit(self, request: GenerationRequest, response: Response) -> bool:
        """One submission, until it ends; False when the engine died before that."""
        stopped = ended = False
        loads, known = self._host.loads, len(response.tokens)
        prompt, lost = len(request.prompt_ids) - known, response.lost(self._host.version)
        try:
            async with aclosing(self._host.stream(request, self._lease, lost=lost)) as deltas:
                async for delta in deltas:
                    if not stopped and delta.tokens:
                        stopped = response.extend(delta.tokens, delta.logprobs, self._tokenizer.decode)
                        version = delta.spans[-1].version if delta.spans else self._host.version
                        response.computed, response.computed_at = prompt + len(response.tokens), version
                        # Handed over before any load: all of it is of the version that the submission began with.
                        if self._host.loads == loads:
                            known = len(response.tokens)
                        self._sampled(response)
                        # The stream is read to its last delta, which has the versions.
                        if stopped and delta.finish_reason is None:
                            await self._host.abort(request.id)
                    if delta.finish_reason is not None:
                        response.end_submission(delta.finish_reason, delta.spans)
                        ended = True
        except (EngineDied, asyncio.CancelledError) as error:
            if not ended:
                response.cut_submission(known)
            if not isinstance(error, EngineDied):
                raise
            response.computed = 0
        return ended

    def _require_innocent(self) -> None:
        failure = self._host.turns.failure(self._lease)
        if failure is not None:
            raise TrajectoryFailed(failure)


def request_seed(run_seed: int, key: str) -> int:
    """Seed of a response: siblings differ. 63 bits."""
    digest = hashlib.blake2b(f"{run_seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Concurrency:
    """The limit, between ``least`` and ``most``."""

    def __init__(self, least: int, most: int, start: int) -> None:
        assert 1 <= least <= most
        self._least, self._most = least, most
        self.limit = min(most, max(least, start))
        self.cuts = 0
        self._settling = False
        """Whether it was cut, and more calls are still running than are allowed."""
        self._preemptions = 0

    def look(self, load: EngineLoad, *, running: int) -> int:
        """The limit from now on. ``running`` calls have a slot.

        ``load.preemptions`` counts up; where it has become less, the engine is another.
        """
        preempted = load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._settling = self._settling and running > self.limit
        if preempted or load.kv_use >= FULL:
            self._cut(running)
        elif load.kv_use < ROOM and not load.queued and running >= self.limit:
            share = GROWTH if not self.cuts else (1 - CUT) / STEPS
            self.limit = min(self._most, self.limit + max(1, int(share * self.limit)))
        return self.limit

    def engine_reloaded(self, load: EngineLoad) -> None:
        """Take its count of preemptions: recomputing keys and values under new weights is no pressure."""
        self._preemptions = load.preemptions

    def _cut(self, running: int) -> None:
        if self._settling:
            return
        # Slots that were not used say nothing of what the cache bears.
        self.limit = max(self._least, int(CUT * min(self.limit, max(1, running))))
        self.cuts += 1
        self._settling = running > self.limit


class Slots:
    """Places of things that run at a time, numbered so that the lowest free one is taken; ``resize`` changes ``size``.

    Invariant: a number belongs to one taker until it is given back; waiters come in the order of asking. Where there
    are fewer slots than are taken, those that have one keep it, and no other comes before enough are given back.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._returned: list[int] = []
        self._unused = 0
        """Number from which on none has been given out."""

    def resize(self, size: int) -> None:
        """Have ``size`` of them from now on."""
        self.size = size
        self._admit()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """Wait for a free slot and hold it; gives its number."""
        await self._enter()
        number = self._number()
        try:
            yield number
        finally:
            heapq.heappush(self._returned, number)
            self._leave()

    def _number(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._unused += 1
        return self._unused - 1

    async def _enter(self) -> None:
        if self.taken < self.size and not self._waiters:
            self.taken += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # ``_admit`` may have taken it out already.
                with suppress(ValueError):
                    self._waiters.remove(waiter)
            else:
                # It was given one in the same moment.
                self._leave()
            raise

    def _leave(self) -> None:
        self.taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self.taken < self.size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.taken += 1
                waiter.set_result(None)


class Player(Protocol):
    """Makes a trajectory of a sample."""

    async def play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        """One attempt. Raises TrajectoryFailed where nothing can come of the lease any more."""


class ServedPolicy:
    """The policy of one rollouter. ``tokenizer`` is set before the first call."""

    tokenizer: Tokenizer

    def __init__(self, config: Config, services: ActorServices, host: EngineHost, trace: Trace) -> None:
        self._config, self._host, self._trace, self._log = config, host, trace, services.log
        self._concurrency = Concurrency(*config.rollout.concurrency_bounds, start=AUTO_START)
        self.slots = Slots(self._concurrency.limit)
        """Slots of the engine."""
        self.places = Slots(config.episodes_open(self.slots.size))
        """Places of open episodes."""

    async def generate(
        self,
        lease: Lease,
        account: CallAccount,
        ids: Sequence[int],
        response: Response,
        key: str,
        **watch: Callable[[Any], None],
    ) -> None:
        """One call of the policy, in a slot of the engine; as ``PolicyCall.generate``."""
        async with self.slots.take() as slot:
            account.took_slot(self._trace.track(f"slot {slot}", FIRST_SLOT + slot))
            try:
                call = PolicyCall(self._host, self.tokenizer, self._config, lease, account, **watch)
                await call.generate(ids, response, key)
            finally:
                account.left_slot()

    async def adapt(self, resized: Callable[[], None]) -> None:
        """Adapt the number of slots for ever; ``resized`` is called after each change."""
        loads = self._host.loads
        while True:
            await asyncio.sleep(LOOK_S)
            load = self._host.load_now
            if load is None:
                continue
            if loads != self._host.loads:
                loads = self._host.loads
                self._concurrency.engine_reloaded(load)
            before = self.slots.size
            limit = self._concurrency.look(load, running=self.slots.taken)
            if limit != before:
                self._log.debug("concurrency", limit=limit, kv_use=load.kv_use, preemptions=load.preemptions)
                self.slots.resize(limit)
                self.places.resize(self._config.episodes_open(limit))
                resized()


class TurnPolicy(Protocol):
    """The policy, as single turns and sessions call it; a ServedPolicy."""

    async def generate(
        self, lease: Lease, account: CallAccount, ids: Sequence[int], response: Response, key: str, **watch: Any
    ) -> None:
        """Sample a continuation of ``ids`` into ``response``; ``watch`` are the callbacks of PolicyCall."""


class SingleTurn:
    """The player of prompts with one response, the simplest episode."""

    def __init__(self, policy: TurnPolicy, stops: Stops, tokenizer: Tokenizer) -> None:
        self._policy, self._stops, self._tokenizer = policy, stops, tokenizer

    async def play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        """One response. Raises TrajectoryFailed."""
        call, sample = account.call(), account.sample
        response = Response(max_tokens=lease.max_tokens, stops=self._stops)
        await self._policy.generate(lease, call, lease.prompt_ids.tolist(), response, f"{lease.uid}/{sample}/1")
        assert response.finish_reason is not None
        return Trajectory(
            sample=sample,
            sequences=[
                TokenSequence(
                    tokens=np.array(response.tokens, np.int32),
                    logprobs=np.array(response.logprobs, np.float32),
                    spans=response.spans,
                )
            ],
            finish_reason=response.finish_reason,
            text=self._tokenizer.decode(response.tokens),
            resumes=response.submissions - 1,
        )
