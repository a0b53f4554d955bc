"""A run and the plain loop over the same parts: configuration, model and prompts, and what they have trained.

A run is asyncrl-launch with every actor a process and two rollouters. Groups without signal are replaced on the way,
and the reward function takes a random time.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from contextlib import closing

from run_files import groups, metrics

from asyncrl.observe.recording import decode, read_bodies
from tools.bench.tiny_model import make_model
from tools.live_run import ROOT, LiveRun, to_toml

RUN_S = 400
"""The longest a run may take; on idle cores the longest takes a minute."""
REWARD = '''
import random
import time

def digits(*, prompt, completion, finish_reason, delay_s, arrivals):
    """The share of digits, in sixths, so that some groups have no signal."""
    time.sleep(delay_s * random.SystemRandom().random())
    if arrivals:
        with open(arrivals, "a") as file:
            file.write(prompt + chr(10))
    share = sum(c.isdigit() for c in completion) / max(1, len(completion))
    return {"reward": round(6 * share) / 6, "stopped": float(finish_reason == "stop")}
'''


def configuration(folder, **sections):
    tree = {
        "run": {"samples_per_step": 1000, "seed": 3},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt_tokens": 12},
        "rollout": {
            "engine": "reference",
            "replicas": 2,
            "gpus_per_replica": 0,
            "samples_per_prompt": 3,
            "max_tokens": 12,
            "concurrency": 6,
            "stream_interval": 4,
        },
        "reward": {"function": "rewards:digits", "options": {"delay_s": 0.0, "arrivals": ""}},
        "learner": {"groups_per_step": 3, "lr": 1e-3, "device": "cpu"},
        "staleness": {"max": 0},
        "checkpoint": {"every_versions": 0},
    }
    return {name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections}


def write_assets(folder):
    """Write the model, the reward function and the prompts into a folder."""
    make_model(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    numbers = random.Random(0)
    # Fewer prompts than groups, two of them too long: epochs run into one another, and prompts are skipped.
    prompts = [f"{numbers.randint(10, 9999)}+{numbers.randint(10, 9999)}=" for _ in range(24)]
    prompts[7] = prompts[15] = "1000000+1000000="
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def run_plainly(folder, tree, name):
    """Run the plain loop. Returns its folder."""
    tree = {**tree, "run": {**tree["run"], "name": name, "dir": str(folder)}}
    (folder / f"{name}.toml").write_text(to_toml(tree))
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    ended = subprocess.run(
        [sys.executable, "-m", "tools.synchronous", str(folder / f"{name}.toml")],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder / name


def run_live(folder, tree, name):
    """Run asyncrl-launch. Returns the run's folder."""
    (folder / name).mkdir()
    with closing(LiveRun(tree, folder / name, env={"PYTHONPATH": str(folder)})) as run:
        assert run.wait(RUN_S) == 0, run.output
        assert run.left() == []
    return run.run_dir


def trained(run_dir):
    """All values of the groups of each step that do not measure time, by step."""
    steps = {}
    for group in groups(run_dir):
        del group["start"]
        steps.setdefault(group.pop("step"), []).append(group)
    return steps


def figures(run_dir, *names):
    return {line["step"]: [line[name] for name in names] for line in metrics(run_dir, "train")}


def counter(run_dir, actor, name):
    """The largest value of a counter of an actor in the snapshots of the run."""
    snapshots = [snapshot for _, body in read_bodies(run_dir) if (snapshot := decode(body)) is not None]
    return max(each.metrics.get(name, 0.0) for snapshot in snapshots for each in snapshot.actors if each.name == actor)


def weights(run_dir):
    return hashlib.sha256((run_dir / "export" / "model.safetensors").read_bytes()).hexdigest()


EXACT = (
    "loss/policy",
    "policy/grad_norm",
    "policy/entropy",
    "reward/trained_mean",
    "weights/version",
    "ledger/trained",
)
