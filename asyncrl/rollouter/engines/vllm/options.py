"""Start of vLLM: its environment and its arguments, from the configuration. Pure, apart from reading the model.

Fails with ConfigError where vLLM would only fail later, in another process and with its reason in a log. Architectures
that vLLM computes otherwise than the learner, or serves no adapters of, are refused by name (``judge``) before anything
starts; an unknown one is left to the probe.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from asyncrl.config import Config
from asyncrl.config.algorithm import VLLM_RANKS
from asyncrl.core.errors import ConfigError
from asyncrl.core.files import lock_is_free
from asyncrl.gpu.sharing import ALONE
from asyncrl.rollouter.engines.vllm.checkpoint import targets, text_config

SCRATCH_PREFIX = "asyncrl-engine-"
SCRATCH_LOCK = "lock"
SHORT_PARENT = "/tmp"
"""Parent of an engine's folder where the temporary folder has too long a path for sockets."""
SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket (unix(7)), without the final zero."""
CPU_NORMS = "asyncrl_cpu"
"""Provider of norms (cpu_norms.py)."""
CPU_BATCHED_TOKENS = 4096
"""Tokens that a CPU engine processes in one step, unless one prompt is longer."""
ALWAYS_TIED = ("gemma2",)
"""Values of model_type for which vLLM loads no head, only the embedding."""
WITHOUT_ADAPTERS = (
    *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM"),
    *("DbrxForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM", "GPT2LMHeadModel"),
    *("GPTJForCausalLM", "Gemma3nForCausalLM", "HrmTextForCausalLM", "IQuestLoopCoderForCausalLM"),
    *("KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    *("OrionForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM"),
    "Zamba2ForCausalLM",
)
"""Values of architectures whose class in vLLM takes no adapters (it has no SupportsLoRA). vLLM itself, which the engine
asks at its start, takes seconds to import."""


def on_cpu(config: Config) -> bool:
    """Whether engines run on CPU."""
    return not config.rollout.gpus_per_replica


def threads_on_cpu() -> int:
    """Threads that an engine on CPU computes with, once its environment is set."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def environment(config: Config) -> dict[str, str]:
    """Environment that vLLM is to find when it is imported; variables that the user has set stay as they are."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A forked child would inherit the threads' locks but not the threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if on_cpu(config):
        threads = config.rollout.vllm.threads
        if not threads and config.rollout.replicas > 1:
            threads = max(1, (os.cpu_count() or 1) // config.rollout.replicas)
        variables |= {
            # Without a C++ compiler the first compiled kernel would kill the engine, eager mode or not.
            "TORCHDYNAMO_DISABLE": "1",
            # The worker lives in the engine core's process: one process less, and half the start-up time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Engines that vLLM binds would all choose the same cores; ClaimedCores does it.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if threads:
            variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def make_scratch_folder() -> tuple[str, int]:
    """A new folder for an engine's sockets and temporary files, and the descriptor of its lock, to be held as long.

    Its name says whose it is: asyncrl-engine-PID-... A process of another container that sees the folder knows by the
    lock that it is used. Raises OSError.
    """
    _remove_scratch_of_the_dead()
    prefix = f"{SCRATCH_PREFIX}{os.getpid()}-"
    parent = tempfile.gettempdir()
    # 8 random characters, and 36 for a socket's name.
    if len(parent) + len(prefix) + 8 + 36 + 2 > SOCKET_PATH_LIMIT:
        parent = SHORT_PARENT
    # It gets its name once its lock is held, so that no other process finds it free.
    made = tempfile.mkdtemp(prefix="asyncrl-new-", dir=parent)
    lock = os.open(os.path.join(made, SCRATCH_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    # Where the file system has no locks, no process takes it for free either.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = os.path.join(parent, prefix + made[-8:])
    os.rename(made, folder)
    return folder, lock


def _remove_scratch_of_the_dead() -> None:
    """Remove the folders that engines left whose process was killed."""
    parents = {tempfile.gettempdir(), SHORT_PARENT}
    for folder in (each for parent in parents for each in Path(parent).glob(f"{SCRATCH_PREFIX}*")):
        pid = folder.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and lock_is_free(folder / SCRATCH_LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def scratch_environment(folder: str) -> dict[str, str]:
    """Environment that makes an engine leave its sockets and temporary files in ``folder``.

    An engine core that is killed cannot remove them itself. Compiled kernels stay where others find them again.
    """
    kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        "VLLM_RPC_BASE_PATH": folder,
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", kept),
    }


def dtype(config: Config) -> str:
    """Dtype that the engine computes in: the learner's, or float32 on CPU and bfloat16 on GPU."""
    if config.learner.dtype != "auto":
        return config.learner.dtype
    return "float32" if on_cpu(config) else "bfloat16"


def max_model_len(config: Config) -> int:
    """Tokens that an engine has room for in one sequence."""
    return config.rollout.vllm.max_model_len or config.longest_sequence


