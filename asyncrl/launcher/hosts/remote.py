"""A host's entry point into a run: ``python -m asyncrl.launcher.hosts.remote``, started by ssh or srun.

It first sends what the host offers, then answers orders (common/agent_messages.py). At a HostSpec it becomes the guard
of the host's agent, with the same standard input and output. Before that it exits when standard input ends, or when no
order comes in time, and leaves nothing behind. The doctor's entry point serves its own orders by ``serve``.

A host that sees the launcher's run folder, which the run's id in it proves, uses that folder. Any other host makes a
folder at the same path and marks it as its part of the run. If an unmarked folder is there already, the host leaves it
alone and refuses the order.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, Union

import msgspec

from asyncrl.core.errors import AsyncRLError, UsageError
from asyncrl.core.files import write_all
from asyncrl.launcher.checks.findings import CheckOrder, Fetched, FetchOrder
from asyncrl.launcher.common.agent_messages import (
    Checked,
    EndOrder,
    HostEnded,
    HostOffer,
    HostSpec,
    Prepared,
    Refusal,
    RouteQuery,
    private_name,
)
from asyncrl.launcher.hosts.addresses import find_routes, interfaces
from asyncrl.launcher.run_folder.private import (
    CONFIG,
    PART,
    RUN_ID,
    hold_private,
    is_live,
    remove_abandoned,
    remove_part,
    remove_private,
)
from asyncrl.rpc.linux import children_of, host_id

ORDER_S = 900.0
LONGEST_ORDER_BYTES = 256 << 20
LOOK_S = 0.05
GUARD = "asyncrl.launcher.node.guard"
AGENT = "asyncrl.launcher.node.agent"
NVIDIA_SMI_S = 30.0


def main() -> int:
    """Serve orders until standard input ends, or become the guard; returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    facts = find_facts()
    answers: dict[type[Any], Callable[[Any], Any]] = {
        RouteQuery: find_routes,
        CheckOrder: lambda order: _answer_until_cut(order, facts),
        FetchOrder: lambda order: _answer_until_cut(order, facts),
        EndOrder: end,
        HostSpec: _become_guard,
    }
    return serve(facts, answers)


def serve(facts: HostOffer, answers: Mapping[type[Any], Callable[[Any], Any]], output: int = 1) -> int:
    """Send ``facts``, then answer orders until standard input ends or none comes in time; returns the exit code.

    The time is ORDER_S, but after a FetchOrder at least its limit. ``answers`` has a function for each type of order.
    ``output`` is the descriptor to which lines are written. If an order fails, a Refusal is the last line.
    """
    orders = msgspec.json.Decoder(Union[tuple(answers)])  # noqa: UP007
    try:
        _send(facts, output)
        next_order_s = ORDER_S
        while line := _read_line(next_order_s):
            order = orders.decode(line)
            _send(answers[type(order)](order), output)
            # The launcher waits for the downloads of all hosts before it sends the next order.
            next_order_s = max(ORDER_S, order.limit_s) if isinstance(order, FetchOrder) else ORDER_S
    except BrokenPipeError:
        return 1
    # This clause comes before OSError, because some of these errors are an OSError too.
    except AsyncRLError as error:
        _send(Refusal(reason=str(error), exit_code=error.exit_code), output)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _send(Refusal(reason=f"{where}{error.strerror or error}"), output)
        return 1
    except ValueError as error:
        _send(Refusal(reason=f"{type(error).__name__}: {error}"), output)
        return 1
    return 0


def _answer_until_cut(order: CheckOrder | FetchOrder, facts: HostOffer) -> Checked | Fetched:
    """Run checks or download files. Exits the process if the launcher closes the connection meanwhile."""
    # Imported late, because it imports the configuration, which would delay the host's first line.
    from asyncrl.launcher.hosts.checks import answer

    # Output of other code goes to standard error, so that it does not come between the answers.
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        return answer(order, facts, is_cut=_launcher_hung_up)
    finally:
        os.dup2(output, 1)
        os.close(output)


