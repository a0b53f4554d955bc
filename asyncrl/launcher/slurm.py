"""Runs under SLURM: finds the hosts of a job, and writes and submits the batch script of a job.

Within a job its nodes are the hosts, in SLURM's order, so the first, where the batch script runs, is the head. SLURM
may start a job again at any time, so a job resumes the run of its name if there is one.

The batch script is train.sbatch with the command of the user and the job's own options. A job requests GPUs only if the
configuration certainly uses some, and then a CPU core for each process. Fails with UsageError for the command line, and
with HostFailed if SLURM is missing or rejects the job.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.operation import PlacementConfig
from asyncrl.core.errors import ConfigError, HostFailed, UsageError
from asyncrl.core.roles import role_of
from asyncrl.launcher.common.placement import PlacementHost, place, with_episode_hosts
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import SlurmStart
from asyncrl.launcher.run_folder.folders import named_in_utf8, runs_of_name
from asyncrl.launcher.run_folder.resume import AUTO

ANSWER_S = 60.0
CONTAINER_PYTHON = "python3"
REQUESTING = {
    "gpus": ("--gpus", "-G", "--gres", "--tres-per"),
    "cpus": ("--cpus-per", "-c", "--mincpus", "--ntasks", "-n", "--exclusive", "--tres-per"),
    "time": ("--time", "-t"),
}
"""Prefixes of the options of sbatch that request a resource, by resource."""
VARIABLES = {
    "gpus": ("SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_GRES"),
    "cpus": ("SBATCH_CPUS_PER_GPU", "SBATCH_CPUS_PER_TASK", "SBATCH_EXCLUSIVE"),
    "time": ("SBATCH_TIMELIMIT",),
}
"""Environment variables of sbatch that request a resource, by resource."""
SCRIPT = Path(__file__).with_name("train.sbatch")
"""The batch script for jobs that users describe themselves."""
OF_THE_JOB = ("--job-name=", "--nodes=", "--output=")
"""Options of train.sbatch that ``batch_script`` replaces with its own."""
BODY_BEGINS = "# SLURM sends USR2"
"""Text in train.sbatch from which on ``batch_script`` copies it unchanged."""


def job_hosts(env: Mapping[str, str] = os.environ) -> list[HostLine]:
    """Return the nodes of the SLURM job that this process belongs to, in order. Raises UsageError or HostFailed."""
    nodes = env.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_JOB_ID" not in env:
        raise UsageError("--inside-slurm: this is not within a SLURM job; --slurm submits one")
    names = _call(["scontrol", "show", "hostnames", nodes]).split()
    if not names:
        raise HostFailed("SLURM", f"scontrol knows no node in SLURM_JOB_NODELIST={nodes}")
    return [HostLine(name) for name in names]


def start_of(container: str | None) -> SlurmStart:
    """Return how srun starts the agents; ``container`` is the user's --container: options of srun, then a command.

    With ``container``, the container's Python runs the agents. Raises UsageError.
    """
    if container is None:
        return SlurmStart()
    try:
        words = tuple(shlex.split(container))
    except ValueError as error:
        raise UsageError(f"--container {container}: {error}") from None
    if not words:
        raise UsageError("--container: says nothing")
    return SlurmStart(words, python=CONTAINER_PYTHON)


def resume_of(config: Config, given: str | None) -> str | None:
    """Return the value of --resume for a job: the user's, else "auto" if a run of its name exists, else None.

    Raises OSError.
    """
    return given or (AUTO if runs_of_name(config) else None)


def batch_script(config: Config, argv: Sequence[str], *, nodes: int, options: str = "") -> str:
    """Return the batch script that runs ``argv`` on the first node; the user's ``options`` win. Raises UsageError."""
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: at least one node is needed")
    if "\n" in options:
        raise UsageError("--sbatch-args: one line of options")
    folder = named_in_utf8(Path(config.run.dir).absolute(), "run.dir")
    lines = [f"#SBATCH --chdir={shlex.quote(os.getcwd())}"]
    lines += [f"#SBATCH --output={shlex.quote(f'{folder}/{config.run.name}-%j.out')}"]
    lines += [f"#SBATCH {option}" for option in _resource_options(config, nodes, options)]
    # Last, because sbatch takes the last of two lines that set the same option.
    lines += [f"#SBATCH {options}"] if options else []
    text = SCRIPT.read_text()
    interpreter, *directives = [line for line in text.splitlines() if line.startswith(("#!", "#SBATCH "))]
    kept = [line for line in directives if not line.removeprefix("#SBATCH ").startswith(OF_THE_JOB)]
    header = [interpreter, f"#SBATCH --job-name={config.run.name}", f"#SBATCH --nodes={nodes}", *kept]
    return "\n".join([*header, *lines, "", f"set -- {shlex.join(argv)}", "", text[text.index(BODY_BEGINS) :]])


