"""Makes a mixture of experts of the quickstart's dense model, which answers nearly as that one does.

Each layer's experts are copies of its dense part with a little noise, and a new router chooses two of them. Fails with
OSError if a folder cannot be read or written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

EXPERTS, CHOSEN = 4, 2
NOISE = 0.03
"""Relative noise of the experts' weights, so that it matters which are chosen."""
KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "eos_token_id", "rope_parameters"),
)
"""Settings of the dense model that the mixture keeps."""


def upcycle(dense: Path, folder: Path) -> Path:
    """Save the model of a folder as a mixture, each expert nearly the dense layer; returns the new folder."""
    auto: Any = transformers.AutoModelForCausalLM
    source = auto.from_pretrained(dense, dtype=torch.float32, local_files_only=True)
    sizes, width = source.config.to_dict(), source.config.intermediate_size
    config = transformers.Qwen2MoeConfig(
        **{name: sizes[name] for name in KEPT if name in sizes},
        intermediate_size=width,
        moe_intermediate_size=width,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        # This family always has a shared expert; its output is 0 here.
        shared_expert_intermediate_size=8,
    )
    torch.manual_seed(0)
    model: Any = transformers.Qwen2MoeForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
        assert all(".mlp." in name for name in (*missing, *unexpected)), (missing, unexpected)
        for layer, old in zip(model.model.layers, source.model.layers, strict=True):
            _fill(layer.mlp, old.mlp)
    model.save_pretrained(folder)
    for file in dense.iterdir():
        if "token" in file.name or file.name == "generation_config.json":
            shutil.copy(file, folder)
    return folder


def _fill(layer: Any, dense: Any) -> None:
    """Make the experts of a layer of its dense part."""
    experts = layer.experts
    for expert in range(EXPERTS):
        experts.gate_up_proj[expert] = torch.cat([dense.gate_proj.weight, dense.up_proj.weight])
        experts.down_proj[expert] = dense.down_proj.weight
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.mul_(1 + NOISE * torch.randn_like(weight))
    layer.gate.weight.normal_(0, 0.05)
    layer.shared_expert.down_proj.weight.zero_()
