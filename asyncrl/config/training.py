"""Training: the run, the policy, its prompts, scoring, the learner, staleness and evaluation."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from asyncrl.config.algorithm import CorrectionConfig, KLConfig, TeacherServerConfig
from asyncrl.config.section import Fraction, NonNegative, OptionalPath, PathText, Positive, Seconds, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run's folder; an existing one is never overwritten: the next free NAME-2 is taken."""
    dir: PathText = "runs"
    """Folder of the run folders."""
    seed: NonNegative = 0
    """Seed of the data order, of sampling and of the learner."""
    samples_per_step: NonNegative = 4
    """Most prompt groups of a kind (trained, filtered, evaluation) whose text is written to samples/ per step or
    evaluation."""


class ModelConfig(Section):
    """The policy."""

    path: OptionalPath = None
    """Folder of a Hugging Face causal LM with its tokenizer, or its name on the hub: ORG/NAME[@REVISION]. Optional if
    everything is simulated and no GPU is shared."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


SOURCE_KEYS = frozenset({"source", "path", "split", "task", "size", "seed", "options", "shuffle"})
"""Keys of a set of prompts that say where its rows come from; the others say how a row becomes a prompt."""
JUDGES = frozenset({"relative_judge", "rubric"})
"""Reward functions that are language models (reward/functions.py)."""
RowsKind = Literal["auto", "jsonl", "parquet", "hf", "reasoning_gym", "synthetic"]


class PromptsConfig(Section):
    """A set of prompts."""

    source: RowsKind = "auto"
    """JSON files (.jsonl, .json, .gz), Parquet files, a folder of datasets.save_to_disk (hf), a reasoning-gym task, or
    synthetic prompts. auto derives one of the first three from path."""
    path: OptionalPath = None
    """File, glob or folder, or a name of the hub: ORG/NAME[@REVISION][/PATH]. From a folder of files, those
    whose paths name the split are read, or all if no path names a split."""
    split: str = "train"
    """Split to read from a folder that has several."""
    task: str | None = None
    """Name of the reasoning-gym task."""
    size: Positive = 1024
    """Number of prompts from reasoning_gym and synthetic."""
    seed: NonNegative = 0
    """Seed of reasoning_gym."""
    options: dict[str, Any] = {}
    """Further options of the reasoning-gym task."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages as in OpenAI's API (docs/first-run.md, "Rows of chat messages").
    Dots reach into objects: extra_info.question."""
    tools_key: str = "tools"
    """Column with the tools that the chat template shows, as OpenAI schemas or their JSON text. Rows may lack it; empty
    shows none. Dots reach into objects."""
    template: Literal["plain", "chat"] = "plain"
    """Tokenize the prompt unchanged, or through the chat template."""
    system: str | None = None
    """System message before each prompt that has no system or developer message; chat template only. In an evaluation
    set, empty text removes data.system."""
    continue_final_message: bool = False
    """Whether the policy continues a final assistant message; chat template and single answers only. Else such a row is
    refused."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are left out (ledger/left_out), which is no failure; the start prints their share."""
    max_left_out_fraction: Fraction = 0.5
    """Largest share of rows that max_prompt_tokens and on_bad_row = "skip" may leave out; else the start is refused."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read or tokenized stops the start with file and line, or is counted and skipped."""
    shuffle: bool = True
    """Shuffle each epoch by (fingerprint, seed, epoch), or keep the order."""

    @property
    def prompt_column(self) -> str:
        """Column with the prompt: prompt_key, or "question" for sources that generate their prompts."""
        return "question" if self.source in ("reasoning_gym", "synthetic") else self.prompt_key

    def inherit(self, training: PromptsConfig, own: Set[str] = SOURCE_KEYS) -> Self:
        """Return this set with the keys of ``training`` (the data section or a source) that it does not set itself.

        The keys ``own`` are not inherited: by default those that say where rows come from. Without the chat template,
        neither are keys that need it.
        """
        given = self.model_fields_set
        taken = {
            key: getattr(training, key) for key in PromptsConfig.model_fields if key not in own and key not in given
        }
        template = self.template if "template" in given else training.template
        # An empty system message removes that of ``training``, which also needs the chat template.
        removes_system = self.system == "" if "system" in given else template != "chat"
        if removes_system:
            taken["system"] = None
        if template != "chat" and "continue_final_message" not in given:
            taken["continue_final_message"] = False
        return self.model_copy(update=taken)

    @property
    def tools_column(self) -> str:
        """Column with the tools: tools_key; empty for sources that generate their prompts."""
        return "" if self.source in ("reasoning_gym", "synthetic") else self.tools_key

    @property
    def source_name(self) -> str:
        """Name of the source of a mixture whose reward scores the set; empty for reward.function."""
        return ""


