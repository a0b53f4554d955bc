"""The list of checks, and the function that runs it on one host.

``asyncrl-launch`` runs the list on every host with actors before a start; errors prevent the start, and warnings are
printed. ``asyncrl-doctor`` runs the same list and adds the checks that compare hosts (hosts/between_hosts.py). No check
starts an actor, or imports torch in this process. The user's data and code are read and called in processes of their
own, under deadlines.

A check gets a CheckedHost and returns findings (findings.py), none if the host has nothing to check.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.config import Config
from asyncrl.config.hub import localized
from asyncrl.config.learnable import obstacles
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import ConfigError
from asyncrl.core.roles import ROLES, role_of
from asyncrl.gpu.learner_memory import in_gigabytes
from asyncrl.gpu.shared_gpus import read_shares
from asyncrl.launcher.checks.findings import CheckOrder, Finding, fail, ok, warn
from asyncrl.launcher.checks.hub import describe_pin, missing_bytes
from asyncrl.launcher.checks.inputs import Inputs, check_inputs
from asyncrl.launcher.checks.model import check_model, check_served, check_window
from asyncrl.launcher.checks.needs import (
    ModelSize,
    Need,
    checkpoints_need,
    count,
    descriptors_need,
    memory_need,
    run_dir_need,
)
from asyncrl.launcher.checks.network import ANY_PORT, check_ports, infiniband_devices, judge_nccl, ports_needed
from asyncrl.launcher.checks.resources import (
    check_folder,
    judge_descriptors,
    judge_memory,
    judge_shm,
    memory_bytes,
    same_disk,
    shm_bytes,
)
from asyncrl.launcher.checks.scoring_models import reference_path
from asyncrl.launcher.checks.user_code import RewardTrial, check_algorithm, check_curriculum, check_episode
from asyncrl.observe.machine import read_gpu
from asyncrl.observe.metrics_line import busy_s, read_metrics
from asyncrl.rpc.linux import descriptor_limit

SINK_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus_client": "prometheus"}
"""Packages that sinks need, each with the extra of asyncrl that installs it."""
BUSY_SHARE = 0.05
"""Share of a GPU's memory from which on other processes count as using it."""
METRICS = "metrics.jsonl"
LAST_STEPS = 20
"""Newest steps of a resumed run whose median duration counts in ``check_grace``."""


@dataclass(kw_only=True)
class CheckedHost:
    """One host and the actors that the run places there. Results that several checks use are computed once."""

    order: CheckOrder
    interfaces: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    """The interface that actors use; empty if unknown."""
    has_gpus: bool = False

    @cached_property
    def config(self) -> Config | None:
        """The run's configuration; None if asyncrl-doctor has none. Checks that need one then return no findings."""
        return localized(config_from_json(self.order.config)) if self.order.config else None

    @property
    def awaits_files(self) -> bool:
        """Whether files of the hub are still to be downloaded, without which the run's inputs cannot be checked."""
        return any(missing_bytes(pin) for pin in self.order.pins)

    def has(self, role: str) -> bool:
        """Whether an actor of this role is on the host."""
        return bool(count(self.order.actors, role))

    @property
    def computes(self) -> bool:
        """True if a learner or an engine on this host runs torch or vLLM, not a simulation; or if that is unknown."""
        if self.config is None:
            return True
        engines = self.has("rollouter") and not self.config.rollout.traits.makes_up
        return engines or (self.has("learner") and self.config.learner.backend != "sim")

    @cached_property
    def model(self) -> asyncio.Task[tuple[Finding | None, ModelSize | None]]:
        """A task with the finding on the model's folder, and the model's size if the folder passes."""
        return asyncio.create_task(self._read_model())

    async def _read_model(self) -> tuple[Finding | None, ModelSize | None]:
        reads = any(ROLES[role_of(actor)].reads_model for actor in self.order.actors)
        if self.config is None or not reads or self.awaits_files:
            return None, None
        return await asyncio.to_thread(check_model, self.config.model.path, self.config.lora)

    @cached_property
    def inputs(self) -> asyncio.Task[Inputs]:
        """A task with the findings on tokenizer, data and scoring models, and sample rows (inputs.py)."""
        return asyncio.create_task(self._read_inputs())

    async def _read_inputs(self) -> Inputs:
        config = self.config
        if config is None or self.awaits_files:
            return Inputs()
        for_learner = "learner/0" in self.order.actors and learner_reads_more(config)
        if not for_learner and not any(ROLES[role_of(actor)].reads_tokenizer for actor in self.order.actors):
            return Inputs()
        rows = self.has("dataloader")
        return await check_inputs(config, with_rows=rows, for_learner=for_learner, known=self.order.known)


