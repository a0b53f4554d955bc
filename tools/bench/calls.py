"""``python -m tools.bench calls``: actor calls, reward tasks, large payloads and shared memory.

asyncrl's client runs in this process and its server in another, each on uvloop as every actor does; raw pyzmq
asyncio runs on the same two event loops. Ray's driver runs in a process of its own, since it lives in another
environment; its actor and its tasks are warm before anything is measured.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from asyncrl.config import Config
from tools.bench import shared_memory
from tools.bench.paired import Comparison, Side, compare, measure_pairs
from tools.bench.ray_environment import CPUS, Ray, ray
from tools.bench.report import Report, Target
from tools.bench.served import EchoTask
from tools.bench.sides import Ours, Raw, server

ROUND_TRIPS = 200
"""Round trips of one sample, whose median counts."""
PIPELINED = 2000
TASKS = 1024
TASK_BYTES = 8192
LARGE_BYTES = 64 << 20
WORKERS = CPUS
CALL_TIMEOUT_S = 120.0
"""Time so long that nothing is repeated within a measurement."""


def config() -> Config:
    """The configuration of a run on one host, with the reward function and as many workers as Ray has cores."""
    return Config.model_validate(
        {
            "rollout": {"engine": "sim"},
            "learner": {"backend": "sim"},
            "data": {"source": "synthetic"},
            "reward": {"function": "tools.bench.reward_function:same", "workers": WORKERS},
            "network": {"call_timeout_s": CALL_TIMEOUT_S},
        }
    )


async def measure(report: Report, *, pairs: int, vs_ray: bool) -> None:
    """Fill the report."""
    report.settings |= {
        "round_trips_per_sample": ROUND_TRIPS,
        "pipelined_calls": PIPELINED,
        "tasks": TASKS,
        "task_bytes": TASK_BYTES,
        "large_bytes": LARGE_BYTES,
        "workers": WORKERS,
    }
    settings = config()
    with ExitStack() as stack:
        addresses, secret = stack.enter_context(server("echo", settings))
        ours = Ours(addresses["actor"], secret, "echo/0", settings, name="rollouter/0")
        stack.callback(ours.close)
        raw = Raw(addresses)
        stack.callback(raw.close)
        await against_raw(report, ours, raw, pairs)
        await shared_memory.measure(report, LARGE_BYTES, pairs)
        if vs_ray:
            async with ray() as other:
                await against_ray(report, ours, other, pairs)
                rewards_at, secret = stack.enter_context(server("reward", settings))
                rewards = Ours(rewards_at["actor"], secret, "reward/0", settings, name="rollouter/0")
                stack.callback(rewards.close)
                await tasks_against_ray(report, rewards, other, pairs)


async def against_raw(report: Report, ours: Ours, raw: Raw, pairs: int) -> None:
    """Round trips and large payloads."""
    sides = ("asyncrl", "raw pyzmq")
    found = await pairs_of(lambda: ours.round_trip(ROUND_TRIPS), lambda: raw.round_trip(ROUND_TRIPS), pairs)
    report.comparison("call_vs_raw", found, unit="s", sides=sides, target=Target("<=", 2.5))
    found = await pairs_of(lambda: ours.round_trip(ROUND_TRIPS, EchoTask), lambda: raw.round_trip(ROUND_TRIPS), pairs)
    report.comparison("call_by_task_vs_raw", found, unit="s", sides=sides, target=Target("<=", 2.5))
    await same(report, "call_vs_raw", lambda: ours.round_trip(ROUND_TRIPS), pairs)

    data = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, np.uint8)
    found = await pairs_of(lambda: ours.large(data), lambda: raw.large(data), pairs)
    report.comparison("payload_vs_raw", found, unit="bytes/s", sides=sides, target=Target(">=", 0.9))
    await same(report, "payload_vs_raw", lambda: ours.large(data), pairs)


async def against_ray(report: Report, ours: Ours, other: Ray, pairs: int) -> None:
    """Round trips and pipelined calls."""
    sides = ("asyncrl", "Ray")
    found = await pairs_of(
        lambda: ours.round_trip(ROUND_TRIPS), lambda: other.measure("round_trip", calls=ROUND_TRIPS), pairs
    )
    report.comparison("call_vs_ray", found, unit="s", sides=sides, target=Target("<=", 1 / 4))
    found = await pairs_of(
        lambda: ours.pipelined(PIPELINED), lambda: other.measure("pipelined", calls=PIPELINED), pairs
    )
    report.comparison("throughput_vs_ray", found, unit="calls/s", sides=sides, target=Target(">=", 4))
    await same(report, "throughput_vs_ray", lambda: ours.pipelined(PIPELINED), pairs)


async def tasks_against_ray(report: Report, rewards: Ours, other: Ray, pairs: int) -> None:
    """Reward tasks submitted and done."""
    texts = ["y" * TASK_BYTES for _ in range(TASKS)]
    found = await pairs_of(
        lambda: rewards.tasks(texts), lambda: other.measure("tasks", tasks=TASKS, size=TASK_BYTES), pairs
    )
    report.comparison("tasks_vs_ray", found, unit="s", sides=("asyncrl", "Ray"), target=Target("<=", 1 / 15))
    await same(report, "tasks_vs_ray", lambda: rewards.tasks(texts), pairs)


async def pairs_of(first: Side, second: Side, pairs: int) -> Comparison:
    """Compare two sides."""
    return compare(await measure_pairs(first, second, pairs))


async def same(report: Report, name: str, side: Side, pairs: int) -> None:
    """Compare a side with itself."""
    report.same(name, compare(await measure_pairs(side, side, pairs)))
