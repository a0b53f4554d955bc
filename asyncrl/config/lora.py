"""Low-rank adapters in place of full training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, Section

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; an adapter takes the room of the next."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers; the model's own weights do not change."""

    rank: NonNegative = 0
    """Rank of each adapter; 0 trains all weights without adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: an adapter adds (alpha / rank) B A x to its layer's output for x."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers with an adapter, by the last part of their names, for example ["q_proj", "v_proj"]; or every linear layer
    of the decoder."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """Content of a version: the adapters (a few megabytes), or the whole weights with the adapters merged in. auto is
    adapter with vllm, else merged."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0
