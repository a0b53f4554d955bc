"""The policy as episodes call it: turns token ids into a finished response, in a slot of the engine (admission.py).

    GroupRunner -> SingleTurn | EpisodePlayer -> Sessions -> ServedPolicy -> EngineManager -> Engine

``PolicyCall.generate`` hides weight updates, pauses and deaths of engines: it returns when the response is finished. A
response consists of one or more *submissions*, requests to engines. Each continues after the tokens of those before it.

Invariants: after each submission, tokens, log-probs, token sets and version spans cover the same positions. Every token
keeps the log-prob and the version that sampled it, over aborts, resumes and the death of an engine. From an engine that
returns routes, each token but the last also keeps the route with which it was first computed. There are never more than
``max_tokens``. Received tokens are dropped only beyond ``max_tokens``, after a stop string, or if their version or a
route is unknown (``Response.cut_submission``).

Fails with TrajectoryFailed when engines have died of the prompt too often (core/death_counts.py). Any other death does
not count as an attempt, and the next engine continues after the kept tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from asyncrl.config import Config
from asyncrl.config.rollout import AUTO_START
from asyncrl.core.errors import EngineDied
from asyncrl.messages.groups import Lease, Trajectory, VersionSpan
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.token_sets import TokenSets, join_sets
from asyncrl.observe.trace import FIRST_SLOT, Trace
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.serving.admission import Concurrency, Slots
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.group_events import CallEvents, SampleEvents
from asyncrl.rpc.services import ActorServices
from asyncrl.text.stops import Stops
from asyncrl.text.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]
Phase = Literal["queue", "engine", "paused"]
"""State of a call. ``queue``: it waits for a slot or its turn. ``engine``: it is in the engine. ``paused``: it waits
because the engine does not serve."""
MARGIN = 8
"""Number of characters at the beginning of a decoded window that may differ from the whole text: a tokenizer may drop a
space there, join it with punctuation, or see only the last bytes of a character."""
LOOK_S = 1.0
"""Interval (s) at which the number of slots is adapted to the engine's load."""