class EvalPromptsConfig(PromptsConfig):
    """The prompts of an evaluation set."""

    mixture_source: str | None = None
    """Name of a source of [[data.source]]: its reward scores the set, which inherits its keys. By default
    reward.function and [data]."""

    @property
    def source_name(self) -> str:
        return self.mixture_source or ""


class TrainingPromptsConfig(PromptsConfig):
    """A set of training prompts."""

    follow: bool = False
    """Read rows that are appended to the file while the run lives; an epoch has the rows that were there when it
    began. For one uncompressed file of JSON lines."""


class SourceConfig(TrainingPromptsConfig):
    """A source of a mixture: a table [[data.source]]. It has all other keys of [data], too.

    It inherits those that do not say where its rows come from.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
    """Name in metrics, samples and errors."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the source among the prompts that are sampled, relative to the other weights."""
    reward: str | None = None
    """Reward of the source's prompts: as reward.function, but no judge. By default reward.function itself."""
    reward_options: dict[str, Any] = {}
    """Keyword arguments of the source's reward."""

    @property
    def source_name(self) -> str:
        return self.name


class CurriculumConfig(Section):
    """Rests for prompts that teach nothing at present."""

    rest: NonNegative = 0
    """Epochs that a prompt rests after a group without a signal: all solved or all failed. Each further such group in
    a row doubles the rest. 0: no prompt rests, unless a function decides."""
    longest: Positive = 16
    """Longest rest, in epochs."""
    solved: float | None = None
    """Mean reward from which a group counts as without a signal, even if its rewards differ."""
    function: str | None = None
    """MODULE:FUNCTION that decides in place of rest, longest and solved, whether a prompt is sampled in an epoch."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @property
    def is_on(self) -> bool:
        """Whether prompts may rest."""
        return self.rest > 0 or self.function is not None


class DataConfig(TrainingPromptsConfig):
    """The training prompts: one set, or a mixture of sources."""

    source: Annotated[
        Annotated[RowsKind, Tag("kind")] | Annotated[list[SourceConfig], Tag("tables"), Field(min_length=1)],
        Discriminator(lambda value: "tables" if isinstance(value, list) else "kind"),
    ] = "auto"  # type: ignore[assignment]
    """JSON files (.jsonl, .json, .gz), Parquet files, a folder of datasets.save_to_disk (hf), a reasoning-gym task, or
    synthetic prompts. auto derives one of the first three from path. Tables [[data.source]] make a mixture."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Rests for prompts that teach nothing at present."""

    @property
    def mixture(self) -> list[SourceConfig]:
        """The sources of a mixture; empty for one set of prompts."""
        return self.source if isinstance(self.source, list) else []

    @model_validator(mode="after")
    def _inherit(self) -> Self:
        """Let the sources of a mixture inherit the keys that they do not set."""
        self.mixture[:] = [each.inherit(self, SOURCE_KEYS - {"shuffle"}) for each in self.mixture]
        return self