def engine_arguments(config: Config, name: str, gpu_share: float = ALONE) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs; ``rollout.vllm.extra`` comes last.

    ``gpu_share`` is the share of each GPU's memory for the engine, unless the user sets one.

    No weights are read: the first update brings them, and nothing is generated before it. Where versions are adapters,
    the model's own weights are read, and the first update brings the adapter.
    """
    vllm = config.rollout.vllm
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        # Nothing of the model's generation_config.json: the run's own sampling holds.
        "generation_config": "vllm",
        "dtype": dtype(config),
        # Engines that share a seed would share the noise of requests that bring none.
        "seed": xxhash.xxh3_64_intdigest(f"{config.run.seed}/{name}".encode()) % 2**31,
        "max_model_len": max_model_len(config),
        "max_num_seqs": vllm.max_num_seqs,
        "block_size": vllm.block_size,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "scheduler_cls": "asyncrl.rollouter.engines.vllm.scheduler.make_scheduler",
        "worker_extension_cls": "asyncrl.rollouter.engines.vllm.worker.weights.FailureReport",
        # Log-probs after temperature, as the learner computes them.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enforce_eager": vllm.enforce_eager or on_cpu(config),
    }
    if on_cpu(config):
        arguments |= {
            "kv_cache_memory_bytes": vllm.cpu_kv_cache_bytes,
            # A prompt cut into chunks makes vLLM wind a seeded generator back, which generators on CPU cannot do: the
            # engine core would die of it.
            "enable_chunked_prefill": False,
            # Without chunks a whole prompt has to fit into one step.
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len(config)),
            "ir_op_priority": {"rms_norm": [CPU_NORMS, "native"], "fused_add_rms_norm": [CPU_NORMS, "native"]},
        }
    else:
        arguments["tensor_parallel_size"] = config.rollout.gpus_per_replica
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization or gpu_share
    if config.publishes_adapter:
        arguments |= _adapter_arguments(config)
    return arguments | vllm.extra


def _adapter_arguments(config: Config) -> dict[str, Any]:
    assert config.model.path is not None
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= config.lora.rank),
        # All others, embedding and head among them, would have room for an adapter and compute with its zeros.
        "lora_target_modules": targets(config.lora, config.model.path),
        "worker_extension_cls": "asyncrl.rollouter.engines.vllm.worker.lora.AdapterLoader",
    }


def check_model(config: Config, model: dict[str, Any], cpu_head_sizes: Sequence[int]) -> None:
    """Raise ConfigError when vLLM cannot run ``model`` (its config.json) as configured.

    ``cpu_head_sizes`` are the head dimensions that vLLM's CPU attention knows.
    """
    text = text_config(model)
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    if not on_cpu(config) or not heads or not width or text.get("kv_lora_rank"):
        return
    head = text.get("head_dim") or width // heads
    if head not in cpu_head_sizes:
        known = ", ".join(map(str, cpu_head_sizes))
        problem = f"its attention heads have {head} dimensions; vLLM's CPU attention knows {known}"
        raise ConfigError([f"model.path: {problem}"])
    if text.get("sliding_window") or set(text.get("layer_types") or ()) - {"full_attention"}:
        return
    # Keys and values of one request of full length, in whole blocks.
    block = config.rollout.vllm.block_size
    tokens = -(-max_model_len(config) // block) * block
    item = 4 if dtype(config) == "float32" else 2
    need = 2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * head * item * tokens
    have = config.rollout.vllm.cpu_kv_cache_bytes
    if have < need:
        raise ConfigError(
            [
                f"rollout.vllm.cpu_kv_cache_bytes: is {have}, but one request of {max_model_len(config)} tokens needs "
                f"{need}; raise it or lower rollout.max_tokens"
            ]
        )


@dataclass(frozen=True, slots=True)
class Unserved:
    """The reason why a model cannot be trained with vLLM, a remedy, and the key to change."""

    detail: str
    fix: str
    key: str = "model.path"


def judge(config: Config, model: dict[str, Any]) -> Unserved | None:
    """The part of a model's config.json that does not fit; None for none."""
    longest = config.rollout.engine_context or config.longest_sequence
    text = model.get("text_config") or model
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if kind == "dynamic":
        told = "its rotary positions are dynamic: the learner stretches them by the length of each row, vLLM always"
        return Unserved(told, "choose a model with another rope_type")
    if kind == "longrope" and isinstance(original, int) and longest > original:
        told = (
            f"its rotary positions are longrope: past {original} tokens the learner uses the long factors in rows that "
            f"long alone, and vLLM in all, because its context has {longest}"
        )
        fix = f"lower data.max_prompt_tokens and rollout.max_tokens (and those of eval) to {original} together"
        return Unserved(told, fix)
    if any("experts" in key and isinstance(count, int) and count > 1 for key, count in text.items()):
        told = (
            "it is a mixture of experts: on CPUs no update reaches the packed experts of vLLM, and elsewhere learner "
            "and vLLM would choose experts each for themselves, since the routes are not replayed"
        )
        fix = 'choose a dense model, or rollout.engine = "reference", which computes with the learner\'s code'
        return Unserved(told, fix)
    if text.get("model_type") in ALWAYS_TIED and not text.get("tie_word_embeddings", True):
        told = f"its head is not tied to its embedding, and vLLM knows {text['model_type']} with a tied head alone"
        return Unserved(told, "choose the model with tie_word_embeddings = true")
    named = [name for name in model.get("architectures") or () if name in WITHOUT_ADAPTERS]
    if named and config.publishes_adapter:
        fix = 'set lora.publish to "merged": engines then get whole weights with the adapters added in'
        return Unserved(f"vLLM's {named[0]} takes no adapters", fix, key="lora.publish")
    return None