@dataclass(slots=True, kw_only=True)
class Response:
    """A response under way: its tokens so far, with log-probs and version spans."""

    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    set_parts: list[TokenSets] = field(default_factory=list)
    """The sets of the tokens, in parts; empty if the distribution is not truncated."""
    submissions: int = 0
    computed: int = 0
    """Number of tokens, prompt included, that the engine has computed; 0 after its death. At the start of a call in an
    episode, the number that earlier calls had computed."""
    computed_at: int = -1
    """The newest version under which the engine computed them."""
    computed_sleeps: int = 0
    """Number of sleeps of the engine before it computed them; each later sleep loses them."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Routes (messages/routes.py) of the tokens after the first ``routed``, prompt included; parts in order."""
    routed: int = 0
    """Number of the prompt's first tokens whose routes an earlier answer of the episode holds."""
    _submission_start: int = 0
    """Index of the first token of the present submission."""
    _submission_version: int = -1
    """Version under which the present submission began."""

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.max_tokens - len(self.tokens)

    @property
    def known_routes(self) -> int:
        """Number of tokens, from the prompt's first on, whose routes are known."""
        return self.routed + sum(map(len, self.routes))

    def final_routes(self, prompt: int) -> np.ndarray | None:
        """Return the routes of a finished response, without its last token; None without any.

        They begin after the first ``routed`` tokens of the prompt, which has ``prompt`` tokens.
        """
        if not self.routes:
            return None
        known: np.ndarray = np.concatenate(self.routes)
        return known[: prompt + len(self.tokens) - 1 - self.routed]

    def lost(self, version: int, sleeps: int) -> int:
        """Number of tokens that the engine must compute again: they are of an older version, or from before a sleep.

        ``sleeps`` is the number of the engine's sleeps so far.
        """
        return self.computed if self.computed_at < version or self.computed_sleeps < sleeps else 0

    def submitted(self, version: int) -> None:
        """Note that a submission begins under ``version``."""
        assert self.finish_reason is None
        assert self.remaining > 0
        self.submissions += 1
        self._submission_start = len(self.tokens)
        self._submission_version = version

    @property
    def sets(self) -> TokenSets | None:
        """The sets from which the tokens were sampled; None if the distribution is not truncated."""
        return join_sets(self.set_parts)

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode, sets: TokenSets | None = None
    ) -> bool:
        """Append the tokens of a delta, up to ``max_tokens``; returns True if a stop string ends the response.

        In that case it drops the tokens after the one that completes the stop string.
        """
        assert len(tokens) == len(logprobs)
        old_count = len(self.tokens)
        room = self.remaining
        self.tokens.extend(tokens[:room])
        self.logprobs.extend(logprobs[:room])
        if sets is not None:
            self.set_parts.append(sets.first(room))
        strings = self.stops.strings
        if not strings:
            return False
        # The window reaches back over earlier submissions, because a stop string may begin in one. It is limited, so
        # that the work does not grow with the response.
        start = self._window_start(old_count, decode)
        if not _contains(decode(self.tokens[start:]), strings):
            return False
        # Bisect for the shortest prefix whose text has a stop string; the text only grows with the tokens.
        low, high = old_count + 1, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            if _contains(decode(self.tokens[start:middle]), strings):
                high = middle
            else:
                low = middle + 1
        self._cut(low)
        self.finish_reason = "stop"
        return True

    def _cut(self, count: int) -> None:
        """Drop all tokens but the first ``count``."""
        del self.tokens[count:]
        del self.logprobs[count:]
        if (sets := self.sets) is not None:
            self.set_parts = [sets.first(count)]

    def _window_start(self, end: int, decode: Decode) -> int:
        """Return the index from which to decode, to find every stop string that ends after the first ``end`` tokens.

        The text from there up to ``end`` has at least the length of the longest stop string plus MARGIN, or is the
        whole text.
        """
        wanted = max(map(len, self.stops.strings)) + MARGIN
        count = wanted
        while count < end and len(decode(self.tokens[end - count : end])) < wanted:
            # Too little text: tokens may be bytes of a character, or have no text.
            count *= 2
        return max(0, end - count)

    def end_submission(
        self, reason: Literal["stop", "length", "abort"] | None, spans: Sequence[VersionSpan] = ()
    ) -> None:
        """End the submission: append its version spans, and set the finish reason if the response is finished.

        ``spans`` count from the submission's first token. Without spans, all its tokens have the version it began with.
        """
        start, end = self._submission_start, len(self.tokens)
        if not spans:
            spans = [VersionSpan(self._submission_version, 0, end - start)]
        for span in spans:
            # ``spans`` also cover the sampled tokens that a stop string or the limit has cut off.
            span_start, span_end = start + span.start, min(start + span.end, end)
            if span_start >= span_end:
                continue
            previous = self.spans[-1] if self.spans else None
            if previous and previous.version == span.version and previous.mixed_kv == span.mixed_kv:
                self.spans[-1] = VersionSpan(span.version, previous.start, span_end, span.mixed_kv)
            else:
                self.spans.append(VersionSpan(span.version, span_start, span_end, span.mixed_kv))
        assert (self.spans[-1].end if self.spans else 0) == end, "spans must cover the response"
        if self.finish_reason is None:
            if reason == "stop":
                self.finish_reason = "stop"
            elif reason == "length" or self.remaining <= 0:
                self.finish_reason = "length"

    def cut_submission(self, known: int, prompt: int) -> None:
        """End a submission that got no version spans, because the engine died or the call was cancelled.

        The first ``known`` tokens of the response arrived before any load, so their version is that of the submission's
        beginning. The tokens after ``known`` are dropped, since it is unknown whether the engine sampled them before or
        after the load. There are such tokens only if the engine continues requests over a load (on_update = keep), or
        if their routes were to come with the last delta. ``prompt`` is the number of tokens of the prompt.
        """
        if known < len(self.tokens):
            self.finish_reason = None
            # The dropped tokens are the last of the computed ones.
            self.computed = max(0, self.computed - (len(self.tokens) - known))
            self._cut(known)
            # Other tokens will follow the first ``known``, and have routes of their own.
            kept = max(0, prompt + known - self.routed)
            self.routes = [np.concatenate(self.routes)[:kept]] if self.routes else []
        self.end_submission("abort")


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


class TrajectoryFailed(Exception):
    """A trajectory failed for good; the text is the reason."""


