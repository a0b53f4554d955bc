"""The configuration: one typed tree, the same for every process of a run.

TOML files are merged left to right (tables deeply, everything else replaced), then dotted flags are laid on top;
the result is validated as a whole and every problem is reported at once. Children of a run read the resolved
JSON, never the TOML again, so all of them see the same values.

Fails with ConfigError, which holds one line a problem: the path, what is wrong, and for an unknown key the
nearest known one.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncrl.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A table of the configuration: immutable, closed to unknown keys, documented by the docstring of each field."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run's folder; an existing one is never overwritten: the next free NAME-2 is taken."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: NonNegative = 0
    """Seed of the data order, of sampling and of the learner."""
    samples_per_step: NonNegative = 4
    """Prompt groups whose text is written to samples/ at each step."""


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """Folder of a Hugging Face causal LM with its tokenizer. Left out only when everything is simulated."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


class DataConfig(Section):
    """A set of prompts."""

    source: Literal["jsonl", "parquet", "hf", "reasoning_gym", "synthetic"] = "jsonl"
    """Kind of source: files, a Hugging Face dataset folder on disk, a reasoning-gym task, or made-up prompts."""
    path: str | None = None
    """File, glob or folder, for jsonl, parquet and hf."""
    split: str = "train"
    """Split of a hf dataset folder that holds several."""
    task: str | None = None
    """Name of the reasoning-gym task."""
    size: Positive = 1024
    """Number of prompts made by reasoning_gym and synthetic."""
    seed: NonNegative = 0
    """Seed of the prompts made by reasoning_gym."""
    options: dict[str, Any] = {}
    """Further options of the reasoning-gym task."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages with role and content."""
    template: Literal["plain", "chat"] = "plain"
    """How a prompt becomes tokens: as it stands, or through the tokenizer's chat template."""
    system: str | None = None
    """System message put before each prompt; chat template only."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are quarantined before they are ever leased."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read ends the start with file and line, or is counted and left out."""
    shuffle: bool = True
    """Order of an epoch: shuffled by (fingerprint, seed, epoch), or as it stands."""


class SimEngineConfig(Section):
    """Timing model of continuous batching for the sim engine."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 50_000.0
    """Prompt tokens processed a second."""
    decode_step_s: Annotated[float, Field(ge=0)] = 0.02
    """Time of one decoding step with one running request."""
    decode_step_per_request_s: Annotated[float, Field(ge=0)] = 0.0002
    """Time that each further running request adds to a step."""
    length: Literal["lognormal", "constant"] = "lognormal"
    """Distribution of response lengths."""
    length_median: Annotated[float, Field(gt=0)] = 128.0
    """Median response length in tokens."""
    length_sigma: Annotated[float, Field(ge=0)] = 1.0
    """Sigma of the lognormal."""
    kv_tokens: Positive = 1_000_000
    """Tokens that fit in the KV cache; requests beyond it queue."""
    load_s: Annotated[float, Field(ge=0)] = 0.05
    """Time to load new weights."""
    crash_probability: Fraction = 0.0
    """Chance that the engine dies at a decoding step."""


class VllmEngineConfig(Section):
    """Settings of the vLLM engine."""

    max_model_len: Positive | None = None
    """Longest prompt plus response; by default data.max_prompt_tokens + rollout.max_tokens."""
    max_num_seqs: Positive = 256
    """Requests decoded together."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of GPU memory that an engine may take."""
    cpu_kv_cache_bytes: Positive = 256 << 20
    """Size of the KV cache on CPU."""
    block_size: Positive = 32
    """Tokens of a KV block; only full blocks are shared between requests."""
    enforce_eager: bool = False
    """No CUDA graphs. CPU engines always run eagerly."""
    threads: NonNegative = 0
    """OpenMP threads of a CPU engine; 0 lets vLLM choose."""
    extra: dict[str, Any] = {}
    """Further AsyncEngineArgs, passed on as they are."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["vllm", "sim", "reference"] = "vllm"
    """Inference engine: vLLM, a timing model, or transformers one sequence at a time (slow, and the same in every bit
    each time)."""
    replicas: Positive = 1
    """Number of rollouters; each holds one engine."""
    gpus_per_replica: NonNegative = 1
    """GPUs of each engine (tensor parallel); 0 runs it on CPU."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Trajectories of a prompt group (n)."""
    max_tokens: Positive = 1024
    """Longest response in tokens."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    stop: list[str] = []
    """Strings that end a response, beside the model's end-of-sequence token."""
    concurrency: Positive = 64
    """Trajectories in flight in each rollouter."""
    stream_interval: Positive = 16
    """Tokens that an engine gathers before it hands them over."""
    on_update: Literal["abort_resume", "keep", "drain"] = "abort_resume"
    """What running requests do when weights change: resume under the new ones, freeze and go on, or finish first."""
    keep_kv: Literal["recompute", "stale"] = "recompute"
    """Under on_update = keep: recompute the KV cache, or go on over the old one (the spans say so)."""
    max_attempts: Positive = 3
    """Attempts at a trajectory before it counts as failed."""
    retry_backoff_s: Seconds = 0.5
    """First pause between attempts; doubles with each."""
    on_failed_trajectory: Literal["quarantine_group", "drop"] = "quarantine_group"
    """A trajectory that failed for good takes its group with it, or is left out (at least 2 must survive)."""
    spool: bool = False
    """Keep finished groups that the learner has not acknowledged on local disk, over a restart of their rollouter."""
    engine_timeout_s: Seconds = 120.0
    """Longest time without a token from a busy engine, or for a control call, before it counts as hanging."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Settings of the vllm engine."""
    sim: SimEngineConfig = SimEngineConfig()
    """Settings of the sim engine."""


