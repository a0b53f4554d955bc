"""A real run: asyncrl-launch, every actor a process, vLLM on CPU, two FSDP2 ranks."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from ledgers import assert_ledgers_add_up
from quick import needs_vllm
from recordings import read_recording
from run_files import assert_spans_cover, groups, json_lines, metrics
from trace_files import load
from transformers import AutoModelForCausalLM

from tools.bench.tiny_model import CHARACTERS, END, make_model

pytestmark = needs_vllm
STEPS = 8
TOKENS = ["", *CHARACTERS]
"""The token that ends a response has number END; a random model samples it once in about a hundred tokens."""
REQUIRED = """
    reward/mean reward/std reward/trained_mean reward/all_zero_fraction reward/all_max_fraction loss/policy
    policy/grad_norm policy/entropy policy/ess policy/behaviour_kl policy/tis_clipped_fraction policy/ratio_max
    learner/lr staleness/token_mean staleness/token_max staleness/limit staleness/late_groups rollout/tokens
    rollout/tokens_per_s rollout/resumed_trajectories rollout/mixed_version_fraction rollout/truncated_fraction
    rollout/length_mean rollout/length_p95 rollout/granted_length_mean buffer/groups time/step_s
    time/wait_for_groups_s time/train_s time/publish_s perf/overlap weights/stall_s ledger/trained ledger/filtered
    ledger/quarantined
""".split()

REWARD = """
async def share_of_lower_case(*, completion, row, finish_reason):
    assert row["answer"] and finish_reason in ("stop", "length")
    share = sum(c.islower() for c in completion) / max(1, len(completion))
    return {"reward": share, "length": float(len(completion))}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "model")
    rows = [f"{random.Random(i).randint(10, 99)}+{i + 10}=" for i in range(80)]
    for name, part in (("train.jsonl", rows[:64]), ("held.jsonl", rows[64:])):
        (folder / name).write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in part))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "config.toml").write_text(f"""
        [run]
        name = "real"
        dir = "runs"
        samples_per_step = 100
        [model]
        path = "model"
        [data]
        path = "train.jsonl"
        max_prompt_tokens = 16
        [rollout]
        gpus_per_replica = 0
        samples_per_prompt = 4
        max_tokens = 96
        concurrency = 4
        stream_interval = 4
        [reward]
        function = "rewards:share_of_lower_case"
        [learner]
        ranks = 2
        steps = {STEPS}
        groups_per_step = 6
        lr = 3e-3
        [staleness]
        max = 2
        [eval.held]
        n = 2
        data = {{ path = "held.jsonl", max_prompt_tokens = 16 }}
        [eval.greedy]
        temperature = 0.0
        data = {{ path = "held.jsonl", max_prompt_tokens = 16 }}
    """)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """The run, once, with what it printed."""
    shared_memory = set(os.listdir("/dev/shm"))
    command = [str(Path(sys.executable).with_name("asyncrl-launch")), "config.toml"]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr + _logs(folder)
    deadline = time.monotonic() + 10
    # Unrelated processes start and end meanwhile.
    while left := set(os.listdir("/dev/shm")) - shared_memory - shared_memory_in_use():
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        time.sleep(0.2)
    return run.stdout