class CallWatch:
    """Observes the progress of a call of the policy. A subclass overrides the methods, which do nothing here."""

    def entered(self, phase: Phase) -> None:
        """Called when the call enters a phase."""

    def submitted(self, version: int, sleeps: int) -> None:
        """Called when a submission begins under ``version``, after this number of the engine's sleeps."""

    def sampled(self, response: Response) -> None:
        """Called when tokens have arrived."""


UNWATCHED = CallWatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request to sample a continuation of ``ids`` into ``response``, after the tokens that it has."""

    lease: Lease
    events: CallEvents
    ids: Sequence[int]
    response: Response
    key: str
    """Name of the call in the run, which gives the seed of its noise."""
    watch: CallWatch = UNWATCHED


class PolicyCall:
    """One call of the policy: submits to the engine until the response is finished."""

    def __init__(self, manager: EngineManager, tokenizer: Tokenizer, config: Config, request: PolicyRequest) -> None:
        self._manager = manager
        self._tokenizer = tokenizer
        self._config = config
        self._request = request
        self._lease, self._watch = request.lease, request.watch

    async def generate(self) -> None:
        """Sample until the response is finished. Submits again after each abort, pause or death of an engine.

        Raises TrajectoryFailed. A cancelled call leaves its tokens in the response and may be repeated.
        """
        lease, response, key = self._lease, self._request.response, self._request.key
        while response.finish_reason is None:
            self._require_not_failed()
            self._watch.entered("queue" if self._manager.serves else "paused")
            async with self._manager.turn(lease) as version:
                # Checked again: the engine may have died of another sample of this lease during the wait.
                self._require_not_failed()
                self._watch.entered("engine")
                response.submitted(version)
                self._request.events.submitted(version, len(response.tokens))
                self._watch.submitted(version, self._manager.sleeps)
                request = GenerationRequest(
                    id=f"{key}/{response.submissions}",
                    prompt_ids=[*self._request.ids, *response.tokens],
                    max_tokens=response.remaining,
                    temperature=lease.temperature,
                    truncation=lease.truncation,
                    seed=request_seed(self._config.run.seed, key) if self._config.rollout.request_seeds else None,
                    stop_token_ids=response.stops.token_ids,
                    # Under keep_kv = "stale" a load does not drop the cache. The salt keeps new requests from using
                    # blocks of older weights.
                    cache_salt=f"v{version}",
                    key=key,
                    held=len(response.tokens),
                    routed=response.known_routes,
                )
                died = not await self._submit(request, response)
                self._request.events.ended(len(response.tokens), response.spans, response.finish_reason, died=died)

    async def _submit(self, request: GenerationRequest, response: Response) -> bool:
        """Run one submission to its end and extend ``response``; returns False if the engine died before the end.

        After a death or a cancellation ``response`` keeps the tokens whose version is known (``cut_submission``).
        """
        # ``stopped``: a stop string has ended the response; ``ended``: the last delta of the submission has come.
        stopped = ended = False
        # ``known``: number of tokens whose version is known even without version spans; see ``cut_submission``.
        loads, known = self._manager.loads, len(response.tokens)
        # A sleep ends every submission, so the number holds for the whole of this one.
        sleeps = self._manager.sleeps
        prompt, lost = len(request.prompt_ids) - known, response.lost(self._manager.version, sleeps)
        returns_routes = self._manager.engine.returns_routes
        try:
            async with aclosing(self._manager.stream(request, self._lease, lost=lost)) as deltas:
                async for delta in deltas:
                    if delta.routes is not None:
                        response.routes.append(delta.routes)
                    if not stopped and delta.tokens:
                        stopped = response.extend(delta.tokens, delta.logprobs, self._tokenizer.decode, delta.sets)
                        version = delta.spans[-1].version if delta.spans else self._manager.version
                        response.computed, response.computed_at = prompt + len(response.tokens), version
                        response.computed_sleeps = sleeps
                        # Without a load since the submission began, all its tokens have the version of its beginning.
                        if self._manager.loads == loads:
                            known = len(response.tokens)
                        self._watch.sampled(response)
                        # Reading continues to the last delta, which has the version spans.
                        if stopped and delta.finish_reason is None:
                            await self._manager.abort(request.id)
                    if delta.finish_reason is not None:
                        response.end_submission(delta.finish_reason, delta.spans)
                        ended = True
        except (EngineDied, asyncio.CancelledError) as error:
            if not ended:
                if returns_routes:
                    # Only the last token may lack a route.
                    known = max(0, min(known, response.known_routes + 1 - prompt))
                response.cut_submission(known, prompt)
            if not isinstance(error, EngineDied):
                raise
            response.computed = 0
        return ended

    def _require_not_failed(self) -> None:
        """Raise TrajectoryFailed if engines have died of the prompt too often."""
        failure = self._manager.turns.failure(self._lease)
        if failure is not None:
            raise TrajectoryFailed(failure)


def request_seed(run_seed: int, key: str) -> int:
    """Return the seed (63 bits) of the response ``key``, different for each sample."""
    digest = hashlib.blake2b(f"{run_seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Player(Protocol):
    """Generates trajectories: a SingleTurn or an EpisodePlayer."""

    async def play(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Make one attempt at a sample. Raises TrajectoryFailed if no further attempt can succeed."""


