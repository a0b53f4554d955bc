"""Takes the stacks of an actor's process, for people: where does it hang?

py-spy reads them from outside where it is installed and allowed: of a stopped process too, and of what the process has
started, as engines and reward workers. Otherwise the process is asked by SIGUSR1 to write its own, those of its
threads and of its tasks, to its log (runtime/stacks.py). A stopped process cannot answer and gets no signal, which
would only wait for it: what the kernel says of it is reported.

Invariant: it ends within ``timeout_s`` and about one second, leaves no process behind, and changes nothing in the
other process. It never raises: what could not be had is said in the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path

from asyncrl.launcher.node.child import Child
from asyncrl.rpc.stacks import TASKS_END

LOOK_S = 0.05
MOST_BYTES = 1 << 20
"""Most bytes that are read."""
KILL_S = 1.0


async def take_stacks(child: Child, timeout_s: float) -> str:
    """The stacks of an actor's process."""
    pid = child.pid
    state = process_state(pid)
    found = await _py_spy(pid, timeout_s / 2, stopped=_is_stopped(state))
    if not found and _is_stopped(state):
        return f"process {pid}: {state}: it was stopped (SIGSTOP) and runs nothing"
    return f"process {pid}: {state}\n{found or await _ask(child, timeout_s / 2)}"


def process_state(pid: int) -> str:
    """The kernel's word on a process: its state, and where in the kernel it waits."""
    folder = Path("/proc", str(pid))
    state = "gone"
    with contextlib.suppress(OSError):
        lines = (folder / "status").read_text().splitlines()
        state = next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
    facts = []
    for name in ("wchan", "syscall"):
        with contextlib.suppress(OSError):
            value = (folder / name).read_text().strip()
            if value not in ("", "0", "running"):
                facts.append(f"{name} {value.split()[0]}")
    return ", ".join([state, *facts])


def _is_stopped(state: str) -> bool:
    return state.startswith(("T", "t"))


def _find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


async def _py_spy(pid: int, timeout_s: float, *, stopped: bool) -> str:
    """Output of py-spy; empty if it is not there, may not, or takes too long."""
    program = _find_py_spy()
    if program is None:
        return ""
    # It cannot suspend what is suspended already.
    argv = [program, "dump", "--subprocesses", "--pid", str(pid), *(["--nonblocking"] if stopped else [])]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await process.wait()
    text = output[:MOST_BYTES].decode(errors="replace").strip()
    # It fails at the first subprocess that is no Python, with what it had until then written.
    return text if "Thread" in text else ""


async def _ask(child: Child, timeout_s: float) -> str:
    """Ask by signal; the lines that its log has gained by then, without those that are JSON."""
    try:
        start = (await asyncio.to_thread(child.log.stat)).st_size
        child.ask_for_stacks()
    except OSError as error:
        return f"it could not be asked: {error}"
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    text = ""
    gone = False
    while loop.time() < until and TASKS_END not in text and not gone:
        # Looked at before the log is read, so that its last lines are not missed.
        gone = process_state(child.pid).startswith(("gone", "Z"))
        await asyncio.sleep(LOOK_S)
        text = await asyncio.to_thread(_plain_lines, child.log, start)
    if TASKS_END not in text:
        why = "it ended" if gone else f"not within {timeout_s:g} s: its interpreter may hang in foreign code"
        text += f"\nits tasks are unknown: {why}"
    return text.strip()


def _plain_lines(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    return "\n".join(line for line in lines if not line.startswith("{"))
