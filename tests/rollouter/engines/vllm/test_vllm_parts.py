"""The parts of the vLLM engine that need no vLLM: watch, processes, options, and what a model folder says."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from virtual import run_virtual

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError, EngineDied
from asyncrl.core.truncation import LARGEST_SET, Truncation
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE, GpuShares
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.engines.vllm import engine as engine_module
from asyncrl.rollouter.engines.vllm import model_folder, options
from asyncrl.rollouter.engines.vllm.engine import VllmEngine, sampling, scoring
from asyncrl.rollouter.engines.vllm.processes import Processes, Watch

RUN = run_virtual
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
MODEL = {"num_attention_heads": 2, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32}


def config_for(*, vllm: Any = None, **tree: Any) -> Config:
    rollout = {"gpus_per_replica": 0, "max_tokens": 100, "vllm": vllm or {}} | tree.pop("rollout", {})
    data = {"source": "synthetic", "max_prompt_tokens": 28}
    return validate_config({"model": {"path": "/models/m"}, "data": data, "rollout": rollout, **tree})


async def test_scores_go_before_requests_that_wait():
    """With an AsyncLLM that answers at once; of two requests vLLM runs the one of the lower priority first."""
    asked = []

    async def generate(prompt, params, name, *, lora_request, priority):
        asked.append((prompt, params, priority))
        yield SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=[-1.0, -2.0]))

    engine = VllmEngine(config_for(), "rollouter/0")
    engine._llm = SimpleNamespace(generate=generate)
    errors = dict.fromkeys(("VLLMClientError", "EngineDeadError", "EngineGenerateError"), KeyError)
    kinds = SimpleNamespace(FINAL_ONLY="final")
    engine._vllm = SimpleNamespace(tokens_input=list, SamplingParams=dict, RequestOutputKind=kinds, **errors)
    assert await engine.score([1, 2, 3]) == [-1.0, -2.0]
    [(prompt, params, priority)] = asked
    assert prompt == [1, 2, 3]
    assert (params["prompt_logprobs"], params["temperature"], params["output_kind"]) == (0, 1.0, "final")
    # An engine that returns token sets refuses a request without a top_k.
    assert (params["top_k"], scoring(engine._vllm, truncates=True)["top_k"]) == (0, 1)
    assert priority < GenerationRequest(id="a", prompt_ids=[1], max_tokens=1, temperature=1.0, seed=None).priority


# --- watch --------------------------------------------------------------------------------------------------


async def test_a_guard_ends_at_its_deadline_and_declares_death():
    deaths = []
    watch, loop = Watch("e", deaths.append), asyncio.get_running_loop()
    for error in (ValueError("mine"), TimeoutError("mine")):
        with pytest.raises(type(error), match="mine"):
            async with watch.guard("it", 5.0):
                raise error
    async with watch.guard("quick", 5.0):
        await asyncio.sleep(1.0)
    with pytest.raises(EngineDied, match=r"did not answer slow within 5\.0 s"):
        async with watch.guard("slow", 5.0):
            await asyncio.Event().wait()
    assert loop.time() == pytest.approx(6.0)
    with pytest.raises(EngineDied, match="slow"):
        async with watch.guard("another", 5.0):
            raise AssertionError("entered although dead")
    assert deaths == ["did not answer slow within 5.0 s"]


# --- processes ----------------------------------------------------------------------------------------------


def _core(ready: Any, stubborn: bool) -> None:
    """A core with a worker of its own; both ignore a polite end if they are stubborn."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen(SLEEPER)
    ready.send(worker.pid)
    time.sleep(600 if stubborn else 2.0)
    worker.kill()
    worker.wait()


