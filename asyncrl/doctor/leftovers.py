"""Leftovers on this host of runs that were killed as a whole, and their removal.

Certainly dead is: a private folder whose lock is free; the unfinished checkpoints of a run none of whose locks is held;
an engine's scratch folder whose process is no more and whose lock is free; a process of asyncrl that has been orphaned,
since a living run's processes all descend from its guard or its agent. Nothing else is ever removed. A lock says
nothing where the file system keeps locks for each host by itself, or not at all: what lies there is only named.
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
from asyncrl.checks.findings import Finding, listed, ok, warn
from asyncrl.config.engines import ENGINES
from asyncrl.config.load import config_from_json
from asyncrl.errors import ConfigError
from asyncrl.files import lock_is_free, try_lock
from asyncrl.launcher.run_folder.private import CONFIG, LOCK, PART, PRIVATE

SCRATCH = "asyncrl-engine-"
SCRATCH_LOCK = "lock"
LOCAL_LOCKS = re.compile(r"\b(local_lock=(all|flock)|localflock|nolock)\b")
"""Mount options under which the locks of other hosts are not seen."""
TITLE = re.compile(r"asyncrl ([a-z_]+/\d+ |reward worker|episodes worker)|.* -m asyncrl\.workers\.(keeper|warden) ")
"""Command line of an actor's process, or of one of its workers."""
ENGINE_TITLES = tuple(traits.process_title for traits in ENGINES.values() if traits.process_title)
LAUNCHER = "asyncrl.launcher."
REAPERS = ("systemd", "init", "tini", "dumb-init", "catatonit")
"""Names of processes that orphans go to, beside process 1."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this user."""

    pid: int
    parent: int
    started: float
    title: str
    """Command line of the process."""
    name: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """A thing, or a process, that belongs to no living run. ``certain`` says that it may be removed."""

    what: str
    path: Path | None = None
    process: Process | None = None
    certain: bool = True


def check_leftovers(runs: Path | None, *, is_head: bool, fix: bool) -> Finding:
    """Name what is left, and with ``fix`` remove what is certainly dead.

    ``runs`` is the folder of run folders, or None where the head sees the same one and looks there.
    """
    found = find_leftovers(runs, is_head=is_head)
    removed = [one for one in found if fix and one.certain and remove(one)]
    rest = [one for one in found if one not in removed]
    told = [f"removed {listed([one.what for one in removed])}"] if removed else []
    if not rest:
        return ok("leftovers", told[0] if told else "none")
    told.append(listed([one.what for one in rest]))
    sure, unsure = any(one.certain for one in rest), any(not one.certain for one in rest)
    advice = ["--fix removes what is certainly dead"] if sure and not fix else []
    advice += ["see why it cannot be removed"] if sure and fix else []
    advice += ["see whether the rest is still used, and remove it yourself"] if unsure else []
    return warn("leftovers", "; ".join(told), "; ".join(advice))


def find_leftovers(runs: Path | None, *, is_head: bool) -> list[Leftover]:
    """Leftovers of this host. The head alone looks for unfinished checkpoints, where the runs' own locks are."""
    return [
        *(_private_folders(runs) if runs is not None else ()),
        *(_checkpoints(runs) if runs is not None and is_head else ()),
        *_scratch_folders(Path(tempfile.gettempdir())),
        *(
            Leftover(f"process {process.pid} ({process.title[:80]})", process=process, certain=certain)
            for process, certain in orphans(read_processes())
        ),
    ]


def remove(leftover: Leftover) -> bool:
    """Remove it, after one more look, so that nothing that lives by now is removed; whether it is gone."""
    if leftover.process is not None:
        return _kill(leftover.process)
    path = leftover.path
    assert path is not None
    if path.name.startswith(PRIVATE):
        return _remove_private(path)
    if path.name.startswith(SCRATCH) or not is_held(_run_of(path)):
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


# --- folders ---


def is_held(run: Path | None) -> bool:
    """Whether the lock of a private folder of this run is held, or cannot be asked."""
    return run is not None and any(not lock_is_free(lock) for lock in run.glob(f"{PRIVATE}*/{LOCK}"))


