"""The GPUs that this process shares with another actor, and the shares of their memory.

The launcher names the other actor in an environment variable. The shares follow from files and from the driver, so a
rank and an engine compute the same shares without a message. The rank's allocator may not take more than its share, and
vLLM gets the size of its KV cache.

Fails with ConfigError if the driver does not report a GPU's memory, or as ``plan_sharing`` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.config.operation import TAKE_SHARE
from asyncrl.core.errors import ConfigError
from asyncrl.core.model_files import read_settings
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE, GpuShares, plan_sharing, sharers_of
from asyncrl.gpu.slices import RankSlices
from asyncrl.observe.machine import read_gpu

NO_ENGINE = -1.0
"""Value of ``shared_engine`` for a rank that shares no GPU."""
RETURN_SHARE = 0.1
"""Share of learner.collective_timeout_s in which the memory of an engine that was killed must be free."""


def sharers() -> dict[str, str]:
    """Return the other actor on each GPU that this process shares; empty if it has its GPUs alone."""
    return sharers_of(os.environ.get(SHARED_GPU_VARIABLE, ""))


def shared_engine() -> float:
    """Return the index N of the engine rollouter/N on this rank's GPU; NO_ENGINE if the rank has its GPU alone."""
    return next((float(name.partition("/")[2]) for name in sharers().values()), NO_ENGINE)


def rank_slices(config: Config, rank: int) -> RankSlices | None:
    """Make the rank's side of a GPU that it has in time slices; None if the rank keeps its memory."""
    if config.placement.share != "time_slice" or not (shared := sharers()):
        return None
    gpu, engine = next(iter(shared.items()))
    # The other ranks wait longer than this for the rank, so that the first error names the engine.
    return RankSlices(gpu, f"learner/{rank}", engine, TAKE_SHARE * config.learner.collective_timeout_s)


def read_shares(config: Config, gpus: Sequence[str]) -> GpuShares:
    """Plan how learner and engine share the memory of these GPUs (entries of CUDA_VISIBLE_DEVICES). Raises ConfigError.

    All GPUs get the shares that fit the smallest of them.

    Reads the config.json of the policy, and of the reference and the teacher if the run loads them. A file that cannot
    be read counts as empty, so that ``plan_sharing`` raises ConfigError.
    """
    sizes = list[int]()
    for gpu in gpus:
        reading = read_gpu(gpu)
        if reading is None:
            problem = f"the driver does not report the memory of GPU {gpu}, which learner and engine are to share"
            raise ConfigError([f'placement.share: {problem}; repair the driver, or set it to "never"'])
        sizes.append(reading.memory_total_bytes)
    learner, policy, scoring = config.learner, config.model.path or "", list[str]()
    # With adapters and no path, the policy without its adapters is the reference.
    if learner.kl.coefficient and (learner.kl.path is not None or not config.lora.is_on):
        scoring.append(learner.kl.path or policy)
    if learner.teacher is not None and learner.teacher_url is None:
        scoring.append(learner.teacher)
    return plan_sharing(config, read_settings(policy), min(sizes), {path: read_settings(path) for path in scoring})
