"""``python -m tools.bench calls``: actor calls, reward tasks and large payloads against raw pyzmq and Ray.

asyncrl's client runs in this process and its server in another (served.py), each on uvloop and with the memory settings
of every actor; raw pyzmq asyncio runs on the same two event loops. Ray's driver is a process in an environment of its
own (ray_side.py); its actor and its tasks are warm before the measurement.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrl.config.load import validate_config
from asyncrl.rpc.process import tune_memory
from tools.bench.paired import Side
from tools.bench.processes import Worker, environment, without_python_settings, worker
from tools.bench.report import Report, Target
from tools.bench.served import Echo, EchoTask, Ours, Raw, server
from tools.live_run import simulated

ROUND_TRIPS = 200
"""Round trips of one sample, whose median counts."""
PIPELINED = 2000
TASKS = 1024
TASK_BYTES = 8192
LARGE_BYTES = 64 << 20
WORKERS = 2
CALL_TIMEOUT_S = 120.0
"""Time so long that nothing is repeated within a measurement."""
RAY = "ray==2.60.*"


async def measure(report: Report, *, pairs: int = 30, vs: Literal["ray"] | None = None) -> None:
    """``vs``: also measure against Ray. asyncrl has as many reward workers as Ray has cores."""
    report.settings |= {
        "round_trips_per_sample": ROUND_TRIPS,
        "pipelined_calls": PIPELINED,
        "tasks": TASKS,
        "task_bytes": TASK_BYTES,
        "large_bytes": LARGE_BYTES,
        "workers": WORKERS,
    }
    tune_memory()
    reward = {"function": "tools.bench.served:same", "workers": WORKERS}
    settings = validate_config(simulated({"reward": reward, "network.call_timeout_s": CALL_TIMEOUT_S}))
    async with AsyncExitStack() as stack:

        async def client(role: str) -> tuple[Ours, dict[str, str]]:
            addresses, secret = await stack.enter_async_context(server(role, settings))
            ours = Ours(addresses["actor"], secret, f"{role}/0", settings, name="rollouter/0")
            stack.callback(ours.close)
            return ours, addresses

        ours, addresses = await client("echo")
        raw = Raw(addresses)
        stack.callback(raw.close)
        await against_raw(report, ours, raw, pairs)
        if vs:
            other = await stack.enter_async_context(ray())
            await against_ray(report, ours, (await client("reward"))[0], other, pairs)


async def against_raw(report: Report, ours: Ours, raw: Raw, pairs: int) -> None:
    for name, kind in (("call_vs_raw", Echo), ("call_by_task_vs_raw", EchoTask)):
        sides = {
            "asyncrl": partial(ours.round_trip, ROUND_TRIPS, kind),
            "raw pyzmq": partial(raw.round_trip, ROUND_TRIPS),
        }
        await report.measure(name, sides, pairs, unit="s", target=Target("<=", 2.5), control=kind is Echo)
    data = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, np.uint8)
    sides = {"asyncrl": partial(ours.large, data), "raw pyzmq": partial(raw.large, data)}
    await report.measure("payload_vs_raw", sides, pairs, unit="bytes/s", target=Target(">=", 0.9))


async def against_ray(report: Report, ours: Ours, rewards: Ours, other: Worker, pairs: int) -> None:
    """Round trips, pipelined calls, and reward tasks from their submission to their result."""

    def theirs(what: str, **arguments: int) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            return float((await other.ask(do=what, **arguments))["value"])

        return once

    sides: dict[str, Side] = {
        "asyncrl": partial(ours.round_trip, ROUND_TRIPS),
        "Ray": theirs("round_trip", calls=ROUND_TRIPS),
    }
    await report.measure("call_vs_ray", sides, pairs, unit="s", target=Target("<=", 1 / 4), control=False)
    sides = {"asyncrl": partial(ours.pipelined, PIPELINED), "Ray": theirs("pipelined", calls=PIPELINED)}
    await report.measure("throughput_vs_ray", sides, pairs, unit="calls/s", target=Target(">=", 4))
    texts = ["y" * TASK_BYTES for _ in range(TASKS)]
    sides = {"asyncrl": partial(rewards.tasks, texts), "Ray": theirs("tasks", tasks=TASKS, size=TASK_BYTES)}
    await report.measure("tasks_vs_ray", sides, pairs, unit="s", target=Target("<=", 1 / 15))


@asynccontextmanager
async def ray() -> AsyncIterator[Worker]:
    """A running Ray with WORKERS cores, and nothing of it left afterwards."""
    python = environment("ray", [RAY])
    # The paths of its sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [str(python), "-I", str(Path(__file__).with_name("ray_side.py")), str(WORKERS), folder]
        async with worker("ray", command, without_python_settings()) as side:
            await side.ask(do="ready")
            yield side
