"""Unmodified agents are trained: whole runs on the real vLLM, with new weights at every step.

By the files of a run, each trained token has the log-prob under the weights of its version, given exactly the
learner's context, for every framework. Frameworks that send answers back unchanged never fork.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quick import needs_vllm
from run_files import groups, json_lines

from asyncrl.checkpoint.contents import TRAINER
from asyncrl.config.training import ModelConfig
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.weights.dcp import load_weights
from tools.learn.recipe import ensure_assets
from tools.learn.tool_lookup import RECIPE as FULL_RECIPE

ROOT = Path(__file__).parent.parent.parent
PLAYS = Path(__file__).with_name("plays_look_up.py")
AGENTS_PYTHON = os.environ.get("ASYNCRL_AGENTS_PYTHON", "")
POSITIONS = 16_384
"""smolagents starts with 10,000 characters, each a token of this model."""
TOLERANCE = 1e-4
STEPS = 4
RECIPE = replace(FULL_RECIPE, settings=replace(FULL_RECIPE.settings, steps=160, batch=4, lr=2e-3))
"""Warmed up until it calls tools, and no further."""
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ECHO = ["openai-agents", "openai-agents-streamed", "openai-agents-responses", "langgraph"]
REWRITE = ["smolagents-tools", "smolagents-code"]


def write_inputs(folder, clients, python):
    """A model for long contexts, tasks for each client, and a configuration."""
    assets = ensure_assets(RECIPE, ROOT / ".cache" / "learn")
    model = folder / "model"
    shutil.copytree(assets.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    rows = json_lines(assets.train)[: 40 * len(clients)]
    rows = [row | {"client": clients[number % len(clients)]} for number, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(f"""
        [run]
        name = "agents"
        dir = "runs"
        samples_per_step = 100
        [model]
        path = "model"
        [data]
        path = "train.jsonl"
        template = "chat"
        max_prompt_tokens = 32
        shuffle = false
        [episode]
        command = ["{python}", "{PLAYS}"]
        max_turns = 4
        max_context_tokens = {POSITIONS}
        start_timeout_s = 120
        [rollout]
        gpus_per_replica = 0
        samples_per_prompt = 2
        max_tokens = 64
        concurrency = 4
        episodes = 4
        stream_interval = 4
        [rollout.vllm]
        threads = 1
        max_num_seqs = 4
        cpu_kv_cache_bytes = 268_435_456
        [learner]
        device = "cpu"
        threads = 1
        steps = {STEPS}
        groups_per_step = {len(clients)}
        lr = 1e-3
        advantage = "grpo"
        dynamic_sampling = false
        tokens_per_microbatch = {POSITIONS}
        [staleness]
        max = 1
        [checkpoint]
        every_versions = 1
        keep = 100
    """)


def train(folder):
    command = [sys.executable, "-m", "asyncrl.cli.launch", "config.toml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=540, stdin=subprocess.DEVNULL, env=environment
    )
    logs = sorted((folder / "runs").glob("*/logs/*/*.log"))
    said = "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)
    assert run.returncode == 0, run.stdout + run.stderr + said
    return folder / "runs" / "agents"


def trajectories_by_client(folder, run):
    """(client, trajectory) of each trained trajectory."""
    clients = {row["prompt"]: row["client"] for row in json_lines(folder / "train.jsonl")}
    found = []
    for group in groups(run):
        first = group["prompt"].split("<|user|>")[1].split("<|end|>")[0]
        found += [(clients[first], trajectory) for trajectory in group["trajectories"]]
    return found


class Weights:
    """The model at each version of a run."""

    def __init__(self, model, run):
        self._config = ModelConfig(path=str(model))
        self._run = run
        self._models = {}

    def logprobs(self, version, ids):
        """float32 [len(ids) - 1]: the log-prob of each token but the first, given all before it."""
        if version not in self._models:
            policy = load_policy(self._config)
            if version > 0:
                load_weights(self._run / "checkpoints" / f"v{version:08d}" / TRAINER, policy)
            self._models[version] = policy.model.eval()
        with torch.no_grad():
            logits = self._models[version](torch.tensor([ids])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def worst_error(trajectories, weights):
    """The largest difference of log-probs, the number of tokens, and their versions."""
    worst, versions = 0.0, Counter()
    for _, trajectory in trajectories:
        for sequence in trajectory["sequences"]:
            ids = [*sequence["prompt_ids"], *sequence["tokens"]]
            held = iter(sequence["logprobs"])
            sampled = [span for span in sequence["spans"] if span[3] == "sampled"]
            recomputed = {version: weights.logprobs(version, ids) for version in {span[0] for span in sampled}}
            for version, start, end, _ in sampled:
                for at in range(start, end):
                    expected = float(recomputed[version][len(sequence["prompt_ids"]) + at - 1])
                    worst = max(worst, abs(expected - next(held)))
                versions[version] += end - start
            assert next(held, None) is None
    return worst, versions


def turns_and_sequences(trajectories):
    """By client: [(turns, sequences)]."""
    found = {}
    for client, trajectory in trajectories:
        turns = sum(len(sequence["turns"]) for sequence in trajectory["sequences"])
        found.setdefault(client, []).append((turns, len(trajectory["sequences"])))
    return found


@pytest.fixture
def agents(tmp_path):
    def trained(clients, python):
        write_inputs(tmp_path, clients, python)
        run = train(tmp_path)
        found = trajectories_by_client(tmp_path, run)
        assert len(found) == STEPS * len(clients) * 2
        worst, versions = worst_error(found, Weights(tmp_path / "model", run))
        table = turns_and_sequences(found)
        print(f"\nworst error {worst:.2e} nats of {versions.total()} tokens by version {dict(versions)}")
        for client, pairs in table.items():
            print(f"{client}: turns and sequences {pairs}")
        assert set(table) == set(clients)
        assert worst <= TOLERANCE and len(versions) > 2
        return table

    return trained


def test_the_bare_client_never_forks(agents):
    table = agents(["openai", "openai-async", "openai-stream"], sys.executable)
    for pairs in table.values():
        assert all(turns > 1 and sequences == 1 for turns, sequences in pairs)


@pytest.mark.skipif(not AGENTS_PYTHON, reason="ASYNCRL_AGENTS_PYTHON names no interpreter with frameworks")
def test_frameworks_fork_if_they_rewrite_answers(agents):
    table = agents([*ECHO, *REWRITE], AGENTS_PYTHON)
    for client in ECHO:
        assert all(sequences == 1 for _, sequences in table[client])
        assert any(turns > 1 for turns, _ in table[client])
    # smolagents writes tool calls into prose, and rewords code.
    for client in REWRITE:
        assert any(sequences > 1 for _, sequences in table[client])