class OverlongPenalty(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    margin_tokens: Positive = 128
    """Length of the interval before max_tokens in which the penalty falls from 0 to -scale."""
    scale: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a response that reached max_tokens."""


class RewardConfig(Section):
    """Scoring."""

    function: str = "exact"
    """Built in: exact, regex, math_verify, reasoning_gym, constant; or MODULE:FUNCTION of your own."""
    per: Literal["trajectory", "group"] = "trajectory"
    """Whether the function scores one trajectory or a whole group (a relative judge)."""
    options: dict[str, Any] = {}
    """Keyword arguments passed to the function with each call."""
    workers: Positive = 2
    """Worker processes of the pool."""
    timeout_s: Seconds = 10.0
    """Longest run of the function, counted from its start in the worker; the worker is killed then."""
    max_memory_bytes: Positive = 4 << 30
    """Memory that a worker may take beyond what it holds when it is ready; past it the function fails."""
    max_output_bytes: Positive = 1 << 20
    """Of what a function prints in one call so much reaches the log."""
    truncated: Literal["score", "mask", "penalty"] = "score"
    """Responses cut at max_tokens: scored as they are, left out of the loss, or scored with the overlong penalty."""
    overlong: OverlongPenalty = OverlongPenalty()
    """The penalty of truncated = penalty."""


class SimLearnerConfig(Section):
    """Timing model of a learner that trains nothing."""

    step_s: Annotated[float, Field(ge=0)] = 0.5
    """Time of an optimizer step."""
    publish_bytes: Positive = 1 << 20
    """Bytes that each publication carries."""


class LearnerConfig(Section):
    """Training."""

    backend: Literal["fsdp2", "sim"] = "fsdp2"
    """What trains: torch FSDP2, or a timing model."""
    ranks: Positive = 1
    """Processes of the learner: one a GPU, or CPU processes with gloo."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where it trains; auto takes CUDA where there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; master weights and reductions are float32. auto is bfloat16 on CUDA and float32 on CPU."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    groups_per_step: Positive = 8
    """Prompt groups of an optimizer step."""
    steps_per_version: Positive = 1
    """Optimizer steps between two publications."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative = 0
    """Linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of the peak."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip of the global gradient norm."""
    tis_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap C of the truncated importance weight min(pi_theta / pi_behaviour, C) of the decoupled loss."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage estimator."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Denominator of the loss: loss tokens, sequences (mean over each one's tokens), or sequences times max_tokens."""
    dynamic_sampling: bool = True
    """Groups whose rewards are all equal are filtered, counted and replaced."""
    max_filtered_ratio: Annotated[float, Field(gt=0)] = 20.0
    """Groups filtered or quarantined between two steps, in steps' worth, past which the run ends with "no signal"."""
    max_quarantined_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of all prompts with an outcome that may be quarantined, past which the run ends and says why; counted from
    100 outcomes on."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run, or quarantines the groups that it came from."""
    signal_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Rewards of a group that differ by no more than this count as equal."""
    tokens_per_microbatch: Positive = 8192
    """Token budget of a packed micro-batch."""
    packing: Literal["auto", "required", "off"] = "auto"
    """Several sequences a row: when the start-up check allows it, or refuse to start without, or never."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """torch.compile each layer."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of one rank for the others within a step, a publication or the start, before the run ends."""
    sim: SimLearnerConfig = SimLearnerConfig()
    """The timing model of backend = sim."""


class StalenessConfig(Section):
    """How old the tokens that are trained may be."""

    max: NonNegative = 1
    """The limit eta, in versions. 0 is synchronous, on-policy training."""
    adapt: bool = True
    """Let the working limit move below the limit, as low as keeps the learner fed."""


class WeightsConfig(Section):
    """Weight updates."""

    transport: Literal["auto", "nccl", "gloo", "shm", "stream"] = "auto"
    """How new weights reach the engines: broadcast (nccl on GPU, gloo on CPU), shared memory, or chunks over the wire.
    auto is nccl where learner and engines are on GPUs, else shm on the learner's host and stream elsewhere. Whoever
    misses a broadcast, and an engine on another host under shm, is served by stream."""
    max_paused_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the replicas that may pause at once for an update by shm or stream; at least one always may."""
    bucket_bytes: Positive = 256 << 20
    """Size of a bucket of parameters."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 4 << 20
    """Size of a chunk under stream."""
    chunks_in_flight: Positive = 8
    """Chunks that a replica has asked for and not yet received under stream."""
    delta: bool = False
    """Under shm and stream send what has changed since the replica's version, compressed, where that is less. Each
    replica keeps another copy of the weights for it."""
    verify: Literal["checksum", "full"] = "checksum"
    """checksum compares every bucket before it is loaded; full also has every replica score the learner's probe after
    each load, and an engine that disagrees loads again."""
    deadline_s: Seconds = 120.0
    """Longest time from a pause to its commit; a replica past it is restarted."""
    broadcast_timeout_s: Seconds = 30.0
    """Longest time that the members of a broadcast wait for one another; past it the group is broken up, and its
    members are served by stream."""
    max_attempts: Positive = 3
    """Attempts at an update before the engine is restarted."""


class EvalConfig(Section):
    """A named evaluation set."""

    data: DataConfig
    """Its prompts; they never train."""
    every_versions: NonNegative = 0
    """Evaluate at each multiple of this many versions; 0 never."""
    at_start: bool = True
    """Evaluate before the first training prompt is leased."""
    at_end: bool = True
    """Evaluate after the last version is served."""
    n: Positive = 1
    """Samples of each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: Positive | None = None
    """Longest response; by default rollout.max_tokens."""


class CheckpointConfig(Section):
    """What the run can go on from, and what it leaves behind."""

    every_versions: NonNegative = 20
    """Write a checkpoint at each multiple of this many versions, and at the end; 0 writes none but when preempted."""
    dir: str | None = None
    """Folder of the checkpoints, seen by all ranks of the learner; by default checkpoints/ in the run folder."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: NonNegative = 0
    """Checkpoints of steps that are multiples of this are kept for good; 0 keeps none."""
    export_at_end: bool = True
    """Write the final weights in Hugging Face layout to export/ in the run folder."""


class ResumeConfig(Section):
    """Going on with a run (asyncrl-launch --resume)."""

    allow: list[Literal["data", "seed", "batch"]] = []
    """What may differ from the run as it was left: the prompts (the new ones begin with another epoch), the seed, the
    geometry of a batch. Set by --allow-changed-data, --allow-changed-seed, --allow-changed-batch."""


class PreemptConfig(Section):
    """Making way for somebody else: SIGTERM or SIGUSR2 to the launcher."""

    grace_s: Seconds = 60.0
    """Time until the checkpoint must be complete; past it the last one counts."""


class WatchdogConfig(Section):
    """Noticing that nothing moves though everybody lives."""

    stall_s: Seconds = 300.0
    """Longest time without a trained group, a version or a token."""
    policy: Literal["report", "restart", "stop"] = "report"
    """What follows: a report that names the actor, with its stacks; and the actor's restart, or the end of the run."""
    budgets_s: dict[str, Seconds] = {"starting": 600.0, "checkpointing": 1800.0, "exporting": 1800.0}
    """Longer times for single states of an actor, by name of the state."""


class NetworkConfig(Section):
    """Sockets."""

    host: str = "127.0.0.1"
    """Address that actors bind and register, in a run on one host."""
    interface: str | None = None
    """Network interface whose address actors bind and register, in a run on several hosts (--hosts, SLURM). By default
    each host takes the address by which it reaches the head."""
    ports: Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")] = "0"
    """Ports that actors may bind: 0 for any free one, or LOW-HIGH. gloo and NCCL have further ones of their own."""
    controller_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the controller; 0 picks one of network.ports at the start and keeps it for the run."""
    max_message_bytes: Positive = 1 << 30
    """Largest message; a larger one is refused by its sender."""
    call_timeout_s: Seconds = 30.0
    """Deadline of a call between actors; a parked call is answered before half of it."""


class SecurityConfig(Section):
    """Who may talk to the actors."""

    curve: Literal["auto", "required", "off"] = "auto"
    """CURVE on every socket; auto requires it unless everything is on loopback. off is for tests and trusted networks:
    the run's secret, and all that is said, then travels in the clear."""


class SupervisionConfig(Section):
    """Starting, watching and restarting actors."""

    heartbeat_s: Seconds = 1.0
    """Interval of heartbeats."""
    silence_s: Seconds = 60.0
    """Silence of an actor on a living host after which it counts as frozen: it is killed and started again."""
    host_lost_s: Seconds = 30.0
    """Silence of a host, its node agent and all its actors, after which it counts as lost and they as dead."""
    start_timeout_s: Seconds = 300.0
    """Longest time from an actor's start to its being ready."""
    max_restarts: NonNegative = 3
    """Restarts of one actor within restart_window_s before the run fails."""
    restart_window_s: Seconds = 600.0
    """Window in which restarts are counted."""
    backoff_s: Seconds = 0.5
    """First pause before a restart; doubles with each."""
    drain_s: Seconds = 10.0
    """Time that actors get to end by themselves before they are killed."""
    host_grace_s: Seconds = 60.0
    """Silence of both launcher and controller after which a node agent ends its host; and how long a run waits for a
    lost host that it cannot go on without."""


class TraceConfig(Section):
    """The timeline of the run: what every actor did when, for Perfetto (docs/timeline.md)."""

    window_s: Annotated[float, Field(ge=0)] = 300.0
    """What is kept of the past, in seconds; 0 keeps nothing, and no trace is written."""


class WandbConfig(Section):
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or the user's netrc, never from here."""

    mode: Literal["off", "offline", "online"] = "off"
    """online sends as the run goes; offline writes to the run folder, for `wandb sync`."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9._ -]{1,128}$")] = "asyncrl"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; by default the user's own default."""


class PrometheusConfig(Section):
    """An endpoint for Prometheus on the head."""

    enabled: bool = False
    """Serve /metrics. Whoever reaches the port may read."""
    host: str | None = None
    """Address that it binds; by default that of the head's actors."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 takes any free one, which is in the log and in monitor/prometheus.json of the run folder."""


class SinksConfig(Section):
    """Where metrics go besides metrics.jsonl (docs/sinks.md). No sink stops or slows a run."""

    tensorboard: bool = False
    """Write event files to tensorboard/ in the run folder."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """An endpoint for Prometheus."""


class MonitorConfig(Section):
    """What is kept of the run for those who look at it later."""

    record_s: Seconds = 2.0
    """How often a snapshot of the run is recorded in monitor/, for a replay."""
    record_bytes: NonNegative = 256 << 20
    """Largest size of the recording; past it the past is kept more coarsely. 0 records nothing."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level written."""


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    """The run as a whole."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    data: DataConfig = DataConfig()
    """The training prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    learner: LearnerConfig = LearnerConfig()
    """Training."""
    staleness: StalenessConfig = StalenessConfig()
    """How old the tokens that are trained may be."""
    weights: WeightsConfig = WeightsConfig()
    """Weight updates."""
    eval: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], EvalConfig] = {}
    """Named evaluation sets."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What the run can go on from, and what it leaves behind."""
    resume: ResumeConfig = ResumeConfig()
    """Going on with a run."""
    preempt: PreemptConfig = PreemptConfig()
    """Making way for somebody else."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Noticing that nothing moves."""
    network: NetworkConfig = NetworkConfig()
    """Sockets."""
    security: SecurityConfig = SecurityConfig()
    """Who may talk to the actors."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Starting, watching and restarting actors."""
    monitor: MonitorConfig = MonitorConfig()
    """Recording the run."""
    log: LogConfig = LogConfig()
    """Logging."""
    sinks: SinksConfig = SinksConfig()
    """Where metrics go besides metrics.jsonl."""
    trace: TraceConfig = TraceConfig()
    """What was done when."""

    @property
    def groups_per_version(self) -> int:
        """G, the prompt groups trained for each published version."""
        return self.learner.groups_per_step * self.learner.steps_per_version

    @property
    def gate_capacity(self) -> int:
        """The most groups that may be granted and not yet trained: (eta + 1) * G."""
        return (self.staleness.max + 1) * self.groups_per_version

    @property
    def actors(self) -> tuple[str, ...]:
        """Every actor of the run as ROLE/INDEX, the controller first."""
        return (
            "controller/0",
            "dataloader/0",
            "reward/0",
            "parameter_server/0",
            *(f"learner/{rank}" for rank in range(self.learner.ranks)),
            *(f"rollouter/{replica}" for replica in range(self.rollout.replicas)),
        )

    @property
    def curve(self) -> bool:
        """Whether CURVE is on."""
        if self.security.curve == "auto":
            return self.network.host not in ("127.0.0.1", "::1", "localhost")
        return self.security.curve == "required"


