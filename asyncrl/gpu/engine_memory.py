"""Estimates the memory that an engine needs on each of its GPUs. Pure.

It adds the shards of the weights, the activations of one step, and CUDA graphs. For the KV cache it gives the bytes of
a token. An engine computes one layer at a time and keeps nothing for a backward pass. Its logits are three float32
arrays: the logits, their log-softmax, and a copy that the sampler sorts or masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.gpu.learner_memory import FLOAT32, ModelShape

GRAPHS_BYTES = 1 << 30
"""Memory of CUDA graphs and of the kernels' workspaces."""
LOGITS_KEPT = 3


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The settings that determine how much memory an engine takes."""

    gpus: int
    """GPUs over which weights and KV cache are sharded (tensor parallel)."""
    step_tokens: int
    """Most tokens of a step, prefill and decoding together."""
    sequences: int
    """Most sequences that are decoded together."""
    longest: int
    """Tokens of the longest sequence."""
    compute_bytes: int
    """Bytes of a number of the weights and of the cache."""
    utilization: float | None = None
    """Share of the GPU that the user gives to the engine; None if it is computed."""


@dataclass(frozen=True, slots=True)
class EngineEstimate:
    """Bytes that an engine needs on each of its GPUs."""

    weights: int
    activations: int
    graphs: int
    token: int
    """Bytes of one token in the KV cache."""

    @property
    def without_cache(self) -> int:
        """Bytes of everything except the KV cache."""
        return self.weights + self.activations + self.graphs


def estimate_engine(shape: ModelShape, engine: EngineShape) -> EngineEstimate:
    """Estimate the bytes that an engine with a model of this ``shape`` needs on each of its GPUs."""
    b = engine.compute_bytes
    # Hidden states before and after, and for each chosen expert; queries, keys and values; the MLP's two products and
    # their result.
    layer = (
        2 * (1 + shape.chosen_experts) * shape.hidden
        + (shape.queries + 2 * shape.keys + 3 * shape.intermediate) // engine.gpus
    )
    return EngineEstimate(
        weights=b * shape.parameters // engine.gpus,
        activations=b * engine.step_tokens * layer + LOGITS_KEPT * FLOAT32 * engine.sequences * shape.vocabulary,
        graphs=GRAPHS_BYTES,
        # Keys and values.
        token=2 * b * shape.layers * max(1, shape.keys // engine.gpus),
    )
