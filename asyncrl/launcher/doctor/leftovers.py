"""Finds and removes what runs that were killed as a whole left on this host: folders and processes.

Only leftovers that are *certainly dead* are ever removed:

* a host's private folder in a run folder (run_folder/private.py) whose lock is free;
* the unfinished checkpoints of a run, if none of its locks is held;
* an engine's scratch folder whose process has ended and whose lock is free;
* an orphaned process of asyncrl, because processes of a live run descend from its guard or its agent.

Some file systems keep locks for each host separately, or keep none. There a free lock proves nothing, and leftovers
are only reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.checkpoint.folder import checkpoint_dir, is_leftover
from asyncrl.config.engines import ENGINES
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import ConfigError
from asyncrl.core.files import are_locks_shared, lock_is_free
from asyncrl.core.formatting import name_some
from asyncrl.launcher.checks.findings import Finding, ok, warn
from asyncrl.launcher.run_folder.private import CONFIG, LOCK, PART, PRIVATE, remove_if_abandoned

SCRATCH = "asyncrl-engine-"
SCRATCH_LOCK = "lock"
TITLE = re.compile(r"asyncrl ([a-z_]+/\d+ |reward worker|episodes worker)|.* -m asyncrl\.workers\.(keeper|warden) ")
"""Command line of an actor's process or of one of its workers."""
ENGINE_TITLES = tuple(traits.process_title for traits in ENGINES.values() if traits.process_title)
"""Beginnings of the command lines of engines' processes."""
LAUNCHER = "asyncrl.launcher."
"""Text in the command lines of the guard and the agent."""
REAPERS = ("systemd", "init", "tini", "dumb-init", "catatonit")
"""Names of processes that adopt orphans, as process 1 does."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this user, or process 1; ``title`` is its command line, ``started`` its start (s since 1970)."""

    pid: int
    parent: int
    started: float
    title: str
    name: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder (``path``) or a process of no live run. If ``certain``, it is certainly dead and may be removed."""

    what: str
    path: Path | None = None
    process: Process | None = None
    certain: bool = True


def check_leftovers(runs: Path | None, *, is_head: bool, fix: bool) -> Finding:
    """Report the leftovers of this host; with ``fix``, first remove those that are certainly dead.

    ``runs`` is the folder that holds the run folders; None if the head has the same folder and searches it.
    """
    leftovers = find_leftovers(runs, is_head=is_head)
    removed = [one for one in leftovers if fix and one.certain and remove(one)]
    remaining = [one for one in leftovers if one not in removed]
    parts = [f"removed {name_some([one.what for one in removed])}"] if removed else []
    if not remaining:
        return ok("leftovers", parts[0] if parts else "none")
    parts.append(name_some([one.what for one in remaining]))
    any_certain, any_uncertain = any(one.certain for one in remaining), any(not one.certain for one in remaining)
    advice = ["--fix removes those that are certainly dead"] if any_certain and not fix else []
    advice += ["find out why it cannot be removed"] if any_certain and fix else []
    advice += ["remove the rest yourself if nothing uses it"] if any_uncertain else []
    return warn("leftovers", "; ".join(parts), "; ".join(advice))


def find_leftovers(runs: Path | None, *, is_head: bool) -> list[Leftover]:
    """List the leftovers of this host: private folders, unfinished checkpoints, scratch folders and processes.

    Only the head looks for unfinished checkpoints, because it sees the locks of the runs.
    """
    return [
        *(_private_folders(runs) if runs is not None else ()),
        *(_unfinished_checkpoints(runs) if runs is not None and is_head else ()),
        *_scratch_folders(Path(tempfile.gettempdir())),
        *(
            Leftover(f"process {process.pid} ({process.title[:80]})", process=process, certain=certain)
            for process, certain in orphans(read_processes())
        ),
    ]


def remove(leftover: Leftover) -> bool:
    """Remove the folder or kill the process. Returns whether it is gone.

    Locks and processes are checked again before. A scratch folder is not: its process has ended for good.
    """
    if leftover.process is not None:
        return _kill(leftover.process)
    path = leftover.path
    assert path is not None
    if path.name.startswith(PRIVATE):
        remove_if_abandoned(path)
    elif path.name.startswith(SCRATCH) or not is_held(_run_folder_around(path)):
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


# --- folders ---


def is_held(run: Path | None) -> bool:
    """Whether the lock of any private folder of this run is held or cannot be read; False for None."""
    return run is not None and any(not lock_is_free(lock) for lock in run.glob(f"{PRIVATE}*/{LOCK}"))


def _private_folders(runs: Path) -> Iterator[Leftover]:
    """Yield private folders whose lock is free, and those that have no lock, which are not certainly dead."""
    locks_are_shared = are_locks_shared(runs)
    for folder in sorted(runs.glob(f"*/{PRIVATE}*")):
        lock = folder / LOCK
        # Folders of other users cannot be read.
        with contextlib.suppress(PermissionError):
            if lock.exists():
                if lock_is_free(lock):
                    yield Leftover(str(folder), folder, certain=locks_are_shared)
            elif folder.is_dir() and not is_held(folder.parent):
                # A folder that is being created has no lock for a moment.
                yield Leftover(f"{folder} (without a lock)", folder, certain=False)


def _unfinished_checkpoints(runs: Path) -> Iterator[Leftover]:
    """Yield the unfinished checkpoints of runs with no held lock."""
    locks_are_shared = are_locks_shared(runs)
    for config_file in sorted(runs.glob(f"*/{CONFIG}")):
        run = config_file.parent
        # PART marks a part of a run whose head is on another host: nothing here shows whether that is alive.
        if is_held(run) or (run / PART).exists():
            continue
        try:
            folder = checkpoint_dir(config_from_json(config_file.read_text()), run)
            names = sorted(os.listdir(folder))
        except (OSError, ValueError, ConfigError):
            continue
        # A checkpoint outside the run folder may belong to a run of the same name in another folder of runs.
        is_certain = locks_are_shared and folder.is_relative_to(run)
        for name in filter(is_leftover, names):
            yield Leftover(f"{folder / name} (unfinished checkpoint)", folder / name, certain=is_certain)


def _run_folder_around(path: Path) -> Path | None:
    """Return the innermost run folder that contains ``path``; None for a path in no run folder."""
    return next((parent for parent in path.parents if (parent / CONFIG).is_file()), None)


def _scratch_folders(parent: Path) -> Iterator[Leftover]:
    """Yield engines' scratch folders, named asyncrl-engine-PID-..., whose process has ended and whose lock is free."""
    for folder in sorted(parent.glob(f"{SCRATCH}*")):
        pid = folder.name.removeprefix(SCRATCH).partition("-")[0]
        with contextlib.suppress(OSError):
            is_gone = pid.isdecimal() and folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid))
            # A process of another container is invisible here, but its lock is not.
            if is_gone and lock_is_free(folder / SCRATCH_LOCK):
                yield Leftover(str(folder), folder)


