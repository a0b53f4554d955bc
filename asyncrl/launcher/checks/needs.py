"""Estimates of the disk space, memory and open files that a run needs. Pure.

A checkpoint holds master weights and both moments of AdamW in float32: 12 bytes for each trained parameter, of the
model or of its adapters. Muon keeps one state for most of them: at least 8 bytes. Published weights are in shared
memory, two versions of them during an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.core.disk import in_bytes
from asyncrl.core.roles import role_of

if TYPE_CHECKING:
    from asyncrl.config import Config

CHECKPOINT_BYTES, LEAST_CHECKPOINT_BYTES = 12, {"adamw": 12, "muon": 8}
"""Bytes for each trained parameter: an upper estimate, and the least by optimizer."""
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes on a learner that trains on CPU: for each parameter, and in addition for each trained one."""
VERSIONS_AT_ONCE = 2
RECORDS_BYTES = 1 << 30
PROCESS_BYTES = 100 << 20
LEAST_DESCRIPTORS = 64
"""Open files of an actor without connections."""
LEAST_DESCRIPTORS_OF_A_PEER = 5
"""Open files for each other actor. Measured: a dataloader has 97 with 12 rollouters and 197 with 32."""
WANTED_DESCRIPTORS = 512
"""LEAST_DESCRIPTORS with a reserve for users' code, torch and vLLM."""
WANTED_DESCRIPTORS_OF_A_PEER = 8
DESCRIPTORS_OF_A_BUCKET = 6
"""Open files for each bucket of weights: two versions, as published, staged and loaded."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of the model's weights."""

    parameters: int
    """Number of parameters, without adapters."""
    bytes: int
    adapters: int = 0
    """Number of parameters of the adapters, which are trained in place of the model; 0 without adapters."""

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return self.adapters or self.parameters

    def published(self, config: Config) -> int:
        """Return the bytes of one published version: the adapters alone, or the whole model."""
        alone = self.adapters and config.publishes_adapter
        return WEIGHT_BYTES * self.adapters if alone else self.bytes


@dataclass(frozen=True, slots=True)
class Need:
    """An amount of a resource that a run needs: bytes or open files.

    A check fails below ``least`` and warns below ``wanted``, which is enough until the end of the run.
    """

    least: int
    wanted: int
    made_of: tuple[str, ...] = ()
    """The parts of ``wanted``, as texts."""

    def __add__(self, other: Need) -> Need:
        return Need(self.least + other.least, self.wanted + other.wanted, self.made_of + other.made_of)


def run_dir_need(config: Config, size: ModelSize | None, *, is_head: bool) -> Need:
    """Estimate the disk space of the run folder on one host, without checkpoints. A short run needs next to nothing."""
    need = Need(0, RECORDS_BYTES, (f"{in_bytes(RECORDS_BYTES)} for logs, metrics and samples of a long run",))
    if is_head and size is not None and config.checkpoint.export_at_end:
        need += Need(0, size.bytes, (f"{in_bytes(size.bytes)} for the exported model",))
    return need


def checkpoints_need(config: Config, size: ModelSize | None) -> Need:
    """Estimate the disk space of all checkpoints that are kept, and of one that is being written."""
    checkpoint = config.checkpoint
    if size is None:
        return Need(least=0, wanted=0)
    kept = checkpoint.keep + 1
    if checkpoint.keep_every_steps:
        kept += config.learner.steps // checkpoint.keep_every_steps
    each = size.trained * CHECKPOINT_BYTES
    if not checkpoint.every_versions:
        return Need(least=0, wanted=each, made_of=(f"{in_bytes(each)} for a checkpoint if the run is preempted",))
    least = size.trained * LEAST_CHECKPOINT_BYTES[config.learner.optimizer]
    return Need(least=least, wanted=each * kept, made_of=(f"{in_bytes(each)} for each of {kept} checkpoints",))


def memory_need(config: Config, actors: Sequence[str], size: ModelSize | None, *, on_gpu: bool) -> Need:
    """Estimate the memory of a host with these actors (bytes).

    ``least`` covers published weights, engines on CPU, the model of sleeping engines with adapters, and training where
    its states are in host memory: on CPUs, with learner.offload and in time slices. ``wanted`` adds all processes.
    ``on_gpu``: the learner trains on GPUs.
    """
    ranks, replicas = count(actors, "learner"), count(actors, "rollouter")
    published = size.published(config) if size is not None else config.learner.sim.publish_bytes
    least = 0
    if ranks or replicas:
        least += VERSIONS_AT_ONCE * published
    kept_on_gpu = on_gpu and not config.learner.offload and config.placement.share != "time_slice"
    if size is not None and ranks and not kept_on_gpu:
        # Each parameter has a weight; a trained one has moments and a gradient too. The ranks of a replica share them.
        states = LEAST_CHECKPOINT_BYTES[config.learner.optimizer] - WEIGHT_BYTES
        training = WEIGHT_BYTES * size.parameters + (states + GRADIENT_BYTES) * size.trained
        least += training * ranks * config.learner.replicas // config.learner.ranks
    if size is not None and on_gpu and config.placement.share == "time_slice" and config.publishes_adapter:
        # A sleeping engine keeps the model below the adapters.
        least += replicas * size.bytes
    traits = config.rollout.traits
    if size is not None and not traits.makes_up and not (traits.gpus and config.rollout.gpus_per_replica != 0):
        least += replicas * (size.bytes + (config.rollout.value_of(traits.cpu_cache_key) or 0))
    processes = len(actors) + config.episode.workers * count(actors, "episodes")
    return Need(least, least + PROCESS_BYTES * processes)


def descriptors_need(config: Config | None, size: ModelSize | None) -> Need:
    """Estimate the open files of the actor that opens most."""
    if config is None:
        return Need(least=LEAST_DESCRIPTORS, wanted=WANTED_DESCRIPTORS)
    peers = len(config.actors)
    buckets = DESCRIPTORS_OF_A_BUCKET * (1 + (size.bytes // config.weights.bucket_bytes if size is not None else 0))
    return Need(
        least=LEAST_DESCRIPTORS + LEAST_DESCRIPTORS_OF_A_PEER * peers + buckets,
        wanted=WANTED_DESCRIPTORS + WANTED_DESCRIPTORS_OF_A_PEER * peers + buckets,
    )


def count(actors: Sequence[str], role: str) -> int:
    """Count the actors that have this role."""
    return sum(role_of(name) == role for name in actors)
