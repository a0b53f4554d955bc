"""The GPUs that this process shares with another actor, and the shares of their memory.

The launcher names the other actor in an environment variable. The shares follow from files and from the driver, so a
rank and an engine get the same ones without a message. Neither waits for the other at its start: the rank's allocator
may not take more than its share, and the engine is told how large its KV cache is.

Fails with ConfigError if the driver does not report a GPU's memory, or as ``plan_sharing`` does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.sharing import SHARED_GPU_VARIABLE, GpuShares, plan_sharing, sharers_of
from asyncrl.observe.machine import gpu_bytes


def sharers() -> dict[str, str]:
    """Return the other actor on each GPU that this process shares; empty if it has its GPUs alone."""
    return sharers_of(os.environ.get(SHARED_GPU_VARIABLE, ""))


def read_shares(config: Config, gpus: Sequence[str]) -> GpuShares:
    """Divide GPUs of this host (entries of CUDA_VISIBLE_DEVICES), by the smallest of them. Raises ConfigError.

    A config.json that cannot be read counts as one without sizes.
    """
    sizes = list[int]()
    for gpu in gpus:
        size = gpu_bytes(gpu)
        if size is None:
            problem = f"the driver does not report the memory of GPU {gpu}, which learner and engine are to share"
            raise ConfigError([f'placement.share: {problem}; repair the driver, or set it to "never"'])
        sizes.append(size)
    settings: Any = {}
    # The check of the model's folder reports a file that cannot be read.
    with contextlib.suppress(OSError, ValueError):
        settings = json.loads((Path(config.model.path or "") / "config.json").read_text())
    return plan_sharing(config, settings if isinstance(settings, dict) else {}, min(sizes))
