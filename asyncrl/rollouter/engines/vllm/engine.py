"""The vLLM engine: an AsyncLLM whose engine core runs in child processes.

*Control calls* are all calls to the engine core except ``generate``. Each has a deadline, except a pause that waits for
requests. A *flight* is a call of ``generate`` that has not ended. launch.py gives the names of vLLM that are used here.

Invariants:

- Each token has the log-prob and the version that vLLM reports for it.
- The model never steps during a load.
- No wait outlives the engine, and after ``close`` none of its processes is left.

Fails with EngineDied if the core ends or does not answer a control call in time. Also fails with it if the core samples
nothing for ``rollout.engine_timeout_s`` while requests are in flight. Fails with WeightsCorrupt if a version is
incomplete or cannot be loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.config import Config
from asyncrl.core.errors import BroadcastFailed, WeightsCorrupt
from asyncrl.gpu.shared_gpus import read_shares, sharers
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import TokenSets, make_sets
from asyncrl.messages.weights import BroadcastPart
from asyncrl.rollouter.engines.base import FIRST, EngineLoad, GenerationRequest, PauseMode, TokenDelta
from asyncrl.rollouter.engines.vllm import model_folder
from asyncrl.rollouter.engines.vllm.model_folder import check_adapters
from asyncrl.rollouter.engines.vllm.options import (
    environment,
    make_scratch_folder,
    on_cpu,
    returns_routes,
    threads_on_cpu,
)
from asyncrl.rollouter.engines.vllm.processes import ClaimedCores, Processes, Watch
from asyncrl.weights.held_version import HeldVersion, Layout, check_complete

CLOSE_GRACE_S = 5.0
"""Time (s) that a healthy engine with several workers has to end by itself, before it is killed."""
CORE_NAME = "EngineCore"
"""Beginning of the names of vLLM's engine core processes."""


@dataclass(slots=True)
class _Flight:
    """A request in flight."""

    tokens: int = 0
    """Number of tokens in its prompt and its response so far."""
    stale: set[int] = field(default_factory=set)
    """Versions under which it continued with keys and values of older weights."""


