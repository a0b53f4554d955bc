"""Whether a host can write where it has to, and whether there is room.

A folder that does not exist yet is judged by the nearest one above it that does. Nothing is left behind: the file of
a trial has no name.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from asyncrl.disk import free_bytes, full_errno, in_bytes, in_words, nearest_folder
from asyncrl.preflight.findings import Finding, fail, ok, warn
from asyncrl.preflight.needs import Need

TRIAL_BYTES = 4096


def write_problem(path: Path) -> OSError | None:
    """Error of a trial to write below ``path``; None if it can be written."""
    folder = nearest_folder(path)
    if not folder.is_dir():
        return NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return OSError(error.errno, f"cannot be written to: {error.strerror or error}", str(folder))
    return None


def same_disk(one: Path, other: Path) -> bool:
    """Whether both use up the same room. Raises OSError."""
    return nearest_folder(one).stat().st_dev == nearest_folder(other).stat().st_dev


def check_folder(check: str, key: str, path: Path, need: Need) -> Finding:
    """Whether what is to be at ``path``, by the configuration's ``key``, can be written there."""
    if problem := write_problem(path):
        fix = f"give this user the right to write there, or set {key} to another"
        if full_errno(problem):
            fix = f"make room, or set {key} to a larger disk"
        return fail(check, f"{path}: {in_words(problem, path)}", fix, key=key)
    free = free_bytes(path)
    if free is None:
        return ok(check, f"{path} does not say how much is free there", key=key)
    return judge_room(check, key, path, free, need)


def judge_room(check: str, key: str, path: Path, free: int, need: Need) -> Finding:
    """Judge the room on a disk. Pure; all numbers are bytes."""
    told = f"{path} has {in_bytes(free)} free"
    if need.wanted:
        told += f"; about {in_bytes(need.wanted)} are needed until the end"
        told += f" ({', '.join(need.made_of)})" if need.made_of else ""
        told += f", and {in_bytes(need.least)} at the least" if need.least else ""
    fix = f"make room, or set {key} to a larger disk"
    if check == "checkpoint_dir":
        fix += "; checkpoint.keep and checkpoint.keep_every_steps say how many are kept"
    if free < need.least:
        return fail(check, told, fix, key=key)
    if free < need.wanted:
        return warn(check, told, fix, key=key)
    return ok(check, told, key=key)