def load_config(files: Sequence[str | Path], overrides: Mapping[str, str] | None = None) -> Config:
    """Read TOML files left to right, lay ``overrides`` (dotted key to text) on top, and validate.

    An override is read as a TOML value, and as plain text where it is none: ``--learner.lr 1e-6``,
    ``--rollout.stop '["\\n"]'``, ``--run.name trial``. Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    for file in files:
        try:
            _merge(tree, tomllib.loads(Path(file).read_text()))
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror or error}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(f"{file}: not valid TOML: {error}")
    for key, text in (overrides or {}).items():
        node = tree
        *parents, last = key.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                problems.append(f"--{key}: {part} is a value, not a table")
                break
            node = child
        else:
            node[last] = _flag_value(text)
    return validate_config(tree, problems)


def validate_config(tree: dict[str, Any], problems: Sequence[str] = ()) -> Config:
    """Validate a plain tree. Raises ConfigError with ``problems`` and every one found here."""
    found = list(problems)
    bad: set[tuple[str, ...]] = set()
    config: Config | None = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for item in error.errors():
            path = tuple(str(part) for part in item["loc"])
            bad.add(path)
            found.append(_describe(path, item))
        try:
            # What is right is checked against itself all the same, so that one run shows every problem.
            config = Config.model_validate(_without(tree, bad))
        except ValidationError:
            config = None
    if config is not None:
        for key, problem in cross_check(config):
            if not any(".".join(path).startswith(key) or key.startswith(".".join(path)) for path in bad):
                found.append(f"{key}: {problem}")
    if found or config is None:
        raise ConfigError(found)
    return config


FORBIDDEN_VLLM_KEYS = (
    *("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "weight_transfer_config"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
)


def _weight_problems(config: Config) -> list[tuple[str, str]]:
    weights, rollout = config.weights, config.rollout
    found = []
    if weights.chunk_bytes > config.network.max_message_bytes // 2:
        found.append(("weights.chunk_bytes", "must be at most half of network.max_message_bytes"))
    if weights.delta and weights.transport in ("gloo", "nccl"):
        found.append(("weights.delta", f"has no use under {weights.transport}; take shm, stream or auto"))
    if rollout.keep_kv == "stale" and rollout.on_update != "keep":
        found.append(("rollout.keep_kv", 'stale is for rollout.on_update = "keep" alone'))
    if weights.broadcast_timeout_s > weights.deadline_s:
        found.append(("weights.broadcast_timeout_s", "must be at most weights.deadline_s"))
    if rollout.engine == "sim" and rollout.sim.load_s >= weights.deadline_s:
        found.append(("rollout.sim.load_s", "must be below weights.deadline_s"))
    return found


def cross_check(config: Config) -> list[tuple[str, str]]:
    """Problems between sections, as (dotted key, what is wrong and what to do)."""
    found: list[tuple[str, str]] = []
    rollout, learner, reward = config.rollout, config.learner, config.reward
    simulated = rollout.engine == "sim" and learner.backend == "sim"
    if config.model.path is None and not simulated:
        found.append(("model.path", 'is required unless rollout.engine and learner.backend are both "sim"'))
    if rollout.engine == "sim" and learner.backend != "sim":
        found.append(("learner.backend", 'what the sim engine makes up must not train a model; set it to "sim"'))
    if rollout.samples_per_prompt > rollout.concurrency:
        found.append(
            (
                "rollout.concurrency",
                f"is {rollout.concurrency}, less than one prompt group needs (samples_per_prompt = "
                f"{rollout.samples_per_prompt})",
            )
        )
    if rollout.engine == "reference" and rollout.gpus_per_replica:
        found.append(("rollout.gpus_per_replica", "the reference engine computes on the CPU; set it to 0"))
    length = rollout.vllm.max_model_len
    if rollout.engine == "vllm" and length is not None and length < config.data.max_prompt_tokens + rollout.max_tokens:
        found.append(
            (
                "rollout.vllm.max_model_len",
                f"is {length}, less than data.max_prompt_tokens + rollout.max_tokens = "
                f"{config.data.max_prompt_tokens + rollout.max_tokens}",
            )
        )
    found += [
        (f"rollout.vllm.extra.{key}", "is set by asyncrl and may not be overridden")
        for key in FORBIDDEN_VLLM_KEYS
        if key in rollout.vllm.extra
    ]
    found += _weight_problems(config)
    if config.weights.transport == "nccl" and (rollout.engine != "vllm" or not rollout.gpus_per_replica):
        found.append(("weights.transport", "nccl reaches engines on GPUs only; take auto, shm, stream or gloo"))
    if reward.truncated == "penalty" and reward.overlong.margin_tokens >= rollout.max_tokens:
        found.append(("reward.overlong.margin_tokens", f"must be below rollout.max_tokens = {rollout.max_tokens}"))
    if reward.function == "reasoning_gym" and config.data.source != "reasoning_gym":
        found.append(("reward.function", 'reasoning_gym scores only prompts of data.source = "reasoning_gym"'))
    if learner.warmup_steps > learner.steps:
        found.append(("learner.warmup_steps", f"is more than learner.steps = {learner.steps}"))
    if learner.steps % learner.steps_per_version:
        found.append(
            (
                "learner.steps",
                f"must be a multiple of learner.steps_per_version = {learner.steps_per_version}",
            )
        )
    found += _check_data("data", config.data)
    for name, evaluation in config.eval.items():
        found += _check_data(f"eval.{name}.data", evaluation.data)
        longest = evaluation.data.max_prompt_tokens + (evaluation.max_tokens or rollout.max_tokens)
        if rollout.engine == "vllm" and length is not None and length < longest:
            found.append(("rollout.vllm.max_model_len", f"is {length}, less than eval.{name} needs: {longest}"))
        if evaluation.n > rollout.concurrency:
            found.append((f"eval.{name}.n", f"is more than rollout.concurrency = {rollout.concurrency}"))
    supervision = config.supervision
    if supervision.silence_s < 3 * supervision.heartbeat_s:
        found.append(
            ("supervision.silence_s", f"must be at least 3 * supervision.heartbeat_s = {3 * supervision.heartbeat_s:g}")
        )
    if supervision.host_lost_s < 3 * supervision.heartbeat_s:
        least = f"must be at least 3 * supervision.heartbeat_s = {3 * supervision.heartbeat_s:g}"
        found.append(("supervision.host_lost_s", least))
    if config.watchdog.stall_s < 3 * supervision.heartbeat_s:
        found.append(
            ("watchdog.stall_s", f"must be at least 3 * supervision.heartbeat_s = {3 * supervision.heartbeat_s:g}")
        )
    low, _, high = config.network.ports.partition("-")
    if high and not 0 < int(low) <= int(high) <= 65535:
        found.append(("network.ports", f"{config.network.ports!r} is not a range LOW-HIGH within 1-65535"))
    if config.security.curve == "off" and config.network.host not in ("127.0.0.1", "::1", "localhost"):
        found.append(("security.curve", f"may be off on loopback only; network.host is {config.network.host}"))
    return found


def _check_data(key: str, data: DataConfig) -> list[tuple[str, str]]:
    found = []
    if data.source in ("jsonl", "parquet", "hf") and data.path is None:
        found.append((f"{key}.path", f'is required by source = "{data.source}"'))
    if data.source == "reasoning_gym" and data.task is None:
        found.append((f"{key}.task", 'is required by source = "reasoning_gym"'))
    if data.system is not None and data.template != "chat":
        found.append((f"{key}.system", 'needs template = "chat"'))
    return found


def config_to_json(config: Config) -> str:
    """The resolved configuration, as children and ``config.json`` have it."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def config_from_json(text: str) -> Config:
    """Read what config_to_json wrote. Raises ConfigError."""
    return validate_config(json.loads(text))


