"""Whole runs on a host with one GPU: ``slots=1``, a stand-in for the driver, simulated learner and engine.

Launcher, checks, placement, agent and actors are the real ones. Only the driver and the computations are not.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from gpu.driver import COMPILER, TOTAL_BYTES, USED_BYTES, build_driver
from recordings import read_recording

from asyncrl.observe.metrics_line import read_metrics
from tools.learn.chat_model import make_model, make_tokenizer, save
from tools.learn.recipe import Settings

pytestmark = pytest.mark.skipif(not COMPILER, reason="the stand-in for the driver needs a C compiler")

STEPS = 8
SHARED = "GPU 0 is shared by learner/0 and rollouter/0"
MEMORY = "the learner's rank may take [0-9]+% of the memory .* and the engine [0-9]+%"


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Flags for a run in which learner and engine have to share the only GPU."""
    (tmp_path / "driver").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_driver(tmp_path / "driver")))
    # The host has two, and the hostfile allows the run one of them.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    tokenizer = make_tokenizer()
    model = make_model(Settings(layers=2, width=64, heads=2, intermediate=128), len(tokenizer))
    save(model, tokenizer, tmp_path / "model")
    return [
        *("--hosts", str(tmp_path / "hosts"), "--model.path", str(tmp_path / "model"), "--learner.device", "cuda"),
        *("--rollout.replicas", "1", "--rollout.gpus_per_replica", "1", "--learner.steps", str(STEPS)),
    ]


@pytest.mark.parametrize(
    ("share", "reason"),
    [("auto", "there are too few GPUs for one each"), ("time_slice", 'placement.share = "time_slice"')],
)
def test_a_run_on_a_host_with_one_gpu_shares_it(launch, flags, share, reason):
    run = launch(*flags, "--placement.share", share)
    code, lines = run.end()
    assert code == 0, lines
    assert run.steps_trained == list(range(1, STEPS + 1))
    shown = next(line for line in lines if SHARED in line)
    assert re.search(f"{re.escape(f'{SHARED} ({reason})')}: {MEMORY}", shown)
    assert ("in turn" in shown) == (share == "time_slice")
    actors = [actor for snapshot in read_recording(run.run_dir) for actor in snapshot.actors]
    seen = {(actor.name, gpu.index, gpu.memory_bytes, gpu.memory_total_bytes) for actor in actors for gpu in actor.gpus}
    assert seen == {(name, 0, USED_BYTES, TOTAL_BYTES) for name in ("agent/0", "learner/0", "rollouter/0")}
    trained = read_metrics(run.run_dir / "metrics.jsonl", ("train",))
    assert any(line.get("time/take_gpu_s") for line in trained) == (share == "time_slice")


def test_a_gpu_is_not_shared_against_the_users_will(launch, flags):
    run = launch(*flags, "--placement.share", "never")
    code, lines = run.end()
    assert code == 78 and 'or set placement.share = "auto"' in run.shown, lines
    assert not run.run_dir.exists()


def test_the_doctor_shows_the_shares(launch, flags, tmp_path):
    launch(*flags, "--dry-run").end()
    command = [sys.executable, "-m", "asyncrl.cli.doctor", str(tmp_path / "sim.toml"), *flags]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=240, env=os.environ
    )
    assert done.stdout, done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert found["sharing"]["result"] == "ok"
    assert re.match(f"{SHARED} .*: {MEMORY}", found["sharing"]["detail"])