@pytest.mark.parametrize("how", ["ends", "killed before", "stopped"])
def test_no_process_of_an_engine_survives(how):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    core = context.Process(target=_core, args=(theirs, how != "ends"), name="EngineCore")
    core.start()
    with ours, theirs, subprocess.Popen(SLEEPER) as bystander, ExitStack() as stack:
        stack.callback(bystander.kill)
        worker = psutil.Process(ours.recv())
        processes = Processes()
        processes.adopt([core])
        assert processes.has_workers
        assert processes.pids == [core.pid, worker.pid]
        if how == "killed before":
            core.kill()
            core.join()
            assert processes.pids == [worker.pid]
        if how == "stopped":
            os.kill(core.pid, signal.SIGSTOP)
        assert processes.end(grace_s=10.0 if how == "ends" else 0.0) == []
        assert not core.is_alive() and processes.pids == [] and not processes.has_workers
        assert bystander.poll() is None
        assert core.exitcode == (0 if how == "ends" else -signal.SIGKILL)


# --- options ------------------------------------------------------------------------------------------------


def test_an_engine_on_a_shared_gpu_gets_its_share_and_its_cache_size(monkeypatch):
    shares = GpuShares(rank=0.3, engine=0.55, checkpointing="full", cached_tokens=1000, cache_bytes=1 << 30)
    config = config_for(rollout={"gpus_per_replica": 1})
    expected = {"gpu_memory_utilization": 0.55, "kv_cache_memory_bytes": 1 << 30}
    assert options.engine_arguments(config, "rollouter/0", shares).items() >= expected.items()
    engine = VllmEngine(config, "rollouter/0")
    engine._vllm = SimpleNamespace(launch=lambda *arguments: arguments[-1], LoadLogger=lambda: None)
    monkeypatch.setattr(engine_module, "read_shares", lambda _, gpus: shares if gpus == ["0"] else None)
    for value, passed in (("0:learner/0", shares), ("", None)):
        monkeypatch.setenv(SHARED_GPU_VARIABLE, value)
        assert engine._launch({}) is passed


def test_arguments_follow_the_configuration():
    def arguments(name: str = "rollouter/0", **tree: Any) -> dict[str, Any]:
        return options.engine_arguments(config_for(**tree), name)

    on_cpu = arguments(vllm={"extra": {"block_size": 64}})
    expected = {"max_model_len": 128, "dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False}
    assert on_cpu.items() >= (expected | {"block_size": 64, "load_format": "dummy"}).items()
    assert on_cpu["max_num_batched_tokens"] >= 128
    assert on_cpu["ir_op_priority"]["rms_norm"] == ["asyncrl_cpu", "native"]
    assert on_cpu["seed"] != arguments("rollouter/1")["seed"]
    on_gpu = arguments(rollout={"gpus_per_replica": 2})
    assert on_gpu.items() >= {"tensor_parallel_size": 2, "dtype": "bfloat16", "enforce_eager": False}.items()
    assert not {"enable_chunked_prefill", "ir_op_priority", "kv_cache_memory_bytes"} & set(on_gpu)
    assert on_gpu["gpu_memory_utilization"] == 0.9
    set_by_user = arguments(rollout={"gpus_per_replica": 1}, vllm={"gpu_memory_utilization": 0.5})
    assert set_by_user["gpu_memory_utilization"] == 0.5
    assert arguments(learner={"dtype": "bfloat16"})["dtype"] == "bfloat16"
    assert not {"return_sampling_mask", "quantization"} & {*on_cpu, *on_gpu}
    # vLLM's own "fp8" quantizes no weights in bfloat16.
    fp8 = arguments(rollout={"gpus_per_replica": 1}, vllm={"quantization": "fp8"})
    assert fp8.items() >= {"quantization": "fp8_per_channel", "dtype": "bfloat16"}.items()
    truncated = arguments(rollout={"gpus_per_replica": 1, "top_p": 0.9})
    assert truncated.items() >= {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}.items()
    # An adapter is added to the model's own weights.
    expected = {"load_format": "auto", "enable_lora": True, "max_loras": 1, "lora_target_modules": ["q_proj", "v_proj"]}
    for rank, room in ((1, 1), (2, 8), (257, 320)):
        lora = {"rank": rank, "targets": ["self_attn.q_proj", "v_proj"]}
        assert arguments(lora=lora).items() >= (expected | {"max_lora_rank": room}).items()
    assert arguments(lora={"rank": 2, "publish": "merged"}) == arguments()


@pytest.mark.parametrize(
    ("truncation", "temperature", "expected"),
    [
        (None, 0.7, {"temperature": 0.7}),
        (None, 0.0, {"temperature": 0.0}),
        (Truncation(top_p=0.9), 0.7, {"temperature": 0.7, "top_p": 0.9, "top_k": LARGEST_SET, "min_p": 0.0}),
        # Evaluations may be greedy, and an engine that returns token sets takes no temperature of 0.
        (Truncation(top_p=0.9), 0.0, {"temperature": 1.0, "top_k": 1}),
    ],
)
def test_a_request_truncates_as_the_run_does(truncation, temperature, expected):
    vllm = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(DELTA="delta"))
    asked = {"id": "a", "prompt_ids": [1], "max_tokens": 1, "seed": None, "temperature": temperature}
    params = sampling(vllm, GenerationRequest(**asked, truncation=truncation), [], 8)
    assert {key: params[key] for key in ("temperature", "top_p", "top_k", "min_p") if key in params} == expected


