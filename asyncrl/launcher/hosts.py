"""The cores and GPUs of the host on which the launcher runs, found out without importing torch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

from asyncrl.errors import UsageError
from asyncrl.launcher.placement import Host

NVIDIA_SMI_S = 30.0


def local_host() -> Host:
    """This host: the cores this process may use, and the GPUs that CUDA_VISIBLE_DEVICES leaves, or all of them."""
    return Host(name=socket.gethostname(), cpus=len(os.sched_getaffinity(0)), gpus=_gpus())


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = tuple(part.strip() for part in visible.split(",") if part.strip())
        return () if "-1" in found else found
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listed = subprocess.run(
            [tool, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"nvidia-smi does not answer within {NVIDIA_SMI_S:g} s; set CUDA_VISIBLE_DEVICES to say which GPUs to use"
        ) from None
    except subprocess.CalledProcessError:
        # The tool without a driver: a host without GPUs.
        return ()
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip())
