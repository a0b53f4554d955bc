"""Ray in an environment of its own, and a process that runs its side.

Ray is never a dependency of asyncrl and never imported here. When the context ends, every process
that it started (raylet, GCS, workers) and its folder are gone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from asyncrl.core.errors import ActorFailed
from tools.bench.environments import environment, without_python_settings

REQUIREMENT = "ray==2.60.*"
CPUS = 2
ANSWER_S = 300.0
CLOSE_S = 20.0


class Ray:
    """Asks the process to measure."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def measure(self, what: str, **arguments: Any) -> float:
        """One figure. Raises ActorFailed when the process is gone, TimeoutError when it does not answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise ActorFailed("ray", f"ended while it measured {what}; its words are above")
        value: float = json.loads(line)["value"]
        return value


@asynccontextmanager
async def ray() -> AsyncIterator[Ray]:
    """A running Ray with CPUS cores, and nothing of it left afterwards."""
    python = environment("ray", [REQUIREMENT])
    # The paths of its sockets have to be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-I",
        str(Path(__file__).with_name("ray_side.py")),
        str(CPUS),
        folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=without_python_settings(),
    )
    family: list[psutil.Process] = []
    try:
        side = Ray(process)
        await side.measure("ready")
        yield side
    finally:
        try:
            family = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except (TimeoutError, psutil.NoSuchProcess):
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            for member in family:
                # The start time identifies a process too, so a number that is used again is safe.
                if member.is_running():
                    member.kill()
            psutil.wait_procs(family, timeout=CLOSE_S)
            shutil.rmtree(folder, ignore_errors=True)