class OverlongPenalty(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    margin_tokens: Positive = 128
    """Interval before max_tokens in which the penalty falls from 0 to -scale."""
    scale: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a response that reached max_tokens."""


class RewardConfig(Section):
    """Scoring."""

    function: str = "exact"
    """A built-in (exact, regex, math_verify, reasoning_gym, constant), a judge (relative_judge, rubric;
    docs/judges.md), or MODULE:FUNCTION. episode takes the reward that episodes return, and is the default with
    episode.function, env and command."""
    per: Literal["trajectory", "group"] = "trajectory"
    """Whether the function scores one trajectory or a whole group."""
    options: dict[str, Any] = {}
    """Keyword arguments of each call."""
    pools: Positive = 1
    """Pools of workers, spread over the hosts, for functions that need more cores than one host has. A judge's limits
    apply to each pool."""
    workers: Positive = 2
    """Worker processes of a pool."""
    timeout_s: Seconds = 10.0
    """Longest call from its start in the worker, which is then killed. For a judge, the longest vote without waits
    under its own limits."""
    on_timeout: Literal["fail"] | Annotated[float, Field(ge=-1e18, le=1e18)] = "fail"
    """After timeout_s the trajectory fails and is tried again (rollout.on_failed_trajectory), or gets this number as
    its reward at once. Only for per = trajectory."""
    max_memory_bytes: Positive = 4 << 30
    """Memory that a worker may allocate once it is ready; beyond it the call fails."""
    max_output_bytes: Positive = 1 << 20
    """Bytes of a call's output that reach the log."""
    truncated: Literal["score", "mask", "penalty"] = "score"
    """Responses that ran out of tokens, turns or time: scored unchanged, masked from the loss, or scored with the
    overlong penalty."""
    overlong: OverlongPenalty = OverlongPenalty()
    """The penalty of truncated = penalty."""

    @property
    def penalty(self) -> OverlongPenalty | None:
        """The overlong penalty; None unless truncated = penalty."""
        return self.overlong if self.truncated == "penalty" else None


class SimLearnerConfig(Section):
    """Timing model of a learner that trains nothing."""

    step_s: Annotated[float, Field(ge=0)] = 0.5
    """Time of an optimizer step."""
    publish_bytes: Positive = 1 << 20
    """Bytes of a published version."""
    gather_s: Annotated[float, Field(ge=0)] = 0.0
    """Time to gather these bytes, in parallel with the training."""


class LearnerConfig(Section):
    """Training."""

    backend: Literal["fsdp2", "sim"] = "fsdp2"
    """torch FSDP2, or a timing model."""
    ranks: Positive = 1
    """Learner processes: one per GPU, or CPU processes with gloo."""
    replicas: Positive = 1
    """Copies of the model among the ranks. Consecutive ranks share a copy."""
    context_parallel: Positive = 1
    """Consecutive ranks that share each packed row (docs/learner.md); divides ranks and attention heads."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto takes CUDA if available. sim only reserves GPUs, under cuda."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; master weights and reductions are float32. auto is bfloat16 on CUDA and float32 on CPU."""
    threads: NonNegative = 0
    """Threads of each CPU rank; 0 divides the host's cores. The last bits of results depend on it."""
    steps: NonNegative = 100
    """Optimizer steps of the run. 0 trains nothing: the run evaluates version 0."""
    groups_per_step: Positive = 8
    """Prompt groups of an optimizer step."""
    steps_per_version: Positive = 1
    """Optimizer steps per published version."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon moves the matrices of the layers by Muon, and everything else by AdamW; both take lr."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up; the last one has the peak rate."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up. It reaches the minimum after the last step."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of the peak."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay; norms and biases have none."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip of the global gradient norm."""
    balance: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balance loss of a mixture of experts, as transformers defines it for the model."""
    routes: Literal["replay", "compare", "ignore"] = "replay"
    """Experts of a mixture of experts, token by token: as the engine chose them (replay), or as the learner chooses,
    with a count of differences (compare) or without one (ignore)."""
    updates_per_batch: Positive = 1
    """Optimizer updates of a step, each on its share of the groups. The weights before the first are the proximal
    policy of the others."""
    loss: str = "decoupled"
    """Name of a loss (docs/algorithms.md), or MODULE:FUNCTION."""
    loss_options: dict[str, Any] = {}
    """Keyword arguments of the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for tokens that older weights sampled."""
    tis_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap C of the truncated importance weight min(rho, C)."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of each token's entropy (nats) in the objective."""
    teacher: OptionalPath = None
    """Teacher of loss = "distill", with the policy's tokenizer: as model.path, or http://HOST:PORT/v1 of a server that
    returns log-probs of prompts, such as vLLM. A server needs rollout.temperature = 1 and no truncation."""
    teacher_server: TeacherServerConfig = TeacherServerConfig()
    """The server of a teacher that is a URL."""
    advantage: str = "grpo"
    """Name of an advantage (docs/algorithms.md), or MODULE:FUNCTION."""
    advantage_options: dict[str, Any] = {}
    """Keyword arguments of the advantage."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Denominator of the loss: loss tokens, trajectories (mean over the tokens of each), or trajectories times
    max_tokens."""
    dynamic_sampling: bool = True
    """Filter, count and replace groups whose rewards, and turn rewards, are all equal."""
    signal: str = "reward"
    """Value that dynamic_sampling compares: the reward before the overlong penalty, or a component by name."""
    max_filtered_ratio: Annotated[float, Field(gt=0)] = 20.0
    """Groups filtered or quarantined between two steps, as a multiple of groups_per_step, above which the run ends with
    "no signal"."""
    max_quarantined_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Largest share of quarantined prompts (of those trained, filtered or quarantined), and of dropped trajectories,
    from 100 groups on. Above it the run ends."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run, or quarantines its groups."""
    signal_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Rewards that differ by no more than this count as equal."""
    tokens_per_microbatch: Positive = 8192
    """Token budget of a packed micro-batch, for each rank."""
    packing: Literal["auto", "required", "off"] = "auto"
    """Pack several sequences per row. auto packs if the start-up check allows it; required refuses the start if not."""
    activation_checkpointing: Literal["auto", "off", "selective", "full"] = "auto"
    """Recompute activations in the backward pass: all of a layer (full), all but its matrix products and attention
    (selective), or none. auto is off on CPU, and on CUDA what fits by estimate (docs/learner.md)."""
    offload: bool = False
    """Keep shards of weights, gradients and optimizer states in host memory, and step there."""
    compile: bool = False
    """torch.compile each layer."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of a rank for the others. After it all ranks start again."""
    sim: SimLearnerConfig = SimLearnerConfig()
    """The timing model of backend = sim."""

    @property
    def may_use_gpus(self) -> bool:
        """Whether each rank gets a GPU where the hosts have some."""
        return self.device == "cuda" or (self.device == "auto" and self.backend != "sim")

    @property
    def row_groups(self) -> int:
        """Groups of ranks that share their rows: the ranks themselves, unless context_parallel joins several."""
        return self.ranks // self.context_parallel

    @property
    def tokens_per_row(self) -> int:
        """Token budget of a packed row, which all ranks of a group share."""
        return self.tokens_per_microbatch * self.context_parallel

    @property
    def teacher_url(self) -> str | None:
        """URL of the teacher's server; None for a folder, and without a teacher."""
        return self.teacher if self.teacher is not None and self.teacher.startswith(("http://", "https://")) else None


class StalenessConfig(Section):
    """Limits on the age of trained tokens."""

    max: NonNegative = 1
    """Staleness limit in versions. 0 is synchronous, on-policy training."""
    adapt: bool = True
    """Let the working limit move below max, as low as keeps the learner busy."""
    late: Literal["train", "mask"] = "train"
    """Tokens whose staleness exceeds max: trained and corrected; or masked from the loss and its denominator. The
    baseline keeps their trajectory's reward in either case."""

    @property
    def hard(self) -> bool:
        """Whether tokens whose staleness exceeds ``max`` are never trained."""
        return self.late == "mask"


class EvalConfig(Section):
    """A named evaluation set.

    Its rows become prompts as those of [data] do. The set inherits the keys that do not say where rows come from; a key
    of its own wins. `system = ""` removes the system message of [data].
    """

    data: EvalPromptsConfig
    """Prompts of the set; they are never trained."""
    every_versions: NonNegative = 0
    """Evaluate at each multiple of this many versions; 0 never."""
    at_start: bool = True
    """Evaluate before the first training prompt is leased."""
    at_end: bool = True
    """Evaluate after the last version is served."""
    n: Positive = 1
    """Samples per prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: Positive | None = None
    """Longest response; by default rollout.max_tokens."""
    pass_at: Annotated[float, Field(ge=-1e18, le=1e18)] = 1.0
    """Reward from which a sample counts as passed, for pass@k."""