class VllmEngine:
    """The Engine that computes with vLLM; the rules are in the module's docstring."""

    def __init__(self, config: Config, name: str) -> None:
        assert config.model.path is not None
        self.name = name
        self.workers = max(1, config.rollout.gpus_per_replica or 0)
        self.returns_routes = False
        self.loaded_by_ipc = False
        self._config = config
        self._model_path = config.model.path
        self._timeout_s = config.rollout.engine_timeout_s
        self._stream_interval = config.rollout.stream_interval
        self._watch = Watch(name, self._fail_streams)
        self._processes = Processes()
        self._claimed: ClaimedCores | None = None
        """CPU cores of this engine alone; None on GPU, and if too few are free."""
        self._flights: dict[str, _Flight] = {}
        self._kv_tokens = 0
        """Number of tokens that the KV cache holds; 0 if it is not known."""
        self._last_active = 0.0
        """Time (s) from which ``_check_silence`` counts: the start, a resume, an output, a request after idleness."""
        self._paused = False
        self._version = -1
        """The version loaded last; -1 before the first."""
        self._loads_adapters = config.publishes_adapter
        self._checksums: list[int] = []
        """Checksums of the buckets of the served version, if versions are adapters."""
        self._layout: Layout | None = None
        """Layout of the last version loaded from staged weights; later versions must have the same."""
        self._score_count = 0
        self._folder, self._folder_lock = "", -1
        """Folder of the engine's sockets and temporary files, and the descriptor of its lock."""
        self._eos_token_ids: list[int] = []
        self._launching: asyncio.Future[Any] | None = None
        """The launch, on a thread; its result is the AsyncLLM. None before ``start``."""
        self._earlier_children: list[BaseProcess] = []
        """Child processes that were there before the launch."""
        self._cores: list[BaseProcess] = []
        """The engine cores whose ends the event loop watches."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        # vLLM's own classes are known only once it is imported; see launch.py.
        self._llm: Any = None
        """The AsyncLLM, once it is launched."""
        self._adapter: Any = None
        """The LoRARequest of all requests; None if versions are not adapters."""
        self._load_logger: Any = None
        """The LoadLogger; None unless rollout.concurrency is "auto"."""
        self._vllm: Any = None
        """The module launch.py."""

    @property
    def kv_use(self) -> float | None:
        """An estimate by the tokens of the requests in flight; it counts a shared prompt for each of them."""
        room = self._kv_tokens
        return min(1.0, sum(flight.tokens for flight in list(self._flights.values())) / room) if room else None

    @property
    def load_now(self) -> EngineLoad | None:
        """The load that vLLM's scheduler reported last."""
        return self._load_logger.load if self._load_logger is not None else None

    # --- life ---

    async def start(self) -> None:
        """Import vLLM, launch the engine in its own folder, bind it to CPU cores and watch its processes."""
        loop = self._loop = asyncio.get_running_loop()
        for variable, value in environment(self._config).items():
            os.environ.setdefault(variable, value)
        async with self._watch.guard("its start", self._config.supervision.start_timeout_s):
            model = await asyncio.to_thread(self._read_model)
            self.returns_routes = returns_routes(self._config, model)
            # Imported before the launch: vLLM's modules keep import errors, which would keep the launch's stack alive.
            self._vllm = await asyncio.to_thread(_import_vllm)
            self._folder, self._folder_lock = make_scratch_folder()
            # A ``close`` during the launch must not kill these children.
            self._earlier_children = multiprocessing.active_children()
            self._launching = loop.run_in_executor(None, self._launch, model)
            # The thread cannot be cancelled; ``close`` makes it end.
            llm = self._llm = await asyncio.shield(self._launching)
        self._cores = list(llm.engine_core.resources.engine_manager.processes)
        self._adapter = self._vllm.adapter_request(self._config, self._folder)
        self._kv_tokens = self._vllm.kv_tokens(llm)
        self._processes.adopt(self._cores)
        if on_cpu(self._config):
            self._claimed = ClaimedCores.claim(threads_on_cpu())
        if self._claimed is not None:
            self._claimed.bind(self._processes.pids)
        for core in self._cores:
            loop.add_reader(core.sentinel, self._core_ended, core)
        async with self._control("its first call", self._timeout_s):
            # vLLM makes this call at its first request, and keeps the answer; here it has a deadline.
            await llm.get_supported_tasks()
        self._last_active = loop.time()
        self._check_silence()

    def _read_model(self) -> dict[str, Any]:
        """Read the end-of-sequence tokens, and return the model's config.json. Runs on a thread."""
        self._eos_token_ids = model_folder.stop_token_ids(self._model_path, required=not self._config.rollout.stops)
        return model_folder.read_config(self._model_path)

    def _launch(self, model: dict[str, Any]) -> Any:
        """Return a started AsyncLLM; ``model`` is config.json. Runs on a thread."""
        if self._config.rollout.concurrency == "auto":
            self._load_logger = self._vllm.LoadLogger()
        shares = read_shares(self._config, list(sharers())) if sharers() and not on_cpu(self._config) else None
        return self._vllm.launch(self._config, self.name, model, self._folder, self._load_logger, shares)

    async def close(self) -> None:
        self._processes.look()
        # Workers need time to remove their shared memory.
        grace_s = CLOSE_GRACE_S if self._processes.has_workers and not self._watch.dead else 0.0
        self._watch.declare_dead("it was closed")
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._unwatch_cores()
        if self._llm is not None and self._llm.output_handler is not None:
            # The handler would log the end of the engine core as an error.
            self._llm.output_handler.cancel()
        await asyncio.to_thread(self._end, grace_s)
        self._llm = self._launching = None

    def _end(self, grace_s: float) -> None:
        """End all processes of the engine, and remove its folder. Blocking.

        vLLM's shutdown has ``grace_s`` seconds, and then all that are left are killed. A launch that still runs fails
        first, because its engine core is killed.
        """
        launching = self._launching
        while launching is not None and not launching.done():
            # The launch may not have started its core yet, so this is repeated.
            for child in multiprocessing.active_children():
                if child.name.startswith(CORE_NAME) and child not in self._earlier_children:
                    self._processes.adopt([child])
            self._processes.end(0.0)
            time.sleep(0.05)
        if launching is not None and not launching.cancelled() and launching.exception() is None:
            llm = launching.result()
            self._processes.adopt(llm.engine_core.resources.engine_manager.processes)
            if not grace_s:
                self._processes.end(0.0)
            llm.shutdown(timeout=grace_s)
        left = self._processes.end(0.0)
        if self._claimed is not None:
            self._claimed.release()
            self._claimed = None
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._folder_lock >= 0:
            os.close(self._folder_lock)
            self._folder_lock = -1
        assert not left, f"processes {left} survived being killed"

    @asynccontextmanager
    async def _control(self, what: str, deadline_s: float | None) -> AsyncIterator[None]:
        """Guard a control call inside the ``async with``; ``what`` names it in errors.

        After ``deadline_s`` seconds (None: no deadline), or if vLLM reports its death, it declares the engine dead and
        raises EngineDied.
        """
        try:
            async with self._watch.guard(what, deadline_s):
                yield
        except (self._vllm.EngineDeadError, self._vllm.EngineGenerateError) as error:
            self._watch.declare_dead(f"{what} failed: {error.__cause__ or error}")
            raise self._watch.died() from error

    @asynccontextmanager
    async def _dies_if_refused(self, what: str) -> AsyncIterator[None]:
        """Declare the engine dead if vLLM refuses a call inside: it reports errors of a core by a plain Exception."""
        try:
            yield
        except (self._vllm.EngineDeadError, self._vllm.EngineGenerateError):
            raise
        except Exception as error:
            self._watch.declare_dead(f"{what} failed: {error}")
            raise self._watch.died() from error

    def _unwatch_cores(self) -> None:
        for core in self._cores:
            assert self._loop is not None
            self._loop.remove_reader(core.sentinel)
        self._cores = []

    def _core_ended(self, core: BaseProcess) -> None:
        # The sentinel of an ended process stays readable, so the event loop would call this function again and again.
        self._unwatch_cores()
        # vLLM watches the core too. If it has collected the exit code, ``exitcode`` is None.
        code = core.exitcode
        self._watch.declare_dead("its engine core ended" + ("" if code is None else f" with exit code {code}"))

    def _check_silence(self) -> None:
        """Declare the engine dead if it has requests and has sampled nothing for too long; else check again later."""
        assert self._loop is not None
        silent_s = self._loop.time() - self._last_active
        if self._flights and not self._paused and silent_s > self._timeout_s:
            self._watch.declare_dead(f"has sampled nothing for {silent_s:.0f} s with {len(self._flights)} requests")
        else:
            self._silence_timer = self._loop.call_later(self._timeout_s / 4, self._check_silence)

    def _fail_streams(self, _reason: str) -> None:
        """End the streams of all requests with vLLM's EngineDeadError."""
        if self._llm is not None:
            self._llm.output_processor.propagate_error(self._vllm.EngineDeadError())

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Submit a request to vLLM and yield its outputs as deltas.

        A finish reason that is not among those of TokenDelta, such as an error, means that the engine is dead. Raises
        ValueError for a request that vLLM refuses.
        """
        self._watch.require_alive()
        llm, vllm, loop = self._llm, self._vllm, self._loop
        assert loop is not None, "not started"
        assert self._version >= 0, "nothing is generated before the first load"
        assert request.id not in self._flights, f"request {request.id} is in flight already"
        # An idle engine samples nothing; its silence counts from its first request on.
        if not self._flights:
            self._last_active = loop.time()
        flight = self._flights[request.id] = _Flight(len(request.prompt_ids))
        try:
            outputs = llm.generate(
                vllm.tokens_input(_to_list(request.prompt_ids), cache_salt=request.cache_salt or None),
                sampling(vllm, request, self._eos_token_ids, self._stream_interval),
                request.id,
                lora_request=self._adapter,
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    self._last_active = loop.time()
                    completion = output.outputs[0]
                    reason = completion.finish_reason
                    flight.tokens += len(completion.token_ids)
                    cached = output.num_cached_tokens or 0
                    if reason is None:
                        yield TokenDelta(
                            tokens=completion.token_ids,
                            logprobs=completion.logprobs.logprobs,
                            sets=_sets(completion),
                            cached_tokens=cached,
                        )
                        continue
                    if reason not in ("stop", "length", "abort"):
                        self._watch.declare_dead(f"it ended request {request.id} with {reason!r}")
                        raise self._watch.died()
                    yield TokenDelta(
                        tokens=completion.token_ids,
                        logprobs=completion.logprobs.logprobs,
                        sets=_sets(completion),
                        finish_reason=reason,
                        spans=_spans(completion.weight_versions, flight),
                        cached_tokens=cached,
                        routes=_routes(completion.routed_experts) if self.returns_routes else None,
                    )
        except vllm.VLLMClientError as error:
            raise ValueError(f"request {request.id}: {error}") from error
        except (vllm.EngineDeadError, vllm.EngineGenerateError) as error:
            self._watch.declare_dead(f"request {request.id} failed: {error.__cause__ or error}")
            raise self._watch.died() from error
        finally:
            del self._flights[request.id]

    async def abort(self, ids: Sequence[str]) -> None:
        async with self._control("an abort", self._timeout_s):
            await self._llm.abort([id for id in ids if id in self._flights])

    async def score(self, ids: Sequence[int]) -> list[float]:
        if len(ids) < 2:
            return []
        self._score_count += 1
        final: Any = None
        async with self._control("a score", self._timeout_s):
            try:
                prompt = self._vllm.tokens_input(_to_list(ids))
                params = scoring(self._vllm, truncates=self._config.rollout.truncation is not None)
                name = f"score/{self._score_count}"
                outputs = self._llm.generate(prompt, params, name, lora_request=self._adapter, priority=FIRST)
                async for output in outputs:
                    final = output
            except self._vllm.VLLMClientError as error:
                raise ValueError(f"cannot score {len(ids)} tokens: {error}") from error
        logprobs: list[float] = final.prompt_logprobs.logprobs
        assert len(logprobs) == len(ids) - 1
        return logprobs

    # --- weights ---

    async def pause(self, mode: PauseMode) -> None:
        # Requests may take any time to finish; ``_check_silence`` finds an engine that stops sampling.
        deadline_s = None if mode == "wait" else self._timeout_s
        async with self._control("a pause", deadline_s):
            # Not vLLM's pause_generation, which then waits for another 20 ms.
            pause = self._llm.engine_core.pause_scheduler_async
            if mode == "abort":
                # An abort drops the tokens that the scheduler holds back (scheduler.py); this pause sends them first.
                await pause(mode="keep", clear_cache=False)
            await pause(mode=mode, clear_cache=False)
        self._paused = True

    async def resume(self) -> None:
        assert self._loop is not None
        async with self._control("a resume", self._timeout_s):
            await self._llm.resume_generation()
        # A paused engine samples nothing; its silence counts from here on.
        self._last_active = self._loop.time()
        self._paused = False

    async def sleep(self) -> None:
        if on_cpu(self._config):
            # There is no GPU to share.
            return
        # Level 2 discards the weights, because the next update brings them. An update of an adapter brings no weights
        # of the model, so level 1 keeps them in CPU memory.
        level = 1 if self._loads_adapters else 2
        async with self._control("its sleep", self._timeout_s), self._dies_if_refused("its sleep"):
            await self._llm.sleep(level=level, mode="abort")

    async def wake(self) -> None:
        if on_cpu(self._config):
            return
        async with self._control("its waking", self._timeout_s), self._dies_if_refused("its waking"):
            await self._llm.wake_up()
            # vLLM schedules again once it is awake.
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
            if not self._loads_adapters:
                await self._llm.collective_rpc("clear_positions")

    async def accept(self, staged: HeldVersion) -> None:
        self._watch.require_alive()
        await asyncio.to_thread(self._check_layout, staged)

    def _check_layout(self, staged: HeldVersion) -> None:
        if self._layout is not None:
            check_complete(staged.version, staged.layout, self._layout)
        elif self._loads_adapters:
            check_adapters(staged, self._model_path, self._config.lora)
        else:
            model_folder.check_layout(staged, self._model_path)

    async def load(self, weights: HeldVersion | BroadcastPart, *, recompute_kv: bool) -> None:
        """Have the workers load the weights, drop the KV cache if asked to, and set vLLM's version."""
        version = weights.version
        assert self._paused, "only a paused engine may load"
        # The caller has the same deadline, which began earlier, so normally the caller ends the wait.
        async with self._control(f"the load of version {version}", self._config.weights.deadline_s):
            try:
                failure = await self._send_weights(weights)
                if failure:
                    raise self._load_error(weights, failure)
                if recompute_kv and not await self._llm.reset_prefix_cache(reset_running_requests=True):
                    raise WeightsCorrupt("vLLM did not drop its KV cache", version=version)
                await self._llm.update_weight_version(str(version))
            except (BroadcastFailed, WeightsCorrupt, self._vllm.EngineDeadError):
                raise
            except Exception as error:
                # The call itself failed, and no worker returned a failure.
                raise self._load_error(weights, str(error)) from error
        if isinstance(weights, HeldVersion):
            self._layout = weights.layout
            if self._loads_adapters:
                self._checksums = [bucket.checksum for bucket in weights.manifest.buckets]
        if not recompute_kv:
            for flight in self._flights.values():
                flight.stale.add(version)
        self._version = version

    def _load_error(self, weights: HeldVersion | BroadcastPart, why: str) -> BroadcastFailed | WeightsCorrupt:
        if isinstance(weights, BroadcastPart):
            return BroadcastFailed(weights.version, f"engine {self.name}: {why}")
        return WeightsCorrupt(f"engine {self.name} could not load them: {why}", version=weights.version)

    async def _send_weights(self, weights: HeldVersion | BroadcastPart) -> str:
        """Have all workers load the weights; returns a worker's reason for its failure, "" if all succeeded."""
        self.loaded_by_ipc = False
        answers = await self._llm.collective_rpc("load_version", kwargs=version_source(weights, self._config))
        failures, by_ipc = zip(*answers, strict=True)
        self.loaded_by_ipc = all(by_ipc)
        return next(filter(None, failures), "")

    async def checksum(self) -> str:
        """Return a checksum of the weights of all workers, and of the adapter as published.

        It leaves out the layers that the CPU backend packs.
        """
        async with self._control("its checksums", self._timeout_s):
            workers: list[dict[str, str]] = await self._llm.compute_weight_checksums()
        return xxhash.xxh3_64_hexdigest(json.dumps([workers, self._checksums], sort_keys=True).encode())