def locks_tell(path: Path, mounts: str | None = None) -> bool:
    """Whether a free lock at ``path`` is free on every host; ``mounts`` is what /proc/self/mountinfo holds."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return False
    best, options = "", ""
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        place = mount.split()[4]
        # The innermost mount counts, and of several at one place the last, which covers the others.
        if path.absolute().is_relative_to(place) and len(place) >= len(best):
            best, options = place, f"{mount} {kind}"
    return not LOCAL_LOCKS.search(options)


def _private_folders(runs: Path) -> Iterator[Leftover]:
    certain = locks_tell(runs)
    for folder in sorted(runs.glob(f"*/{PRIVATE}*")):
        lock = folder / LOCK
        # Another user's is for that user to look into.
        with contextlib.suppress(PermissionError):
            if lock.exists():
                if lock_is_free(lock):
                    yield Leftover(str(folder), folder, certain=certain)
            elif folder.is_dir() and not is_held(folder.parent):
                # One that is being made has no lock for a moment.
                yield Leftover(f"{folder} (without a lock)", folder, certain=False)


def _remove_private(path: Path) -> bool:
    # Held while it goes, so that nobody takes it over meanwhile.
    with contextlib.suppress(OSError), try_lock(path / LOCK) as is_free:
        if is_free:
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
    return False


def _checkpoints(runs: Path) -> Iterator[Leftover]:
    certain = locks_tell(runs)
    for config_file in sorted(runs.glob(f"*/{CONFIG}")):
        run = config_file.parent
        # The part of a run whose head is elsewhere: nothing here tells whether that goes on.
        if is_held(run) or (run / PART).exists():
            continue
        try:
            folder = checkpoint_dir(config_from_json(config_file.read_text()), run)
            names = sorted(os.listdir(folder))
        except (OSError, ValueError, ConfigError):
            continue
        # A checkpoint elsewhere is not told apart from that of a run of the same name in another folder of runs.
        mine = certain and folder.is_relative_to(run)
        for name in filter(is_leftover, names):
            yield Leftover(f"{folder / name} (unfinished checkpoint)", folder / name, certain=mine)


def _run_of(path: Path) -> Path | None:
    """The run folder around a path."""
    return next((parent for parent in path.parents if (parent / CONFIG).is_file()), None)


def _scratch_folders(parent: Path) -> Iterator[Leftover]:
    for folder in sorted(parent.glob(f"{SCRATCH}*")):
        pid = folder.name.removeprefix(SCRATCH).partition("-")[0]
        with contextlib.suppress(OSError):
            is_gone = pid.isdecimal() and folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid))
            # A process of another container is not seen from here, and its lock is.
            if is_gone and lock_is_free(folder / SCRATCH_LOCK):
                yield Leftover(str(folder), folder)


# --- processes ---


def read_processes() -> dict[int, Process]:
    """Processes of this user, and process 1, by their id."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error), process.oneshot():
            words = process.cmdline()
            if process.uids().real == os.getuid() or process.pid == 1:
                name, started = process.name(), process.create_time()
                found[process.pid] = Process(process.pid, process.ppid(), started, " ".join(words).strip(), name)
    return found


def orphans(processes: dict[int, Process]) -> list[tuple[Process, bool]]:
    """Processes of asyncrl that belong to no living run, and whether that is certain. Pure.

    Above a process of a living run there is its guard or its agent; above one that was started by hand there is its
    starter. Orphans go to process 1, or to another process that takes in orphans. Engine cores may be anybody's.
    """
    found = []
    for process in processes.values():
        is_ours = TITLE.match(process.title) is not None
        if not is_ours and not process.title.startswith(ENGINE_TITLES):
            continue
        above = process
        while (TITLE.match(above.title) or above.title.startswith(ENGINE_TITLES)) and above.parent in processes:
            above = processes[above.parent]
        if LAUNCHER in above.title:
            continue
        if above.pid == 1 or above.name in REAPERS:
            found.append((process, is_ours))
    return found


def _kill(process: Process) -> bool:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # From here on the number stands for the process that has it now, and no other can take it.
        now = {one.pid: one for one, certain in orphans(read_processes()) if certain}.get(process.pid)
        if now is None or now.started != process.started:
            return not psutil.pid_exists(process.pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
