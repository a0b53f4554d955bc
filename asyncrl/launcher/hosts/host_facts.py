"""Facts of the host on which this runs, found out without importing torch or the configuration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from importlib.metadata import version
from itertools import takewhile

from asyncrl.launcher.common.agent_messages import HostOffer
from asyncrl.launcher.hosts.addresses import interfaces

NVIDIA_SMI_S = 30.0


def find_facts() -> HostOffer:
    """Offer of this host: the cores this process may use, the GPUs that CUDA_VISIBLE_DEVICES leaves, or all."""
    gpus, problem = _gpus()
    return HostOffer(
        version=version("asyncrl"),
        hostname=socket.gethostname(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
        gpu_problem=problem,
        interfaces=interfaces(),
        client=os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    )


def _gpus() -> tuple[list[str], str]:
    """The GPUs, and the reason if they are unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = [part.strip() for part in visible.split(",") if part.strip()]
        # CUDA ignores everything from the first unknown device on, and -1 is unknown.
        return list(takewhile(lambda gpu: gpu != "-1", found)), ""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], ""
    try:
        listed = subprocess.run(
            [tool, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        told = f"nvidia-smi does not answer within {NVIDIA_SMI_S:g} s"
        return [], f"{told}; set CUDA_VISIBLE_DEVICES to say which GPUs to use"
    except subprocess.CalledProcessError:
        # The tool without a driver: a host without GPUs.
        return [], ""
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()], ""
