"""Registers asyncrl's norms with vLLM on CPU, as a plugin (entry points vllm.general_plugins).

vLLM calls ``register`` in each of its processes, in some of them more than once. So ``register`` imports nothing heavy.
"""

from __future__ import annotations


def register() -> None:
    """On CPU add the norms. May be repeated."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import asyncrl.rollouter.engines.vllm.cpu_norms  # noqa: F401
