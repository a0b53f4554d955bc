"""An engine on CUDA is launched without vLLM's modules for CPUs, which its build for CUDA lacks. CUDA is made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
from rollouter.engines.changing import config_for

from asyncrl.core.errors import ConfigError
from asyncrl.rollouter.engines.vllm import launch, plugin

CPU_MODULES = (
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.lora.punica_wrapper.punica_cpu",
    "asyncrl.rollouter.engines.vllm.cpu_norms",
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform is CUDA, and its modules for CPUs cannot be imported."""
    platform = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(launch, "current_platform", platform)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    for name in CPU_MODULES:
        monkeypatch.setitem(sys.modules, name, None)


def test_an_engine_on_cuda_needs_no_module_for_cpus(cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "AsyncEngineArgs", SimpleNamespace)
    monkeypatch.setattr(launch.AsyncLLM, "from_engine_args", lambda arguments, **_: started.append(arguments) or "llm")
    plugin.register()
    model = {"num_attention_heads": 2, "hidden_size": 96}
    assert launch.launch(config_for("/m", gpus_per_replica=1), "rollouter/0", model, "/folder", None, None) == "llm"
    assert started[0].tensor_parallel_size == 1 and not hasattr(started[0], "ir_op_priority")
    # The same modules are needed on CPUs, so their absence is found here.
    with pytest.raises(ConfigError, match="the vLLM installed here runs on cuda"):
        launch.launch(config_for("/m"), "rollouter/0", model, "/folder", None, None)
    monkeypatch.setattr(launch.current_platform, "is_cpu", lambda: True)
    with pytest.raises(ImportError, match="cpu_attn"):
        launch.launch(config_for("/m"), "rollouter/0", model, "/folder", None, None)
    with pytest.raises(ImportError, match="cpu_norms"):
        plugin.register()