class ServedPolicy:
    """The policy of one rollouter. ``tokenizer`` is set before the first call."""

    tokenizer: Tokenizer

    def __init__(self, config: Config, services: ActorServices, manager: EngineManager, trace: Trace) -> None:
        self._config, self._manager, self._trace, self._log = config, manager, trace, services.log
        self._concurrency = Concurrency(*config.rollout.concurrency_bounds, start=AUTO_START)
        self.slots = Slots(self._concurrency.limit)
        """Slots of the engine."""
        self.places = Slots(config.episodes_open(self.slots.size))
        """Places for open episodes (admission.py)."""

    async def generate(self, request: PolicyRequest) -> None:
        """Wait for a slot of the engine, and make one call of the policy in it; see ``PolicyCall.generate``."""
        async with self.slots.take() as slot:
            request.events.took_slot(self._trace.track(f"slot {slot}", FIRST_SLOT + slot))
            try:
                await PolicyCall(self._manager, self.tokenizer, self._config, request).generate()
            finally:
                request.events.left_slot()

    async def adapt(self, resized: Callable[[], None]) -> None:
        """Adapt the numbers of slots and places to the engine's load, for ever; calls ``resized`` after each change."""
        # ``loads`` counts loads of weights; ``load`` is how busy the engine is.
        loads = self._manager.loads
        while True:
            await asyncio.sleep(LOOK_S)
            load = self._manager.load_now
            if load is None:
                continue
            if loads != self._manager.loads:
                loads = self._manager.loads
                self._concurrency.engine_reloaded(load)
            old_limit = self.slots.size
            limit = self._concurrency.look(load, running=self.slots.taken)
            if limit != old_limit:
                self._log.debug("concurrency", limit=limit, kv_use=load.kv_use, preemptions=load.preemptions)
                self.slots.resize(limit)
                self.places.resize(self._config.episodes_open(limit))
                resized()


class TurnPolicy(Protocol):
    """The policy, as single turns and sessions call it; a ServedPolicy."""

    async def generate(self, request: PolicyRequest) -> None:
        """Answer a request."""


class SingleTurn:
    """Plays the simplest episode: one prompt, one response."""

    def __init__(self, policy: TurnPolicy, stops: Stops, tokenizer: Tokenizer) -> None:
        self._policy, self._stops, self._tokenizer = policy, stops, tokenizer

    async def play(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Generate one response and return it as a trajectory. Raises TrajectoryFailed."""
        sample = events.sample
        response = Response(max_tokens=lease.max_tokens, stops=self._stops)
        await self._policy.generate(
            PolicyRequest(
                lease=lease,
                events=events.call(),
                ids=lease.prompt_ids.tolist(),
                response=response,
                key=f"{lease.uid}/{sample}/1",
            )
        )
        assert response.finish_reason is not None
        return Trajectory(
            sample=sample,
            sequences=[
                TokenSequence(
                    tokens=np.array(response.tokens, np.int32),
                    logprobs=np.array(response.logprobs, np.float32),
                    spans=response.spans,
                    sets=response.sets,
                    routes=response.final_routes(len(lease.prompt_ids)),
                )
            ],
            finish_reason=response.finish_reason,
            text=self._tokenizer.decode(response.tokens),
            resumes=response.submissions - 1,
        )
