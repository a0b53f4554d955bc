"""I8, parity: on the reference engine with staleness.max = 0 a run has the same tokens, losses and weights, bit by bit,
as the plain synchronous loop over the same parts (tools/synchronous.py), in any order of its groups. On vLLM, where
rounding depends on the batch, the tokens of the first steps are equal.

The run is asyncrl-launch with every actor a process and two rollouters. Groups without signal are replaced on the way,
and the reward function takes a random time.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from quick import needs_vllm
from run_files import groups, metrics

from tools.bench.tiny_model import make_model
from tools.live_run import LiveRun, to_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    make_model(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    numbers = random.Random(0)
    # Fewer prompts than groups, two of them too long: epochs run into one another, and prompts are skipped.
    prompts = [f"{numbers.randint(10, 9999)}+{numbers.randint(10, 9999)}=" for _ in range(24)]
    prompts[7] = prompts[15] = "1000000+1000000="
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return folder


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
    run = LiveRun(tree, folder / name, env={"PYTHONPATH": str(folder)})
    try:
        assert run.wait(RUN_S) == 0, run.output
        assert run.left() == []
    finally:
        run.close()
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
CASES = {
    "steps": {"learner": {"steps": 12, "loss": "bypass"}},
    # Several updates a batch, several steps from one version's groups, weights by broadcast, requests frozen instead of
    # ended.
    "updates": {
        "learner": {"steps": 6, "steps_per_version": 2, "updates_per_batch": 3},
        "weights": {"transport": "gloo"},
        "rollout": {"on_update": "keep"},
    },
}


def both(folder, tree, name):
    """The folders of a plain loop and of a run whose rewards arrive out of order, and the order of their arrival."""
    plain = run_plainly(folder, tree, f"plain-{name}")
    arrivals = folder / f"arrivals-{name}.txt"
    delayed = {**tree["reward"], "options": {"delay_s": 0.1, "arrivals": str(arrivals)}}
    live = run_live(folder, {**tree, "reward": delayed}, f"live-{name}")
    return plain, live, list(dict.fromkeys(arrivals.read_text().splitlines()))


@pytest.mark.parametrize("case", CASES)
def test_i8_a_run_equals_the_plain_loop_bit_for_bit(folder, case):
    tree = configuration(folder, **CASES[case])
    plain, live, arrivals = both(folder, tree, case)
    expected, found = trained(plain), trained(live)
    assert list(expected) == list(range(1, tree["learner"]["steps"] + 1))
    for step, of_step in expected.items():
        assert [group["uid"] for group in of_step] == [group["uid"] for group in found[step]], f"step {step}"
        assert of_step == found[step], f"step {step}"
    assert found == expected
    assert figures(live, *EXACT) == figures(plain, *EXACT)
    assert weights(live) == weights(plain)

    # The hard cases occurred: groups out of order, left out and replaced, both kinds of ends, and learning.
    prompts = [group["prompt"] for of_step in expected.values() for group in of_step]
    assert arrivals != list(dict.fromkeys(prompts))
    assert figures(live, "ledger/filtered")[len(expected)] > [0]
    responses = [response for of_step in expected.values() for group in of_step for response in group["trajectories"]]
    assert {response["finish_reason"] for response in responses} == {"stop", "length"}
    assert weights(live) != hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@needs_vllm
def test_i8_on_vllm_the_first_steps_have_equal_tokens_and_losses_within_rounding(folder):
    vllm = {"engine": "vllm", "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1}}
    tree = configuration(folder, learner={"steps": 5}, rollout=vllm)
    plain, live, arrivals = both(folder, tree, "vllm")
    expected, found = trained(plain), trained(live)
    assert list(expected) == [1, 2, 3, 4, 5]
    assert found == expected
    for step, (loss,) in figures(plain, "loss/policy").items():
        assert figures(live, "loss/policy")[step][0] == pytest.approx(loss, abs=1e-5), f"step {step}"
    prompts = [group["prompt"] for of_step in expected.values() for group in of_step]
    assert arrivals != list(dict.fromkeys(prompts))
