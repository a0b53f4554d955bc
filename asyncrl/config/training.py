"""Training: the run, the policy, its prompts, scoring, the learner, staleness and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.algorithm import CorrectionConfig, KLConfig, TeacherServerConfig
from asyncrl.config.section import Fraction, NonNegative, OptionalPath, PathText, Positive, Seconds, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run's folder; an existing one is never overwritten: the next free NAME-2 is taken."""
    dir: PathText = "runs"
    """Folder that holds the run folders."""
    seed: NonNegative = 0
    """Seed of the data order, of sampling and of the learner."""
    samples_per_step: NonNegative = 4
    """Prompt groups whose text is written to samples/: so many trained and so many filtered ones at each step, and so
    many of each evaluation."""


class ModelConfig(Section):
    """The policy."""

    path: OptionalPath = None
    """Folder of a Hugging Face causal LM with its tokenizer. Left out only when everything is simulated."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""


SOURCE_KEYS = frozenset({"source", "path", "split", "task", "size", "seed", "options", "shuffle"})
"""Keys of a set of prompts that say where its rows come from; the others say how a row becomes a prompt."""


class DataConfig(Section):
    """A set of prompts."""

    source: Literal["auto", "jsonl", "parquet", "hf", "reasoning_gym", "synthetic"] = "auto"
    """Kind of source: JSON files, Parquet files, a folder of datasets.save_to_disk (hf), a reasoning-gym task, or
    made-up prompts. auto is one of the first three and follows from path. jsonl is for .jsonl, .json (lines or one
    list) and their .gz."""
    path: OptionalPath = None
    """File, glob or folder. A folder of JSON or Parquet files, as a download from the hub, gives the files whose names
    hold the split."""
    split: str = "train"
    """Split that is read of a folder that holds several."""
    task: str | None = None
    """Name of the reasoning-gym task."""
    size: Positive = 1024
    """Number of prompts made by reasoning_gym and synthetic."""
    seed: NonNegative = 0
    """Seed of the prompts made by reasoning_gym."""
    options: dict[str, Any] = {}
    """Further options of the reasoning-gym task."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages as in OpenAI's API (docs/first-run.md, "Rows of
    chat messages"). Dots lead into objects: extra_info.question."""
    tools_key: str = "tools"
    """Column that holds the tools which the chat template shows with the prompt, as schemas in OpenAI's form or as
    their JSON text. A row need not have it; empty: no column is shown. Dots lead into objects."""
    template: Literal["plain", "chat"] = "plain"
    """Conversion of a prompt into tokens: as it stands, or through the tokenizer's chat template."""
    system: str | None = None
    """System message put before each prompt that has no system or developer message; chat template only. Empty text in
    an evaluation set: no system message, where data.system has one."""
    continue_final_message: bool = False
    """Whether the policy continues a prompt whose last message is the assistant's, from the end of its text; chat
    template and single answers only. If not, such a row is refused."""
    max_prompt_tokens: Positive = 1024
    """Prompts with more tokens are left out before a lease. The start prints their share. They count as left out
    (ledger/left_out), which is no failure."""
    max_left_out_fraction: Fraction = 0.5
    """Share of the rows that may be left out, by max_prompt_tokens and by on_bad_row = "skip" together. With a larger
    share the start is refused."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read or tokenized ends the start with file and line, or is counted and left out."""
    shuffle: bool = True
    """Order of an epoch: shuffled by (fingerprint, seed, epoch), or as it stands."""

    @property
    def prompt_column(self) -> str:
        """The column of a row that holds its prompt; sources that make their prompts have one of their own."""
        return "question" if self.source in ("reasoning_gym", "synthetic") else self.prompt_key

    def inherit(self, training: DataConfig) -> DataConfig:
        """The set with the keys of ``training`` that say how a row becomes a prompt, unless they are given here."""
        given = self.model_fields_set
        taken = {
            key: getattr(training, key)
            for key in DataConfig.model_fields
            if key not in SOURCE_KEYS and key not in given
        }
        template = self.template if "template" in given else training.template
        # A system message needs the chat template.
        if self.system == "" if "system" in given else template != "chat":
            taken["system"] = None
        if template != "chat" and "continue_final_message" not in given:
            taken["continue_final_message"] = False
        return self.model_copy(update=taken)

    @property
    def tools_column(self) -> str:
        """The column of a row that holds its tools; empty for sources that make their prompts."""
        return "" if self.source in ("reasoning_gym", "synthetic") else self.tools_key


