"""The start of a host's part of a run: a command whose standard input and output are that part's.

Everything that follows is the same for each way. Nothing secret is ever an argument. Each way says in words why
a start failed, from the exit code and what the command wrote to its standard error.
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
"""Exit code of ssh for what is its own; every other is that of the command."""
KEEPALIVE_S = 10
KEEPALIVES = 3
SIGNALLED = 128
"""Exit codes of srun above this one: its step was killed, and be it with its node, unless it ended with such a code."""
EXITED = ": Exited with exit code "
"""Words of srun on a step that was not killed, and ended with another code than 0."""
SAFE = re.compile(r"[A-Za-z0-9_./:=@%+-]+")


class StartCommand(Protocol):
    """One way to start something on a host."""

    def argv(self, host: str) -> list[str]:
        """The command that runs ``asyncrl.launcher.hosts.remote`` on a host."""
        ...

    def is_lost(self, exit_code: int, errors: str) -> bool:
        """Whether the command ended because its connection did, so that the host's part may continue.

        ``errors`` is what it wrote to its standard error.
        """
        ...

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        """Reason that it ended before it said anything, in one line."""
        ...


@dataclass(frozen=True, slots=True)
class LocalStart:
    """A start on the host where the launcher runs."""

    words: tuple[str, ...] = REMOTE
    """Arguments of Python."""

    def argv(self, host: str) -> list[str]:
        return [sys.executable, *self.words]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        return False

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        return explain_python(host, sys.executable, exit_code, errors)


@dataclass(frozen=True, slots=True)
class SshStart:
    """A start over the system's ssh, with its configuration and agent, and never with a question."""

    connect_s: float
    args: tuple[str, ...] = ()
    """Further arguments of ssh; what they set counts before what is set here."""
    python: str = sys.executable
    words: tuple[str, ...] = REMOTE
    """Arguments of Python."""

    def argv(self, host: str) -> list[str]:
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={math.ceil(self.connect_s)}",
            f"ServerAliveInterval={KEEPALIVE_S}",
            f"ServerAliveCountMax={KEEPALIVES}",
            # A connection of its own, or one that is there already; none that outlives the command.
            "ControlMaster=no",
        ]
        flags = [flag for option in options for flag in ("-o", option)]
        return ["ssh", "-T", *self.args, *flags, "--", host, " ".join(map(_quote, (self.python, *self.words)))]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        return exit_code == SSH_FAILED or exit_code < 0

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        if exit_code != SSH_FAILED:
            return explain_python(host, self.python, exit_code, errors)
        said = last_line(errors)
        told = f"ssh: {said.removeprefix('ssh: ')}" if said else "ssh failed without a word"
        if "Permission denied" in said:
            told += f"; `ssh {host}` has to work without a password: a key that {host} knows, or an agent that has one"
        elif "Host key verification failed" in said:
            told += f"; call `ssh {host}` once and see that its key is the right one"
        elif "Could not resolve" in said:
            told += "; the name is that of the hostfile"
        return told


@dataclass(frozen=True, slots=True)
class SlurmStart:
    """A start on a node of the SLURM job that this process runs in, as a step of its own."""

    args: tuple[str, ...] = ()
    """Further words before Python: options of srun, and then perhaps a command that leads into a container."""
    python: str = sys.executable
    words: tuple[str, ...] = REMOTE
    """Arguments of Python."""

    def argv(self, host: str) -> list[str]:
        step = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
        # Everything that the job has on that node, independent of the options for its tasks.
        whole = ["--cpu-bind=none", "--mpi=none", "--export=ALL", "--job-name=asyncrl"]
        return ["srun", *step, *whole, *self.args, self.python, *self.words]

    def is_lost(self, exit_code: int, errors: str) -> bool:
        # The guard reports the signal that killed its agent by such a code too.
        return exit_code < 0 or (exit_code > SIGNALLED and EXITED not in errors)

    def explain(self, host: str, exit_code: int, errors: str) -> str:
        # srun says the exit code of any end of its task, last; the reason stands above.
        lines = [line for line in errors.splitlines() if not (line.startswith("srun:") and ": task " in line)]
        said = last_line("\n".join(lines))
        if "execve()" in said:
            return explain_python(host, self.python, 127, said)
        if said.startswith("srun:"):
            return said
        return explain_python(host, self.python, exit_code, said)


def explain_python(host: str, python: str, exit_code: int, errors: str) -> str:
    """Reason that ``python -m asyncrl.launcher.hosts.remote`` did not begin."""
    said = last_line(errors)
    if exit_code in (126, 127):
        return f"no Python can run there at {python}; asyncrl has to be installed at the same place on each host"
    if "No module named" in said:
        return f"no asyncrl of this version is installed for {python} ({said.rpartition(': ')[2]})"
    return f"asyncrl did not start there, {describe_exit(exit_code)}" + (f": {said}" if said else "")


def last_line(text: str) -> str:
    """The last line that is not empty; empty for none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _quote(word: str) -> str:
    # For any shell that the user has there.
    return word if SAFE.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


def shown(argv: Sequence[str]) -> str:
    """A command as one would type it."""
    return " ".join(map(_quote, argv))
