"""The start of a rank and an engine on a shared GPU: their shares of the memory, and the order in which they take them.

vLLM measures the free memory before and after a trial step, and gives what is left to its KV cache. If another process
takes or frees memory meanwhile, vLLM fails or sizes its cache wrongly. So an engine starts after the rank on its GPU
has reserved its whole share, and a rank that starts again waits for an engine that is starting. The rank keeps its
share until it ends.

Two Unix sockets for each GPU are the locks: "start" is held by a process that takes its memory, and "reserved" by a
rank that has taken it. Their names are the kernel's own (unix(7), "abstract"): it frees them when a process dies, and
nothing is left on disk.

Invariant: at most one process takes memory of a GPU at a time. Fails with DeadlineExceeded if the other side does not
finish its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError, DeadlineExceeded
from asyncrl.gpu.sharing import SHARED_GPU_VARIABLE, GpuShares, plan_sharing, sharers_of
from asyncrl.observe.machine import gpu_bytes

LOOK_S = 0.1
WAIT_S = 900.0
"""Longest wait for the other side (s); an engine that compiles its kernels takes minutes."""
_reserved: list[socket.socket] = []
"""The "reserved" locks of this process."""


def sharers() -> dict[str, str]:
    """The other actor on each GPU that this process shares; empty if it has its GPUs alone."""
    return sharers_of(os.environ.get(SHARED_GPU_VARIABLE, ""))


def read_shares(config: Config, gpus: Sequence[str]) -> GpuShares:
    """Divide GPUs (entries of CUDA_VISIBLE_DEVICES) of this host, the smallest of them, as ``plan_sharing`` does.

    Reads the models' config.json. A file that cannot be read counts as a model of unknown size; loading the model
    raises the better error. Raises ConfigError if the driver does not say how much memory a GPU has.
    """
    sizes = {gpu: gpu_bytes(gpu) for gpu in gpus}
    for gpu, size in sizes.items():
        if size is None:
            problem = f"the driver does not say how much memory GPU {gpu} has, which learner and engine are to share"
            raise ConfigError([f'placement.share: {problem}; repair the driver, or set it to "never"'])
    learner, frozen = config.learner, list[str | None]()
    if learner.kl.coefficient and (learner.kl.path is not None or not config.lora.is_on):
        frozen.append(learner.kl.path or config.model.path)
    if learner.teacher is not None and learner.teacher_url is None:
        frozen.append(learner.teacher)
    total = min(size for size in sizes.values() if size is not None)
    return plan_sharing(config, _settings(config.model.path), total, [_settings(path) for path in frozen])


def _settings(path: str | None) -> Mapping[str, Any]:
    try:
        settings = json.loads((Path(path or "") / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


@contextlib.contextmanager
def rank_start(gpu: str, name: str, within_s: float = WAIT_S) -> Iterator[None]:
    """Wait until no engine starts on the GPU; inside, the rank called ``name`` reserves its memory. Blocking."""
    with contextlib.ExitStack() as held:
        for _ in _attempts({gpu: sharers().get(gpu, "")}, name, within_s, held):
            time.sleep(LOOK_S)
        yield
        if (lock := _try_lock(gpu, "reserved")) is not None:
            _reserved.append(lock)


@contextlib.asynccontextmanager
async def engine_start(name: str, within_s: float = WAIT_S) -> AsyncIterator[None]:
    """Wait until the ranks on this engine's GPUs have reserved their memory; inside, the engine starts."""
    others = sharers()
    with contextlib.ExitStack() as held:
        for _ in _attempts(others, name, within_s, held, after_rank=True):
            await asyncio.sleep(LOOK_S)
        yield


def _attempts(
    others: Mapping[str, str], name: str, within_s: float, held: contextlib.ExitStack, *, after_rank: bool = False
) -> Iterator[None]:
    """Lock the start on each GPU of ``others``, in ``held``. Yields before each new attempt.

    With ``after_rank`` the lock is taken only once a rank has reserved its memory. Every process takes locks in one
    order, so no two wait for each other.
    """
    until = time.monotonic() + within_s
    for gpu, other in sorted(others.items()):
        while (after_rank and not _is_reserved(gpu)) or (lock := _try_lock(gpu, "start")) is None:
            if time.monotonic() > until:
                raise DeadlineExceeded(name, other, f"the memory that it takes of GPU {gpu} at its start", within_s)
            yield
        held.callback(lock.close)


def _is_reserved(gpu: str) -> bool:
    lock = _try_lock(gpu, "reserved")
    if lock is not None:
        lock.close()
    return lock is None


def _try_lock(gpu: str, what: str) -> socket.socket | None:
    """Returns the lock, which is held until the socket closes; None if a process holds it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0asyncrl-gpu-{gpu}-{what}")
    except OSError:
        lock.close()
        return None
    return lock