class OverlongPenalty(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    margin_tokens: Positive = 128
    """Length of the interval before max_tokens in which the penalty falls from 0 to -scale."""
    scale: Annotated[float, Field(ge=0)] = 1.0
    """Penalty of a response that reached max_tokens."""


class RewardConfig(Section):
    """Scoring."""

    function: str = "exact"
    """Built in: exact, regex, math_verify, reasoning_gym, constant, and the judges relative_judge and rubric
    (docs/judges.md); or MODULE:FUNCTION of your own. An episode that says its reward itself is not scored; episode
    stands for no function, and is the default with episode.function, env and command."""
    per: Literal["trajectory", "group"] = "trajectory"
    """Whether the function scores one trajectory or a whole group (a relative judge)."""
    options: dict[str, Any] = {}
    """Keyword arguments passed to the function with each call."""
    pools: Positive = 1
    """Pools of workers, each on a host of its own as far as there are hosts: where the functions of many replicas take
    more cores than one host has. A judge keeps its limits in each of them."""
    workers: Positive = 2
    """Worker processes of a pool."""
    timeout_s: Seconds = 10.0
    """Longest run of the function, counted from its start in the worker; the worker is killed then. For a judge the
    time of a vote, without that in which it waits under the judge's own limits."""
    on_timeout: Literal["fail"] | Annotated[float, Field(ge=-1e18, le=1e18)] = "fail"
    """A trajectory whose scoring runs over timeout_s fails as by any other error, is tried again and left to
    rollout.on_failed_trajectory; or gets this number as its reward, at once, so that responses which make a verifier
    hang are punished. With per = trajectory only: which response of a group made it hang cannot be told."""
    max_memory_bytes: Positive = 4 << 30
    """Memory that a worker may take beyond what it holds when it is ready; past it the function fails."""
    max_output_bytes: Positive = 1 << 20
    """Bytes of a function's output in one call that reach the log."""
    truncated: Literal["score", "mask", "penalty"] = "score"
    """Responses that ran out of tokens, turns or time: scored as they are, left out of the loss, or scored with the
    overlong penalty, which counts sampled tokens alone."""
    overlong: OverlongPenalty = OverlongPenalty()
    """The penalty of truncated = penalty."""


class SimLearnerConfig(Section):
    """Timing model of a learner that trains nothing."""

    step_s: Annotated[float, Field(ge=0)] = 0.5
    """Time of an optimizer step."""
    publish_bytes: Positive = 1 << 20
    """Bytes that each publication carries."""
    gather_s: Annotated[float, Field(ge=0)] = 0.0
    """Time to gather these bytes, beside the training, evenly over the buckets."""


class LearnerConfig(Section):
    """Training."""

    backend: Literal["fsdp2", "sim"] = "fsdp2"
    """Trainer: torch FSDP2, or a timing model."""
    ranks: Positive = 1
    """Processes of the learner: one a GPU, or CPU processes with gloo."""
    replicas: Positive = 1
    """Copies of the model among the ranks: each is cut up over learner.ranks / replicas of them, which follow one
    another, so that layers are gathered within a copy (a host) alone. The copies step alike."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device that the learner trains on; auto takes CUDA where there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; master weights and reductions are float32. auto is bfloat16 on CUDA and float32 on CPU."""
    threads: NonNegative = 0
    """Threads of each rank that trains on CPU; 0 shares the host's cores among its ranks. The last bits of what is
    computed depend on it."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    groups_per_step: Positive = 8
    """Prompt groups of an optimizer step."""
    steps_per_version: Positive = 1
    """Optimizer steps between two publications."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly; the last of them has the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up. The minimum lies behind the last step, so each step has a rate above it."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate behind the last step, at the end of the decay, as a share of the peak."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip of the global gradient norm."""
    updates_per_batch: Positive = 1
    """Optimizer updates of a step, each from its share of the step's groups; from the second on the weights of the
    first are the proximal policy."""
    loss: str = "decoupled"
    """Name of a loss (docs/algorithms.md), or MODULE:FUNCTION of your own."""
    loss_options: dict[str, Any] = {}
    """Keyword arguments of the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """The factor of the loss of tokens that other weights have sampled."""
    tis_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap C of the truncated importance weight min(rho, C)."""
    kl: KLConfig = KLConfig()
    """The divergence from the policy that the run began with."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy, nats, that is added to the objective of each token."""
    teacher: OptionalPath = None
    """The teacher of loss = "distill", a causal LM with the policy's tokenizer: its folder, scored as the reference is;
    or http://HOST:PORT/v1 of a server that returns log-probs of prompts, as vLLM's, which is asked beside the
    training. A server's are of temperature 1, so rollout.temperature must be 1."""
    teacher_server: TeacherServerConfig = TeacherServerConfig()
    """The server of a teacher that is a URL."""
    advantage: str = "grpo"
    """Name of an advantage (docs/algorithms.md), or MODULE:FUNCTION of your own."""
    advantage_options: dict[str, Any] = {}
    """Keyword arguments of the advantage."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Denominator of the loss: loss tokens, trajectories (mean over each one's tokens), or trajectories times
    max_tokens."""
    dynamic_sampling: bool = True
    """Groups whose rewards are all equal, and those of their turns too, are filtered, counted and replaced."""
    signal: str = "reward"
    """Figure that dynamic_sampling judges by: the reward as it was before the overlong penalty, or a component of it by
    name."""
    max_filtered_ratio: Annotated[float, Field(gt=0)] = 20.0
    """Groups filtered or quarantined between two steps, in steps' worth, past which the run ends with "no signal"."""
    max_quarantined_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Largest share of quarantined prompts among those trained, filtered or quarantined, and of dropped trajectories
    among all. Past it the run ends and says why; counted from 100 groups on. Prompts that the rules of data leave out
    are in neither number. A reward function that fails in all of its calls ends the run before."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run, or quarantines the groups that it came from."""
    signal_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Rewards of a group, or of its turns, that differ by no more than this count as equal."""
    tokens_per_microbatch: Positive = 8192
    """Token budget of a packed micro-batch."""
    packing: Literal["auto", "required", "off"] = "auto"
    """Several sequences a row: when the start-up check allows it, or refuse to start without, or never."""
    activation_checkpointing: Literal["auto", "off", "selective", "full"] = "auto"
    """Activations that are computed again in the backward pass: those of a layer (full), all but its matrix products
    (selective), or none. auto is full on CUDA and off on CPU."""
    offload: bool = False
    """Keep the shards of weights and gradients and the optimizer's states in host memory, and step there."""
    compile: bool = False
    """torch.compile each layer."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of one rank for the others within a step, a publication or the start, before the run ends."""
    sim: SimLearnerConfig = SimLearnerConfig()
    """The timing model of backend = sim."""

    @property
    def teacher_url(self) -> str | None:
        """URL of the teacher's server; None for a folder, and without a teacher."""
        return self.teacher if self.teacher is not None and self.teacher.startswith(("http://", "https://")) else None


class StalenessConfig(Section):
    """Limits on the age of the tokens that are trained."""

    max: NonNegative = 1
    """The limit eta, in versions. 0 is synchronous, on-policy training."""
    adapt: bool = True
    """Let the working limit move below the limit, as low as keeps the learner fed."""
    late: Literal["train", "mask"] = "train"
    """Tokens whose staleness exceeds max: trained, corrected and counted; or left out of the loss and its denominator,
    while the reward of their trajectory stays in the baseline."""

    @property
    def hard(self) -> bool:
        """Whether no token that is staler than ``max`` is trained."""
        return self.late == "mask"

    @field_validator("late", mode="before")
    @classmethod
    def _refuse_removed(cls, late: object) -> object:
        if late in ("wait", "requeue"):
            raise ValueError(f'"{late}" was removed; take "mask" to leave late tokens out of the loss, or "train"')
        return late


class EvalConfig(Section):
    """A named evaluation set.

    Its rows become prompts as those of [data] do. The set inherits template, system, prompt_key, on_bad_row and the
    limits; a key of its own wins. `system = ""` removes the system message of [data].
    """

    data: DataConfig
    """Prompts of the set; they never train."""
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
    pass_at: Annotated[float, Field(ge=-1e18, le=1e18)] = 1.0
    """Reward from which a sample passes: the threshold of pass@k."""