def _launcher_hung_up() -> bool:
    """Whether standard input is closed, and nothing is left in it to read."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))


def _become_guard(spec: HostSpec) -> NoReturn:
    """Make the host's folders, answer Prepared, and replace this process by the guard.

    Before that, removes private folders of killed runs. If the guard cannot be started, removes the private folder, and
    this host's own part of the run if it has one. An error before the private folder is held leaves the marked folder,
    because another run may be live in it. Raises UsageError, OSError.
    """
    run_dir, logs = Path(spec.run_dir), Path(spec.log_dir)
    for path in remove_abandoned(run_dir.parent):
        sys.stderr.write(f"removed {path}, left behind by a run that was killed\n")
    shared = _contains(logs / RUN_ID, spec.run_id)
    private = run_dir / private_name(spec.index)
    if not shared:
        _make_part(run_dir, spec)
    lock = hold_private(private, spec.run_id, spec.credentials)
    try:
        if not shared:
            logs.mkdir(parents=True, exist_ok=True)
            for name, content in {CONFIG: spec.config, **spec.files}.items():
                (run_dir / name).write_text(content)
        log = os.open(logs / f"agent-{spec.index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        spec.adopt()
        # The lock stays held: execv makes this process the guard, with the same descriptors.
        os.set_inheritable(lock, True)
        _send(Prepared())
        sys.stderr.flush()
        # Standard error becomes the agent's log, which can be written even if the connection breaks.
        os.dup2(log, 2)
        os.execv(sys.executable, [sys.executable, "-m", GUARD, str(private), str(lock)])
    finally:
        # This runs only if the guard could not be started: execv does not return.
        remove_private(private)
        if not shared:
            remove_part(run_dir)


def _contains(path: Path, run_id: str) -> bool:
    """Whether this file holds the run's id, which proves that the host sees the launcher's run folder."""
    try:
        return path.read_text() == run_id
    except OSError:
        return False


def _make_part(run_dir: Path, spec: HostSpec) -> None:
    """Make a run folder for this host alone and mark it. A marked folder of an earlier run is used again.

    Raises UsageError for an unmarked folder, and OSError.
    """
    if run_dir.exists() and not (run_dir / PART).is_file():
        raise UsageError(
            f"{run_dir} is there already and is not part of this run; move it away, or choose another run.name"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / PART).write_text(spec.run_id)


def end(order: EndOrder) -> HostEnded:
    """Carry out an EndOrder: wait for the run's processes to end, and report whether some are left.

    With ``preempt`` it first sends the agent SIGTERM. After ``patience_s`` it kills the agent, if the order says so and
    there is one, and waits as long again. Once nothing is left, it reads the record of the end, and removes the private
    folders of runs that were killed. The guard is found by its argument, the private folder.
    """
    run_dir, private = Path(order.run_dir), private_name(order.index)
    if order.preempt:
        _signal_agents(str(run_dir / private), signal.SIGTERM)
    until = time.monotonic() + order.patience_s
    killed = False
    # The guard removes the folder, and with it the lock, at the very last, but ends a moment later.
    while is_live(run_dir, private) or pids_with(GUARD, str(run_dir / private)):
        if time.monotonic() >= until:
            if killed or not order.kill:
                return HostEnded(living=True, killed=killed)
            killed = _signal_agents(str(run_dir / private), signal.SIGKILL)
            if not killed:
                return HostEnded(living=True, killed=False)
            # The guard now kills what its agent leaves behind, and has as long again for this.
            until = time.monotonic() + order.patience_s
        time.sleep(LOOK_S)
    ended = None
    with contextlib.suppress(OSError):
        # Imported late, because it imports the configuration, which would delay the host's first line.
        from asyncrl.launcher.run_folder.ended import read_end_of

        ended = read_end_of(run_dir, Path(order.log_dir).name)
    for path in remove_abandoned(run_dir.parent):
        sys.stderr.write(f"removed {path}\n")
    return HostEnded(living=False, killed=killed, ended=ended)


def _signal_agents(private: str, number: signal.Signals) -> bool:
    """Send a signal to the agents of this private folder; returns whether there was one."""
    signalled = False
    for guard in pids_with(GUARD, private):
        for agent in children_of(guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, number)
                signalled = True
    return signalled


def pids_with(module: str, private: str) -> list[int]:
    """Return the pids of the guard or agent (``module``) that has this private folder as an argument.

    Only processes that are visible to this one are found.
    """
    pids, name = [], os.path.basename(private)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # The same folder may have several names.
            if module in words and any(os.path.samefile(word, private) for word in words if word.endswith(name)):
                pids.append(int(entry.name))
    return pids


def _read_line(within_s: float) -> bytes:
    """Return the next line of standard input; empty at its end, after ``within_s``, and for a line that is too long.

    Reads one byte at a time, because the agent reads what follows the line.
    """
    line = bytearray()
    until = time.monotonic() + within_s
    while len(line) < LONGEST_ORDER_BYTES:
        ready, _, _ = select.select([0], [], [], max(0.0, until - time.monotonic()))
        byte = os.read(0, 1) if ready else b""
        if not byte:
            return b""
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""


def _send(answer: Any, output: int = 1) -> None:
    write_all(output, msgspec.json.encode(answer) + b"\n")


# --- what the host offers ---


def find_facts() -> HostOffer:
    """Return what this host offers: the cores that this process may use, and the GPUs that it can see."""
    gpus, problem = _gpus()
    return HostOffer(
        version=version("asyncrl"),
        hostname=socket.gethostname(),
        identity=f"{socket.gethostname()}/{host_id()}",
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        gpu_problem=problem,
        interfaces=interfaces(),
        client=os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    )


def _gpus() -> tuple[list[str], str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or else all; and why they are unknown, empty if they are known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [part.strip() for part in visible.split(",") if part.strip()]
        # CUDA ignores everything from the first unknown device on, and -1 is unknown.
        return list(takewhile(lambda gpu: gpu != "-1", gpus)), ""
    try:
        ended = ask_nvidia_smi("index")
    except subprocess.TimeoutExpired:
        problem = f"nvidia-smi does not answer within {NVIDIA_SMI_S:g} s"
        return [], f"{problem}; set CUDA_VISIBLE_DEVICES to say which GPUs to use"
    if ended is None or ended.returncode:
        # Without nvidia-smi, or with the tool but no driver, the host counts as one without GPUs.
        return [], ""
    return [line.strip() for line in ended.stdout.splitlines() if line.strip()], ""


def ask_nvidia_smi(fields: str) -> subprocess.CompletedProcess[str] | None:
    """Ask for these fields of each GPU; None without nvidia-smi. Raises subprocess.TimeoutExpired, and OSError."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    argv = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
