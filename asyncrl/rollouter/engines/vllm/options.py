"""Makes vLLM's environment, arguments and folder from the configuration, and checks that vLLM can run the model.

Raises ConfigError where vLLM would only fail later, in another process, with the reason in a log. ``judge`` refuses
architectures that vLLM computes differently from the learner, or for which it takes no adapters. An unknown
architecture is left to the drift probe (serving/drift.py).
"""

from __future__ import annotations

import contextlib
import fcntl
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
from asyncrl.core.compile_cache import compile_cache
from asyncrl.core.errors import ConfigError
from asyncrl.core.files import lock_is_free
from asyncrl.core.model_files import text_config
from asyncrl.gpu.memory_shares import ALONE, GpuShares
from asyncrl.rollouter.engines.vllm.model_folder import targets

SCRATCH_PREFIX = "asyncrl-engine-"
SCRATCH_LOCK = "lock"
SHORT_PARENT = "/tmp"
"""Parent of an engine's folder if the path of the temporary folder is too long for sockets."""
SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket (bytes, unix(7)), without the final zero."""
CPU_NORMS = "asyncrl_cpu"
"""Name under which cpu_norms.py registers its norms."""
CPU_BATCHED_TOKENS = 4096
"""Most tokens that a CPU engine processes in one step, unless its context is longer."""
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable by which a user chooses vLLM's model runner."""
QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""Names of vLLM for rollout.vllm.quantization. Its own "fp8" takes checkpoints that are quantized already."""
ALWAYS_TIED = ("gemma2",)
"""Values of model_type for which vLLM loads no head, only the embedding."""
ALWAYS_ALIBI = ("bloom", "step1")
"""Values of model_type whose positions are always ALiBi; in other config.json ``alibi`` says so."""
RECURRENT = ("linear_conv_", "mamba_", "conv_L_")
"""Beginnings of keys in the config.json of a hybrid, whose layers carry a state from token to token."""
WITHOUT_ADAPTERS = (
    *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM"),
    *("DbrxForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM", "GPT2LMHeadModel"),
    *("GPTJForCausalLM", "Gemma3nForCausalLM", "HrmTextForCausalLM", "IQuestLoopCoderForCausalLM"),
    *("KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    *("OrionForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM"),
    "Zamba2ForCausalLM",
)
"""Values of ``architectures`` whose class in vLLM takes no adapters (it has no SupportsLoRA). They are listed here
because importing vLLM takes seconds; launch.py also asks vLLM itself."""


def has_experts(model: dict[str, Any]) -> bool:
    """Whether a model, given by its config.json, is a mixture of experts."""
    return any("experts" in key and isinstance(count, int) and count > 1 for key, count in text_config(model).items())


def returns_routes(config: Config, model: dict[str, Any]) -> bool:
    """Whether the engine returns the routes of tokens (messages/routes.py). ``model`` is the model's config.json."""
    return config.learner.routes != "ignore" and has_experts(model) and not on_cpu(config)


def on_cpu(config: Config) -> bool:
    """Whether engines run on CPU."""
    return not config.rollout.gpus_per_replica


