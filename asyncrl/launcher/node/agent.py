"""The node agent: spawns the actors of one host, watches them, restarts them, ends them.

    python -m asyncrl.launcher.node.agent GUARD_PID LOCK_FD PRIVATE_FOLDER HEARTBEAT_FD

It reads its spec and then commands from standard input, and writes events to standard output
(common/agent_messages.py). A host that does not share the run folder sends its logs to the launcher, and keeps them
only if that fails. The agent is a subreaper: a process that an actor leaves behind becomes its child and is ended too.
If the agent dies, its guard ends the rest. The guard kills a frozen agent (agent_heartbeat.py). Guard and agent both
hold the run's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from asyncrl.config.load import config_from_json
from asyncrl.launcher.common.agent_messages import AgentSpec
from asyncrl.launcher.node.agent_heartbeat import AgentHeartbeat
from asyncrl.launcher.node.host_agent import FAREWELL_S, HostAgent
from asyncrl.launcher.run_folder.private import CONFIG, PART, remove_part
from asyncrl.observe.logging import configure_logging, write_text
from asyncrl.rpc.linux import become_subreaper, die_with_parent, end_children

SPEC_BYTES = 16 << 20
"""Longest line of standard input; the spec is one line."""
END_S = 5.0
"""Seconds for processes that are left at the end to end, once they are killed."""


async def _run_agent(run_dir: Path, pipe: int) -> int:
    """Read the spec, run a HostAgent to its end, and return the exit code.

    At the end the launcher gets the last events. A host that does not share the run folder then removes its own part of
    it, once the launcher has the logs. From the spec on, a thread writes heartbeats for the guard to the descriptor
    ``pipe``. If the launcher ends before it sends the spec, removes such a part too, and returns 1.
    """
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=SPEC_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    output = asyncio.StreamWriter(transport, protocol, None, loop)
    agent: HostAgent | None = None
    heartbeat: AgentHeartbeat | None = None
    try:
        line = await commands.readline()
        if not line:
            write_text("agent: the launcher was gone before it said what to do\n")
            if (run_dir / PART).exists():
                await asyncio.to_thread(remove_part, run_dir)
            return 1
        spec = msgspec.json.decode(line, type=AgentSpec)
        config = config_from_json((run_dir / CONFIG).read_text())
        configure_logging(config.log.level)
        silence_s, heartbeat_s = config.supervision.agent_silence_s, config.supervision.heartbeat_s
        stall_s = config.watchdog.stall_s
        heartbeat = AgentHeartbeat(pipe, loop, heartbeat_s=heartbeat_s, silence_s=silence_s, stall_s=stall_s)
        heartbeat.start()
        agent = HostAgent(spec, config, output)
        return await agent.main(commands)
    finally:
        # With a limit of 0, drain returns only when everything is written.
        transport.set_write_buffer_limits(0)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                await output.drain()
        if agent is not None:
            await agent.remove_part_once_logs_arrived(commands)
        output.close()
        if heartbeat is not None:
            heartbeat.stop()


def main() -> int:
    """Run the agent, then end every process that is left below it; returns the exit code."""
    guard, lock, private, heartbeat = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    os.set_inheritable(lock, False)
    os.set_inheritable(heartbeat, False)
    become_subreaper()
    die_with_parent(signal.SIGTERM)
    # The guard may have died before die_with_parent, which then sends no signal.
    if os.getppid() != guard:
        return 1
    try:
        return asyncio.run(_run_agent(Path(private).parent, heartbeat))
    finally:
        if stuck := end_children(END_S):
            write_text(f"agent: processes {stuck} were killed but do not end\n")


if __name__ == "__main__":
    sys.exit(main())
