"""Runs untrusted programs, such as code that a policy wrote, for users' episodes and rewards.

``run`` blocks, ``run_async`` is awaited. Both make a SandboxRequest and give it to a backend: Bubblewrap by default, or
a class of the user. Bubblewrap starts a process of jail.py for each request. Invariant: a result is about the program.
If the sandbox itself fails, SandboxError is raised, so a host without bubblewrap never looks like a wrong answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from subprocess import PIPE
from typing import Any, Protocol

from asyncrl.workers.user_code import load

__all__ = ["Bubblewrap", "SandboxBackend", "SandboxError", "SandboxRequest", "SandboxResult", "run", "run_async"]

MIB = 1 << 20
START_S = 60.0
"""Longest time of the sandbox itself (s): to start, to write and read files, and to end on a busy host."""


JAIL = (sys.executable, "-m", "asyncrl.sandbox.jail")
"""Command that runs one request."""


class SandboxError(RuntimeError):
    """The sandbox could not run the program."""


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """A program and its limits. Raises ValueError for an ``argv`` that is text or empty, and for a path in ``files`` or
    ``outputs`` that is not below the work folder."""

    argv: Sequence[str]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Contents by path, relative to the work folder, in which the program starts."""
    timeout: float = 10.0
    """Wall time (s)."""
    network: bool = False
    """Whether the program shares the host's network, loopback included."""
    outputs: Sequence[str] = ()
    """Paths of files that come back, relative to the work folder."""
    stdin: str | bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables; nothing of the caller's passes."""
    read_only: Sequence[str] = ()
    """Further files and folders of the host that the program may read, at the same paths."""
    memory_bytes: int = 1024 * MIB
    """Private memory of each process, and resident memory of all together."""
    disk_bytes: int = 64 * MIB
    """Size of the work folder and /tmp, which are in memory, and of each file."""
    disk_files: int = 10_000
    """Most files, folders and links in the work folder and /tmp together."""
    processes: int = 128
    """Processes and threads at the same time; no limit before Linux 5.14."""
    output_bytes: int = MIB // 16
    """Bytes that are kept of standard output, and of standard error: the first and the last half."""

    def __post_init__(self) -> None:
        if isinstance(self.argv, str) or not self.argv:
            raise ValueError("argv must be a list of words: the program and its arguments")
        for path in (*self.files, *self.outputs):
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                raise ValueError(f"{path!r} is not a path below the work folder of a sandbox")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The end of a program."""

    exit_code: int
    """As a shell has it: 127 if the program was not found, and 128 more than the number of a signal that killed it."""
    stdout: str
    stderr: str
    timed_out: bool
    memory_exceeded: bool
    duration: float
    """Wall time of the program (s)."""
    outputs: Mapping[str, bytes]
    """Contents of the asked outputs, up to disk_bytes in all. Missing files, links and special files are left out."""

    @property
    def ok(self) -> bool:
        """Whether the program ended with exit code 0, within its limits."""
        return self.exit_code == 0 and not self.timed_out and not self.memory_exceeded


class SandboxBackend(Protocol):
    """Runs requests. A class that is named as backend="MODULE:CLASS" is called without arguments."""

    def run(self, request: SandboxRequest) -> SandboxResult:
        """Run the program until it ends or reaches a limit. Raises SandboxError."""


class Bubblewrap:
    """Runs programs by bubblewrap on this host (jail.py)."""

    def run(self, request: SandboxRequest) -> SandboxResult:
        """Run the program; blocks."""
        with subprocess.Popen(JAIL, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
            try:
                output, errors = process.communicate(_encoded(request), timeout=request.timeout + START_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"the sandbox did not end within {error.timeout:g} s") from error
            finally:
                # After the jail, the kernel ends the processes inside it.
                process.kill()
        return _decoded(output, errors)

    async def run_async(self, request: SandboxRequest) -> SandboxResult:
        """Run the program. If it is cancelled, no process is left when it returns."""
        process = await asyncio.create_subprocess_exec(*JAIL, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(request.timeout + START_S):
                output, errors = await process.communicate(_encoded(request))
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not end within {request.timeout + START_S:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        return _decoded(output, errors)


def run(
    argv: Sequence[str],
    files: Mapping[str, str | bytes] | None = None,
    timeout: float = 10.0,
    network: bool = False,
    *,
    backend: str | SandboxBackend = "",
    **limits: Any,
) -> SandboxResult:
    """Run a program in a sandbox and wait for its end; for reward functions and plain episodes.

    ``limits`` are further fields of SandboxRequest. ``backend`` is an object or "MODULE:CLASS"; by default Bubblewrap.
    Raises SandboxError if the sandbox fails, and ValueError for a request that makes no sense.
    """
    request = SandboxRequest(argv=argv, files=files or {}, timeout=timeout, network=network, **limits)
    return _backend(backend).run(request)


async def run_async(
    argv: Sequence[str],
    files: Mapping[str, str | bytes] | None = None,
    timeout: float = 10.0,
    network: bool = False,
    *,
    backend: str | SandboxBackend = "",
    **limits: Any,
) -> SandboxResult:
    """Run a program in a sandbox, as ``run`` does; for episodes. A backend other than Bubblewrap runs in a thread."""
    request = SandboxRequest(argv=argv, files=files or {}, timeout=timeout, network=network, **limits)
    chosen = _backend(backend)
    if isinstance(chosen, Bubblewrap):
        return await chosen.run_async(request)
    return await asyncio.to_thread(chosen.run, request)


def _backend(named: str | SandboxBackend) -> SandboxBackend:
    if not isinstance(named, str):
        return named
    return load(named, "backend", "MODULE:CLASS")() if named else Bubblewrap()


def _encoded(request: SandboxRequest) -> bytes:
    """The request in JSON, with contents in base64."""
    contents = {path: _base64(content) for path, content in request.files.items()}
    return json.dumps(asdict(request) | {"files": contents, "stdin": _base64(request.stdin)}).encode()


def _base64(content: str | bytes) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def _decoded(output: bytes, errors: bytes) -> SandboxResult:
    """Read the jail's output. If it is empty, raises SandboxError with the last line of ``errors`` as the reason."""
    if not output:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise SandboxError(lines[-1] if lines else "the process of the sandbox was killed")
    found: dict[str, Any] = json.loads(output)
    found["outputs"] = {path: base64.b64decode(content) for path, content in found["outputs"].items()}
    return SandboxResult(**found)
