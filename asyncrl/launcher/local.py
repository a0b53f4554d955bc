"""A launch on the host of its launcher: begins the run in its folder, starts the guard, shows what came of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.checkpoint.origin import digests, record
from asyncrl.config import Config
from asyncrl.launcher.common.agent_messages import ActorSpec, AgentSpec, EndedEvent
from asyncrl.launcher.common.placement import INTERFACE_VARIABLES, Placed
from asyncrl.launcher.run_folder.ended import describe_end, find_left, write_command
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.run_folder.resume import Resumption
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.launcher.terminal.summary import summarise
from asyncrl.observe.metrics_line import read_metrics
from asyncrl.observe.snapshots.recording import last_recorded
from asyncrl.rpc.lifecycle.incarnations import attempt_begins_above

LEARNER = "learner/0"
ACTOR_ARGV = (sys.executable, "-m", "asyncrl.cli.actor")
GUARD_ARGV = (sys.executable, "-m", "asyncrl.launcher.node.guard")
RESUMED_FROM = "resumed_from.txt"
"""File in the folder of logs of a resumed attempt: the checkpoint gone on from, and what was passed over."""
LONGEST_EVENT_BYTES = 64 << 20


def begin(
    folder: RunFolder, resumption: Resumption | None, config: Config, progress: Progress, command: str = ""
) -> int:
    """Say which run begins, or make it the next attempt of the one that is resumed. Raises CheckpointError, OSError.

    Returns the number that the incarnations of this attempt are above.
    """
    if resumption is None:
        progress.say(f"run folder: {folder.path}")
    else:
        _resume(folder, resumption, config, progress)
    # Before anything of the attempt loads these files.
    record(folder.path, digests(config))
    if command:
        write_command(folder, command)
    return attempt_begins_above(folder.attempt, CheckpointFolder(checkpoint_dir(config, folder.path)).newest_writer())


def _resume(folder: RunFolder, resumption: Resumption, config: Config, progress: Progress) -> None:
    for path in resumption.begin(config):
        progress.say(f"set aside as {path}")
    said = [resumption.describe(), *resumption.describe_changes(config)]
    for line in said:
        progress.say(line)
    progress.warn(resumption.warnings)
    said += resumption.warnings
    (folder.logs / RESUMED_FROM).write_text("".join(f"{line}\n" for line in said))


def agent_spec(
    config: Config,
    folder: RunFolder,
    placed: Sequence[Placed],
    actor_argv: Sequence[str] = ACTOR_ARGV,
    *,
    above: int,
    index: int = 0,
    host: str = "",
    name: str = "",
) -> AgentSpec:
    """The spec of a host's agent; ``placed`` are its actors, ``host`` the address that they bind.

    ``name`` is that of the host in the hostfile; incarnations are larger than ``above``, the same for all agents. The
    interfaces that the user has chosen by environment variables come before those of the placement.
    """
    chosen = [name for name in INTERFACE_VARIABLES if name in os.environ]
    env = {actor.name: {key: value for key, value in actor.env.items() if key not in chosen} for actor in placed}
    return AgentSpec(
        run_dir=str(folder.path),
        log_dir=str(folder.logs),
        attempts=config.supervision.max_restarts + 1,
        actors=[ActorSpec(name=actor.name, argv=list(actor_argv), env=env[actor.name]) for actor in placed],
        index=index,
        host=host,
        name=name,
        above=above,
    )


async def start_guard(folder: RunFolder, lock: int, spec: AgentSpec) -> asyncio.subprocess.Process:
    """Start the guard of this host, and below it the agent, which has its spec. Raises OSError."""
    with (folder.logs / "agent-0.log").open("ab") as errors:
        guard = await asyncio.create_subprocess_exec(
            *GUARD_ARGV,
            str(folder.private),
            str(lock),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=(lock,),
            limit=LONGEST_EVENT_BYTES,
        )
    assert guard.stdin is not None
    guard.stdin.write(msgspec.json.encode(spec) + b"\n")
    return guard


def _last_figures(folder: RunFolder) -> dict[str, float]:
    """The learner's figures, as the run's controller has recorded them last; empty where it has not, or not here."""
    try:
        recorded = last_recorded(folder.path, folder.attempt)
    except OSError:
        return {}
    learner = [actor for actor in recorded.actors if actor.name == LEARNER] if recorded is not None else []
    return learner[0].metrics if learner else {}


def show_end(config: Config, folder: RunFolder, ended: EndedEvent, progress: Progress) -> int:
    """Show what came of a run; its exit code."""
    progress.end()
    left = find_left(config, folder, heard=progress.step)
    lines = read_metrics(folder.path / "metrics.jsonl", ("train", "eval"))
    for row in summarise(
        lines,
        folder.path,
        folder.logs,
        config.learner.steps,
        trained=left.trained,
        checkpoint=left.checkpoint.path if left.checkpoint is not None else None,
        restarts=progress.restarts,
        figures={} if left.trained else _last_figures(folder),
    ):
        progress.say(row)
    progress.warn(progress.notices.summary())
    rows = describe_end(folder, ended, left)
    if ended.result == "failed":
        progress.warn(rows)
    else:
        for row in rows:
            progress.say(row)
    return ended.exit_code
