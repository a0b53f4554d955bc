"""The ways to start the entry point (remote.py) on a host: on this host, by ssh, or by srun.

The standard input and output of the command are those of the entry point, so what follows is the same for each way.
Secrets are never arguments. Each way explains why a start failed, from the exit code and standard error.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.rpc.lifecycle.supervision import describe_exit

REMOTE = ("-m", "asyncrl.launcher.hosts.remote")
SSH_FAILED = 255
"""Exit code of ssh for its own failures; any other is that of the command on the host."""
KEEPALIVE_S = 10
KEEPALIVES = 3
"""ssh gives a connection up after KEEPALIVES probes without an answer, one every KEEPALIVE_S seconds."""
SIGNALLED = 128
"""srun exits with a code above this one if its step was killed, lost its node, or exited with such a code."""
EXITED = ": Exited with exit code "
"""srun writes this about a step that was not killed, and exited with another code than 0."""
SAFE = re.compile(r"[A-Za-z0-9_./:=@%+-]+")
"""Words that need no quotes in a shell."""


class StartCommand(Protocol):
    """One way to start the entry point on a host."""

    def argv(self, host: str) -> list[str]:
        """Return the command that runs ``asyncrl.launcher.hosts.remote`` on a host."""
        ...

    def is_lost(self, exit_code: int, errors: str) -> bool:
        """Whether the command ended because its connection broke; the host's part of the run may then continue.

        ``errors`` is what the command wrote to standard error.
        """
        ...

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        """Explain in one line why the command ended before the host sent anything."""
        ...


@dataclass(frozen=True, slots=True)
class LocalStart:
    """A start on the host where the launcher runs."""

    words: tuple[str, ...] = REMOTE
    """Arguments of Python, in every start command: the module to run."""

    def argv(self, host: str) -> list[str]:
        return [sys.executable, *self.words]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        return False

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        return explain_python(host, sys.executable, exit_code, errors)


@dataclass(frozen=True, slots=True)
class SshStart:
    """A start over the system's ssh, with its configuration and ssh agent. ssh never asks the user anything."""

    connect_s: float
    args: tuple[str, ...] = ()
    """Further arguments of ssh, which take precedence over the options set here."""
    python: str = sys.executable
    words: tuple[str, ...] = REMOTE

    def argv(self, host: str) -> list[str]:
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={math.ceil(self.connect_s)}",
            f"ServerAliveInterval={KEEPALIVE_S}",
            f"ServerAliveCountMax={KEEPALIVES}",
            # ssh may use a shared connection that exists, but does not start one, which would outlive the command.
            "ControlMaster=no",
        ]
        flags = [flag for option in options for flag in ("-o", option)]
        return ["ssh", "-T", *self.args, *flags, "--", host, " ".join(map(_quote, (self.python, *self.words)))]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        return exit_code == SSH_FAILED or exit_code < 0

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        if exit_code != SSH_FAILED:
            return explain_python(host, self.python, exit_code, errors)
        last = last_line(errors)
        text = f"ssh: {last.removeprefix('ssh: ')}" if last else "ssh failed without a word"
        if "Permission denied" in last:
            text += f"; `ssh {host}` has to work without a password: a key that {host} knows, or an agent that has one"
        elif "Host key verification failed" in last:
            text += f"; call `ssh {host}` once and see that its key is the right one"
        elif "Could not resolve" in last:
            text += "; the name is that of the hostfile"
        return text


@dataclass(frozen=True, slots=True)
class SlurmStart:
    """A start as a job step of its own, on a node of the SLURM job in which this process runs."""

    args: tuple[str, ...] = ()
    """Words before Python: options of srun, and then perhaps a command that enters a container."""
    python: str = sys.executable
    words: tuple[str, ...] = REMOTE

    def argv(self, host: str) -> list[str]:
        step = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
        # The step gets everything that the job has on that node, independent of the options for the job's tasks.
        whole = ["--cpu-bind=none", "--mpi=none", "--export=ALL", "--job-name=asyncrl"]
        return ["srun", *step, *whole, *self.args, self.python, *self.words]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        # If a signal killed the agent, the guard exits with such a code too, and srun writes EXITED.
        return exit_code < 0 or (exit_code > SIGNALLED and EXITED not in errors)

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        # The last lines of srun only have the exit codes of its task; the reason is above them.
        lines = [line for line in errors.splitlines() if not (line.startswith("srun:") and ": task " in line)]
        last = last_line("\n".join(lines))
        if "execve()" in last:
            return explain_python(host, self.python, 127, last)
        if last.startswith("srun:"):
            return last
        return explain_python(host, self.python, exit_code, last)


def explain_python(host: str, python: str, exit_code: int, errors: str) -> str:
    """Explain why ``python -m asyncrl.launcher.hosts.remote`` ended before the host sent anything."""
    last = last_line(errors)
    # A shell's codes for a program that cannot be run, or is not found.
    if exit_code in (126, 127):
        return f"no Python can run there at {python}; asyncrl has to be installed at the same place on each host"
    if "No module named" in last:
        return f"no asyncrl of this version is installed for {python} ({last.rpartition(': ')[2]})"
    return f"asyncrl did not start there, {describe_exit(exit_code)}" + (f": {last}" if last else "")


def last_line(text: str) -> str:
    """Return the last line that is not blank; empty if all are blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _quote(word: str) -> str:
    # Single quotes, which any login shell on the host understands.
    return word if SAFE.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


def shown(argv: Sequence[str]) -> str:
    """Return a command as a user would type it."""
    return " ".join(map(_quote, argv))
