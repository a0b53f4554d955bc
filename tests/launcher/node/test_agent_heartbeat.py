"""The beats of an agent for its guard: a frozen agent is noticed, and a pause of the guard or of a disk is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from harness import until

from asyncrl.launcher.node.agent_heartbeat import AgentHeartbeat, HeartbeatWatch, Silence
from tools.waiting import wait_until

BEATING = "import os, sys, time\nwhile True: os.write(int(sys.argv[1]), sys.argv[2].encode()); time.sleep(0.1)"
GENEROUS_S = 60.0


class Agent:
    """A process that beats and announces a silence of ``silence_s``, and its guard's watch."""

    def __init__(self, silence_s: float) -> None:
        beats, theirs = os.pipe()
        argv = [sys.executable, "-c", BEATING, str(theirs), f"{silence_s}\n"]
        self.process = subprocess.Popen(argv, pass_fds=(theirs,))
        os.close(theirs)
        self.watch = HeartbeatWatch(self.process.pid, beats)
        self.found: list[float] = []
        self.thread = threading.Thread(target=lambda: self.found.append(self.watch.until_end_or_frozen()), daemon=True)
        self.thread.start()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def beating(silence_s: float) -> Iterator[Agent]:
    """An agent that has beaten once."""
    made = Agent(silence_s)
    try:
        wait_until(lambda: made.watch._limit_s > 0.0, "its first beat")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.process.kill()
        made.process.wait()
        made.thread.join(GENEROUS_S)


def test_a_stopped_agent_counts_as_frozen_after_its_announced_silence():
    with beating(1.5) as agent:
        time.sleep(1.0)
        assert agent.thread.is_alive()
        agent.signal(signal.SIGSTOP)
        agent.thread.join(GENEROUS_S)
        assert agent.found and agent.found[0] >= 1.5


def test_an_agent_that_wakes_in_time_does_not_count_as_frozen():
    with beating(5.0) as agent:
        silence = agent.watch._silence
        # The sum of these silences is the limit.
        for _ in range(5):
            agent.signal(signal.SIGSTOP)
            wait_until(lambda: silence.seconds >= 1.0, "a silence of two checks")
            agent.signal(signal.SIGCONT)
            wait_until(lambda: silence.seconds == 0.0 or not agent.thread.is_alive(), "its end")
        assert agent.thread.is_alive(), "its silences are not added up"
        agent.signal(signal.SIGTERM)
        agent.thread.join(GENEROUS_S)
        assert agent.found == [0.0]


def test_time_without_a_check_does_not_count_as_silence():
    silence = Silence(look_s=0.5)
    assert [silence.look(heard=heard) for heard in (False, False, True, False)] == [0.5, 1.0, 0.0, 0.5]


def test_a_long_hang_of_the_event_loop_ends_heartbeats_and_a_short_one_does_not():
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def beats() -> int:
        with contextlib.suppress(BlockingIOError):
            return len(os.read(ours, 1 << 16).splitlines())
        return 0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        made = AgentHeartbeat(theirs, loop, heartbeat_s=0.05, silence_s=60.0, stall_s=2.0)
        made.start()
        await asyncio.sleep(0.3)
        beats()
        # The loop stands still, as at a disk that does not answer.
        time.sleep(1.0)  # noqa: ASYNC251
        assert beats() > 1
        time.sleep(2.0)  # noqa: ASYNC251
        beats()
        time.sleep(0.5)  # noqa: ASYNC251
        assert beats() == 0
        await until(beats)
        await asyncio.to_thread(made.stop)

    asyncio.run(main())
    os.close(ours)
    os.close(theirs)