def learner_reads_more(config: Config) -> bool:
    """Whether rank 0 of the learner reads conversations (sft.data), a teacher or a reference model."""
    learner = config.learner
    return config.sft.data is not None or learner.teacher is not None or reference_path(learner) is not None


async def _nccl(host: CheckedHost) -> list[Finding]:
    used = host.interface if host.order.several else ""
    return [judge_nccl(os.environ, host.interfaces, infiniband_devices(), used=used, several=host.order.several)]


async def _sharing(host: CheckedHost) -> list[Finding]:
    if host.config is None or not host.order.shared_gpus or host.awaits_files:
        return []
    return await asyncio.to_thread(check_sharing, host.config, host.order.shared_gpus)


def check_sharing(config: Config, shared: Mapping[str, str]) -> list[Finding]:
    """Check whether rank and engine fit on each GPU that they share. ``shared``: their names by GPU."""
    found = []
    share = config.placement.share
    reason = "there are too few GPUs for one each" if share == "auto" else f'placement.share = "{share}"'
    for gpu, names in shared.items():
        sharing = f"GPU {gpu} is shared by {names} ({reason})"
        reading = read_gpu(gpu)
        if reading is not None and reading.memory_bytes > BUSY_SHARE * reading.memory_total_bytes:
            text = (
                f"other processes use {in_gigabytes(reading.memory_bytes)} of GPU {gpu}, which the shares do not know"
            )
            found.append(warn("sharing", text, "end these processes"))
        try:
            found.append(ok("sharing", f"{sharing}: {read_shares(config, [gpu])}"))
        except ConfigError as error:
            for text in error.problems:
                # A problem reads KEY: DETAIL; FIX.
                key, _, problem = text.partition(": ")
                detail, _, fix = problem.rpartition("; ")
                found.append(fail("sharing", f"{sharing}: {detail}", fix, key=key))
    return found


async def _ports(host: CheckedHost) -> list[Finding]:
    if host.config is None:
        return [check_ports(host.order.address, ANY_PORT, 0, 0)]
    network = host.config.network
    controller_port = network.controller_port if host.order.is_head else 0
    return [
        check_ports(host.order.address, network.ports, controller_port, ports_needed(host.config, host.order.actors))
    ]


async def _hub(host: CheckedHost) -> list[Finding]:
    return [describe_pin(pin) for pin in host.order.pins]


async def _model(host: CheckedHost) -> list[Finding | None]:
    findings: list[Finding | None] = [(await host.model)[0]]
    if host.config is not None and host.has("rollouter"):
        findings += [await asyncio.to_thread(check, host.config) for check in (check_window, check_served)]
    return findings


async def _inputs(host: CheckedHost) -> list[Finding]:
    return (await host.inputs).findings


async def _reward(host: CheckedHost) -> list[Finding]:
    """Start the reward function while the sample rows are read, then call it on them."""
    config = host.config
    if config is None or not host.has("reward") or config.only_episodes_score:
        return []
    async with RewardTrial(config) as trial:
        inputs, problem = await asyncio.gather(host.inputs, trial.start())
        # With episodes the function scores whole conversations, and no sample has one.
        samples = inputs.samples if config.episode.kind == "single" else []
        return [problem or await trial.call(samples)]


async def _algorithm(host: CheckedHost) -> list[Finding | None]:
    return [await check_algorithm(host.config)] if host.config is not None and host.has("learner") else []


async def _curriculum(host: CheckedHost) -> list[Finding | None]:
    return [await check_curriculum(host.config)] if host.config is not None and host.has("dataloader") else []


async def _learning(host: CheckedHost) -> list[Finding]:
    if host.config is None or not host.has("learner"):
        return []
    return [warn("learning", obstacle.detail, obstacle.fix, key=obstacle.key) for obstacle in obstacles(host.config)]


async def _episode(host: CheckedHost) -> list[Finding]:
    return [await check_episode(host.config)] if host.config is not None and host.has("episodes") else []


async def _sinks(host: CheckedHost) -> list[Finding]:
    if host.config is None or not host.order.is_head:
        return []
    sinks = host.config.sinks
    wanted = {
        "tensorboard": ("sinks.tensorboard", sinks.tensorboard),
        "wandb": ("sinks.wandb.mode", sinks.wandb.mode != "off"),
        "prometheus_client": ("sinks.prometheus.enabled", sinks.prometheus.enabled),
    }
    findings = []
    for package, (key, is_wanted) in wanted.items():
        if is_wanted and is_installed(package):
            findings.append(ok("sinks", f"{package} is installed", key=key))
        elif is_wanted:
            fix = f"pip install 'asyncrl[{SINK_PACKAGES[package]}]'"
            findings.append(fail("sinks", f"the package {package} is not installed", fix, key=key))
    return findings


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    spec = find_spec(package)
    # Python also finds a mere folder of that name, as wandb creates one; its spec has no origin.
    return spec is not None and spec.origin is not None