def _import_vllm() -> Any:
    from asyncrl.rollouter.engines.vllm import launch

    return launch


def _sets(completion: Any) -> TokenSets | None:
    mask = completion.sampling_mask
    return make_sets(mask.token_ids) if mask is not None and completion.token_ids else None


def _spans(versions: Any, flight: _Flight) -> list[VersionSpan]:
    """Make version spans of vLLM's spans, without the empty ones."""
    spans = []
    for span in versions or ():
        if span.end > span.start:
            version = int(span.version)
            spans.append(VersionSpan(version, span.start, span.end, version in flight.stale))
    return spans


def _to_list(ids: Sequence[int]) -> list[int]:
    # vLLM's serialiser does not know numpy's integers.
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def sampling(vllm: Any, request: GenerationRequest, eos_token_ids: list[int], stream_interval: int) -> Any:
    """Make vLLM's parameters of a request.

    vLLM reports log-probs after the temperature and the truncation (logprobs_mode in options.py). So they are those of
    the policy that is trained. An engine that returns sets takes no temperature of 0; there top_k is 1 instead.
    """
    truncation, greedy = request.truncation, request.temperature == 0
    cuts: dict[str, Any] = {}
    if truncation is not None:
        cuts = {"top_k": 1} if greedy else dataclasses.asdict(truncation)
    return vllm.SamplingParams(
        temperature=1.0 if cuts and greedy else request.temperature,
        **cuts,
        max_tokens=request.max_tokens,
        seed=submission_seed(request),
        stop_token_ids=[*eos_token_ids, *request.stop_token_ids],
        # 0 asks for the log-prob of the sampled token alone.
        logprobs=0,
        flat_logprobs=True,
        routed_experts_prompt_start=request.routed,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.DELTA,
        stream_interval=stream_interval,
        # Made for this one request, so vLLM need not copy it.
        skip_clone=True,
    )


