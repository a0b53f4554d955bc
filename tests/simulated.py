"""The configuration of runs that are launched with simulated engines and a simulated learner."""

from typing import Any


def simulated(**sections: dict[str, Any]) -> dict[str, Any]:
    """Two rollouters, updates while trajectories run. ``sections`` are merged over it, including ``sim`` tables."""
    tree: dict[str, dict[str, Any]] = {
        "data": {"source": "synthetic", "size": 4096},
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "gpus_per_replica": 0,
            "samples_per_prompt": 2,
            "concurrency": 8,
            "max_tokens": 64,
            "sim": {"length_median": 24.0, "decode_step_s": 0.004, "load_s": 0.02},
        },
        "reward": {"function": "constant", "workers": 1},
        "learner": {"backend": "sim", "groups_per_step": 4, "dynamic_sampling": False, "sim": {"step_s": 0.1}},
        "staleness": {"max": 2},
    }
    for name, section in sections.items():
        table = tree.get(name, {})
        sim = {"sim": table["sim"] | section["sim"]} if "sim" in table and "sim" in section else {}
        tree[name] = table | section | sim
    return tree
