"""The configuration: one typed tree, the same for every process of a run.

This package validates each value by itself. ``checks`` compares values with each other, ``load`` reads files and flags,
and ``keys`` describes the keys.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field, model_validator

from asyncrl.config.algorithm import LoraConfig, SftConfig
from asyncrl.config.episode import ChatConfig, EpisodeConfig
from asyncrl.config.monitor import DriftConfig, LogConfig, MonitorConfig, SinksConfig, TraceConfig
from asyncrl.config.operation import (
    CheckpointConfig,
    HubConfig,
    NetworkConfig,
    PlacementConfig,
    PreemptConfig,
    ResumeConfig,
    SecurityConfig,
    SupervisionConfig,
    WatchdogConfig,
)
from asyncrl.config.rollout import EPISODES_PER_CALL, RolloutConfig, WeightsConfig
from asyncrl.config.section import Section
from asyncrl.config.training import (
    DataConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    PromptsConfig,
    RewardConfig,
    RunConfig,
    StalenessConfig,
)
from asyncrl.core.roles import ROLES


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
    episode: EpisodeConfig = EpisodeConfig()
    """Code that plays a task against the policy."""
    chat: ChatConfig = ChatConfig()
    """Conversion between messages and tokens."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    learner: LearnerConfig = LearnerConfig()
    """Training."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""
    sft: SftConfig = SftConfig()
    """Supervised training."""
    staleness: StalenessConfig = StalenessConfig()
    """Limits on the age of trained tokens."""
    weights: WeightsConfig = WeightsConfig()
    """Weight updates."""
    drift: DriftConfig = DriftConfig()
    """Differences between the log-probs of engines and learner."""
    # A uid, NAME@ROUND-INDEX, has at most 200 characters.
    eval: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,150}$")], EvalConfig] = {}
    """Named evaluation sets."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and export."""
    resume: ResumeConfig = ResumeConfig()
    """Resuming a run."""
    hub: HubConfig = HubConfig()
    """Names of the Hugging Face hub."""
    preempt: PreemptConfig = PreemptConfig()
    """Preemption."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Detecting stalls."""
    placement: PlacementConfig = PlacementConfig()
    """GPUs of learner and engines."""
    network: NetworkConfig = NetworkConfig()
    """Sockets."""
    security: SecurityConfig = SecurityConfig()
    """Access and isolation."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Starting, watching and restarting actors."""
    monitor: MonitorConfig = MonitorConfig()
    """Recording of the run."""
    log: LogConfig = LogConfig()
    """Logging."""
    sinks: SinksConfig = SinksConfig()
    """Destinations of metrics in addition to metrics.jsonl."""
    trace: TraceConfig = TraceConfig()
    """The timeline."""

    @model_validator(mode="before")
    @classmethod
    def _let_episodes_score(cls, tree: Any) -> Any:
        """Make reward.function = "episode" the default if users' code plays the episode and returns a reward."""
        if not isinstance(tree, dict) or not isinstance(tree.get("episode"), dict):
            return tree
        reward = tree.get("reward", {})
        # Not for episode.tools, because tools return no reward.
        if any(tree["episode"].get(key) for key in ("function", "env", "command")) and isinstance(reward, dict):
            return tree | {"reward": {"function": "episode"} | reward}
        return tree

    @model_validator(mode="after")
    def _inherit_data(self) -> Config:
        """Let each evaluation set inherit the keys that it does not set, from its ``mixture_source`` or else [data].

        It never inherits the keys that say where its rows come from (SOURCE_KEYS).
        """
        sources: dict[str, PromptsConfig] = {each.name: each for each in self.data.mixture}
        for name, each in self.eval.items():
            base = sources.get(each.data.source_name, self.data)
            self.eval[name] = each.model_copy(update={"data": each.data.inherit(base)})
        return self

    @property
    def training_sets(self) -> dict[str, PromptsConfig]:
        """The sets of training prompts by their table: data, or data.source.NAME for each source of a mixture."""
        sources = self.data.mixture
        return {f"data.source.{each.name}": each for each in sources} if sources else {"data": self.data}

    @property
    def prompt_sets(self) -> dict[str, PromptsConfig]:
        """All sets of prompts by their table, those of evaluations last."""
        return self.training_sets | {f"eval.{name}.data": each.data for name, each in self.eval.items()}

    def prompts_of(self, purpose: str, source: str) -> PromptsConfig:
        """Return the set of a lease's prompt, by its purpose and its source."""
        if purpose != "train":
            return self.eval[purpose.removeprefix("eval/")].data
        # A run that is resumed with other data may still hold prompts of a source that is gone.
        return next((each for each in self.data.mixture if each.name == source), self.data)

    def reward_function(self, source: str) -> str:
        """Return the reward function of a source's prompts; reward.function if no source has this name, also for ""."""
        own = next((each.reward for each in self.data.mixture if each.name == source), None)
        return own or self.reward.function

    @property
    def only_episodes_score(self) -> bool:
        """Whether every reward function is "episode": that of [reward], used or not, and those of the sources."""
        own = [each.reward for each in self.data.mixture if each.reward is not None]
        return {self.reward.function, *own} == {"episode"}

    @property
    def longest_prompt(self) -> int:
        """Longest training prompt, in tokens."""
        return max(each.max_prompt_tokens for each in self.training_sets.values())

    @property
    def longest_sequence(self) -> int:
        """Longest prompt or context plus response, over training and evaluation, in tokens."""
        response = self.rollout.max_tokens
        context = self.episode.max_context_tokens or 0
        evals = (each.data.max_prompt_tokens + (each.max_tokens or response) for each in self.eval.values())
        return max(self.longest_prompt + response, context, *evals)

    @property
    def longest_supervised(self) -> int:
        """Longest sequence of a conversation of sft.data, in tokens."""
        return self.sft.max_tokens or self.longest_sequence

    def longest_context(self, purpose: str) -> int:
        """Longest context plus answer of an episode for this purpose, in tokens."""
        if self.episode.max_context_tokens:
            return self.episode.max_context_tokens
        if purpose == "train":
            return self.longest_prompt + self.rollout.max_tokens
        held = self.eval[purpose.removeprefix("eval/")]
        return held.data.max_prompt_tokens + (held.max_tokens or self.rollout.max_tokens)

    def episodes_open(self, concurrency: int) -> int:
        """Most open episodes of a rollouter whose engine takes ``concurrency`` calls at a time."""
        if self.episode.kind == "single":
            return concurrency
        return self.rollout.episodes or EPISODES_PER_CALL * concurrency

    @property
    def most_episodes(self) -> int:
        """Most open episodes of any rollouter, and of an episode host that serves all rollouters."""
        return self.episodes_open(self.rollout.concurrency_bounds[1])

    @property
    def publishes_adapter(self) -> bool:
        """Whether a published version holds the adapters alone, and not the whole weights."""
        lora = self.lora
        return lora.is_on and (
            lora.publish == "adapter" or (lora.publish == "auto" and self.rollout.traits.adapter_rank > 0)
        )

    @property
    def groups_per_version(self) -> int:
        """G, the prompt groups trained for each published version."""
        return self.learner.groups_per_step * self.learner.steps_per_version

    @property
    def gate_capacity(self) -> int:
        """Most groups that may be leased and not trained yet: (staleness.max + 1) * G."""
        return (self.staleness.max + 1) * self.groups_per_version

    @property
    def actors(self) -> tuple[str, ...]:
        """Every actor of the run as ROLE/INDEX, the controller first."""
        return tuple(f"{role}/{index}" for role in ROLES for index in range(self.number_of(role)))

    def number_of(self, role: str) -> int:
        """Number of actors with this role."""
        number = ROLES[role].number
        return int(attrgetter(number)(self)) if number else 1

    @property
    def episode_hosts(self) -> int:
        """Number of episode hosts: one per rollouter, and the extra ones; 0 for a run without episodes."""
        return self.rollout.replicas + (self.episode.extra_hosts or 0) if self.episode.kind != "single" else 0

    @property
    def reward_pools(self) -> tuple[str, ...]:
        """The pools that score, as ROLE/INDEX."""
        return tuple(f"reward/{pool}" for pool in range(self.reward.pools))

    @property
    def extra_episode_hosts(self) -> tuple[str, ...]:
        """The extra episode hosts as ROLE/INDEX; empty until the launcher has counted the hosts."""
        first = self.rollout.replicas
        return tuple(f"episodes/{first + extra}" for extra in range(self.episode.extra_hosts or 0))

    @property
    def curve(self) -> bool:
        """Whether the sockets are encrypted by CURVE."""
        if self.security.curve == "auto":
            return self.network.host not in ("127.0.0.1", "::1", "localhost")
        return self.security.curve == "required"
