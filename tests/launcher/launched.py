"""A launched run with stub actors, as a process of its own: python launched.py BEHAVIOUR_JSON CONFIG_JSON RESUME."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.runtime.processes import children_of

STUB = Path(__file__).parent / "stub_actor.py"
WAIT_S = 60.0


def config_tree(run_dir: Path, sections: dict[str, Any] | None = None, **supervision: Any) -> dict[str, Any]:
    """A simulated run in ``run_dir``/runs/trial; ``sections`` are laid over it."""
    return {
        "run": {"name": "trial", "dir": str(run_dir / "runs")},
        "data": {"source": "synthetic"},
        "rollout": {"engine": "sim"},
        "learner": {"backend": "sim", "steps": 3},
        "supervision": {"backoff_s": 0.05, "drain_s": 4.0} | supervision,
    } | (sections or {})


def marked(mark: object) -> dict[int, str]:
    """Command lines of the living processes that name ``mark``, this one excluded."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            words = command_line(int(entry))
            if str(mark) in words:
                found[int(entry)] = words
    return found


def end_marked(mark: object) -> None:
    """Kill whatever names ``mark``, so that a failing test leaves nothing."""
    while found := marked(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def wait_until(condition: Any, what: str | Callable[[], str]) -> Any:
    """What the condition gives once that is something; ``what`` is waited for."""
    until = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {WAIT_S:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.03)
    return found


class Launched:
    """After ``close`` nothing of it is left behind, whatever the test does."""

    def __init__(
        self,
        folder: Path,
        behaviour: dict[str, Any],
        sections: dict[str, Any] | None = None,
        *,
        resume: str = "",
        **supervision: Any,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "trial"
        self.out = folder / f"out-{len(list(folder.glob('out-*')))}.txt"
        tree = config_tree(folder, sections, **supervision)
        argv = [sys.executable, __file__, json.dumps(behaviour), json.dumps(tree), resume]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_marked(self.folder)

    @property
    def shown(self) -> str:
        return self.out.read_text()

    def wait_to_show(self, text: str) -> None:
        wait_until(lambda: text in self.shown or self.process.poll() is not None, f"{text!r} in {self.shown}")
        assert text in self.shown

    def end(self) -> tuple[int, list[str]]:
        """(exit code, lines shown), once all is over."""
        code = self.process.wait(WAIT_S)
        return code, self.shown.splitlines()

    def actor(self, name: str) -> int:
        """Pid of an actor's process, once there is one."""

        def find() -> int | None:
            return next((pid for pid, words in marked(self.run_dir).items() if f" {name} --run " in words), None)

        found: int = wait_until(find, name)
        return found

    def pid(self, module: str) -> int:
        """Of the guard or the agent."""

        def find() -> int | None:
            below = [self.process.pid]
            for pid in below:
                for child in children_of(pid):
                    if f"asyncrl.launcher.node.{module}" in command_line(child):
                        return child
                    below.append(child)
            return None

        found: int = wait_until(find, module)
        return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def launch_placed(config: Any, placed: Any, argv: tuple[str, ...] = (), resumption: Any = None) -> int:
    """A launch of actors that have their places already, all of them on this host; the exit code."""
    from asyncrl.launcher.fleet.hostfile import HostLine
    from asyncrl.launcher.launch import Launch
    from asyncrl.launcher.local import ACTOR_ARGV
    from asyncrl.launcher.terminal.interrupts import undone_by_signals
    from asyncrl.launcher.terms.placement import PlacementHost

    launch = Launch(config, [HostLine("here")], actor_argv=argv or ACTOR_ARGV, head="here", head_is_here=True)
    launch.hosts, launch.resumption = [PlacementHost(name="here", cpus=2)], resumption
    launch.placed = [dataclasses.replace(actor, host="here") for actor in placed]
    return asyncio.run(undone_by_signals(launch.run(), launch.progress))


def main() -> int:
    from asyncrl.config.load import validate_config
    from asyncrl.launcher.run_folder.resume import find_resumption
    from asyncrl.launcher.terms.placement import PlacementHost, place

    behaviour, tree, resume = sys.argv[1:]
    config, resumption = validate_config(json.loads(tree)), None
    if resume:
        config, resumption = find_resumption(config, resume)
    placed = place(config, [PlacementHost(name="box", cpus=2)])
    return launch_placed(config, placed, (sys.executable, str(STUB), behaviour), resumption)


if __name__ == "__main__":
    # What a shell starts in the background, tests too, is deaf to it, and so is what that starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
