"""An evaluation of a run's checkpoint by asyncrl-eval equals the run's own last evaluation."""

import json
import subprocess
import sys

import pytest
from e2e.parity import configuration, run_live, write_assets
from quick import needs_vllm
from run_files import json_lines

from asyncrl.observe.evaluations import FILE, RESULT, read_rewards
from tools.live_run import to_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DATA = {"path": "held.jsonl", "max_prompt_tokens": 12}
ENGINES = {"reference": {}, "vllm": {"engine": "vllm", "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1}}}


@pytest.mark.parametrize("engine", ["reference", pytest.param("vllm", marks=needs_vllm)])
def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(tmp_path, engine):
    write_assets(tmp_path)
    (tmp_path / "held.jsonl").write_text("".join(f'{{"prompt": "{number}+7="}}\n' for number in range(10, 30)))
    data = DATA | {"path": str(tmp_path / "held.jsonl")}
    sets = {"held": {"n": 4, "pass_at": 0.5, "at_start": False}, "greedy": {"temperature": 0.0, "at_start": False}}
    tree = configuration(
        tmp_path,
        rollout=ENGINES[engine],
        learner={"steps": 3, "lr": 3e-3},
        checkpoint={"every_versions": 1, "export_at_end": False},
        eval={name: each | {"data": data} for name, each in sets.items()},
    )
    run_dir = run_live(tmp_path, tree, f"evaluated-{engine}")
    config = tmp_path / f"evaluated-{engine}.toml"
    config.write_text(to_toml(tree))
    flags = ["--run.dir", str(run_dir.parent), "--run.name", engine, "--run.seed", "17", "--data.path", "missing.jsonl"]
    flags += ["--compare", str(run_dir)]
    ended = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli.eval", str(config), "--checkpoint", f"{run_dir}@3", "--json", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result, folder = json.loads(ended.stdout), run_dir.parent / f"{engine}-eval"
    assert result == json.loads((folder / RESULT).read_text()) and result["model"] == f"{run_dir}@3"
    # Greedy responses are equal: the engine has the same weights.
    assert read_rewards(folder)["greedy"] == read_rewards(run_dir)["greedy"]
    assert len(json_lines(folder / FILE)) == 40
    # The seed differs, and so do the samples, but not the policy.
    assert read_rewards(folder)["held"] != read_rewards(run_dir)["held"]
    difference = result["differences"]["held"]
    assert (difference["prompts"], difference["unpaired"]) == (20, 0)
    assert all(found["low"] <= 0.0 <= found["high"] for found in difference["values"].values())
    assert set(result["differences"]["greedy"]["values"]["mean"].values()) == {0.0}
    # The checkpoint's model was temporary.
    assert not list(run_dir.parent.glob(".eval-*"))
