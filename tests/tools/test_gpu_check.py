"""The checks on a GPU: their judgement, and the part of their work that is the same on a CPU."""

import json
import tomllib
from types import SimpleNamespace

import pytest
import torch
from learner.learner_cases import save_small_model
from quick import needs_vllm

from asyncrl.config.load import validate_config
from tools.gpu_check import __main__ as command
from tools.gpu_check import checks, learner_rate
from tools.gpu_check.checks import Host, run_check
from tools.gpu_check.results import (
    BEGIN,
    END,
    Result,
    as_json,
    exit_code,
    judge_cost,
    judge_learning,
    judge_rate,
    judge_updates,
    put,
)


def update(drift=None, way="shm", **values):
    line = {"weights/transport": way, "weights/load_s": 0.2, "weights/stall_s": 0.3, "weights/bytes": 5}
    return line | ({} if drift is None else {"policy/drift": drift}) | values


@pytest.mark.parametrize(
    ("drifts", "result", "words"),
    [
        ([0.01] * 10, "pass", "10 updates by shm; log-probs are at most 0.01 nats"),
        ([0.01] * 9 + [0.2], "fail", "at most 0.2 nats"),
        ([0.01] * 9, "fail", "9 updates were compared"),
        ([0.01] * 9 + [None], "fail", "9 updates were compared"),
        ([], "fail", "0 updates"),
    ],
)
def test_updates_are_judged_by_the_worst_log_probs(drifts, result, words):
    found = judge_updates("updates", [update(drift) for drift in drifts], 0.15)
    assert found.result == result and words in found.detail


@pytest.mark.parametrize(
    ("accuracies", "result"), [([0.3, 0.9], "pass"), ([0.3, 0.45], "fail"), ([0.3], "fail"), ([], "fail")]
)
def test_a_run_passes_if_it_learns(accuracies, result):
    assert judge_learning("run", accuracies, "a GPU").result == result


def test_the_cost_of_an_update_leaves_the_first_load_out():
    slow = update(**{"weights/load_s": 9.0})
    found = judge_cost("cost", [slow, update(), update()])
    assert found.result == "pass" and (found.figures["load_s"], found.figures["stall_s"]) == (0.2, 0.3)
    assert judge_cost("cost", [slow]).result == "fail"


@pytest.mark.parametrize(("used", "result"), [(10 << 30, "pass"), (12 << 30, "fail")])
def test_the_learner_may_not_use_much_more_than_is_estimated(used, result):
    kernels = [{"name": "flash", "share": 0.4}]
    rate = {"tokens_per_s": 3e4, "mfu": 0.3, "used_bytes": used, "estimated_bytes": 10 << 30, "kernels": kernels}
    found = judge_rate("learner", rate)
    assert found.result == result and "30,000 tokens/s" in found.detail and "40% flash" in found.detail


def test_the_report_goes_into_a_page():
    results = [Result("versions", "pass", "torch 2"), Result("run", "skip", "torch sees no CUDA device")]
    report = json.loads(json.dumps(as_json({"GPU": "none"}, results)))
    page = f"# Page\n\n{BEGIN}old\n{END}\n\nmore\n"
    new = put(page, report)
    assert "| run | skip | torch sees no CUDA device |" in new and "old" not in new and new.endswith("more\n")
    assert put(new, report) == new
    with pytest.raises(ValueError, match="gpu_check"):
        put("# Page", report)
    assert exit_code(results) == 0 and exit_code([*results, Result("x", "fail", "y")]) == 1


def host_of(tmp_path, gpus=(), problem=""):
    return Host(tuple(gpus), problem, tmp_path)


def test_impossible_checks_are_skipped_with_a_reason_and_errors_are_failures(tmp_path):
    def breaks(host):
        raise KeyError("policy/drift")

    none, one = host_of(tmp_path, problem="torch sees no CUDA device"), host_of(tmp_path, ["H100"])
    assert run_check(none, "run", 1, breaks) == Result("run", "skip", "torch sees no CUDA device")
    assert run_check(one, "nccl", 2, breaks) == Result("nccl", "skip", "needs 2 GPUs, and torch sees 1")
    assert run_check(one, "run", 1, breaks) == Result("run", "fail", "KeyError: 'policy/drift'")