def known_keys() -> list[tuple[str, str, str, str]]:
    """Each key as (dotted key, type, default, description), tables descended into; NAME stands for a free name."""
    rows: list[tuple[str, str, str, str]] = []

    def visit(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            key = prefix + name
            kind = field.annotation
            arguments = get_args(kind)
            if isinstance(kind, type) and _is_section(kind):
                visit(kind, key + ".")
            elif arguments and _is_section(arguments[-1]):
                visit(arguments[-1], key + ".NAME.")
            else:
                default = "required" if field.is_required() else json.dumps(field.default)
                rows.append((key, _type_name(kind), default, field.description or ""))

    visit(Config, "")
    return rows


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _flag_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _describe(path: tuple[str, ...], item: Any) -> str:
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _siblings(path), n=1, cutoff=0.5)
        if not near:
            everywhere = {known.rsplit(".", 1)[-1]: known for known, *_ in known_keys()}
            match = difflib.get_close_matches(path[-1], everywhere, n=1, cutoff=0.8)
            near = [everywhere[match[0]]] if match else []
        return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if item["type"] == "missing":
        return f"{key}: is required"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: {message} (got {item['input']!r})"


def _siblings(path: tuple[str, ...]) -> list[str]:
    """The keys known where the last part of ``path`` stands."""
    section: Any = Config
    named = False
    for part in path[:-1]:
        if named:
            # A table of named tables: whatever the name, the section is the same.
            named = False
            continue
        field = section.model_fields.get(part)
        if field is None:
            return []
        kind, arguments = field.annotation, get_args(field.annotation)
        named = bool(arguments) and _is_section(arguments[-1])
        inner = arguments[-1] if named else kind
        if not _is_section(inner):
            return []
        section = inner
    return list(section.model_fields)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _without(tree: dict[str, Any], paths: set[tuple[str, ...]]) -> dict[str, Any]:
    def strip(node: Any, here: tuple[str, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {k: strip(v, (*here, k)) for k, v in node.items() if (*here, k) not in paths}

    stripped: dict[str, Any] = strip(tree, ())
    return stripped
