"""Entry point of group vllm.general_plugins: makes our weight transfer and norms known in every process of vLLM.

vLLM calls ``register`` in each of its processes, some of them more than once. It imports nothing heavy: the
transfer itself is loaded by the worker that uses it.
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
