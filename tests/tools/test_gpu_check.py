"""The checks on a GPU: their judgement, and the part of their work that is the same on a CPU."""

import json
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from learner.learner_cases import save_small_model
from quick import needs_vllm

from asyncrl.config.load import validate_config
from asyncrl.config.training import ModelConfig
from asyncrl.gpu.learner_memory import choose_checkpointing, training_shape
from asyncrl.gpu.memory_shares import GpuShares
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.startup import sharding
from asyncrl.learner.fsdp.startup.loading import load_policy
from tools.asset_cache import Assets
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
    judge_experts,
    judge_learning,
    judge_rate,
    judge_updates,
    put,
)
from tools.live_run import RunEnded
from tools.quickstart import experts


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


@pytest.mark.parametrize(("fallbacks", "result"), [(0, "pass"), (4, "pass"), (6, "fail"), (12, "fail")])
def test_most_updates_must_come_by_the_transport_that_was_planned(fallbacks, result):
    ways = ["shm"] * fallbacks + ["ipc"] * (12 - fallbacks)
    updates = [update(0.01, way) for way in ways]
    found = judge_updates("updates", updates, 0.15, "ipc")
    assert found.result == result and (
        result == "pass" or f"{12 - fallbacks} of 12 updates came by ipc" in found.detail
    )
    assert judge_updates("updates", updates, 0.15).result == "pass"


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
    found = judge_rate("learner", rate_of(used_bytes=used, estimated_bytes=10 << 30))
    assert found.result == result and "30,000 tokens/s" in found.detail and "40% flash" in found.detail
    assert "first step 20.3 s" in found.detail and "activation checkpointing selective: " in found.detail


def rate_of(**values):
    kernels = [{"name": "flash<1>*|`x`", "share": 0.4}]
    rate = {"tokens_per_s": 3e4, "mfu": 0.3, "kernels": kernels, "first_step_s": 20.3, "checkpointing": "selective"}
    return rate | {"used_bytes": 1, "estimated_bytes": 1} | values


def test_the_report_of_the_gpu_check_is_inserted_into_a_page():
    results = [Result("versions", "pass", "torch 2"), Result("run", "skip", "torch sees no CUDA device")]
    results.append(judge_rate("learner", rate_of()))
    report = json.loads(json.dumps(as_json({"GPU": "none"}, results)))
    page = f"# Page\n\n{BEGIN}old\n{END}\n\nmore\n"
    new = put(page, report)
    assert "| run | skip | torch sees no CUDA device |" in new and "old" not in new and new.endswith("more\n")
    assert r"first step 20.3 s" in new and r"40% flash&lt;1&gt;\*\|\`x\` |" in new
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
    way = "shm"

    def __init__(self, tree, folder):
        tree = {**tree, "run": {**tree.get("run", {}), "name": "live", "dir": str(folder)}}
        assert tomllib.loads(checks_toml(tree))
        self.trees.append(validate_config(tree))
        self.transport = "nccl" if self.trees[-1].weights.transport == "nccl" else self.way

    def wait(self, timeout):
        return 0

    def lines(self, kind):
        if kind == "eval":
            return [{"eval/heldout/mean": 0.3}, {"eval/heldout_greedy/mean": 0.5}, {"eval/heldout/mean": 0.8}]
        if kind == "train":
            return [{"step": step, "policy/routes_differ": 0.001, "policy/engine_kl": 1e-5} for step in range(12)]
        return [update(0.01, self.transport)] * 11

    def close(self):
        pass


def checks_toml(tree):
    from tools.live_run import to_toml

    return to_toml(tree)


def made_up(monkeypatch, run):
    """Let the checks start runs that are made up, without the quickstart's files."""
    monkeypatch.setattr("tools.quickstart.assets.ensure_assets", lambda: Assets(Path("/made-up")))
    monkeypatch.setattr("tools.live_run.LiveRun", run)
    Run.trees.clear()


def test_the_configurations_of_all_runs_are_valid(tmp_path, monkeypatch):
    made_up(monkeypatch, Run)
    monkeypatch.setattr(checks, "model_of", lambda host: "/0.6B")
    monkeypatch.setattr(experts, "upcycle", lambda dense, folder: folder)
    host = host_of(tmp_path, ["H100", "H100"])
    names = [name for name in checks.checks() if not name.startswith(("learner", "two ranks"))]
    found = {name: run_check(host, name, *checks.checks()[name]) for name in names}
    assert {name: each.result for name, each in found.items()} == dict.fromkeys(names, "pass")
    assert [(each.placement.share, each.weights.transport) for each in Run.trees] == [
        *[("always", "auto")] * 6,
        ("never", "nccl"),
    ]
    assert {each.rollout.on_update for each in Run.trees[:3]} == {"abort_resume", "keep", "drain"}
    assert all(each.learner.device == "cuda" and each.rollout.gpus_per_replica == 1 for each in Run.trees)


