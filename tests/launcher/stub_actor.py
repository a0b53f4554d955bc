"""A process that stands for an actor in tests of the launcher: python stub_actor.py BEHAVIOUR_JSON NAME ...

BEHAVIOUR_JSON maps an actor's name to what it does beside living on the real runtime until it is drained:

    {"die": [SECONDS, EXIT_CODE, TIMES]}   ends unasked; a negative code is a signal
    {"finish": STEPS}                      writes STEPS lines of metrics, then says that the run is finished
    {"finish_on": NAME}                    waits for this file in the run folder before it says so
    {"preempted": VERSION}                 once preempted, says that this checkpoint is complete and all is done
    {"preempted_on": NAME}                 waits for this file in the run folder before it says so
    {"deaf": true}                         does not end when drained
    {"children": true}                     leaves processes behind: in its group, in another, and daemonised
    {"storm": true}                        once it runs, forks and forks
    {"slow": SECONDS}                      takes as long to start
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.cli.actor import LEFT_TO_OTHERS
from asyncrl.messages.actors import CheckpointWritten, RunFinished
from asyncrl.messages.monitor import MetricsLine
from asyncrl.rpc.actor import CONTROLLER, Actor

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"

STORM = """
import os, time
for i in range(60):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.002)
time.sleep(600)
"""


class Stub(Actor):
    role = "stub"
    is_restarted = False
    does: dict[str, Any]

    async def setup(self) -> None:
        if "slow" in self.does:
            await asyncio.sleep(self.does["slow"])
        if self.does.get("children"):
            await asyncio.to_thread(leave_children, str(self.context.run_dir))

    async def run(self) -> None:
        if self.does.get("storm"):
            await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", STORM, str(self.context.run_dir)])
        if "die" in self.does:
            await self._die(*self.does["die"])
        if "finish" in self.does:
            for step in range(1, self.does["finish"] + 1):
                line = {"kind": "train", "step": step, "reward/mean": step / 10}
                with (self.context.run_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                self.peer(CONTROLLER).cast(MetricsLine(line=line))
                await asyncio.sleep(0.01)
            await self._awaited("finish_on")
            await self.peer(CONTROLLER).call(RunFinished())
        await self.drained()
        if self.does.get("deaf"):
            await asyncio.sleep(600)

    def preempted(self) -> None:
        if "preempted" in self.does:
            self.tasks.create_task(self._leave_checkpoint(self.does["preempted"]))

    async def _awaited(self, key: str) -> None:
        while key in self.does and not (self.context.run_dir / self.does[key]).exists():
            await asyncio.sleep(0.05)

    async def _leave_checkpoint(self, version: int) -> None:
        await self._awaited("preempted_on")
        await self.peer(CONTROLLER).call(CheckpointWritten(version=version, step=version, path="somewhere"))
        await self.peer(CONTROLLER).call(RunFinished(preempted=True))

    async def _die(self, after: float, exit_code: int, times: int) -> None:
        tally = self.context.run_dir / f"deaths-{self.role}"
        deaths = len(tally.read_text()) if tally.exists() else 0
        if deaths < times:
            await asyncio.sleep(after)
            tally.write_text("x" * (deaths + 1))
            if exit_code < 0:
                os.kill(os.getpid(), -exit_code)
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            os._exit(exit_code)


def leave_children(mark: str) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run([sys.executable, "-c", DAEMON, mark], check=True)


def main() -> int:
    for number in LEFT_TO_OTHERS:
        signal.signal(number, lambda *_: None)
    behaviour, name, *rest = sys.argv[1:]
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    from asyncrl.rpc.process import run_actor

    if name == CONTROLLER:
        from asyncrl.controller.actor import Controller as actor
    else:
        actor = type("Stub", (Stub,), {"role": name.partition("/")[0], "does": json.loads(behaviour).get(name, {})})
    return run_actor(
        actor,
        name=name,
        run_dir=Path(options["--run"]),
        controller=options.get("--controller"),
        incarnation=int(options["--incarnation"]),
        attempt=int(options["--attempt"]),
        address=options.get("--address", ""),
    )


if __name__ == "__main__":
    sys.exit(main())
