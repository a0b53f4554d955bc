"""The guard: outlives the node agent and ends every process that the agent leaves behind.

    python -m asyncrl.launcher.node.guard PRIVATE_FOLDER LOCK_FD

It is the agent's parent and a subreaper, and that makes it airtight without any bookkeeping: when the agent
dies, even by SIGKILL and even in the middle of starting an actor, every descendant it had becomes a
descendant of this process, so there is no list that could miss one. It kills its children until the kernel
says that there are none, gives the run's name back if nothing came of it (begun.py), removes the run's private folder,
and exits with the agent's exit code, or 128 + the signal that killed the agent.

Standard input and output are the agent's; as the guard holds them open, their end means that all is gone.
The lock is held as long as this process or the agent lives: a private folder whose lock is free belongs to no living
run. Signals meant for the run go to the agent; this process ignores them, for it ends when the agent does.
Should it be killed itself, the agent is told by SIGTERM: the run makes way, and ends as failed.

A frozen agent (beats.py) is killed: it restarts no actor, obeys no command, and would hold the run for ever. Then the
guard ends what is left, as after any death of an agent. It writes to standard error only at its end: an output that
takes nothing, as a terminal after Ctrl-S, would hold up the kill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from asyncrl.launcher.node.beats import Watch
from asyncrl.launcher.run_folder.begun import leave_name
from asyncrl.launcher.terms.signals import STOPPING
from asyncrl.runtime.linux import become_subreaper, end_children

END_S = 10.0
STANDARD_ERROR = 2
IGNORED = (*STOPPING, signal.SIGUSR1, signal.SIGPIPE)


def main() -> int:
    """Spawn the agent, wait for its end, end what is left."""
    private, lock = sys.argv[1], int(sys.argv[2])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    beats, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    agent = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "asyncrl.launcher.node.agent", str(os.getpid()), str(lock), private, str(theirs)],
        os.environ,
        setsid=True,
        setsigdef=IGNORED,
        # The agent unblocks them once it can handle them.
        setsigmask=STOPPING,
    )
    os.close(theirs)
    silent_s = 0.0
    try:
        if silent_s := Watch(agent, beats).until_end_or_frozen():
            # Not reaped, so the pid is its own. It may wake up at any time, and would find that nothing waits for it.
            os.kill(agent, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    finally:
        stuck = end_children(END_S)
        folder = Path(private)
        if folder.name == "private" and not stuck:
            # The head's. Its lock is held here, and nothing else of the run is left.
            leave_name(folder.parent, Path.cwd())
        shutil.rmtree(private, ignore_errors=True)
        with contextlib.suppress(OSError):
            # The folder of a host that has only a part of the run: the agent has emptied it.
            folder.parent.rmdir()
    if silent_s:
        _report(f"the agent did not beat for {silent_s:g} s (supervision.silence_s) and was killed")
    if stuck:
        _report(f"processes {stuck} were killed but do not end")
        return 1
    return status if status >= 0 else 128 - status


def _report(text: str) -> None:
    # Not by ``sys.stderr``, which raises where the output is closed, and again when this process ends.
    with contextlib.suppress(OSError):
        os.write(STANDARD_ERROR, f"guard: {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
