"""Runs under SLURM: the hosts of a job, and the job that runs a configuration.

Within a job its nodes are the hosts, in SLURM's order, so the first, where the batch script runs, is the head. A job
may be started again at any time, so there a run of a name is one: it is resumed if it is there, and else begun.

The batch script is the same text here and in launch/slurm/train.sbatch, but for what it is called with. Fails with
UsageError for what the command line asks, and with HostFailed where SLURM is not there or will not have the job.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import HostFailed, UsageError
from asyncrl.launcher.choice import find_candidates
from asyncrl.launcher.hostfile import HostLine
from asyncrl.launcher.resume import AUTO
from asyncrl.launcher.start import SlurmStart

ANSWER_S = 60.0
"""Longest time in which a command of SLURM answers."""
CONTAINER_PYTHON = "python3"
"""Of the container, by its own PATH."""
HEADER = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
"""
BODY = """\
# SLURM sends USR2 to this script alone, 120 s before the time limit (by --signal) or when somebody asks for it:
#   scancel --batch --signal=USR2 JOB
# It is passed on: a checkpoint is written within preempt.grace_s, and the job goes back into the queue,
# to go on where it was. SIGTERM, by which SLURM ends jobs, reaches every process by itself.
told= launch= passed=
pass_on() {
  told=1
  [ -n "$launch" ] && [ -z "$passed" ] && passed=1 && kill -USR2 "$launch" 2>/dev/null
}
trap pass_on USR2
trap : TERM
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
"$@" &
launch=$!
[ -z "$told" ] || pass_on
# A signal breaks off the waiting, and not what is waited for.
while kill -0 "$launch" 2>/dev/null; do
  wait "$launch"
done
wait "$launch"
code=$?
# 75 with a checkpoint; 128 + USR2 when the signal came before there was anything to keep.
if [ -n "$told" ] && { [ "$code" = 75 ] || [ "$code" = 140 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def job_hosts(env: Mapping[str, str] = os.environ) -> list[HostLine]:
    """The nodes of the job within which this runs, in order. Raises UsageError or HostFailed."""
    nodes = env.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_JOB_ID" not in env:
        raise UsageError("--inside-slurm: this is not within a SLURM job; --slurm submits one")
    names = _call(["scontrol", "show", "hostnames", nodes]).split()
    if not names:
        raise HostFailed("SLURM", f"scontrol knows no node in SLURM_JOB_NODELIST={nodes}")
    return [HostLine(name) for name in names]


def start_of(container: str | None) -> SlurmStart:
    """How the nodes' parts are started; ``container`` leads to another Python than ours. Raises UsageError."""
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
    """What a run within a job is resumed from: what the user says, or else itself, if it is there.

    Starts that ended before their first step hold no name. Raises CheckpointError or OSError.
    """
    if given is not None:
        return given
    return AUTO if any(not candidate.unbegun for candidate in find_candidates(config)) else None


def batch_script(config: Config, argv: Sequence[str], *, nodes: int, options: str = "") -> str:
    """The script of a job that runs ``argv`` on its first node; ``options`` are further ones of sbatch, and win.

    Raises UsageError.
    """
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: at least one node is needed")
    if "\n" in options:
        raise UsageError("--sbatch-args: one line of options")
    folder = Path(config.run.dir).absolute()
    lines = [f"#SBATCH --chdir={shlex.quote(os.getcwd())}"]
    lines += [f"#SBATCH --output={shlex.quote(f'{folder}/{config.run.name}-%j.out')}"]
    lines += [f"#SBATCH {options}"] if options else []
    header = HEADER.format(name=config.run.name, nodes=nodes)
    return header + "\n".join([*lines, "", f"set -- {shlex.join(argv)}", "", BODY])


def submit(config: Config, script: str) -> tuple[str, Path, str]:
    """Keep the script in the folder of run folders and hand it to sbatch: (job, the script, where the output goes).

    Raises HostFailed or OSError.
    """
    _find("sbatch")
    folder = Path(config.run.dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.run.name}.sbatch"
    path.write_text(script)
    job = _call(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
    # Only SLURM knows what the options have made of it.
    said = _call(["scontrol", "--oneliner", "show", "job", job])
    output = next((word.partition("=")[2] for word in said.split() if word.startswith("StdOut=")), "")
    return job, path, output or str(folder / f"{config.run.name}-{job}.out")


def _call(argv: Sequence[str]) -> str:
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
