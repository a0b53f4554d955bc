"""asyncrl-eval on simulated runs."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from launcher.launched import Run, sim_tree
from run_files import json_lines

from asyncrl.config.keys import default_words
from asyncrl.observe.evaluations import FILE, RESULT

SETS = {
    "held": {"n": 3, "pass_at": 1.0, "every_versions": 1, "data": {"source": "synthetic", "size": 12}},
    "other": {"at_start": False, "data": {"source": "synthetic", "size": 4}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configuration of a simulated run, whose training prompts are missing."""
    folder = tmp_path_factory.mktemp("eval")
    tree = sim_tree(folder, eval=SETS) | {"data": {"path": str(folder / "missing.jsonl")}}
    (folder / "sim.toml").write_text("".join(f"{name} = {default_words(table)}\n" for name, table in tree.items()))
    return folder


def argv(folder, *flags):
    return [sys.executable, "-m", "asyncrl.cli.eval", str(folder / "sim.toml"), *flags]


def evaluate(folder, *flags):
    return subprocess.run(argv(folder, *flags), cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def evaluated(folder):
    """The first evaluation, and its run folder."""
    return evaluate(folder), folder / "runs" / "trial-eval"


def test_it_prints_a_table_and_keeps_the_rewards_of_each_prompt(evaluated):
    ended, run_dir = evaluated
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = ended.stdout.partition("intervals of 95 %: bootstrap over prompts")[2]
    assert "eval/held: 12 prompts, up to 3 samples each" in table and "eval/other: 4 prompts" in table
    assert all(f"  {name:<8}" in table for name in ("mean", "pass@1", "pass@2", "pass@3"))
    result = json.loads((run_dir / RESULT).read_text())
    prompts = json_lines(run_dir / FILE)
    held = [reward for prompt in prompts if prompt["eval"] == "held" for reward in prompt["rewards"]]
    assert len(held) == 36 and result["sets"]["held"]["values"]["mean"]["value"] == pytest.approx(sum(held) / 36)
    [shown] = [line for line in ended.stdout.splitlines() if line.startswith("version 0  eval/held ")]
    assert shown.startswith(f"version 0  eval/held {result['sets']['held']['values']['mean']['value']:.3f}")
    [line] = [line for line in json_lines(run_dir / "metrics.jsonl") if "eval/held/mean" in line]
    assert line["eval/held/pass_at/2"] == pytest.approx(result["sets"]["held"]["values"]["pass@2"]["value"])
    assert not list((run_dir / "checkpoints").glob("v*")) and not (run_dir / "export").exists()


def test_json_goes_to_standard_output_alone_with_the_differences_to_another_evaluation(folder, evaluated):
    ended = evaluate(folder, "--json", "--compare", "trial-eval", "--run.seed", "5", "--eval.held.n=2")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert "run folder: " in ended.stderr and result["compared_with"] == str(evaluated[1])
    difference = result["differences"]["held"]
    assert (difference["prompts"], difference["unpaired"], list(difference["values"])) == (
        12,
        0,
        ["mean", "pass@1", "pass@2"],
    )
    before = json.loads((evaluated[1] / RESULT).read_text())["sets"]["held"]["values"]["mean"]["value"]
    found = result["sets"]["held"]["values"]["mean"]["value"] - before
    assert difference["values"]["mean"]["value"] == pytest.approx(found)


def test_a_comparison_without_a_common_set_starts_nothing(folder, evaluated):
    other = shutil.copytree(evaluated[1], folder / "runs" / "renamed")
    (other / FILE).write_text((other / FILE).read_text().replace('"eval":"', '"eval":"my_'))
    before = set(folder.glob("runs/*"))
    ended = evaluate(folder, "--compare", "renamed")
    assert ended.returncode == 2 and "it evaluated my_held, my_other, and none of held, other" in ended.stderr
    assert set(folder.glob("runs/*")) == before


def test_a_signal_ends_it_without_a_result(folder):
    run = Run(folder, argv(folder, "--run.name", "long", "--eval.held.data.size", "20000"))
    try:
        run.wait_to_show("running")
        run.process.send_signal(signal.SIGINT)
        code, shown = run.end()
    finally:
        run.close()
    assert code == 130, shown
    assert shown[-1] == "ended before the last step: Ctrl-C" and "checkpoint" not in run.shown
    assert not (folder / "runs" / "long-eval" / RESULT).exists()


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        (["--model", "a", "--checkpoint", "b"], 2, "argument --checkpoint: not allowed with argument --model"),
        (["--compare", "nowhere"], 2, "asyncrl-eval: nowhere: no such folder"),
        (["--checkpoint", "nowhere@3"], 2, "asyncrl-eval: nowhere: no such folder"),
        (["--eval.held.m", "3"], 78, "asyncrl-eval: eval.held.m: unknown key"),
        (["--eval.held.data.source", "jsonl", "--eval.held.data.path", "none.jsonl"], 78, "eval.held.data: none.jsonl"),
    ],
)
def test_wrong_usage_and_configurations_start_nothing(folder, flags, code, problem):
    before = set(folder.glob("runs/*"))
    ended = evaluate(folder, *flags)
    assert ended.returncode == code and problem in ended.stderr, ended.stderr
    assert set(folder.glob("runs/*")) == before
