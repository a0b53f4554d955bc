"""Several reward pools in a whole run, every actor a process: all score, and the death of one stops nothing."""

import os
import signal

import pytest

from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

USERS = '''
import os, pathlib

def reward(*, completion, folder):
    """The pool is the worker's parent."""
    (pathlib.Path(folder) / str(os.getppid())).touch()
    return float(len(completion) % 2)
'''


def test_two_pools_score_and_one_is_enough_while_the_other_is_started_again(tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "pools").mkdir()
    tree = {
        "data": {"source": "synthetic", "size": 4096},
        "rollout": {
            "engine": "sim",
            "replicas": 2,
            "samples_per_prompt": 4,
            "concurrency": 16,
            "max_tokens": 32,
            "retry_backoff_s": 0.05,
            "sim": {"length": "lognormal", "length_median": 12.0, "decode_step_s": 0.004, "load_s": 0.01},
        },
        "reward": {
            "function": "users:reward",
            "pools": 2,
            "workers": 1,
            "options": {"folder": str(tmp_path / "pools")},
        },
        "learner": {"backend": "sim", "steps": 120, "groups_per_step": 4, "sim": {"step_s": 0.1}},
        "network": {"call_timeout_s": 2.0},
        "checkpoint": {"every_versions": 0},
    }
    run = LiveRun(tree, tmp_path, env={"PYTHONPATH": str(tmp_path)})

    def scored() -> set[str]:
        return {path.name for path in (tmp_path / "pools").iterdir()}

    try:
        pools = {
            name: run.until(lambda name=name: run.pid(name), f"{name} runs", 60) for name in ("reward/0", "reward/1")
        }
        run.until(lambda: scored() >= {str(pid) for pid in pools.values()}, "both pools score", 90)
        before = scored()
        os.kill(pools["reward/1"], signal.SIGKILL)
        died_at = run.step
        run.until(lambda: run.step >= died_at + 5, "steps with one pool", 60)
        assert run.wait(200) == 0, run.output
        assert run.left() == []
    finally:
        run.close()
    assert "reward/1 died" in run.output
    assert len(scored() - before) == 1, "its successor scores as well"
    assert run.lines("train")[-1]["ledger/trained"] == 120 * 4
