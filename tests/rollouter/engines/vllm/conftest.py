"""vLLM in pytest's process leaves its ZeroMQ contexts to the garbage collector, and errors may keep them for longer
than their module. They are closed here; otherwise the collector would warn of them in another module's test.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import zmq


def _open_contexts() -> set[zmq.Context]:
    return {made for made in gc.get_objects() if type(made) is zmq.Context and not made.closed}


@pytest.fixture(scope="module")
def contexts_closed() -> Iterator[None]:
    before = _open_contexts()
    yield
    gc.collect()
    for context in _open_contexts() - before:
        context.term()
