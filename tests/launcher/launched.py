"""Launched runs, each a process of its own, which leave nothing behind when their test ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_settings import laid_over, launched_run

from asyncrl.config.keys import default_words
from asyncrl.observe.metrics_line import read_metrics
from asyncrl.observe.recording import last_recorded
from asyncrl.rpc.linux import children_of
from tools.waiting import wait_until

STUB = Path(__file__).parent / "stub_actor.py"
LAUNCH_HERE = Path(__file__).parent / "launch_here.py"
WAIT_S = 60.0
STEPS = 40
GROUPS = 4
"""Prompt groups of a step."""


def config_tree(run_dir: Path, sections: dict[str, Any] | None = None, **supervision: Any) -> dict[str, Any]:
    """A run of stubs in ``run_dir``/runs/trial; ``sections`` are laid over it."""
    return {
        "run": {"name": "trial", "dir": str(run_dir / "runs")},
        "data": {"source": "synthetic"},
        "rollout": {"engine": "sim"},
        "learner": {"backend": "sim", "steps": 3},
        "supervision": {"backoff_s": 0.05, "drain_s": 4.0} | supervision,
    } | (sections or {})


def sim_tree(folder: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """A simulated run of a few seconds in ``folder``/runs/trial; the keys of ``tables`` are laid over its own."""
    found = launched_run(
        run={"name": "trial", "dir": str(folder / "runs")},
        data={"size": 400},
        rollout={"sim": {"length_median": 16.0, "decode_step_s": 0.002, "load_s": 0.002}},
        reward={"options": {"spread": 1.0}},
        learner={"steps": STEPS, "groups_per_step": GROUPS, "sim": {"step_s": 0.15, "publish_bytes": 4096}},
        staleness={"max": 1},
        checkpoint={"every_versions": 5},
        supervision={"heartbeat_s": 0.5},
    )
    return laid_over(found, tables)


def command_line(pid: int) -> str:
    """The words of a process, or its title; empty once it is gone."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def marked(mark: object) -> dict[int, str]:
    """Command lines of the living processes that name ``mark``, this one excluded."""
    found = {int(entry): command_line(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: words for pid, words in found.items() if str(mark) in words and pid != os.getpid()}


def end_marked(mark: object) -> None:
    """Kill every process that names ``mark``, so that a failing test leaves nothing."""

    def all_ended() -> bool:
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(all_ended, f"the end of all that name {mark}")


class Launched:
    """A launcher's process, followed by its output in ``out``; its run is in ``run_dir``."""

    process: subprocess.Popen[Any]
    out: Path
    run_dir: Path
    wait_s = WAIT_S

    @property
    def shown(self) -> str:
        return self.out.read_text()

    def wait_to_show(self, text: str) -> None:
        over = lambda: text in self.shown or self.process.poll() is not None  # noqa: E731
        wait_until(over, lambda: f"{text!r} in {self.shown}", self.wait_s)
        assert text in self.shown, self.shown

    def end(self, within_s: float = 120.0) -> tuple[int, list[str]]:
        """(exit code, lines shown), once it has ended."""
        return self.process.wait(within_s), self.shown.splitlines()

    @property
    def steps_trained(self) -> list[int]:
        """The steps trained, as they stand."""
        path = self.run_dir / "metrics.jsonl"
        return [line["step"] for line in read_metrics(path) if line["kind"] == "train"] if path.exists() else []

    @property
    def is_running(self) -> bool:
        """Whether the newest snapshot of its first attempt says that it is running, all of its actors being ready."""
        last = last_recorded(self.run_dir, 1) if (self.run_dir / "monitor").exists() else None
        return last is not None and last.run.phase == "running"


def next_output(folder: Path) -> Path:
    """The file for the output of one more launcher in this folder."""
    return folder / f"out-{len(list(folder.glob('out-*')))}.txt"


class Run(Launched):
    """A launch, followed by its output, or on a terminal of this descriptor. Its run is ``folder``/runs/trial."""

    def __init__(self, folder: Path, argv: Sequence[str], terminal: int | None = None) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "trial"
        self.out = next_output(folder)
        if terminal is not None:
            on = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
            # It is the terminal's only when its session's leader has taken it.
            self.process = subprocess.Popen(argv, **on, start_new_session=True, preexec_fn=_take_terminal)
            return
        with self.out.open("w") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def close(self) -> None:
        """Kill the launcher, its descendants and every process that names its folder."""
        pids = list(self.processes()) if self.process.poll() is None else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        end_marked(self.folder)
        wait_until(lambda: not any(command_line(pid) for pid in pids), "the end of all")

    def processes(self) -> dict[int, str]:
        """Title by pid of the launcher and all below it. Real actors have the titles that people see."""
        pids = [self.process.pid]
        for pid in pids:
            pids += children_of(pid)
        return {pid: command_line(pid) for pid in pids}

    def below(self, words: str) -> int:
        """Pid of the first process of the run whose title has these words, once there is one."""
        found: int = wait_until(lambda: next((p for p, title in self.processes().items() if words in title), 0), words)
        return found

    def actor(self, name: str) -> int:
        return self.below(f" {name} ")

    def node(self, module: str) -> int:
        """Pid of the guard or the agent."""
        return self.below(f"asyncrl.launcher.node.{module}")


def placed_run(
    folder: Path,
    tree: dict[str, Any],
    actor_argv: Sequence[str] = (),
    *,
    hosts: Sequence[str] = ("here",),
    resume: str = "",
) -> Run:
    """A run whose hosts are all this machine; ``actor_argv`` is the entry of its actors, by default the real one."""
    request = {"tree": tree, "argv": list(actor_argv), "hosts": list(hosts), "resume": resume}
    return Run(folder, [sys.executable, str(LAUNCH_HERE), json.dumps(request)])


def stub_run(
    folder: Path,
    behaviour: dict[str, Any],
    sections: dict[str, Any] | None = None,
    *,
    resume: str = "",
    **supervision: Any,
) -> Run:
    """A run of stub actors that behave so."""
    argv = [sys.executable, str(STUB), json.dumps(behaviour)]
    return placed_run(folder, config_tree(folder, sections, **supervision), argv, resume=resume)


def sim_run(folder: Path, *flags: str, terminal: int | None = None) -> Run:
    """``asyncrl-launch`` of a simulated run, every real actor in its own process."""
    config = folder / "sim.toml"
    config.write_text("".join(f"{name} = {default_words(table)}\n" for name, table in sim_tree(folder).items()))
    return Run(folder, [sys.executable, "-m", "asyncrl.cli.launch", str(config), *flags], terminal)


def _take_terminal() -> None:
    # Under nohup it would be ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
