"""All that is checked of one host's part of a run, on that host: in seconds, without torch, and starting no actor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.checks.findings import Finding, warn
from asyncrl.checks.inputs import Inputs, KnownPrompts, check_inputs
from asyncrl.checks.model import check_model, check_served, check_window
from asyncrl.checks.needs import ModelSize, checkpoints_need, count, descriptors_need, run_dir_need
from asyncrl.checks.room import (
    check_folder,
    check_ports,
    judge_descriptors,
    ports_needed,
    same_disk,
)
from asyncrl.checks.scoring_models import reference_path
from asyncrl.checks.user_code import RewardTrial, check_algorithm, check_episode
from asyncrl.config import Config
from asyncrl.config.learnable import obstacles
from asyncrl.roles import ROLES, role_of
from asyncrl.runtime.linux import descriptor_limit

RANK_0 = "learner/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a host in a run: these actors, at this address. ``run`` is the run folder, or what it would be."""

    config: Config
    actors: Sequence[str]
    address: str
    run: Path
    is_head: bool = True
    known: KnownPrompts | None = None
    """Training prompts of the run that is resumed."""


async def check_part(part: Part) -> tuple[list[Finding], ModelSize | None]:
    """The findings, and the size of the model if there is one that can be measured. Never fails."""
    config, actors = part.config, part.actors
    found: list[Finding] = []
    size: ModelSize | None = None
    if any(ROLES[role_of(actor)].reads_model for actor in actors):
        finding, size = await asyncio.to_thread(check_model, config.model.path, config.lora)
        found.append(finding)
    if count(actors, "rollouter"):
        problems = [await asyncio.to_thread(check, config) for check in (check_window, check_served)]
        found += [problem for problem in problems if problem is not None]
    inputs, algorithm = await asyncio.gather(
        _check_inputs(config, actors, part.known), _check_algorithm(config, actors)
    )
    found += [*inputs, *algorithm]
    if count(actors, "learner"):
        found += [warn("learning", each.told, each.fix, key=each.key) for each in obstacles(config)]
    port = config.network.controller_port if part.is_head else 0
    found.append(check_ports(part.address, config.network.ports, port, ports_needed(config, list(actors))))
    found += await asyncio.to_thread(check_folders, part, size)
    found.append(judge_descriptors(descriptor_limit(), descriptors_need(config, size)))
    return found, size


async def _check_algorithm(config: Config, actors: Sequence[str]) -> list[Finding]:
    finding = await check_algorithm(config) if count(actors, "learner") else None
    return [finding] if finding is not None else []


async def _check_inputs(config: Config, actors: Sequence[str], known: KnownPrompts | None) -> list[Finding]:
    """Look at what the user brings: tokenizer, prompts, the reward function, the code that plays episodes."""
    if not count(actors, "episodes"):
        return await _check_data(config, actors, known)
    found, playing = await asyncio.gather(_check_data(config, actors, known), check_episode(config))
    return [*found, playing]


async def _check_data(config: Config, actors: Sequence[str], known: KnownPrompts | None) -> list[Finding]:
    if not count(actors, "reward") or config.reward.function == "episode":
        return (await _read_inputs(config, actors, known)).findings
    async with RewardTrial(config) as trial:
        inputs, problem = await asyncio.gather(_read_inputs(config, actors, known), trial.start())
        # The function scores a whole conversation of an episode, if the episode gives no reward of its own.
        samples = inputs.samples if config.episode.kind == "single" else []
        return [*inputs.findings, problem or await trial.call(samples)]


async def _read_inputs(config: Config, actors: Sequence[str], known: KnownPrompts | None) -> Inputs:
    for_learner = RANK_0 in actors and asks_of_learner(config)
    if not for_learner and not any(ROLES[role_of(actor)].reads_tokenizer for actor in actors):
        return Inputs()
    return await check_inputs(config, with_rows=bool(count(actors, "dataloader")), for_learner=for_learner, known=known)


def asks_of_learner(config: Config) -> bool:
    """Whether rank 0 of the learner needs more than the model's weights: conversations, or models that only score."""
    learner = config.learner
    return config.sft.data is not None or learner.teacher is not None or reference_path(learner) is not None


def check_folders(part: Part, size: ModelSize | None) -> list[Finding]:
    """Look at the run folder and that of checkpoints, whether they can be written to and have room."""
    config, run, found, shared = part.config, part.run.absolute(), list[Finding](), False
    need = run_dir_need(config, size, is_head=part.is_head)
    if count(part.actors, "learner") and config.learner.backend != "sim":
        checkpoints, each = checkpoint_dir(config, run).absolute(), checkpoints_need(config, size)
        key = "checkpoint.dir" if config.checkpoint.dir is not None else "run.dir"
        with contextlib.suppress(OSError):
            if shared := same_disk(run, checkpoints):
                each += need
        found.append(check_folder("checkpoint_dir", key, checkpoints, each))
    records = check_folder("run_dir", "run.dir", run, need)
    # A lack of room on a disk that both are on is told once.
    if not (shared and records.result == found[0].result == "warn"):
        found.append(records)
    return found