def _routes(experts: np.ndarray | None) -> np.ndarray | None:
    """Make routes (messages/routes.py) of vLLM's experts, which are in the order of their scores."""
    return None if experts is None else np.sort(experts, axis=-1)


def submission_seed(request: GenerationRequest) -> int | None:
    """Return the seed (63 bits) of a submission, derived from its response's seed.

    vLLM's first model runner restarts its noise with each request. With the same seed, a later submission would repeat
    the noise.
    """
    if request.seed is None or not request.held:
        return request.seed
    digest = hashlib.blake2b(f"{request.seed}/{request.held}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def version_source(weights: HeldVersion | BroadcastPart, config: Config) -> dict[str, Any]:
    """Make the arguments with which workers load a version; see worker/weights.py."""
    # Workers do not need the probe, and JSON cannot hold its arrays.
    manifest = msgspec.structs.replace(weights.manifest, probe=None)
    if isinstance(weights, BroadcastPart):
        return {"broadcast": msgspec.json.encode(msgspec.structs.replace(weights, manifest=manifest)).decode()}
    scaling = config.lora.alpha / config.lora.rank if config.publishes_adapter else None
    return {"manifest": msgspec.json.encode(manifest).decode(), "scaling": scaling}


def scoring(vllm: Any, *, truncates: bool) -> Any:
    """Make vLLM's parameters of a request that only returns the log-probs of its prompt.

    ``truncates``: whether the engine returns sets, and so demands a top_k.
    """
    return vllm.SamplingParams(
        temperature=1.0,
        # vLLM samples at least one token, which is not used.
        max_tokens=1,
        top_k=1 if truncates else 0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
