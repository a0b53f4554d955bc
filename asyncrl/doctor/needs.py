"""What a run needs of disk and memory, estimated from the size of its model. Pure; all numbers are bytes.

A checkpoint holds master weights and both moments of AdamW in float32: 12 bytes a parameter. Published weights lie in
shared memory, two versions of them while one takes over from the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.runtime.supervision import role_of

CHECKPOINT_BYTES = 12
"""Of each parameter."""
TRAINING_BYTES = 16
"""Of each parameter on a learner that trains on CPU: a checkpoint's worth, and the gradient."""
VERSIONS_AT_ONCE = 2
RECORDS_BYTES = 1 << 30
"""Room for logs, metrics and samples."""
PROCESS_BYTES = 100 << 20
"""Of an actor with nothing in it."""
DESCRIPTORS_OF_A_PROCESS = 512
DESCRIPTORS_OF_A_PEER = 8
DESCRIPTORS_OF_A_BUCKET = 6
"""Two versions, as published, staged and loaded."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of the model's weights."""

    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """``least`` to write anything at all, ``wanted`` until the run's end."""

    least: int
    wanted: int


def run_dir_need(config: Config, size: ModelSize | None, *, is_head: bool) -> DiskNeed:
    """Of the run folder on one host, without checkpoints."""
    wanted = RECORDS_BYTES
    if is_head and size is not None and config.checkpoint.export_at_end:
        wanted += size.bytes
    return DiskNeed(least=RECORDS_BYTES // 16, wanted=wanted)


def checkpoints_need(config: Config, size: ModelSize | None) -> DiskNeed:
    """Of the folder of checkpoints: those that are kept, and the one being written."""
    checkpoint = config.checkpoint
    if size is None:
        return DiskNeed(least=0, wanted=0)
    kept = checkpoint.keep + 1
    if checkpoint.keep_every_steps:
        kept += config.learner.steps // checkpoint.keep_every_steps
    if not checkpoint.every_versions:
        # None but when the run makes way.
        kept = 1
    each = size.parameters * CHECKPOINT_BYTES
    return DiskNeed(least=each, wanted=each * kept)


def memory_need(config: Config, actors: Sequence[str], size: ModelSize | None, *, on_gpu: bool) -> int:
    """Of one host with these actors."""
    ranks, replicas = count(actors, "learner"), count(actors, "rollouter")
    published = size.bytes if size is not None else config.learner.sim.publish_bytes
    need = PROCESS_BYTES * len(actors)
    if ranks or replicas:
        need += VERSIONS_AT_ONCE * published
    if config.weights.delta:
        need += replicas * published
    if size is None:
        return need
    if ranks and not on_gpu:
        need += size.parameters * TRAINING_BYTES * ranks // config.learner.ranks
    if config.rollout.engine == "reference":
        need += replicas * size.bytes
    elif config.rollout.engine == "vllm" and not config.rollout.gpus_per_replica:
        need += replicas * (size.bytes + config.rollout.vllm.cpu_kv_cache_bytes)
    return need


def descriptors_need(config: Config | None, size: ModelSize | None) -> int:
    """Of the actor that needs most."""
    need = DESCRIPTORS_OF_A_PROCESS
    if config is None:
        return need
    buckets = 1 + (size.bytes // config.weights.bucket_bytes if size is not None else 0)
    return need + DESCRIPTORS_OF_A_PEER * len(config.actors) + DESCRIPTORS_OF_A_BUCKET * buckets


def count(actors: Sequence[str], role: str) -> int:
    """How many of these are of the role."""
    return sum(role_of(name) == role for name in actors)