def shared_memory_in_use():
    """Names in /dev/shm of files that live processes have mapped or open, by inode: they may have been renamed."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Processes that end meanwhile cannot be read.
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"(\d+) +/dev/shm/", (process / "maps").read_text()))
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith("/dev/shm/"):
                        inodes.add(str(file.stat().st_ino))
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) in inodes}


def _logs(folder):
    logs = sorted((folder / "runs").glob("*/logs/*/*.log"))
    return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)


def lines(folder, kind):
    return metrics(folder / "runs" / "real", kind)


def test_every_step_is_trained_published_and_recorded(folder, finished):
    train = lines(folder, "train")
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    assert [line["weights/version"] for line in train] == list(range(1, STEPS + 1))
    for line in train:
        assert [key for key in REQUIRED if line.get(key) is None and key != "rollout/granted_length_mean"] == []
    assert train[-1]["ledger/trained"] == STEPS * 6
    assert train[-1]["reward/mean"] > train[0]["reward/mean"]
    assert any(line["reward/component/length"] > 1 for line in train)


def test_i3_every_token_has_one_version_and_updates_met_running_trajectories(folder, finished):
    trajectories = [each for group in groups(folder / "runs" / "real") for each in group["trajectories"]]
    assert len(trajectories) == STEPS * 6 * 4
    for trajectory in trajectories:
        assert_spans_cover(trajectory)
        assert len(trajectory["sequences"][0]["tokens"]) <= 96
    assert any(len(trajectory["sequences"][0]["spans"]) > 1 for trajectory in trajectories)
    assert any(trajectory["resumes"] for trajectory in trajectories)


def test_i2_staleness_of_first_tokens_stays_within_the_limit_up_to_stragglers(folder, finished):
    train = lines(folder, "train")
    assert max(line["staleness/token_max"] for line in train) <= 2 + max(
        line["staleness/late_groups"] for line in train
    )
    assert any(line["staleness/token_mean"] > 0 for line in train)


def test_i4_the_trainers_own_logprobs_agree_with_the_engines_on_equal_versions(folder, finished):
    compared = [line for line in lines(folder, "train") if line.get("policy/engine_kl_tokens")]
    assert compared
    assert all(abs(line["policy/engine_kl"]) < 1e-6 for line in compared)
    # By the probe: of prompts at the start, and of trained samples from then on.
    drifts = [line["policy/drift"] for line in lines(folder, "update") if "policy/drift" in line]
    assert len(drifts) > 1 and max(drifts) < 1e-3
    assert "drift apart" not in finished


def test_the_first_and_the_last_version_are_evaluated(folder, finished):
    evals = lines(folder, "eval")
    for name in ("held", "greedy"):
        first, last = (line for line in evals if f"eval/{name}/mean" in line)
        assert (first["weights/version"], last["weights/version"]) == (0, STEPS)
        assert last[f"eval/{name}/version_min"] == STEPS
        assert last[f"eval/{name}/prompts"] == 16


def test_the_exported_model_loads_and_scores_the_same(folder, finished):
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "real" / "export", dtype=torch.float32).eval()
    # All prompts are equally long.
    ids = torch.tensor([[TOKENS.index(c) for c in row["prompt"]] for row in json_lines(folder / "held.jsonl")])
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 96, "pad_token_id": END}
    rewards = []
    for generated in model.generate(ids, **how)[:, ids.shape[1] :]:
        text = "".join(TOKENS[i] for i in generated)
        rewards.append(sum(c.islower() for c in text) / max(1, len(text)))
    (last,) = [line for line in lines(folder, "eval") if line.get("eval/greedy/mean") is not None][1:]
    assert sum(rewards) / len(rewards) == pytest.approx(last["eval/greedy/mean"], abs=1e-6)


def test_the_ledgers_of_all_serial_resources_add_up(folder, finished):
    run_dir = folder / "runs" / "real"
    states = assert_ledgers_add_up(read_recording(run_dir), run_dir)
    names = {name for name, _ in states}
    assert {"learner/0 rank", "learner/1 rank", "rollouter/0 engine", "reward/0 worker/0"} <= names
    of = {name: found for (name, _), found in states.items()}
    assert {"training", "publishing", "following"} <= of["learner/1 rank"]


def test_the_timeline_has_every_actor_and_the_phases_of_each_rank(folder, finished):
    trace = load(folder / "runs" / "real" / "trace" / "trace-001.json")
    assert {"rollouter/0", "learner/0", "learner/1", "reward/0", "controller/0"} <= set(trace)
    for rank in ("learner/0", "learner/1"):
        phases = [span.name for span in trace[rank]["phases"]]
        assert phases.count("optimizer") == phases.count("forward and backward") == STEPS
        assert phases.count("copy") >= STEPS


def test_a_run_leaves_no_process_and_its_summary_names_the_results(folder, finished):
    run_dir = folder / "runs" / "real"
    assert not (run_dir / "private").exists()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or [])]
    assert left == []
    for place in ("metrics.jsonl", "samples", "export", "logs"):
        assert f"runs/real/{place}" in finished
