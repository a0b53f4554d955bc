"""Processes on the other side of a benchmark, and the environments of other packages that some of them run in.

A worker gets each order as a line of JSON on stdin and answers with a line of JSON on stdout. It ends when stdin ends.
It may live as one real actor of asyncrl. A whole run is started with asyncrl-launch and gives its metrics.
Other packages are never dependencies of asyncrl: their environments are made on demand under .bench. An environment is
complete if its mark holds the requirements; an incomplete one is made again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import ActorFailed
from asyncrl.rpc.actor import Actor, ActorContext
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.transport import Transport
from asyncrl.rpc.wire.zeromq import ZmqTransport
from tools.bench.report import for_json_alone
from tools.live_run import run_to_end

FOLDER = Path(__file__).resolve().parents[2] / ".bench"
ANSWER_S, CLOSE_S = 600.0, 20.0
LONGEST_LINE = 1 << 24


class Worker:
    """A process that takes orders."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name, self._process = name, process
        self._stdin, self._stdout = process.stdin, process.stdout

    def order(self, **order: Any) -> None:
        """Send an order. Raises ActorFailed if the process has ended."""
        try:
            self._stdin.write(json.dumps(order).encode() + b"\n")
        except RuntimeError as error:
            # uvloop's, for a pipe that is closed.
            raise ActorFailed(self._name, "ended before it measured; its output is above") from error

    async def answer(self, within_s: float | None = ANSWER_S) -> dict[str, Any]:
        """Receive the next answer. Raises ActorFailed if the process ended, TimeoutError if it does not answer."""
        async with asyncio.timeout(within_s):
            line = await self._stdout.readline()
        if not line:
            raise ActorFailed(self._name, "ended while it measured; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def kill(self) -> None:
        """End the process by SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, **order: Any) -> dict[str, Any]:
        self.order(**order)
        return await self.answer()


@asynccontextmanager
async def worker(
    name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
) -> AsyncIterator[Worker]:
    """A running process. It is gone when the context ends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=variables, limit=LONGEST_LINE)
    made = Worker(name, process)
    try:
        yield made
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(CLOSE_S):
            await process.wait()
    finally:
        await made.kill()


def lines_of_run(tree: Mapping[str, Any], timeout: float) -> dict[str, list[dict[str, Any]]]:
    """Launch a run and wait for its end; returns its lines of metrics.jsonl by kind. Raises RunEnded."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        run = run_to_end(tree, Path(folder), timeout)
        return {kind: run.lines(kind) for kind in ("train", "update")}


def answer_orders(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be a worker until stdin ends. Other output of this process goes to stderr."""
    with for_json_alone() as answers:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def actor_context(
    config: Config,
    name: str,
    run_dir: Path,
    credentials: Credentials,
    *,
    incarnation: int = 1,
    transport: Transport | None = None,
    controller: str | None = None,
    bind_host: str = "",
) -> ActorContext:
    """The context of an actor, on ZeroMQ unless another transport is given."""
    return ActorContext(
        config=config,
        name=name,
        incarnation=incarnation,
        run_dir=run_dir,
        transport=transport or ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes),
        credentials=credentials,
        controller=controller,
        bind_host=bind_host,
    )


async def until_ready(actors: Sequence[Actor], lives: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all actors are ready or one of their lives is over. Raises the error that ended it."""
    while not all(actor.ready for actor in actors) and not any(life.done() for life in lives):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for life in lives:
        if life.done():
            life.result()


async def live(
    actor: Actor, ready: Callable[[], Mapping[str, Any]], obey: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Be a worker that lives as this actor until stdin ends. Its first line is ``ready()``."""
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(actor.main())
        await until_ready([actor], [life])
        print(json.dumps(ready()), flush=True)
        while line := await orders.readline():
            if obey is not None:
                obey(json.loads(line))
        actor.begin_drain()


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter with these packages, made at the first use. Raises CalledProcessError if one is not installed."""
    folder = FOLDER / name
    python, mark = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join(requirements)
    if not mark.exists() or mark.read_text() != wanted:
        print(f"making {folder} with {', '.join(requirements)}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
            check=True,
            stdout=sys.stderr,
            env=without_python_settings(),
        )
        mark.write_text(wanted)
    return python


def without_python_settings() -> dict[str, str]:
    """The variables of this process, for an interpreter of another environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