def test_the_first_model_runner_is_refused_for_truncated_distributions(monkeypatch):
    truncated, whole = (config_for(rollout={"gpus_per_replica": 1, "top_p": top_p}) for top_p in (0.9, 1.0))
    assert options.judge(truncated, MODEL) is None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    found = options.judge(truncated, MODEL)
    assert found is not None and found.key == "rollout.top_p" and "second model runner" in found.detail
    assert options.judge(whole, MODEL) is None


def test_longest_sequence_counts_evaluations():
    data = {"source": "synthetic", "max_prompt_tokens": 50}
    evals = {"long": {"data": data, "max_tokens": 300}, "short": {"data": data}}
    assert options.max_model_len(config_for(eval=evals)) == 350
    assert options.max_model_len(config_for(vllm={"max_model_len": 999}, eval=evals)) == 999


def test_environment_shares_the_cores():
    assert "OMP_NUM_THREADS" not in options.environment(config_for())
    assert options.environment(config_for(vllm={"threads": 3}))["OMP_NUM_THREADS"] == "3"
    assert options.environment(config_for(rollout={"replicas": 4096}))["OMP_NUM_THREADS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in options.environment(config_for(rollout={"gpus_per_replica": 1}))


@pytest.mark.parametrize(
    ("changes", "tree", "words"),
    [
        ({"head_dim": 48}, {}, "48 dimensions; vLLM's CPU attention knows 32, 64, 128"),
        ({"head_dim": None, "hidden_size": 80}, {}, "40 dimensions"),
        ({}, {"vllm": {"cpu_kv_cache_bytes": 65535}}, "needs 65536"),
        ({}, {"rollout": {"temperature": 2.1}}, "rollout.temperature"),
        ({}, {"eval": {"e": {"data": {"source": "synthetic"}, "temperature": 3.0}}}, "eval.e.temperature"),
        *[
            ({}, {"vllm": {"extra": {key: 1}}}, f"rollout.vllm.extra.{key}")
            for key in ("enable_lora", "max_lora_rank", "worker_extension_cls", "return_sampling_mask")
        ],
        ({}, {"lora": {"rank": 513}}, r"lora\.rank: is 513, and vLLM takes adapters up to 512"),
        ({"num_attention_heads": None}, {}, None),
        ({}, {"vllm": {"cpu_kv_cache_bytes": 65536}}, None),
        ({"text_config": MODEL, "head_dim": 48}, {}, None),
        ({"head_dim": 48}, {"rollout": {"gpus_per_replica": 1}}, None),
    ],
)
def test_a_model_that_vllm_cannot_run_is_refused(changes, tree, words):
    if words is None:
        options.check_model(config_for(**tree), MODEL | changes, [32, 64, 128])
        return
    with pytest.raises(ConfigError, match=words):
        options.check_model(config_for(**tree), MODEL | changes, [32, 64, 128])


# --- folders ------------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> str:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 2}}, [2]),
        ({"config": {"text_config": {"eos_token_id": 3}}}, [3]),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [5, 2]}}, [2, 5]),
        (
            {
                "config": {},
                "tokenizer_config": {"eos_token": {"content": "<|im_end|>"}},
                "tokenizer": {"added_tokens": [{"id": 8, "content": "<pad>"}, {"id": 9, "content": "<|im_end|>"}]},
            },
            [9],
        ),
    ],
)
def test_stop_tokens_come_from_every_place(tmp_path, files, expected):
    assert model_folder.stop_token_ids(write(tmp_path, **files)) == expected