async def _grace(host: CheckedHost) -> list[Finding]:
    if host.config is None or not host.order.is_head:
        return []
    return await asyncio.to_thread(check_grace, host.config, host.order.resumed)


def check_grace(config: Config, resumed: str = "") -> list[Finding]:
    """Warn if preempt.grace_s, the time that a preempted run has to write its checkpoint, is too short for a step.

    The duration of a step comes from the metrics in ``resumed``, the folder of the resumed run, or is configured for a
    simulated learner. Else it is unknown, and there is no finding.
    """
    lines = read_metrics(Path(resumed) / METRICS, ("train",)) if resumed else []
    steps_s = [step_s for line in lines[-LAST_STEPS:] if (step_s := busy_s(line)) is not None]
    if not steps_s and config.learner.backend == "sim":
        steps_s = [config.learner.sim.step_s]
    problem, fix = config.preempt.too_short(statistics.median(steps_s)) if steps_s else ("", "")
    return [warn("grace", problem, fix, key="preempt.grace_s")] if problem else []


async def _folders(host: CheckedHost) -> list[Finding]:
    _, size = await host.model
    return await asyncio.to_thread(check_folders, host, size)


def check_folders(host: CheckedHost, size: ModelSize | None) -> list[Finding]:
    """Check that the run folder and the checkpoint folder can be written to and have enough space.

    Only hosts with a real learner check the checkpoint folder. A disk that has both folders must have room for both.
    """
    config, run, findings, one_disk = host.config, Path(host.order.run).absolute(), list[Finding](), False
    if config is None:
        return [check_folder("run_dir", "run.dir", run, Need(least=0, wanted=0))]
    need = run_dir_need(config, size, is_head=host.order.is_head)
    if host.has("learner") and config.learner.backend != "sim":
        checkpoints, checkpoints_room = checkpoint_dir(config, run).absolute(), checkpoints_need(config, size)
        key = "checkpoint.dir" if config.checkpoint.dir is not None else "run.dir"
        if one_disk := same_disk(run, checkpoints):
            checkpoints_room += need
        findings.append(check_folder("checkpoint_dir", key, checkpoints, checkpoints_room))
    run_finding = check_folder("run_dir", "run.dir", run, need)
    # On one disk, the warning about checkpoints includes the need of the run folder.
    if not (one_disk and run_finding.result == findings[0].result == "warn"):
        findings.append(run_finding)
    return findings


async def _memory(host: CheckedHost) -> list[Finding]:
    config = host.config
    if config is None:
        return []
    _, size = await host.model
    on_gpu = config.learner.device == "cuda" or (config.learner.device == "auto" and host.has_gpus)
    return [judge_memory(*memory_bytes(), memory_need(config, host.order.actors, size, on_gpu=on_gpu))]


async def _shm(host: CheckedHost) -> list[Finding]:
    return [judge_shm(shm_bytes())] if host.computes else []


async def _descriptors(host: CheckedHost) -> list[Finding]:
    _, size = await host.model
    return [judge_descriptors(descriptor_limit(), descriptors_need(host.config, size))]


ORDER = (
    *("ssh", "identity", "clock", "versions", "placement", "gpus", "sharing", "interface", "nccl", "ports", "reach"),
    *("hub", "model", "tokenizer", "teacher", "chat", "data", "prompt", "reward", "algorithm", "curriculum"),
    *("learning", "episode", "sinks", "grace", "run_dir", "checkpoint_dir"),
    *("memory", "shm", "descriptors", "leftovers"),
)
"""Names of all checks, in the order in which findings are shown.

asyncrl-launch makes only "identity" and the findings of CHECKS; asyncrl-doctor makes all.
"""
CHECKS: Sequence[Callable[[CheckedHost], Awaitable[Iterable[Finding | None]]]] = (
    *(_sharing, _nccl, _ports, _hub, _model, _inputs, _reward, _algorithm, _curriculum, _learning, _episode),
    *(_sinks, _grace, _folders, _memory, _shm, _descriptors),
)


async def check_host(host: CheckedHost) -> list[Finding]:
    """Run all CHECKS on this host in parallel and return the findings, in ORDER. A missing resource never raises."""
    by_check = await asyncio.gather(*(check(host) for check in CHECKS))
    return in_order([finding for findings in by_check for finding in findings if finding is not None], [])


def in_order(findings: Iterable[Finding], hosts: Sequence[str]) -> list[Finding]:
    """Sort findings: first those on all hosts together, then host by host as in ``hosts``. Each part is in ORDER."""
    places = {name: number for number, name in enumerate(("", *hosts))}
    return sorted(findings, key=lambda finding: (places[finding.host], ORDER.index(finding.check)))
