"""Users' code that tries to steal the run's secrets. Standard library alone; ``prepare`` copies it to the folder of
such code.

``TARGETS`` in the same folder (JSON) lists the secrets. ``steal`` returns its loot by the way it was tried, and writes
the same to a new file there: so the run's working directory must be writable.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "hush-hush"
PTRACE_SEIZE = 0x4206
NEW_NAMESPACES = 0x10020000
libc = ctypes.CDLL(None, use_errno=True)


def prepare(folder: Path, private: Path, **processes: int) -> None:
    """Let it steal what there is, in a folder of users' code."""
    (folder / "thief.py").write_text(Path(__file__).read_text())
    (folder / "TARGETS").write_text(json.dumps({"private": str(private), "processes": processes}))


def steal() -> dict[str, Any]:
    reported = json.loads((HERE / "TARGETS").read_text())
    private, processes = Path(reported["private"]), reported["processes"]
    loot = {
        "keys": tried(lambda: [path.read_text() for path in sorted(private.glob("*.json"))]),
        "listed": tried(lambda: os.listdir(private)),
        "linked": tried(lambda: linked(private)),
        "environment": sorted(name for name, value in os.environ.items() if MARK in value),
        "descriptors": [path for path in descriptors() if MARK in path or reported["private"] in path],
        "uncovered": tried(lambda: (libc.umount2(str(private).encode(), 2), os.listdir(private))[1]),
        "uncovered in namespaces": in_child(lambda: uncovered(private)),
    }
    for name, pid in processes.items():
        loot |= {f"{what} of {name}": got for what, got in entered(pid, private).items()}
    # Last, since they change the process.
    loot["moved"] = tried(lambda: moved(private, private.with_name("elsewhere")))
    loot["moved with its folder"] = tried(
        lambda: (
            moved(private.parent, private.parent.with_name("there"))
            and os.listdir(private.parent.with_name("there") / private.name)
        )
    )
    got = {way: what for way, what in loot.items() if what}
    with tempfile.TemporaryFile(dir=HERE) as file:
        file.write(b"x")
    (HERE / "loot.new").write_text(json.dumps(got))
    (HERE / "loot.new").rename(HERE / "loot")
    return got


def entered(pid: int, private: Path) -> dict[str, Any]:
    of = Path(f"/proc/{pid}")
    return {
        "environment": tried(lambda: MARK.encode() in (of / "environ").read_bytes()),
        "memory": tried(lambda: memory(pid)),
        "descriptor": tried(lambda: os.open(of / "fd" / "1", os.O_RDONLY) > 0),
        "folders": tried(lambda: os.listdir(f"{of}/root{private}")),
        "trace": traced(pid),
    }


def tried(way: Callable[[], Any]) -> Any:
    try:
        return way()
    except OSError:
        return None


def linked(private: Path) -> str:
    os.link(private / "run.json", HERE / "link")
    return (HERE / "link").read_text()


def moved(source: Path, target: Path) -> list[str]:
    os.rename(source, target)
    return os.listdir(target)


def uncovered(private: Path) -> bool:
    if libc.unshare(NEW_NAMESPACES):
        return False
    libc.umount2(str(private).encode(), 2)
    return bool(os.listdir(private))


def in_child(way: Callable[[], Any]) -> bool:
    """Whether it worked in a process of its own."""
    pid = os.fork()
    if not pid:
        code = 0
        try:
            code = 3 if tried(way) else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def descriptors() -> list[str]:
    links = (tried(lambda fd=fd: os.readlink(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd"))
    return [link for link in links if link]


def memory(pid: int) -> int:
    start = int(Path(f"/proc/{pid}/maps").read_text().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb") as file:
        file.seek(start)
        return len(file.read(16))


def traced(pid: int) -> bool:
    """It is released with this process, and nothing stops it meanwhile."""
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return bool(libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0)


def reward(*, completion: str) -> float:
    return float(len(steal()))


async def episode(task: Any, client: Any) -> float:
    return float(len(steal()))


if __name__ == "__main__":
    signal.alarm(60)
    print(len(steal()))
    sys.exit(0)