def test_the_learner_is_measured_on_a_cpu_as_on_a_gpu(tmp_path, monkeypatch):
    folder = save_small_model(tmp_path / "model")
    stand_in(monkeypatch)
    found = learner_rate.measure(str(folder), 128, compiled=False, device="cpu")
    assert found["tokens_per_s"] == pytest.approx(512 / found["seconds"])
    assert found["estimated_bytes"] > 0 < found["mfu"] and found["used_bytes"] == 1 << 20
    assert judge_rate("learner", found).name == "learner"
    assert found["first_step_s"] > 0


def stand_in(monkeypatch):
    """The calls of torch.cuda in ``learner_rate.measure``, without CUDA."""
    for name, value in {"is_available": True, "max_memory_allocated": 1 << 20, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.mark.parametrize(("total", "kind"), [(80 * 10**9, "off"), (10**6, "full")])
def test_memory_is_judged_by_the_checkpointing_that_the_trainer_chose(total, kind, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    plan = sharding.plan_memory

    def plan_on_a_gpu(policy, scoring, config, ranks, *others):
        gather = lambda values, what: np.array([values])  # noqa: E731
        gpu = SimpleNamespace(rank=0, device=torch.device("cuda"), all_gather=gather)
        return plan(policy, scoring, config, gpu, *others)

    monkeypatch.setattr(sharding, "plan_memory", plan_on_a_gpu)
    monkeypatch.setattr(learner_rate, "STEPS", 1)
    folder = save_small_model(tmp_path / "model")
    found = learner_rate.measure(str(folder), 128, compiled=False, device="cpu")
    config = learner_rate.configuration(str(folder), 128, compiled=False, device="cpu")
    shape = sharding.shape_of(load_policy(ModelConfig(path=str(folder))))
    assert found["checkpointing"] == kind
    assert found["estimated_bytes"] == learner_rate.estimated_bytes(config, shape, kind)


def test_the_model_of_the_checks_keeps_its_activations_on_80_gb_and_passes():
    """Qwen3-0.6B in rows of 16k, of which an H100 has room for all activations."""
    with torch.device("meta"):
        policy = Policy(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**checks.SIZES)))
    shape, config = sharding.shape_of(policy), learner_rate.configuration("/m", 16_384, compiled=False)
    kind = choose_checkpointing(shape, training_shape(config, shape, 2), 80 * 10**9)
    estimated = learner_rate.estimated_bytes(config, shape, kind)
    assert kind == "off" and 42 < estimated / 2**30 < 43
    assert judge_rate("learner", rate_of(used_bytes=estimated, estimated_bytes=estimated)).result == "pass"


def test_the_profile_lists_the_kernels_with_most_time(monkeypatch):
    events = [
        SimpleNamespace(key=key, self_device_time_total=time)
        for key, time in {"a": 1, "b": 4, "c": 0, "d": 3, "e": 2}.items()
    ]
    stepped = []

    @contextmanager
    def profile(activities):
        yield SimpleNamespace(key_averages=lambda: events if stepped else [])

    monkeypatch.setattr(torch.profiler, "profile", profile)
    found = learner_rate.kernels_of(lambda: stepped.append(1))
    assert found == [{"name": name, "share": share} for name, share in (("b", 0.4), ("d", 0.3), ("e", 0.2))]


def test_a_run_with_experts_needs_the_routes_of_every_step():
    updates, line = [update(0.01, "ipc")] * 11, {"step": 1, "policy/routes_differ": 0.02, "policy/engine_kl": 1e-5}
    found = judge_experts("experts", [line, line | {"policy/routes_differ": 0.01}], updates, 0.15)
    assert found.result == "pass" and "2.0% of experts" in found.detail and found.figures["engine_kl"] == 1e-5
    assert judge_experts("experts", [line, {"step": 2}], updates, 0.15).detail == "steps without routes: [2]"
    assert judge_experts("experts", [], updates, 0.15).result == "fail"
    assert judge_experts("experts", [line], [update(0.2, "ipc")] * 11, 0.15).result == "fail"


@pytest.mark.parametrize(("name", "layers"), [("experts", "Router"), ("hybrid", "GatedDeltaNet")])
def test_models_with_experts_and_with_states_are_made_too(name, layers, tmp_path, monkeypatch):
    tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    monkeypatch.setattr(checks, "SIZES", tiny | heads | {"tie_word_embeddings": True})
    family, sizes = checks.MODELS[name]
    few = {key: min(value, 4) for key, value in sizes.items()}
    monkeypatch.setitem(checks.MODELS, name, (family, few | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}))
    policy = load_policy(ModelConfig(path=str(checks.model_of(host_of(tmp_path), name))))
    assert any(layers in type(module).__name__ for module in policy.modules())
    whole, active = (sum(p.numel() for p in policy.parameters()), policy.count_active(trained=False))
    assert active == whole if name == "hybrid" else active < whole


