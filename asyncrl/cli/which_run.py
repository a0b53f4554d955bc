"""Finds the run that the argument RUN means: a folder, a name under runs/, HOST:PORT, or without RUN the newest.

Importing this module loads nothing beyond the standard library. Fails with UsageError, which names what was found
instead.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

PROGRAM = "asyncrl-top"
RUNS = "runs"
CONNECT_S = 4.0
"""Longest wait for a connection."""


def run_folder(run: str | None, flag: str) -> Path:
    """Return the folder of ``run``, live or not; for None that of the newest run. ``flag`` is named in UsageError."""
    from asyncrl.core.errors import UsageError

    if run is not None:
        path = _named(run)
        if path is None:
            raise UsageError(f"{run}: no such folder; {flag} wants the folder of a run")
        return path
    runs = _newest_runs()
    if not runs:
        raise UsageError(f"there is no run under {Path(RUNS).absolute()}; name the folder of one")
    return runs[0]


def named(run: str) -> str:
    """Return the folder of a run by its path or its name under runs/; any other text unchanged."""
    return str(_named(run) or run)


def _named(run: str) -> Path | None:
    folders = [path for path in (Path(run), Path(RUNS) / run) if path.is_dir()]
    # A folder with config.json comes first: another folder here may have the name of the run.
    return next((path for path in folders if (path / "config.json").is_file()), folders[0] if folders else None)


def _newest_runs() -> list[Path]:
    """Return the run folders under runs/, the newest first, without those that this user may not read."""
    by_time = []
    with contextlib.suppress(OSError):
        for path in Path(RUNS).iterdir():
            with contextlib.suppress(OSError):
                by_time.append(((path / "config.json").stat().st_mtime, path))
    return [path for _, path in sorted(by_time, reverse=True)]


def may_live(run_dir: Path, *, if_hidden: bool = True) -> bool:
    """Return whether a run is live in the folder; returns ``if_hidden`` if this user may not read the folder's lock."""
    from asyncrl.launcher.run_folder.private import is_live

    try:
        return is_live(run_dir)
    except PermissionError:
        return if_hidden


def live_run_place(run: str | None) -> str:
    """Return the folder or HOST:PORT of the live run that ``run`` means; for None, of the newest live run.

    Raises UsageError if no run is live there, with the next step for the user.
    """
    from asyncrl.core.errors import UsageError
    from asyncrl.launcher.run_folder.private import is_live

    if run is None:
        runs = _newest_runs()
        live = next((path for path in runs if may_live(path, if_hidden=False)), None)
        if live is not None:
            return str(live)
        if not runs:
            raise UsageError(f"no run lives under {Path(RUNS).absolute()}; name its folder, or HOST:PORT with --keys")
        raise UsageError(f"no run lives under {RUNS}; to see the last one again: {PROGRAM} {runs[0]} --replay")
    path = _named(run)
    if path is None:
        if ":" in run:
            return run
        raise UsageError(f"{run}: no such run folder, none of that name under {RUNS}, and not HOST:PORT")
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: this is not the folder of a run (it has no config.json)")
    if not is_live(path):
        raise UsageError(f"{path}: the run has ended; to see it again: {PROGRAM} {path} --replay")
    return str(path)


def must_be_reachable(address: str) -> None:
    """Require that the address accepts connections. Raises ActorFailed, so that a wrong address is reported at once."""
    from asyncrl.core.errors import ActorFailed

    if why := why_unreachable(address):
        hint = "that run has ended, or it is at another address, see RUN/private/controller.json on its head"
        raise ActorFailed("controller/0", f"{address}: {why}; {hint}")


def why_unreachable(address: str) -> str:
    """Reason that an address cannot be connected to; empty if it can. Tries each address of the host for CONNECT_S."""
    from asyncrl.top.client import split_address

    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.gaierror as error:
        return f"the host {host} is unknown here ({error.strerror})"
    except UnicodeError:
        return f"{host} is not a valid host name"
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s: the host is down, or a firewall blocks the port"
    except ConnectionRefusedError as error:
        return f"nothing listens there ({error.strerror})"
    except OSError as error:
        return f"it cannot be reached ({error.strerror})"
