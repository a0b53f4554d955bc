"""Which actor runs on which host, with which GPUs and which environment: a pure function of config and hosts.

GPUs go to the learner's ranks first, in order, then to the engines; no GPU is shared. Every learner rank of a host
sees all the learner's GPUs there and takes the one of its LOCAL_RANK, as under torchrun; an engine sees its own
alone; everybody else sees none. Threads: the learner's ranks and the engines of a host share its cores evenly and
everybody else gets one, so nothing is oversubscribed. What does not fit is refused with the sum that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.runtime.supervision import role_of

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a host offers. ``gpus`` are the values that CUDA_VISIBLE_DEVICES may take there."""

    name: str
    cpus: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One actor on its host."""

    name: str
    host: str
    gpus: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def place(config: Config, hosts: Sequence[Host]) -> list[Placed]:
    """Place every actor of a run, the controller first. Raises ConfigError.

    Everything is on the first host: what spans hosts needs a way to start it there.
    """
    assert len(hosts) == 1
    host = hosts[0]
    on_gpu = _learner_on_gpu(config, host)
    learner_gpus, engine_gpus = _assign(config, host, on_gpu)
    threads = _threads(config, host)
    placed = []
    for name in config.actors:
        role, index = role_of(name), int(name.partition("/")[2])
        gpus = visible = engine_gpus[index] if role == "rollouter" else ()
        env = dict.fromkeys(THREAD_VARIABLES, str(threads.get(role, 1)))
        if role == "learner":
            gpus, visible = learner_gpus[index : index + 1], learner_gpus
            env |= _torch_environment(config, index)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        placed.append(Placed(name=name, host=host.name, gpus=gpus, env=env))
    return placed


def _learner_on_gpu(config: Config, host: Host) -> bool:
    learner = config.learner
    return learner.backend != "sim" and (learner.device == "cuda" or (learner.device == "auto" and bool(host.gpus)))


def _assign(config: Config, host: Host, on_gpu: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The GPUs of the learner's ranks and of each engine."""
    ranks = config.learner.ranks if on_gpu else 0
    replicas = config.rollout.replicas
    each = config.rollout.gpus_per_replica if config.rollout.engine == "vllm" else 0
    needed, there = ranks + replicas * each, len(host.gpus)
    if needed > there:
        parts = [f"learner.ranks = {ranks}"] * bool(ranks)
        parts += [f"rollout.replicas x rollout.gpus_per_replica = {replicas} x {each} = {replicas * each}"] * bool(each)
        advice = ['set learner.device = "cpu"'] * bool(ranks) + ["set rollout.gpus_per_replica = 0"] * bool(each)
        raise ConfigError(
            [
                f"GPUs: {' + '.join(parts)} makes {needed}, but {host.name} has {there}; "
                f"ask for fewer, or {' and '.join(advice)} to use the CPU"
            ]
        )
    engines = [host.gpus[ranks + i * each : ranks + (i + 1) * each] for i in range(replicas)]
    return host.gpus[:ranks], engines


def _threads(config: Config, host: Host) -> dict[str, int]:
    """Threads of a process of each role that computes."""
    counts = {}
    if config.learner.backend != "sim":
        counts["learner"] = config.learner.ranks
    if config.rollout.engine == "vllm":
        counts["rollouter"] = config.rollout.replicas
    share = max(1, host.cpus // max(1, sum(counts.values())))
    threads = dict.fromkeys(counts, share)
    if "rollouter" in counts and config.rollout.vllm.threads:
        threads["rollouter"] = config.rollout.vllm.threads
    return threads


def _torch_environment(config: Config, rank: int) -> dict[str, str]:
    """What torch.distributed reads of itself; the port is agreed on by the ranks."""
    ranks = str(config.learner.ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": config.network.host,
    }


def describe(config: Config, placed: Sequence[Placed]) -> list[str]:
    """Placement and derived numbers, a line each, for people."""
    width = max(len(actor.name) for actor in placed)
    rows = ["", "placement:"]
    for actor in placed:
        where = f"GPU {','.join(actor.gpus)}" if actor.gpus else "CPU"
        rows.append(f"  {actor.name:<{width}}  {actor.host}  {where}  threads {actor.env[THREAD_VARIABLES[0]]}")
    learner, rollout = config.learner, config.rollout
    in_flight = rollout.concurrency * rollout.replicas
    return [
        *rows,
        "",
        "derived:",
        f"  G, groups per version        {config.groups_per_version} = learner.groups_per_step "
        f"{learner.groups_per_step} x learner.steps_per_version {learner.steps_per_version}",
        f"  gate capacity, groups        {config.gate_capacity} = (staleness.max {config.staleness.max} + 1) x G",
        f"  trajectories per step        {learner.groups_per_step * rollout.samples_per_prompt}",
        f"  trajectories in flight       {in_flight} = rollout.concurrency {rollout.concurrency} x "
        f"rollout.replicas {rollout.replicas}; the gate admits "
        f"{config.gate_capacity * rollout.samples_per_prompt}",
        f"  versions of the run          {learner.steps // learner.steps_per_version}",
    ]
