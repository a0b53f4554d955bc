"""Configurations of the runs that chaos breaks: a simulated run of minutes, and the quickstart. Pure."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from tools.asset_cache import Assets
from tools.chaos.audit import Expected
from tools.chaos.plan import Episodes
from tools.chaos.users import KINDS
from tools.live_run import quickstart, with_keys

PROGRAM = str(Path(__file__).with_name("users.py"))
SIM_SILENCE_S, SILENCE_IN_UPDATES_S = 3.0, 6.0
VLLM_SILENCE_S = 20.0
SIM_UNREACHABLE_S = 4.0
"""Longer than a lost host is waited for, and shorter than some partitions."""
HOST_GRACE_S = 120.0
"""Longer than any two partitions in a row."""
PORTS = "7000-7063"
SIM_PROMPTS = 300
SIM_GROUPS = 4
REPLICAS = 2
REPLICAS_IN_UPDATES = 3
RANKS = 2
DISK_MIB = {"sim": 256, "vllm": 2048}

_SUPERVISION = {"heartbeat_s": 0.5, "max_restarts": 50, "restart_window_s": 1.0, "backoff_s": 0.05}
"""More restarts than any actor needs within a window, because the faults do not stop. One key each."""


def transport_of(seed: int) -> str:
    return random.Random(f"transport {seed}").choice(("gloo", "shm", "stream"))


def sim_tree(seed: int, steps: int, data: Path) -> dict[str, Any]:
    """Return a run of two rollouters and two ranks, a version a step. The seed chooses transport and pauses."""
    return with_keys(
        {},
        {
            "run": {"seed": seed % 1000, "samples_per_step": SIM_GROUPS},
            "data.path": str(data),
            "rollout": {
                "engine": "sim",
                "replicas": REPLICAS,
                "gpus_per_replica": 0,
                "samples_per_prompt": 2,
                "concurrency": 16,
                "max_tokens": 64,
                "max_attempts": 4,
                "retry_backoff_s": 0.1,
                "on_update": random.Random(f"mode {seed}").choice(("abort_resume", "keep", "drain")),
                "engine_timeout_s": 8.0,
                "stream_interval": 8,
            },
            # Routes, so that the learner notices a token with a foreign one.
            "rollout.sim": {"length_median": 24.0, "decode_step_s": 0.008, "load_s": 0.05, "routes": True},
            "reward": {"function": "tools.chaos.users:score", "workers": 2, "timeout_s": 2.0},
            "learner": {"backend": "sim", "ranks": RANKS, "steps": steps, "groups_per_step": SIM_GROUPS},
            # Faults then nearly always meet a version that is being gathered.
            "learner.sim": {"step_s": 0.1, "publish_bytes": 4 << 20, "gather_s": 0.08},
            "weights": {"transport": transport_of(seed), "deadline_s": 8.0, "broadcast_timeout_s": 4.0},
            "weights.chunk_bytes": 1 << 20,
            "weights.bucket_bytes": 1 << 20,
            "staleness.max": 2,
            "checkpoint": {"every_versions": 3, "export_at_end": False},
            "network.call_timeout_s": 5.0,
            "supervision": {**_SUPERVISION, "silence_s": SIM_SILENCE_S, "host_lost_s": SIM_SILENCE_S},
            "supervision.unreachable_s": SIM_UNREACHABLE_S,
            "supervision.start_timeout_s": 60.0,
            "log.level": "debug",
        },
    )


def several_hosts(seed: int) -> dict[str, Any]:
    """Return the keys of a run over several hosts. The seed chooses encryption and a range of ports."""
    randomness = random.Random(f"hosts {seed}")
    return {
        "security.curve": randomness.choice(("auto", "off")),
        "network.ports": randomness.choice(("0", PORTS)),
        "supervision.host_grace_s": HOST_GRACE_S,
    }


SLOW_UPDATES = {
    "rollout.replicas": REPLICAS_IN_UPDATES,
    "rollout.sim.load_s": 0.2,
    "learner.sim": {"step_s": 0.5, "publish_bytes": 48 << 20, "gather_s": 0.4},
    "weights.deadline_s": 10.0,
    "weights.broadcast_timeout_s": 5.0,
    "weights.bucket_bytes": 8 << 20,
    "network.call_timeout_s": 6.0,
    "supervision.silence_s": SILENCE_IN_UPDATES_S,
}
"""Keys of a simulated run with phases of updates that are long enough to strike."""


def playing(episodes: Episodes) -> dict[str, Any]:
    """Return the keys of a run with episodes of the agent as trajectories."""
    if episodes is None:
        return {}
    agent = {"function": "tools.chaos.users:play"} if episodes == "function" else {"command": [sys.executable, PROGRAM]}
    limits = {
        "max_context_tokens": 2048,
        "start_timeout_s": 10.0,
        "turn_timeout_s": 5.0,
        "timeout_s": 60.0,
        "close_timeout_s": 2.0,
        "stall_timeout_s": SIM_SILENCE_S,
    }
    return {"episode": agent | limits, "data.max_prompt_tokens": 64}


def vllm_tree(seed: int, steps: int, assets: Assets) -> dict[str, Any]:
    """Return the quickstart with checkpoints, for as many steps as the faults need."""
    keys: dict[str, Any] = {
        "run.seed": seed % 1000,
        "learner.steps": steps,
        "checkpoint": {"every_versions": 5, "export_at_end": False},
        "rollout.replicas": REPLICAS,
        "rollout.engine_timeout_s": 8.0,
        "weights": {"transport": transport_of(seed), "deadline_s": 10.0, "broadcast_timeout_s": 5.0},
        "weights.bucket_bytes": 1 << 20,
        "network.call_timeout_s": 10.0,
        "supervision": {**_SUPERVISION, "silence_s": VLLM_SILENCE_S},
        "log.level": "debug",
    }
    tree = quickstart(assets, keys)
    return with_keys(tree, {"run.samples_per_step": tree["learner"]["groups_per_step"]})


def expected(tree: dict[str, Any], prompts: int, kinds: list[str] | None = None) -> Expected:
    """Return the promises of a run of ``tree`` on these prompts. ``kinds`` are those of users.py, by index."""
    return Expected(
        steps=tree["learner"]["steps"],
        groups_per_step=tree["learner"]["groups_per_step"],
        prompts=prompts,
        outcome=None if kinds is None else lambda index: KINDS[kinds[index]],
    )
