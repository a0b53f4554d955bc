"""Processes with torch already imported: it is imported once, in the server that forks them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

MODULES = ["transformers", "asyncrl.learner.fsdp.trainer", "asyncrl.weights.broadcast"]
"""None of them starts a thread, which a fork would lose."""


def torch_context() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context