def threads_on_cpu() -> int:
    """Return the number of threads of an engine on CPU. The variables of ``environment`` must be set."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def environment(config: Config) -> dict[str, str]:
    """Return the variables to set before vLLM is imported, unless the user has set them."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A forked child would inherit locks that threads hold, but not the threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if on_cpu(config):
        threads = config.rollout.vllm.threads
        if not threads and config.rollout.replicas > 1:
            threads = max(1, (os.cpu_count() or 1) // config.rollout.replicas)
        variables |= {
            # Without a C++ compiler the first compiled kernel would kill the engine, even in eager mode.
            "TORCHDYNAMO_DISABLE": "1",
            # The worker then runs in the engine core's process, which halves the start-up time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM would bind all engines to the same cores; ClaimedCores binds them instead.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if threads:
            variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def make_scratch_folder() -> tuple[str, int]:
    """Make a folder for an engine's sockets and temporary files, and lock it.

    First removes the folders of killed processes. Returns the folder and the descriptor of its lock, to be kept open as
    long as the folder is used. The name has the PID: asyncrl-engine-PID-... A process in another container cannot look
    the PID up, so the lock also shows that the folder is in use. Raises OSError.
    """
    _remove_leftover_folders()
    prefix = f"{SCRATCH_PREFIX}{os.getpid()}-"
    parent = tempfile.gettempdir()
    # 8 random characters, and 36 for a socket's name.
    if len(parent) + len(prefix) + 8 + 36 + 2 > SOCKET_PATH_LIMIT:
        parent = SHORT_PARENT
    # Renamed only once it is locked, so that no other process removes it before.
    unnamed = tempfile.mkdtemp(prefix="asyncrl-new-", dir=parent)
    lock = os.open(os.path.join(unnamed, SCRATCH_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    # On a file system without locks, ``lock_is_free`` is False too.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = os.path.join(parent, prefix + unnamed[-8:])
    os.rename(unnamed, folder)
    return folder, lock


def _remove_leftover_folders() -> None:
    """Remove the engine folders whose process is dead and whose lock is free; errors are ignored."""
    parents = {tempfile.gettempdir(), SHORT_PARENT}
    for folder in (each for parent in parents for each in Path(parent).glob(f"{SCRATCH_PREFIX}*")):
        pid = folder.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and lock_is_free(folder / SCRATCH_LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def scratch_environment(folder: str) -> dict[str, str]:
    """Return variables that make an engine put its sockets and temporary files into ``folder``.

    A killed engine core cannot remove them itself. Compiled kernels stay outside, so that later engines find them.
    """
    return {
        "VLLM_RPC_BASE_PATH": folder,
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": compile_cache(),
    }


def dtype(config: Config) -> str:
    """Return the engine's dtype: the learner's; if that is "auto", float32 on CPU and bfloat16 on GPU."""
    if config.learner.dtype != "auto":
        return config.learner.dtype
    return "float32" if on_cpu(config) else "bfloat16"


def max_model_len(config: Config) -> int:
    """Return the longest sequence (tokens) of an engine."""
    return config.rollout.vllm.max_model_len or config.longest_sequence


def engine_arguments(
    config: Config, name: str, shares: GpuShares | None = None, *, routes: bool = False
) -> dict[str, Any]:
    """Make the arguments of AsyncEngineArgs; ``rollout.vllm.extra`` overrides them.

    The engine reads no weights ("dummy"), because the first update brings them before anything is generated. If
    versions are adapters, the engine reads the model's weights, and the first update brings the adapter. ``shares``
    divides the memory of GPUs that the engine shares with ranks; None: it shares none. With ``shares`` vLLM gets the
    size of its KV cache, because it cannot measure memory that a rank also takes. With ``routes`` it returns those of
    the tokens.
    """
    vllm = config.rollout.vllm
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        # Ignores the model's generation_config.json: the run's configuration decides how to sample.
        "generation_config": "vllm",
        "dtype": dtype(config),
        # A different seed for each engine, because equal seeds give equal noise to requests without a seed.
        "seed": xxhash.xxh3_64_intdigest(f"{config.run.seed}/{name}".encode()) % 2**31,
        "max_model_len": max_model_len(config),
        "max_num_seqs": vllm.max_num_seqs,
        "block_size": vllm.block_size,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "scheduler_cls": "asyncrl.rollouter.engines.vllm.scheduler.make_scheduler",
        "worker_extension_cls": "asyncrl.rollouter.engines.vllm.worker.weights.WorkerMethods",
        # Log-probs after temperature, as the learner computes them.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enforce_eager": vllm.enforce_eager or on_cpu(config),
    }
    if on_cpu(config):
        arguments |= {
            "kv_cache_memory_bytes": vllm.cpu_kv_cache_bytes,
            # With chunks vLLM resets a seeded generator to an earlier state. Generators on CPU cannot do that, and the
            # engine core would die.
            "enable_chunked_prefill": False,
            # Without chunks a whole prompt must fit into one step.
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len(config)),
            # vLLM's own choice on CPU is its native implementation; cpu_norms.py adds its C kernels.
            "ir_op_priority": {"rms_norm": [CPU_NORMS, "native"], "fused_add_rms_norm": [CPU_NORMS, "native"]},
        }
    else:
        arguments["tensor_parallel_size"] = config.rollout.gpus_per_replica
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization or ALONE
        if config.placement.share == "time_slice":
            arguments["enable_sleep_mode"] = True
        if shares is not None:
            arguments |= {"gpu_memory_utilization": shares.engine, "kv_cache_memory_bytes": shares.cache_bytes}
    if vllm.quantization is not None:
        arguments["quantization"] = QUANTIZATIONS[vllm.quantization]
    if config.rollout.truncation is not None:
        # Returns the set that each token was sampled from.
        arguments["return_sampling_mask"] = True
    if config.publishes_adapter:
        arguments |= _adapter_arguments(config)
    if routes:
        arguments["enable_return_routed_experts"] = True
    return arguments | vllm.extra


def _adapter_arguments(config: Config) -> dict[str, Any]:
    assert config.model.path is not None
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= config.lora.rank),
        # On all other layers, embedding and head included, vLLM would compute with an adapter of zeros.
        "lora_target_modules": targets(config.lora, config.model.path),
    }


def check_model(config: Config, model: dict[str, Any], cpu_head_sizes: Sequence[int]) -> None:
    """Raise ConfigError if an engine on CPU cannot run ``model`` (its config.json) as configured.

    Checks that vLLM's CPU attention has kernels for the head size, one of ``cpu_head_sizes``. For models with full
    attention in all layers it also checks that the longest request fits into the KV cache. Checks nothing if
    config.json does not give the sizes, or if the model compresses its keys and values (``kv_lora_rank``).
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
    # Bytes of the keys and values of one request of full length, in whole blocks.
    block = config.rollout.vllm.block_size
    tokens = -(-max_model_len(config) // block) * block
    item = 4 if dtype(config) == "float32" else 2
    # The first factor counts keys and values.
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
    """Why a model cannot be trained with vLLM, what to do, and the configuration key to change."""

    detail: str
    fix: str
    key: str = "model.path"


def judge(config: Config, model: dict[str, Any]) -> Unserved | None:
    """Check whether vLLM computes the model as the learner does; returns the first problem, None without any.

    ``model`` is its config.json.
    """
    longest = config.rollout.engine_context or config.longest_sequence
    text = text_config(model)
    if config.rollout.truncation is not None and os.environ.get(V2_RUNNER) == "0":
        problem = f"only vLLM's second model runner returns the tokens that are left, and {V2_RUNNER} is 0"
        return Unserved(problem, "unset the variable, or leave the key out", f"rollout.{config.rollout.truncation_key}")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if rope_type == "dynamic":
        problem = "its rotary positions are dynamic: the learner stretches them by the length of each row, vLLM always"
        return Unserved(problem, "choose a model with another rope_type")
    if rope_type == "longrope" and isinstance(original, int) and longest > original:
        problem = (
            f"its rotary positions are longrope: past {original} tokens the learner uses the long factors in rows that "
            f"long alone, and vLLM in all, because its context has {longest}"
        )
        fix = f"lower data.max_prompt_tokens and rollout.max_tokens (and those of eval) to {original} together"
        return Unserved(problem, fix)
    if on_cpu(config) and has_experts(model):
        problem = "it is a mixture of experts: on CPUs no update reaches the packed experts of vLLM"
        fix = 'choose a dense model, or rollout.engine = "reference", which computes with the learner\'s code'
        return Unserved(problem, fix)
    if on_cpu(config) and any(key.startswith(RECURRENT) for key in text):
        problem = "it is a hybrid: on CPUs vLLM cannot start it in float32, or computes other log-probs"
        return Unserved(problem, 'set rollout.engine to "reference", or choose a model without recurrent layers')
    if text.get("model_type") in ALWAYS_TIED and not text.get("tie_word_embeddings", True):
        problem = f"its head is not tied to its embedding, and vLLM knows {text['model_type']} with a tied head alone"
        return Unserved(problem, "choose the model with tie_word_embeddings = true")
    is_alibi = text.get("alibi") or text.get("model_type") in ALWAYS_ALIBI
    if is_alibi and config.placement.share == "time_slice" and not on_cpu(config):
        # After a sleep of level 2 vLLM restores the model's buffers, and the slopes are not among them.
        problem = "its positions are ALiBi, and vLLM loses their slopes while the engine sleeps in time slices"
        return Unserved(problem, 'set placement.share to "always" or "never", or choose another model')
    named = [name for name in model.get("architectures") or () if name in WITHOUT_ADAPTERS]
    if named and config.publishes_adapter:
        fix = 'set lora.publish to "merged": engines then get whole weights with the adapters merged'
        return Unserved(f"vLLM's {named[0]} takes no adapters", fix, key="lora.publish")
    return None