def left_open(config: Config, *, nodes: int, options: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return warnings for resources that the job does not request, each with the option to add.

    They are about CPUs, the time, and GPUs if the configuration does not say whether it uses some.
    """
    requested, gpus = _requested_by_user(options, env), gpus_of_a_node(config, nodes)
    warnings = []
    if gpus is None and "gpus" not in requested:
        problem = "the configuration does not say whether GPUs are used"
        fix = "set rollout.gpus_per_replica and learner.device, or --sbatch-args '--gpus-per-node=N'"
        warnings.append(f"GPUs: {problem}, so the job asks for none; {fix}")
    if not gpus and "cpus" not in requested:
        warnings.append("CPUs: the job asks for none, and many clusters give one; --sbatch-args '--cpus-per-task=N'")
    if "time" not in requested:
        warnings.append(
            "time: the job asks for none, so it ends at the partition's limit; --sbatch-args '--time=8:00:00'"
        )
    return warnings


def gpus_of_a_node(config: Config, nodes: int) -> int | None:
    """Return the fewest GPUs per node with which the actors fit on ``nodes`` nodes.

    Returns 0 if the configuration uses none, and None if it uses them only where there are some.
    """
    if config.placement.share == "auto":
        # The job asks for GPUs that no engine shares with a rank.
        config = config.model_copy(update={"placement": PlacementConfig(share="never")})
    learner, rollout = config.learner, config.rollout
    gpus_each = rollout.gpus_per_replica if rollout.traits.gpus else rollout.gpus_per_replica or 0
    if gpus_each is None or (learner.may_use_gpus and learner.device == "auto" and not gpus_each):
        # auto: engines and learner use GPUs if the host has some.
        return None
    ranks = learner.ranks if learner.may_use_gpus else 0
    total = ranks + rollout.replicas * gpus_each
    if config.placement.share in ("always", "time_slice"):
        # Ranks and engines use the same GPUs.
        total = max(ranks, rollout.replicas * gpus_each)
    # Try from an even share of the GPUs, rounded up, to all of them on one node.
    for count in range(-(-total // nodes), total):
        if _processes_by_node(config, nodes, count) is not None:
            return count
    return total


def _processes_by_node(config: Config, nodes: int, gpus: int) -> list[int] | None:
    """Place the actors on ``nodes`` nodes with ``gpus`` GPUs each, and return the number of processes on each node.

    The processes are the actors, the reward workers, and the episode workers, unless episodes are commands. Returns
    None if the actors do not fit.
    """
    hosts = [PlacementHost(name=str(node), cpus=1, gpus=tuple(map(str, range(gpus)))) for node in range(nodes)]
    try:
        placed = place(with_episode_hosts(config, hosts), hosts)
    except ConfigError:
        return None
    process_hosts = [actor.host for actor in placed]
    process_hosts += [actor.host for actor in placed if role_of(actor.name) == "reward"] * config.reward.workers
    episodes = [actor.host for actor in placed if role_of(actor.name) == "episodes"]
    process_hosts += episodes * (0 if config.episode.kind == "command" else config.episode.workers)
    return [process_hosts.count(host.name) for host in hosts]


def _resource_options(config: Config, nodes: int, options: str) -> list[str]:
    """Return the options of sbatch that request GPUs and CPUs, unless the user requests them.

    Returns no options if the configuration uses no GPUs, or does not say whether it does.
    """
    requested, gpus = _requested_by_user(options, os.environ), gpus_of_a_node(config, nodes)
    if not gpus:
        return []
    added = [] if "gpus" in requested else [f"--gpus-per-node={gpus}"]
    processes = _processes_by_node(config, nodes, gpus)
    if processes is not None and "cpus" not in requested:
        added.append(f"--cpus-per-task={max(processes)}")
    return added


def _requested_by_user(options: str, env: Mapping[str, str]) -> set[str]:
    """Return the resources (keys of REQUESTING) that the user sets by options of sbatch or environment variables."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--sbatch-args {options}: {error}") from None
    requested = {resource for resource, names in REQUESTING.items() if any(word.startswith(names) for word in words)}
    return requested | {resource for resource, names in VARIABLES.items() if any(name in env for name in names)}


def submit(config: Config, script: str) -> tuple[str, Path, str]:
    """Write the script to ``run.dir`` and submit it with sbatch. Raises HostFailed or OSError.

    Returns the job's id, the path of the script, and the path of the job's output.
    """
    _find("sbatch")
    folder = Path(config.run.dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.run.name}.sbatch"
    path.write_text(script)
    # sbatch prints JOB, or JOB;CLUSTER.
    job = _call(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
    # The user's options may change the output's path: SLURM reports the final one.
    description = _call(["scontrol", "--oneliner", "show", "job", job])
    output = next((word.partition("=")[2] for word in description.split() if word.startswith("StdOut=")), "")
    return job, path, output or str(folder / f"{config.run.name}-{job}.out")


def _call(argv: Sequence[str]) -> str:
    """Run a command of SLURM and return its output. Raises HostFailed if it fails or does not end within ANSWER_S."""
    tool = _find(argv[0])
    try:
        done = subprocess.run([tool, *argv[1:]], capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise HostFailed("SLURM", f"{argv[0]} does not answer within {ANSWER_S:g} s") from None
    if done.returncode:
        raise HostFailed("SLURM", " ".join(done.stderr.split()) or f"{argv[0]} exited with {done.returncode}")
    return done.stdout


def _find(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise HostFailed("SLURM", f"{tool} is not found; call this where a SLURM cluster takes jobs")
    return found
