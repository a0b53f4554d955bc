"""Registers asyncrl's weight transfer and norms with vLLM, as a plugin (entry points vllm.general_plugins).

vLLM calls ``register`` in each of its processes, in some of them more than once. So ``register`` imports nothing heavy:
only the worker that uses the weight transfer loads it.
"""

from __future__ import annotations

BACKEND = "asyncrl"
"""Name of the weight transfer backend."""


def register() -> None:
    """Add the backend to vLLM's registry, and on CPU the norms. May be repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl.rollouter.engines.vllm.worker.weights", "WeightTransfer"
        )
    if current_platform.is_cpu():
        import asyncrl.rollouter.engines.vllm.cpu_norms  # noqa: F401