@needs_vllm
def test_every_check_without_a_gpu_is_skipped_with_a_reason(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert command.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    versions, *others = report["results"]
    assert versions["result"] == "pass" and "torch" in report["device"]
    assert len(others) == len(checks.checks()) - 1 >= 9
    assert {(each["result"], each["detail"]) for each in others} == {("skip", "torch sees no CUDA device")}
    page = tmp_path / "page.md"
    page.write_text(BEGIN + END)
    (tmp_path / "gpu.json").write_text(json.dumps(report))
    assert command.main(["--into", str(page), str(tmp_path / "gpu.json")]) == 0
    assert "| run on one GPU | skip |" in page.read_text()


class Run:
    """A run whose configuration is checked and whose lines are made up."""

    step, output, trees = 20, "", []

    def __init__(self, tree, folder):
        tree = {**tree, "run": {**tree.get("run", {}), "name": "live", "dir": str(folder)}}
        assert tomllib.loads(checks_toml(tree))
        self.trees.append(validate_config(tree))
        self.transport = "nccl" if self.trees[-1].weights.transport == "nccl" else "shm"

    def wait(self, timeout):
        return 0

    def lines(self, kind):
        if kind == "eval":
            return [{"eval/heldout/mean": 0.3}, {"eval/heldout_greedy/mean": 0.5}, {"eval/heldout/mean": 0.8}]
        return [update(0.01, self.transport)] * 11

    def close(self):
        pass


def checks_toml(tree):
    from tools.live_run import to_toml

    return to_toml(tree)


def test_the_configurations_of_all_runs_are_valid(tmp_path, monkeypatch):
    assets = SimpleNamespace(model="/m", train="/t.jsonl", heldout="/h.jsonl")
    monkeypatch.setattr("tools.quickstart.assets.ensure_assets", lambda *_: assets)
    monkeypatch.setattr(checks, "LiveRun", Run)
    monkeypatch.setattr(checks, "model_of", lambda host: "/0.6B")
    Run.trees.clear()
    host = host_of(tmp_path, ["H100", "H100"])
    names = [name for name in checks.checks() if not name.startswith(("learner", "two ranks"))]
    found = {name: run_check(host, name, *checks.checks()[name]) for name in names}
    assert {name: each.result for name, each in found.items()} == dict.fromkeys(names, "pass")
    assert [(each.placement.share, each.weights.transport) for each in Run.trees] == [
        *[("always", "auto")] * 5,
        ("never", "nccl"),
    ]
    assert {each.rollout.on_update for each in Run.trees[:3]} == {"abort_resume", "keep", "drain"}
    assert all(each.learner.device == "cuda" and each.rollout.gpus_per_replica == 1 for each in Run.trees)


def test_the_learner_is_measured_on_a_cpu_as_on_a_gpu(tmp_path, monkeypatch):
    folder = save_small_model(tmp_path / "model")
    for name, value in {"is_available": True, "max_memory_allocated": 1 << 20, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    found = learner_rate.measure(str(folder), 128, compiled=False, device="cpu")
    assert found["tokens_per_s"] == pytest.approx(512 / found["seconds"])
    assert found["estimated_bytes"] > 0 < found["mfu"] and found["used_bytes"] == 1 << 20
    assert judge_rate("learner", found).name == "learner"


@pytest.mark.slow
@needs_vllm
def test_the_log_probs_of_updates_are_checked_in_a_real_run(tmp_path, monkeypatch):
    """The same check on CPUs, with the real vLLM."""
    on_cpu = {"rollout": {"gpus_per_replica": 0}, "learner": {"device": "cpu"}}
    monkeypatch.setattr(checks, "ON_ONE_GPU", on_cpu)
    found = checks.check_updates(host_of(tmp_path), "abort_resume")
    assert found.result == "pass", found
    # Both sides compute in float32 here.
    assert found.figures["worst_drift_nats"] < 0.003
