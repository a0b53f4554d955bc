"""The quickstart's configuration over three hosts: the real learner on one, the real engine on two."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from cluster.launches import Launch

from asyncrl.observe.metrics_line import read_metrics
from tools.chaos.audit import read_lines
from tools.cluster.capture import conversations
from tools.cluster.netns import REPOSITORY, Cluster
from tools.quickstart.assets import draw_splits
from tools.quickstart.model import make_model, make_tokenizer, save
from tools.quickstart.settings import Settings
from tools.waiting import wait_until

pytest.importorskip("vllm")
UPDATES = 3
"""Updates of each replica, since one may be ready long before the other; then the run is preempted."""
PROMPTS = 96
START_S = 600
"""A safety net: loading vLLM twice is a minute of work, on a machine that may have other work."""
WEIGHTS = 4 * 650_000
"""Bytes of the model."""
RANKS_AND_ENGINES = ("learner/0", "learner/1", "rollouter/0", "rollouter/1")
REWARD = """
def digits(*, completion, **_):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""
"""A pattern that an untrained model meets now and then."""


@pytest.fixture
def cluster(namespaces, tmp_path, monkeypatch):
    """A head with two cores, and two hosts with one each: the learner's ranks go to the head, the engines elsewhere."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two hosts want a core each")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "shared" / "cache"))
    (tmp_path / "shared").mkdir()
    own = {"head": cores[:2], "a": cores[:1], "b": cores[1:2]}
    with Cluster(["a", "b"], shared=[tmp_path / "shared"], cores=own) as made:
        yield made


@pytest.fixture
def assets(tmp_path):
    """A folder with the quickstart's model before its warm-up, and its prompts: (folder, prompts)."""
    folder = tmp_path / "shared"
    tokenizer = make_tokenizer()
    save(make_model(Settings()), tokenizer, folder / "model")
    splits = draw_splits(Settings())
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in islice(splits.train, PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    (folder / "rewards.py").write_text(REWARD)
    return folder, [row["prompt"] for row in rows]


def have_updated(launch):
    lines = read_lines(launch.run_dir / "metrics.jsonl")[0]
    replicas = Counter(line["replica"] for line in lines if line["kind"] == "update" and line["weights/version"] > 0)
    return len(replicas) == 2 and min(replicas.values()) >= UPDATES


@pytest.mark.timeout(1500)
def test_i6_the_quickstart_over_three_hosts_is_encrypted(cluster, assets):
    """No prompt is visible between the hosts, as text or as tokens.

    test_launched_hosts.py shows that both are visible without encryption.
    """
    folder, prompts = assets
    flags = {
        "run.name": "trial",
        "run.dir": folder / "runs",
        "model.path": folder / "model",
        "data.path": folder / "train.jsonl",
        "eval.heldout.data.path": folder / "heldout.jsonl",
        "eval.heldout_greedy.data.path": folder / "heldout.jsonl",
        "rollout.replicas": 2,
        "reward.function": "rewards:digits",
        "learner.ranks": 2,
        "learner.steps": 4000,
        "learner.dynamic_sampling": "false",
        "supervision.start_timeout_s": START_S,
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    config = (REPOSITORY / "configs" / "quickstart.toml").read_text()
    with cluster.capture() as capture:
        launch = Launch(cluster, folder, "head\na\nb\n", *words, config=config)
        wait_until(
            lambda: have_updated(launch) or launch.process.poll() is not None, "updates of both replicas", 2 * START_S
        )
        launch.process.send_signal(signal.SIGTERM)
        code, shown = launch.end()
    found = conversations(capture)
    assert code == 75, shown
    steps = [line["step"] for line in read_metrics(launch.run_dir / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= UPDATES
    assert json.loads((launch.run_dir / "config.json").read_text())["security"]["curve"] == "required"
    for host, actors in {"head": ["learner/0", "learner/1"], "a": ["rollouter/0"], "b": ["rollouter/1"]}.items():
        agent = launch.log(f"agent-{['head', 'a', 'b'].index(host)}")
        assert [name for name in RANKS_AND_ENGINES if f'"actor": "{name}"' in agent] == actors
    for name in ("rollouter-0", "rollouter-1"):
        (ended,) = [line for line in launch.log(name).splitlines() if '"event": "ended"' in line]
        assert json.loads(ended)["counters"]["rollout/sampled_tokens"] > 0
    for name in ("a", "b"):
        # New weights after each step.
        assert sum(len(said) for (_, to), said in found.items() if to[0] == cluster[name].address) > UPDATES * WEIGHTS
    everything = b"\n".join(found.values())
    tokenizer = make_tokenizer()
    tokens = [np.array(tokenizer.encode(prompt), dtype="<i4").tobytes() for prompt in prompts]
    assert not any(secret in everything for secret in [*(prompt.encode() for prompt in prompts), *tokens])
    assert not [host for host in cluster.all_hosts if host.processes()]
    assert not list(launch.run_dir.glob("private*"))