# --- processes ---


def read_processes() -> dict[int, Process]:
    """Return the processes of this user, and process 1, by process id."""
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error), process.oneshot():
            words = process.cmdline()
            if process.uids().real == os.getuid() or process.pid == 1:
                name, started = process.name(), process.create_time()
                processes[process.pid] = Process(process.pid, process.ppid(), started, " ".join(words).strip(), name)
    return processes


def orphans(processes: dict[int, Process]) -> list[tuple[Process, bool]]:
    """Find processes of asyncrl that belong to no live run; each comes with whether that is certain. Pure.

    The search goes from each process up to its first ancestor that is no process of an actor, a worker or an engine. In
    a live run this ancestor is the launcher's guard or agent, or the shell in which a person started the actor. If it
    is process 1 or another reaper, the process is an orphan. An engine is never certain: another program may own it.
    """
    orphaned = []
    for process in processes.values():
        is_of_asyncrl = TITLE.match(process.title) is not None
        if not is_of_asyncrl and not process.title.startswith(ENGINE_TITLES):
            continue
        ancestor = process
        while (
            TITLE.match(ancestor.title) or ancestor.title.startswith(ENGINE_TITLES)
        ) and ancestor.parent in processes:
            ancestor = processes[ancestor.parent]
        if LAUNCHER in ancestor.title:
            continue
        if ancestor.pid == 1 or ancestor.name in REAPERS:
            orphaned.append((process, is_of_asyncrl))
    return orphaned


def _kill(process: Process) -> bool:
    """Kill the process if it is still certainly an orphan. Returns whether it is killed or its id is unused.

    False also if another process has the id now.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # The id may be used again, but the handle keeps its process. So this check comes after the handle is open.
        current = {each.pid: each for each, certain in orphans(read_processes()) if certain}.get(process.pid)
        if current is None or current.started != process.started:
            return not psutil.pid_exists(process.pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
