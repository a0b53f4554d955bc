"""The guard: the parent of a host's node agent. It ends every process that the agent leaves behind.

    python -m asyncrl.launcher.node.guard PRIVATE_FOLDER LOCK_FD

The guard is a subreaper. When the agent dies, even by SIGKILL, the kernel makes all its descendants children of the
guard, so no bookkeeping can miss one. The guard then kills its children until none is left, and removes the run's
private folder. Its exit code is the agent's, 128 + the signal that killed the agent, or 1 if a process cannot be ended.
A frozen agent restarts no actor and obeys no command, so the guard kills it (agent_heartbeat.py).

Standard input and output are the agent's. The guard holds them open, so their end means that no process is left. The
guard and the agent hold the lock of the private folder. The guard ignores signals for the run, which the agent handles.
If the guard is killed, the agent gets SIGTERM: the run is preempted, and ends as failed. The guard writes to standard
error only at its end, because a blocked terminal would delay the kill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from asyncrl.launcher.common.signals import STOPPING
from asyncrl.launcher.node.agent_heartbeat import HeartbeatWatch
from asyncrl.rpc.linux import become_subreaper, end_children

END_S = 10.0
"""Seconds for the processes that an agent leaves behind to end, once they are killed."""
STANDARD_ERROR = 2
IGNORED = (*STOPPING, signal.SIGUSR1, signal.SIGPIPE)


def main() -> int:
    """Spawn the agent, wait until it ends or kill it once it is frozen, and end what is left; returns the exit code."""
    private, lock = sys.argv[1], int(sys.argv[2])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    heartbeats, agent_end = os.pipe()
    os.set_inheritable(agent_end, True)
    agent = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "asyncrl.launcher.node.agent", str(os.getpid()), str(lock), private, str(agent_end)],
        os.environ,
        setsid=True,
        setsigdef=IGNORED,
        # The agent unblocks these signals once it can handle them.
        setsigmask=STOPPING,
    )
    os.close(agent_end)
    silent_s = 0.0
    try:
        if silent_s := HeartbeatWatch(agent, heartbeats).until_end_or_frozen():
            # The agent is not reaped, so no other process has its pid. If left alive, it could resume unwatched.
            os.kill(agent, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    finally:
        stuck = end_children(END_S)
        shutil.rmtree(private, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Removes the run folder of a host that has its own, which the agent has emptied.
            Path(private).parent.rmdir()
    if silent_s:
        _report(f"the agent did not beat for {silent_s:g} s (supervision.silence_s) and was killed")
    if stuck:
        _report(f"processes {stuck} were killed but do not end")
        return 1
    return status if status >= 0 else 128 - status


def _report(text: str) -> None:
    # If the output is closed, ``sys.stderr`` would raise here and again when this process ends.
    with contextlib.suppress(OSError):
        os.write(STANDARD_ERROR, f"guard: {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