def test_the_model_of_the_checks_is_made_once_and_whole(tmp_path, monkeypatch):
    tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    monkeypatch.setattr(checks, "SIZES", tiny | heads | {"tie_word_embeddings": True})
    host = host_of(tmp_path)
    (tmp_path / "0.6B").mkdir()
    # A process that was ended while it wrote the model.
    (tmp_path / "0.6B" / "config.json").write_text("{}")
    folder = checks.model_of(host)
    policy = load_policy(ModelConfig(path=str(folder)))
    assert sharding.shape_of(policy).layers == 1 and json.loads((folder / "config.json").read_text())["dtype"]
    monkeypatch.setattr(checks, "make_model", None)
    assert checks.model_of(host) == folder


def test_the_learner_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "model_of", lambda host, name: tmp_path)
    host = host_of(tmp_path, ["H100"])
    if not torch.cuda.is_available():
        found = checks.check_rate(host, 16_384, compiled=True)
        assert (found.result, found.detail) == ("fail", "RuntimeError: torch sees no CUDA device")
    output, asked = "a line of a library\n" + json.dumps(rate_of()) + "\n", []

    def ran(argv, **_):
        asked.append(argv[-3:])
        return SimpleNamespace(returncode=0, stdout=output)

    monkeypatch.setattr(checks.subprocess, "run", ran)
    found = checks.check_rate(host, 65_536, compiled=True)
    assert found == judge_rate("learner, rows of 64k, compiled", rate_of()) and found.result == "pass"
    assert asked == [[str(tmp_path), "65536", "1"]]


class Ranks(Run):
    """A run whose learner/1 is a process that sleeps. It ends with exit code 0 if that process was killed."""

    def until(self, condition, what, timeout):
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return condition()

    def pid(self, actor):
        return self.rank.pid if actor == "learner/1" else None

    def wait(self, timeout):
        return 0 if self.rank.wait(10) == -signal.SIGKILL else 1

    def close(self):
        self.rank.kill()
        self.rank.wait()


def test_the_second_rank_is_killed_and_a_run_that_ends_early_fails(tmp_path, monkeypatch):
    made_up(monkeypatch, Ranks)
    host = host_of(tmp_path, ["H100", "H100"])
    found = checks.check_rank_death(host)
    assert (found.result, found.detail) == ("pass", "20 steps, on H100")
    assert (Run.trees[-1].learner.ranks, Run.trees[-1].learner.steps) == (2, 20)

    def ends(self, *_):
        self.rank = subprocess.Popen(["true"])
        raise RunEnded("while waiting for step 5: out of memory")

    monkeypatch.setattr(Ranks, "until", ends)
    again = host_of(tmp_path / "again", ["H100", "H100"])
    found = run_check(again, "two ranks, one is killed", 2, checks.check_rank_death)
    assert found.result == "fail" and "out of memory" in found.detail


def test_a_run_that_falls_back_from_the_copy_on_the_gpu_fails(tmp_path, monkeypatch):
    made_up(monkeypatch, Run)
    shares = GpuShares(0.3, 0.6, "off", 1 << 20, 1 << 30, has_copy=True)
    monkeypatch.setattr(
        Run, "output", f"GPU 0 is shared by learner/0 and rollouter/0 (there are too few GPUs for one each): {shares}\n"
    )
    found = checks.check_updates(host_of(tmp_path), "keep")
    assert found.result == "fail" and found.detail.startswith("0 of 11 updates came by ipc: ")
    monkeypatch.setattr(Run, "way", "ipc")
    assert checks.check_updates(host_of(tmp_path / "again"), "keep").result == "pass"


def test_a_question_without_an_answer_is_a_problem_of_the_host(monkeypatch):
    monkeypatch.setattr(checks, "ASK_S", 0.01)
    assert checks._ask("import time; time.sleep(60)")[1].startswith("no answer within 0.01 s")


def test_the_help_says_how_long_the_checks_may_take(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    most = checks.longest_s() / 60
    assert f"fails after 4 minutes: all take at most {most:.0f}" in " ".join(capsys.readouterr().out.split())
    assert most >= len(checks.checks()) * checks.CHECK_S / 60


@pytest.mark.slow
@needs_vllm
def test_the_log_probs_of_updates_are_checked_in_a_real_run(tmp_path, monkeypatch):
    """The same check on CPUs, with the real vLLM."""
    on_cpu = {"rollout.gpus_per_replica": 0, "learner.device": "cpu"}
    monkeypatch.setattr(checks, "ON_ONE_GPU", on_cpu)
    found = checks.check_updates(host_of(tmp_path), "abort_resume")
    assert found.result == "pass", found
    # Both sides compute in float32 here.
    assert found.figures["worst_drift_nats"] < 0.003
