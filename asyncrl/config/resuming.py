"""Compares the configuration of a resume with that of the checkpoint, and says what each change applies to. Pure.

``TABLE`` puts every key into one class of ``Applies``. A checkpoint holds prompt groups that were generated and scored
under its configuration. If a key changes that these groups depend on, they are generated again.

Invariant: every key of the configuration is in one class. A key that generation, scoring or the choice of groups
depends on is in the class GENERATED, or in one whose changes are checked.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config import Config
from asyncrl.config.keys import listed_table_of, table_of
from asyncrl.config.section import Section

LONGEST_VALUE = 60
"""Most characters of a value that are shown."""


class Applies(enum.Enum):
    """The data that a change at a resume applies to."""

    NOW = "at once"
    GENERATED = "to groups that are generated from now on"
    PROMPTS = "to the prompts, which are compared"
    SEED = "to the order of the prompts"
    BATCH = "to the geometry of the batches"
    REFUSED = "never: the checkpoint fits no other value"
    COMMAND = "to the choice of the run, and is not compared"


TABLE: dict[Applies, str] = {
    Applies.NOW: """
        run.samples_per_step
        data.max_prompt_tokens data.max_left_out_fraction data.shuffle data.follow data.curriculum.*
        rollout.replicas rollout.min_replicas rollout.gpus_per_replica rollout.concurrency rollout.episodes
        rollout.stream_interval rollout.on_update rollout.keep_kv rollout.request_seeds rollout.max_attempts
        rollout.retry_backoff_s rollout.on_failed_trajectory rollout.engine_timeout_s
        rollout.vllm.max_num_seqs rollout.vllm.gpu_memory_utilization rollout.vllm.cpu_kv_cache_bytes
        rollout.vllm.block_size rollout.vllm.enforce_eager rollout.vllm.threads rollout.sim.*
        episode.workers episode.extra_hosts episode.start_timeout_s episode.turn_timeout_s episode.timeout_s
        episode.close_timeout_s episode.stall_timeout_s episode.max_memory_bytes episode.max_output_bytes
        episode.max_request_bytes
        chat.check_timeout_s chat.render_threads
        reward.pools reward.workers reward.timeout_s reward.max_memory_bytes reward.max_output_bytes
        learner.ranks learner.replicas learner.context_parallel learner.device learner.dtype learner.threads
        learner.steps
        learner.optimizer learner.lr learner.warmup_steps learner.decay learner.min_lr_ratio learner.betas
        learner.weight_decay learner.max_grad_norm learner.balance learner.routes learner.updates_per_batch
        learner.loss learner.loss_options
        learner.correction.* learner.tis_cap learner.kl.* learner.entropy_bonus learner.teacher
        learner.teacher_server.* learner.advantage learner.advantage_options learner.aggregation
        learner.max_filtered_ratio learner.max_quarantined_fraction learner.on_nonfinite learner.tokens_per_microbatch
        learner.packing learner.activation_checkpointing learner.offload learner.compile learner.collective_timeout_s
        learner.sim.*
        lora.publish sft.* staleness.* weights.* drift.* eval.* checkpoint.* hub.timeout_s preempt.* watchdog.*
        placement.* network.* security.* supervision.* monitor.* log.* sinks.* trace.*
    """,
    Applies.GENERATED: """
        model.path model.trust_remote_code
        data.template data.system data.continue_final_message
        data.source.NAME.reward data.source.NAME.reward_options
        rollout.engine rollout.max_tokens rollout.temperature rollout.top_p rollout.top_k rollout.min_p
        rollout.stop rollout.stop_token_ids rollout.vllm.max_model_len rollout.vllm.quantization rollout.vllm.extra
        episode.function episode.env episode.tools episode.command episode.options episode.max_turns
        episode.max_context_tokens
        chat.template_options chat.history chat.tool_parser chat.reasoning_parser chat.renderer chat.date
        reward.function reward.per reward.options reward.on_timeout reward.truncated reward.overlong.*
        learner.dynamic_sampling learner.signal learner.signal_tolerance
    """,
    Applies.PROMPTS: """
        data.source data.path data.split data.task data.size data.seed data.options data.prompt_key
        data.tools_key data.on_bad_row data.source.NAME.name data.source.NAME.weight
    """,
    Applies.SEED: "run.seed",
    Applies.BATCH: "learner.groups_per_step learner.steps_per_version rollout.samples_per_prompt",
    Applies.REFUSED: "learner.backend lora.rank lora.alpha lora.targets",
    Applies.COMMAND: "run.name run.dir resume.allow hub.pinned",
}
"""Every key of the configuration, by what a change of it applies to; SECTION.* are all keys of a section."""
_CLASS = {entry: applies for applies, entries in TABLE.items() for entry in entries.split()}


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from that in the checkpoint's configuration."""

    key: str
    applies: Applies
    difference: str
    """The old and the new value, or what else differs."""

    def describe(self) -> str:
        """One line for people."""
        return f"{self.key} {self.difference}; the change applies {self.applies.value}"


