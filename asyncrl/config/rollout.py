"""Generation and weight updates."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.engines import ENGINES, EngineName, EngineTraits
from asyncrl.config.section import Fraction, NonNegative, Positive, Seconds, Section
from asyncrl.core.truncation import LARGEST_SET, Truncation

AUTO_START = 64
"""Calls in an engine at which concurrency = "auto" starts."""
AUTO_MOST = 1024
"""Most calls under concurrency = "auto", if the engine sets no bound."""
EPISODES_PER_CALL = 4
"""Open episodes per call in the engine, if rollout.episodes is unset."""


class SimEngineConfig(Section):
    """Timing model of continuous batching for the sim engine."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 50_000.0
    """Prompt tokens processed per second."""
    decode_step_s: Annotated[float, Field(ge=0)] = 0.02
    """Time of a decoding step with one request."""
    decode_step_per_request_s: Annotated[float, Field(ge=0)] = 0.0002
    """Time that each further request adds to a step."""
    length: Literal["lognormal", "constant"] = "lognormal"
    """Distribution of response lengths."""
    length_median: Annotated[float, Field(gt=0)] = 128.0
    """Median response length."""
    length_sigma: Annotated[float, Field(ge=0)] = 1.0
    """Sigma of the lognormal."""
    kv_tokens: Positive = 1_000_000
    """Tokens that fit into the KV cache; further requests queue."""
    load_s: Annotated[float, Field(ge=0)] = 0.05
    """Time to load new weights."""
    crash_probability: Fraction = 0.0
    """Probability that the engine dies at a decoding step."""
    routes: bool = False
    """Return routes, as of a mixture of experts; each token's is its id. A sim learner then checks them."""


class VllmEngineConfig(Section):
    """Settings of the vLLM engine."""

    max_model_len: Positive | None = None
    """Longest prompt plus response; by default the longest that the run samples."""
    max_num_seqs: Positive = 256
    """Most requests decoded together."""
    gpu_memory_utilization: Fraction | None = None
    """Share of GPU memory for an engine. By default 0.9, or on a GPU of the learner what its rank leaves."""
    cpu_kv_cache_bytes: Positive = 256 << 20
    """Size of the KV cache on CPU."""
    block_size: Positive = 32
    """Tokens of a KV block; only full blocks are shared between requests."""
    enforce_eager: bool = False
    """No CUDA graphs. CPU engines are always eager."""
    threads: NonNegative = 0
    """OpenMP threads of a CPU engine; 0 lets vLLM choose."""
    quantization: Literal["fp8"] | None = None
    """Quantize an engine's linear layers at each load, on GPUs (docs/weights.md)."""
    extra: dict[str, Any] = {}
    """Further AsyncEngineArgs, passed on unchanged."""


