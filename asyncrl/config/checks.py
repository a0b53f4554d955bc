"""Conflicts between values that are valid by themselves."""

from __future__ import annotations

import glob
import math
import re
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from asyncrl.config import Config
from asyncrl.config.algorithm import LoraConfig, TeacherServerConfig
from asyncrl.config.episode import OWN_REASONING_PARSERS, OWN_TOOL_PARSERS
from asyncrl.config.operation import TAKE_SHARE
from asyncrl.config.training import JUDGES, DataConfig, LearnerConfig, PromptsConfig, TrainingPromptsConfig

Problem = tuple[str, str]
"""A dotted key, and the words that follow it in an error: what is wrong with the value, and what to do."""
FORBIDDEN_VLLM_KEYS = (
    *("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "return_sampling_mask"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
    *("worker_extension_cls", "scheduler_cls"),
)
"""Arguments of vLLM that asyncrl sets itself, so rollout.vllm.extra may not have them."""


def _context_key(config: Config) -> str:
    """Dotted key of the engine's longest prompt plus response."""
    return f"rollout.{config.rollout.traits.context_key}"


def _update_problems(config: Config) -> Iterator[Problem]:
    """Conflicts between keys of weight updates: transfer, KV cache, drift and deadlines."""
    weights, rollout = config.weights, config.rollout
    # A chunk travels in a message beside its header.
    if weights.chunk_bytes > config.network.max_message_bytes // 2:
        yield "weights.chunk_bytes", "must be at most half of network.max_message_bytes"
    if rollout.keep_kv == "stale" and rollout.on_update != "keep":
        yield "rollout.keep_kv", 'stale requires rollout.on_update = "keep"'
    warn, stop = config.drift.warn, config.drift.stop
    if warn != "auto" and stop != "auto" and stop < warn:
        yield "drift.stop", f"is {stop:g}, below drift.warn = {warn:g}"
    if weights.stage_deadline_s < weights.deadline_s:
        yield "weights.stage_deadline_s", "must be at least weights.deadline_s"
    if weights.broadcast_timeout_s > weights.deadline_s:
        yield "weights.broadcast_timeout_s", "must be at most weights.deadline_s"
    load_key = rollout.traits.load_key
    if load_key and rollout.value_of(load_key) >= weights.deadline_s:
        yield f"rollout.{load_key}", "must be below weights.deadline_s"


def _truncation_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of a truncated distribution with the engine, the size of a group's message, and a teacher."""
    rollout, truncation = config.rollout, config.rollout.truncation
    if truncation is None:
        return
    key, traits = f"rollout.{rollout.truncation_key}", rollout.traits
    if not traits.truncates:
        yield key, f"{traits.title} cannot truncate the distribution; leave it out"
    elif traits.gpus and rollout.gpus_per_replica == 0:
        problem = f"on CPUs {traits.title} does not return the tokens that a truncated distribution has left"
        yield key, f'{problem}; leave it out, use GPUs or take rollout.engine = "reference"'
    # Four bytes for each member of each set.
    most = 4 * truncation.top_k * rollout.max_tokens * rollout.samples_per_prompt
    if most > config.network.max_message_bytes:
        yield (
            "rollout.top_k",
            f"the token sets of a group may have {most} bytes ({truncation.top_k} tokens in each set), and a message "
            f"at most network.max_message_bytes = {config.network.max_message_bytes}; set a smaller top_k, or raise it",
        )
    if config.learner.teacher_url is not None:
        yield key, "a teacher on a server scores under the whole distribution; leave it out, or name a folder"


def _quantization_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of quantized engines with devices, dtypes and further arguments of vLLM."""
    rollout = config.rollout
    if rollout.quantization is None:
        return
    key = f"rollout.{rollout.traits.quantization_key}"
    if rollout.gpus_per_replica == 0:
        yield key, "engines on CPUs have no fast kernels for fp8; leave it out, or use GPUs"
    if config.learner.dtype == "float32":
        yield (
            key,
            'vLLM quantizes weights in bfloat16, and learner.dtype is "float32"; set that to "auto" or "bfloat16"',
        )
    if "quantization" in rollout.vllm.extra:
        yield key, "rollout.vllm.extra has a quantization too; leave one out"


def _lora_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of adapters with engine and transport, and keys of [lora] without an effect."""
    lora, weights = config.lora, config.weights
    if not lora.is_on:
        problem = "has no effect without adapters; set lora.rank, for example to 32"
        changed = [key for key in ("alpha", "targets", "publish") if getattr(lora, key) != getattr(LoraConfig(), key)]
        yield from ((f"lora.{key}", problem) for key in changed)
        return
    if config.learner.backend == "sim":
        yield "lora.rank", 'learner.backend = "sim" trains nothing; leave it out'
    if not lora.targets:
        yield "lora.targets", 'is empty; name layers, for example ["q_proj", "v_proj"], or take "all-linear"'
    if not config.publishes_adapter:
        return
    traits = config.rollout.traits
    if not traits.adapter_rank:
        problem = f'is adapter, which the engine {config.rollout.engine} cannot load; take auto or "merged"'
        yield "lora.publish", problem
    elif lora.rank > traits.adapter_rank:
        problem = (
            f"is {lora.rank}, and {traits.title} takes adapters up to {traits.adapter_rank}; "
            'lower it or set lora.publish to "merged"'
        )
        yield "lora.rank", problem
    if weights.transport in ("gloo", "nccl"):
        problem = f"is {weights.transport}, a broadcast, and an adapter is too small for that; take auto, shm or stream"
        yield "weights.transport", problem


def _chat_problems(config: Config) -> Iterator[Problem]:
    """Parsers that the engine does not have."""
    named = (("tool_parser", OWN_TOOL_PARSERS), ("reasoning_parser", OWN_REASONING_PARSERS))
    for key, own in named:
        if getattr(config.chat, key) not in own and not config.rollout.traits.parsers:
            problem = f'must be one of {", ".join(own)}; vLLM\'s parsers need rollout.engine = "vllm"'
            yield f"chat.{key}", problem


def _episode_problems(config: Config) -> Iterator[Problem]:
    """Keys of [episode] without an effect, and conflicts of episodes with rewards and limits of size."""
    episode, rollout = config.episode, config.rollout
    if episode.kind == "single":
        for key, value in (("rollout.episodes", rollout.episodes), ("episode.extra_hosts", episode.extra_hosts)):
            if value is not None:
                yield key, "is for episodes; set episode.function, env, tools or command, or leave it out"
        if episode.options:
            yield "episode.options", "are for episode.function, env or tools, and none of them is set"
        return
    if episode.kind == "command" and episode.options:
        yield "episode.options", "are not given to a command; put them into its arguments"
    if config.reward.truncated == "penalty":
        problem = "penalty compares one response with rollout.max_tokens, and an episode has many; take score or mask"
        yield "reward.truncated", problem
    if episode.max_request_bytes > config.network.max_message_bytes:
        yield "episode.max_request_bytes", "must be at most network.max_message_bytes"
    context, length = episode.max_context_tokens, rollout.engine_context
    if context is not None and length is not None and length < context:
        yield _context_key(config), f"is {length}, less than episode.max_context_tokens = {context}"


def _sft_problems(config: Config) -> Iterator[Problem]:
    """Keys of [sft] without an effect, and conflicts of supervised steps with the learner."""
    sft, learner = config.sft, config.learner
    if sft.data is None:
        problem = "has no effect without sft.data; name the file of the conversations"
        yield from ((f"sft.{key}", problem) for key in ("warm_steps", "weight") if getattr(sft, key))
        return
    if not sft.is_on:
        yield "sft.data", "is not trained: set sft.warm_steps, or sft.weight for the later steps"
    if learner.backend == "sim":
        yield "sft.data", 'learner.backend = "sim" trains nothing; leave it out'
    if sft.weight and sft.batch < learner.updates_per_batch:
        problem = f"is {sft.batch}, fewer than the updates of a step (learner.updates_per_batch = "
        yield "sft.batch", f"{problem}{learner.updates_per_batch})"
    if sft.rise_steps > sft.warm_steps:
        yield "sft.rise_steps", f"is more than sft.warm_steps = {sft.warm_steps}"
    if sft.warm_steps and learner.kl.coefficient and learner.kl.path is None:
        problem = "is model.path by default, and the policy moves away from it in sft.warm_steps; name a folder"
        yield "learner.kl.path", problem


def _teacher_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of a teacher on a server."""
    learner = config.learner
    if learner.teacher_url is None:
        if learner.teacher_server != TeacherServerConfig():
            yield "learner.teacher_server", "has no effect unless learner.teacher is a URL"
        return
    if config.rollout.temperature != 1.0:
        problem = f"is {config.rollout.temperature:g}, but a teacher on a server scores at temperature 1; set it to 1"
        yield "rollout.temperature", f"{problem}, or learner.teacher to the folder of the model"
    key = learner.teacher_server.api_key_env
    if key and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        problem = "takes the name of an environment variable, never the key itself"
        yield "learner.teacher_server.api_key_env", problem


def _time_slice_problems(config: Config) -> Iterator[Problem]:
    """A rank must wait for its GPU for longer than an engine may keep it: in its start, or in a load and a drain.

    The pause or the sleep that follows may take rollout.engine_timeout_s, after which a hanging engine is replaced.
    """
    if config.placement.share != "time_slice":
        return
    supervision, weights, rollout = config.supervision, config.weights, config.rollout
    keeps_s, keys = supervision.start_timeout_s, "supervision.start_timeout_s"
    loads = 2 if rollout.on_update == "drain" else 1
    if loads * weights.deadline_s > keeps_s:
        keeps_s, keys = loads * weights.deadline_s, f"{'2 * ' if loads > 1 else ''}weights.deadline_s"
    keeps_s += rollout.engine_timeout_s
    least = keeps_s / TAKE_SHARE
    timeout_s = config.learner.collective_timeout_s
    if timeout_s < least:
        problem = (
            f"is {timeout_s:g}, and in time slices a rank waits for its GPU for {TAKE_SHARE:g} of it. An engine may "
            f"keep the GPU for {keeps_s:g} s ({keys} + rollout.engine_timeout_s)"
        )
        yield "learner.collective_timeout_s", f"{problem}; set it to {math.ceil(least)} or more, or lower these keys"


def cross_check(config: Config) -> Iterator[Problem]:
    """Yield a problem for every conflict between the values of a valid configuration."""
    rollout, learner = config.rollout, config.learner
    simulated = rollout.traits.makes_up and learner.backend == "sim"
    if config.model.path is None and not simulated:
        yield "model.path", 'is required unless rollout.engine and learner.backend are both "sim"'
    if rollout.traits.makes_up and learner.backend != "sim":
        problem = f'the {rollout.engine} engine makes up its tokens, which must not train a model; set it to "sim"'
        yield "learner.backend", problem
    # Most trajectories at a time. With episodes, these are more than the engine's calls.
    most_at_once = config.most_episodes
    at_once_key = "rollout.concurrency" if config.episode.kind == "single" else "rollout.episodes"
    if rollout.samples_per_prompt > most_at_once:
        yield (
            at_once_key,
            f"is {most_at_once}, less than one prompt group needs (samples_per_prompt = {rollout.samples_per_prompt})",
        )
    yield from _learner_problems(learner)
    yield from _episode_problems(config)
    if not rollout.traits.kv_cache and rollout.concurrency == "auto":
        problem = f"auto needs the engine's KV cache, and the {rollout.engine} engine has none; give a number"
        yield "rollout.concurrency", problem
    if not rollout.traits.gpus and not rollout.traits.makes_up and rollout.gpus_per_replica:
        yield "rollout.gpus_per_replica", f"the {rollout.engine} engine computes on the CPU; set it to 0"
    context_length = rollout.engine_context
    if context_length is not None and context_length < config.longest_prompt + rollout.max_tokens:
        yield (
            _context_key(config),
            f"is {context_length}, less than data.max_prompt_tokens + rollout.max_tokens = "
            f"{config.longest_prompt + rollout.max_tokens}",
        )
    yield from (
        (f"rollout.vllm.extra.{key}", "is set by asyncrl and may not be overridden")
        for key in FORBIDDEN_VLLM_KEYS
        if key in rollout.vllm.extra
    )
    yield from _truncation_problems(config)
    yield from _quantization_problems(config)
    yield from _update_problems(config)
    yield from _lora_problems(config)
    yield from _chat_problems(config)
    yield from _sft_problems(config)
    yield from _teacher_problems(config)
    yield from _time_slice_problems(config)
    if config.weights.transport == "nccl" and (not rollout.traits.gpus or rollout.gpus_per_replica == 0):
        yield "weights.transport", "nccl reaches engines on GPUs only; take auto, shm, stream or gloo"
    yield from _reward_problems(config)
    if learner.warmup_steps > learner.steps:
        yield "learner.warmup_steps", f"is more than learner.steps = {learner.steps}"
    if learner.steps % learner.steps_per_version:
        yield (
            "learner.steps",
            f"must be a multiple of learner.steps_per_version = {learner.steps_per_version}",
        )
    is_episode = config.episode.kind != "single"
    for key, data in config.training_sets.items():
        yield from _check_data(key, data, is_episode=is_episode)
        is_followed = isinstance(data, TrainingPromptsConfig) and data.follow
        if is_followed and (data.source not in ("auto", "jsonl") or glob.has_magic(data.path or "")):
            yield f"{key}.follow", "is for one file of JSON lines; name it in path, or leave follow out"
    yield from _mixture_problems(config)
    yield from _curriculum_problems(config)
    for name, evaluation in config.eval.items():
        yield from _check_data(f"eval.{name}.data", evaluation.data, is_episode=is_episode)
        named = evaluation.data.mixture_source
        if named is not None and named not in (sources := [each.name for each in config.data.mixture]):
            known = f"the sources are {', '.join(sources)}" if sources else "there is no [[data.source]]"
            yield f"eval.{name}.data.mixture_source", f"is {named!r}; {known}"
        longest = evaluation.data.max_prompt_tokens + (evaluation.max_tokens or rollout.max_tokens)
        if context_length is not None and context_length < longest:
            yield _context_key(config), f"is {context_length}, less than eval.{name} needs: {longest}"
        if evaluation.n > most_at_once:
            yield f"eval.{name}.n", f"is more than {at_once_key} = {most_at_once}"
    if rollout.min_replicas > rollout.replicas:
        yield "rollout.min_replicas", f"is more than rollout.replicas = {rollout.replicas}"
    # With a shorter limit, one late heartbeat would count as silence.
    beats = 3 * config.supervision.heartbeat_s
    for key in ("supervision.silence_s", "supervision.unreachable_s", "supervision.host_lost_s", "watchdog.stall_s"):
        if attrgetter(key)(config) < beats:
            yield key, f"must be at least 3 * supervision.heartbeat_s = {beats:g}"
    low, _, high = config.network.ports.partition("-")
    if int(high or low) > 65535 or (high and not 0 < int(low) <= int(high)):
        yield "network.ports", f"{config.network.ports!r} is not a range LOW-HIGH within 1-65535"
    if config.security.curve == "off" and config.network.host not in ("127.0.0.1", "::1", "localhost"):
        yield "security.curve", f"may be off on loopback only; network.host is {config.network.host}"


def _learner_problems(learner: LearnerConfig) -> Iterator[Problem]:
    """Conflicts among the learner's groups, ranks and rows."""
    if learner.updates_per_batch > learner.groups_per_step:
        problem = f"is {learner.updates_per_batch}, more than there are groups (learner.groups_per_step = "
        yield "learner.updates_per_batch", f"{problem}{learner.groups_per_step})"
    if learner.ranks % learner.replicas:
        yield "learner.replicas", f"is {learner.replicas}, which does not divide learner.ranks = {learner.ranks}"
    if learner.ranks % learner.context_parallel:
        problem = f"is {learner.context_parallel}, which does not divide learner.ranks = {learner.ranks}"
        yield "learner.context_parallel", problem
    if learner.context_parallel > 1 and learner.packing == "off":
        yield "learner.packing", 'is "off", but ranks share packed rows (learner.context_parallel); leave it out'
    if learner.advantage == "reinforce" and learner.dynamic_sampling:
        problem = "drops groups of equal rewards, from which the advantage reinforce learns; set it to false"
        yield "learner.dynamic_sampling", problem


def _reward_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of the reward with the data, the episodes and the limit of responses."""
    reward, rollout = config.reward, config.rollout
    if reward.truncated == "penalty" and reward.overlong.margin_tokens >= rollout.max_tokens:
        yield "reward.overlong.margin_tokens", f"must be below rollout.max_tokens = {rollout.max_tokens}"
    if reward.per == "group" and reward.on_timeout != "fail":
        yield (
            "reward.on_timeout",
            'a number needs reward.per = "trajectory": it is unknown which response of a group made the function '
            'hang, and one reward for all of them teaches nothing; set it to "fail"',
        )
    if reward.function == "episode" and config.episode.kind == "single":
        yield "reward.function", "episode is for runs with an [episode]; name a function"
    unmade = [each for each in _scored_by_default(config) if each.source != "reasoning_gym"]
    if reward.function == "reasoning_gym" and unmade:
        yield "reward.function", 'reasoning_gym scores only prompts of data.source = "reasoning_gym"'


def _scored_by_default(config: Config) -> list[PromptsConfig]:
    """Return the sets of training prompts that reward.function scores."""
    return [each for each in config.training_sets.values() if getattr(each, "reward", None) is None]


def _mixture_problems(config: Config) -> Iterator[Problem]:
    """Conflicts of the sources of a mixture with each other, with [data] and with a judge."""
    data, default = config.data, DataConfig()
    if not data.mixture:
        return
    for name, count in Counter(each.name for each in data.mixture).items():
        if count > 1:
            yield "data.source", f"{count} sources have the name {name!r}; give each its own"
    for key in sorted({"path", "split", "task", "size", "seed", "options", "follow"}):
        if getattr(data, key) != getattr(default, key):
            yield f"data.{key}", "has no effect beside [[data.source]]; set it in a source"
    for each in data.mixture:
        key = f"data.source.{each.name}.reward"
        if each.reward is None and each.reward_options:
            yield f"{key}_options", "are for a reward of the source; set reward too, or use reward.options"
        if each.reward in JUDGES:
            yield key, "is a judge, which scores whole runs; set it as reward.function, or name another function"
        elif each.reward is not None and config.reward.function in JUDGES:
            yield key, "does not go with a judge as reward.function, which scores whole runs; leave one out"
        if each.reward == "reasoning_gym" and each.source != "reasoning_gym":
            yield key, 'reasoning_gym scores only prompts of a source of kind "reasoning_gym"'
        if each.reward == "episode" and config.episode.kind == "single":
            yield key, "episode is for runs with an [episode]; name a function"


def _curriculum_problems(config: Config) -> Iterator[Problem]:
    """Keys of [data.curriculum] without an effect."""
    curriculum = config.data.curriculum
    if curriculum.function is None and curriculum.options:
        yield "data.curriculum.options", "are for data.curriculum.function, which is not set"
    if curriculum.function is not None and ":" not in curriculum.function:
        yield "data.curriculum.function", f"is {curriculum.function!r}, and must be MODULE:FUNCTION"
    if curriculum.function is not None and curriculum.rest:
        yield "data.curriculum.rest", "has no effect beside data.curriculum.function; leave one out"
    if curriculum.rest > curriculum.longest:
        yield "data.curriculum.rest", f"is more than data.curriculum.longest = {curriculum.longest}"
    if not curriculum.is_on and curriculum.solved is not None:
        yield "data.curriculum.solved", "has no effect without data.curriculum.rest; set that too"


def _check_data(key: str, data: PromptsConfig, *, is_episode: bool) -> Iterator[Problem]:
    """Yield the conflicts within a set of prompts. ``key`` is its table, for example "eval.NAME.data"."""
    if data.source not in ("reasoning_gym", "synthetic") and data.path is None:
        yield f"{key}.path", 'is required unless source is "reasoning_gym" or "synthetic"'
    if data.source == "reasoning_gym" and data.task is None:
        yield f"{key}.task", 'is required by source = "reasoning_gym"'
    if data.system is not None and data.template != "chat":
        yield f"{key}.system", 'needs template = "chat"'
    if data.continue_final_message:
        if data.template != "chat":
            yield f"{key}.continue_final_message", 'needs template = "chat"'
        if is_episode:
            yield f"{key}.continue_final_message", "is for single answers; an episode's first call is a turn of its own"
