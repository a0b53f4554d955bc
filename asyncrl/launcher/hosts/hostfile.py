"""The hostfile: which hosts a run may use, and how many GPUs of each.

    # comment
    node-1 slots=8
    node-2            # its GPUs are detected

Order counts: the first host is the head. ssh gets each name unchanged, so users, ports and addresses belong into the
ssh configuration. A name that ssh would read as an option is an error.

Fails with UsageError, which has a line for every problem of the file.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.errors import UsageError
from asyncrl.core.formatting import name_some

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SLOTS = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class HostLine:
    """A host of the hostfile. ``slots`` is the number of GPUs that the run may use there; None for all."""

    name: str
    slots: int | None = None

    def usable(self, gpus: Sequence[str]) -> tuple[str, ...]:
        """Return the first ``slots`` of the ``gpus`` found on the host. Raises UsageError if there are too few."""
        if self.slots is not None and self.slots > len(gpus):
            raise UsageError(f"{self.name}: slots={self.slots} in the hostfile, but {len(gpus)} GPUs are there")
        return tuple(gpus[: self.slots])


def read_hostfile(path: str | Path) -> list[HostLine]:
    """Read the hosts of a file, in its order. Raises UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"hostfile {path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"hostfile {path}: is not text in UTF-8") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> list[HostLine]:
    """Parse the text of a hostfile into its hosts, in order; ``path`` is for errors. Raises UsageError."""
    hosts: list[HostLine] = []
    lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *settings = words
        wrong = _name_problems(name)
        slots, slot_problems = _slots(settings)
        wrong += slot_problems
        # Upper and lower case do not count in host names.
        first_line = lines.setdefault(name.lower(), number)
        if first_line != number and not _name_problems(name):
            wrong.append(f"{name} is there already, in line {first_line}; name each host once, with all of its slots")
        problems += [f"{path}:{number}: {problem}" for problem in wrong]
        if not wrong:
            hosts.append(HostLine(name, slots))
    if not lines:
        problems.append(f"{path}: names no host; write one a line, as in: node-1 slots=8")
    if problems:
        raise UsageError("\n".join(problems))
    return hosts


def select_hosts(hosts: Sequence[HostLine], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[HostLine]:
    """Select the hosts named in ``include`` (all, if it is empty) but not in ``exclude``, in the hostfile's order.

    Raises UsageError for names that are not in the hostfile, and if no host is left.
    """
    known = {host.name.lower(): host for host in hosts}
    listed = name_some([host.name for host in hosts])
    problems = []
    for option, names in (("--include", include), ("--exclude", exclude)):
        for name in names:
            if name.lower() not in known:
                near = difflib.get_close_matches(name.lower(), known, n=1)
                hint = f"did you mean {known[near[0]].name}?" if near else f"there are {listed}"
                problems.append(f"{option}: {name} is not in the hostfile; {hint}")
    if problems:
        raise UsageError("\n".join(problems))
    wanted = {name.lower() for name in include or known} - {name.lower() for name in exclude}
    if not wanted:
        raise UsageError(f"--include and --exclude leave no host of {listed}")
    return [host for host in hosts if host.name.lower() in wanted]


def _name_problems(name: str) -> list[str]:
    if _NAME.fullmatch(name) or _is_address(name):
        return []
    if "@" in name:
        return [f"{name!r}: the user belongs into the ssh configuration (User, under its Host)"]
    if ":" in name:
        return [f"{name!r}: the port belongs into the ssh configuration (Port, under its Host)"]
    if "=" in name:
        return [f"{name!r}: the host's name comes first, as in: node-1 slots=8"]
    return [f"{name!r} is no host name"]


def _is_address(name: str) -> bool:
    try:
        # ip_address accepts a zone after "%", which is any text.
        return "%" not in name and bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _slots(settings: Sequence[str]) -> tuple[int | None, list[str]]:
    """Parse the words after a host's name; returns (slots, problems). Without slots=N, slots is None."""
    slots: int | None = None
    problems = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key != "slots" or not equals:
            problems.append(f"{setting!r} is not known; after the name comes slots=N or nothing")
        elif slots is not None:
            problems.append("slots is there twice")
        elif not _SLOTS.fullmatch(value):
            problems.append(f"slots={value!r} is no number of GPUs (0 to 9999)")
        else:
            slots = int(value)
    return slots, problems