def applies(key: str) -> Applies:
    """Return the class of a dotted key or table, by its own entry in TABLE or the nearest SECTION.* around it.

    Raises KeyError for a key that TABLE does not have.
    """
    parts = key.split(".")
    if key.startswith("data.source.") and len(parts) == 4:
        # A key of a source has the class of the same key of [data], unless only sources have it.
        key = f"data.source.NAME.{parts[3]}"
        key = key if key in _CLASS else f"data.{parts[3]}"
    elif key.startswith("data.source."):
        key = "data.source"
    for entry in (key, *(".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))):
        if entry in _CLASS:
            return _CLASS[entry]
    raise KeyError(f"{key} is not in TABLE of {__name__}: say what a change of it at a resume applies to")


def changes(was: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the keys that ``config`` changes from ``was``, an earlier configuration as plain data, in section order.

    Keys of the classes REFUSED and COMMAND are left out: a resume that changes the former is refused, and the latter
    may change. A key that is missing in ``was``, because an earlier release wrote it, counts as its default.
    """
    found = []
    for key, before, after in _differences(Config, was, config.model_dump(mode="json"), ""):
        kind = applies(key)
        if kind not in (Applies.REFUSED, Applies.COMMAND):
            found.append(Change(key, kind, f"was {_shown(before)}, is {_shown(after)}"))
    return found


def differences(was: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, before, after) of each key of the classes BATCH and REFUSED that ``config`` changes from ``was``.

    ``was`` is an earlier configuration as plain data; a key that it lacks counts as unchanged. The keys are in the
    order of TABLE. The scale and the targets of adapters count only if both configurations have adapters.
    """
    now, found = config.model_dump(mode="json"), []
    have_adapters = was.get("lora", {}).get("rank", config.lora.rank) > 0 and config.lora.is_on
    for key in f"{TABLE[Applies.BATCH]} {TABLE[Applies.REFUSED]}".split():
        section, _, name = key.partition(".")
        after = now[section][name]
        before = was.get(section, {}).get(name, after)
        if isinstance(before, list) and isinstance(after, list):
            before, after = sorted(before), sorted(after)
        if before != after and (have_adapters or key not in ("lora.alpha", "lora.targets")):
            found.append((key, before, after))
    return found


def _differences(
    section: type[Section], was: Mapping[str, Any], now: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, after) of each value of ``section`` that differs; ``prefix`` leads to it, as "learner.".

    A table that only one side has counts as one value.
    """
    for name, field in section.model_fields.items():
        # An earlier release may lack the key in ``was``; ``now`` is complete.
        before, after, table = was.get(name, _default(field)), now.get(name), table_of(field)
        if before == after:
            continue
        item = listed_table_of(field)
        if item is not None and isinstance(before, list) and isinstance(after, list):
            was_named, now_named = ({each["name"]: each for each in tables} for tables in (before, after))
            for each in dict.fromkeys([*was_named, *now_named]):
                yield from _of_named(item, was_named.get(each), now_named.get(each), f"{prefix}{name}.{each}")
            continue
        if table is None or not (isinstance(before, Mapping) and isinstance(after, Mapping)):
            yield f"{prefix}{name}", before, after
            continue
        subsection, is_named = table
        if is_named:
            for each in dict.fromkeys([*before, *after]):
                yield from _of_named(subsection, before.get(each), after.get(each), f"{prefix}{name}.{each}")
        else:
            yield from _differences(subsection, before, after, f"{prefix}{name}.")


def _of_named(section: type[Section], before: Any, after: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of a table that the user has named, such as eval.NAME; None for a side without it."""
    if before is not None and after is not None:
        yield from _differences(section, before, after, f"{key}.")
    else:
        yield key, before, after


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return None
    return field.default.model_dump(mode="json") if isinstance(field.default, BaseModel) else field.default


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