class RolloutConfig(Section):
    """Generation."""

    engine: EngineName = "vllm"
    """Inference engine. sim is a timing model. reference computes one sequence at a time with transformers: slow and
    bit-reproducible."""
    replicas: Positive = 1
    """Rollouters; each has one engine."""
    min_replicas: Positive = 1
    """Rollouters that the run needs. One that keeps failing rests and is tried again later; with too few the run
    fails."""
    gpus_per_replica: NonNegative | None = None
    """GPUs of each engine (tensor parallel); 0 is CPU. By default 1, or 0 if no host has a GPU. sim only
    reserves them."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Trajectories of a prompt group (n)."""
    max_tokens: Positive = 1024
    """Longest response."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this probability together, also in evaluations; 1 is off."""
    top_k: Annotated[int, Field(ge=0, le=LARGEST_SET)] = 0
    """Sample from this number of the likeliest tokens; 0 is off, or 1024 with top_p or min_p."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens at least this times as likely as the likeliest; 0 is off."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response, in addition to the end-of-sequence token. A special token, such as <|im_end|>,
    counts as its id in stop_token_ids."""
    stop_token_ids: list[NonNegative] = []
    """Further tokens that end a response. They are trained, as the end-of-sequence token is."""
    concurrency: Positive | Literal["auto"] = 64
    """Trajectories in flight per rollouter; with episodes, calls in its engine. auto adapts to the engine's KV
    cache."""
    episodes: Positive | None = None
    """Open episodes per rollouter, including those that wait for tools; by default 4 times concurrency."""
    stream_interval: Positive = 16
    """Tokens that an engine collects before it reports them."""
    on_update: Literal["abort_resume", "keep", "drain"] = "abort_resume"
    """Running requests when weights change: resume under the new ones, freeze and continue, or finish first."""
    keep_kv: Literal["recompute", "stale"] = "recompute"
    """KV cache under on_update = keep: recompute it, or keep the old one (recorded in the spans)."""
    request_seeds: bool = True
    """Give each response its own noise, from run.seed and its name. false lets the engine draw it, which is faster in
    vLLM on CPU."""
    max_attempts: Positive = 3
    """Attempts at a trajectory before it counts as failed."""
    retry_backoff_s: Seconds = 0.5
    """First pause between attempts; doubles up to a minute."""
    on_failed_trajectory: Literal["drop", "quarantine_group"] = "drop"
    """A trajectory that finally failed is dropped if 2 or more of its group survive; or its whole group is
    quarantined."""
    engine_timeout_s: Seconds = 120.0
    """Longest time of a busy engine without a token, or of a control call, before the engine counts as hanging."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Settings of the vllm engine."""
    sim: SimEngineConfig = SimEngineConfig()
    """Settings of the sim engine."""

    @property
    def concurrency_bounds(self) -> tuple[int, int]:
        """Least and most calls that may be in an engine at a time; equal if concurrency is a number."""
        if self.concurrency == "auto":
            return 1, self.value_of(self.traits.calls_key) or AUTO_MOST
        return self.concurrency, self.concurrency

    @property
    def traits(self) -> EngineTraits:
        """The traits of the engine."""
        return ENGINES[self.engine]

    def value_of(self, key: str) -> Any:
        """The value of a key of the engine, dotted and below ``rollout``; None for an empty key."""
        return attrgetter(key)(self) if key else None

    @property
    def engine_context(self) -> int | None:
        """Tokens of the engine's context, if they are configured; None if the longest sequence decides."""
        context: int | None = self.value_of(self.traits.context_key)
        return context

    @property
    def on_gpu(self) -> bool:
        """Whether engines compute on GPUs; False until the launcher has set gpus_per_replica."""
        return self.traits.gpus and bool(self.gpus_per_replica)

    @property
    def quantization(self) -> str | None:
        """The quantization of the engine's weights; None if they have the engine's dtype."""
        quantization: str | None = self.value_of(self.traits.quantization_key)
        return quantization

    @property
    def truncation(self) -> Truncation | None:
        """The truncation of the sampling distribution; None if engines sample from all of it."""
        if (self.top_p, self.top_k, self.min_p) == (1.0, 0, 0.0):
            return None
        return Truncation(top_p=self.top_p, top_k=self.top_k or LARGEST_SET, min_p=self.min_p)

    @property
    def truncation_key(self) -> str:
        """The first key that truncates the distribution."""
        return "top_k" if self.top_k else "top_p" if self.top_p < 1 else "min_p"

    @property
    def stops(self) -> bool:
        """Whether anything but the model's end-of-sequence token ends a response."""
        return bool(self.stop or self.stop_token_ids)


class WeightsConfig(Section):
    """Weight updates."""

    transport: Literal["auto", "nccl", "gloo", "shm", "stream"] = "auto"
    """Path of weights to the engines (docs/weights.md): broadcast (nccl on GPU, gloo on CPU), shared memory, or chunks
    over the wire (stream). auto is nccl if learner and engines are on GPUs and publish whole weights. Otherwise it is
    shm on the learner's host; on each other host one replica takes a stream, and the rest share its copy."""
    max_paused_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the replicas that may pause at once for an update by shm or stream; at least one may."""
    bucket_bytes: Positive = 256 << 20
    """Size of a bucket of parameters."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 4 << 20
    """Size of a chunk under stream."""
    chunks_in_flight: Positive = 8
    """Chunks that a replica requests ahead under stream."""
    verify: Literal["checksum", "full"] = "checksum"
    """checksum compares every bucket before the load. full also has every replica score the learner's probe, and load
    again if it disagrees."""
    deadline_s: Seconds = 120.0
    """Longest pause of a replica for an update; then it is restarted."""
    stage_deadline_s: Seconds = 1800.0
    """Longest fetch of a version by shm or stream; then the replica fetches the newest instead."""
    versions_held: Annotated[int, Field(ge=2)] = 4
    """Most versions that the parameter server holds, each as large as the weights: the newest, and older ones that
    replicas still fetch."""
    broadcast_timeout_s: Seconds = 30.0
    """Longest wait of the members of a broadcast for one another. After a failure they fetch the version."""
    max_attempts: Positive = 3
    """Attempts at an update before the engine is restarted."""