def test_model_folders_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        model_folder.read_config(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_folder.read_config(str(tmp_path))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        model_folder.stop_token_ids(write(tmp_path, config={}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_folder.read_config(str(tmp_path))


def test_shapes_come_from_the_headers(tmp_path):
    def write_safetensors(name: str, *tensors: str) -> None:
        entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
        text = json.dumps({"__metadata__": {}} | dict.fromkeys(tensors, entry)).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))

    assert model_folder.weight_shapes(str(tmp_path)) is None
    write_safetensors("one.safetensors", "a")
    write_safetensors("two.safetensors", "b", "layers.0.rotary_emb.inv_freq")
    files = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert model_folder.weight_shapes(str(tmp_path)) == {"a": ("bfloat16", (2, 3)), "b": ("bfloat16", (2, 3))}
    (tmp_path / "two.safetensors").unlink()
    assert model_folder.weight_shapes(str(tmp_path)) is None


def test_tied_heads_and_all_around_the_language_model_are_optional():
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    config = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    assert model_folder.optional_names(config, names) == {"lm_head.weight"}
    assert model_folder.optional_names(config | {"tie_word_embeddings": False}, names) == frozenset()
    assert model_folder.optional_names({"architectures": ["NoSuchModel"]}, names) == frozenset()
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    names = ["model.language_model.embed_tokens.weight", "model.visual.merger.norm.weight", "mtp.norm.weight"]
    assert model_folder.optional_names(config, names) == {*names[1:]}


def test_a_new_scratch_folder_replaces_only_those_of_dead_processes(monkeypatch, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    # pytest's own folders are too deep for the sockets that go into such a folder.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        dead, other = Path(short, f"asyncrl-engine-{ended.pid}-x"), Path(short, "asyncrl-engine-x")
        mine = Path(short, f"asyncrl-engine-{os.getpid()}-x")
        for folder in (dead, other, mine):
            folder.mkdir()
        locks = []
        for _ in range(2):
            folder, lock = options.make_scratch_folder()
            locks.append(lock)
            # As a process of another container sees it: the number belongs to no process there.
            unseen = Path(short, f"asyncrl-engine-{ended.pid}-{len(locks)}")
            os.rename(folder, unseen)
        assert sorted(Path(short).iterdir()) == sorted([other, mine, unseen.with_name(f"{unseen.name[:-1]}1"), unseen])
        for lock in locks:
            os.close(lock)
        folder, lock = options.make_scratch_folder()
        assert sorted(Path(short).iterdir()) == sorted([other, mine, Path(folder)])
        assert Path(folder).name.startswith(f"asyncrl-engine-{os.getpid()}-")
        os.close(lock)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(options, "SHORT_PARENT", short)
        Path(short, f"asyncrl-engine-{ended.pid}-x").mkdir()
        folder, lock = options.make_scratch_folder()
        os.close(lock)
        assert [str(left) for left in Path(short).iterdir()] == [folder]
        assert len(folder) + 37 <= options.SOCKET_PATH_LIMIT
