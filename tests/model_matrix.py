"""Tiny models of the served families, tied and untied. Random weights make each family's own parts matter: soft caps
that bite, windows shorter than the sequences, norms far from 1, a vocabulary that engines pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 97
WINDOW = 16
FAMILIES = ("Qwen2", "Qwen3", "Llama", "Gemma2", "Gemma3", "Phi3", "Mistral", "Olmo2")
EXPERTS = ("Qwen3Moe", "Mixtral", "Glm4Moe", "DeepseekV3")
"""Families whose layers send each token to 2 of 4 experts. Glm4Moe also has a shared expert and a dense first layer."""
HYBRIDS = ("Qwen3_5", "Lfm2", "FalconH1", "Qwen3Next")
"""Families with a state from token to token: of a gated delta rule, of a short convolution, of a state space."""
HALF = [(family, bool(at % 2)) for at, family in enumerate(FAMILIES + EXPERTS + HYBRIDS)]
"""Every second one is tied: the code for it is the same in all families."""
MIXED_LAYERS = ["sliding_attention", "full_attention"]
CLASSES = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
"""Configurations that are not named after their family."""
_OWN: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "head_dim": 16,
    },
    "FalconH1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "Gemma2": {
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "sliding_window": WINDOW,
        "layer_types": MIXED_LAYERS,
    },
    "Gemma3": {
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": MIXED_LAYERS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "conv_bias": True},
    "Mistral": {"sliding_window": WINDOW},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {"pad_token_id": None},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "Qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def make_family(family: str, *, tied: bool, seed: int = 0, **settings: Any) -> Any:
    """A model of two layers in float32, in evaluation mode."""
    import transformers

    config = getattr(transformers, CLASSES.get(family, f"{family}Config"))(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": VOCABULARY - 1,
        }
        | _OWN.get(family, {})
        | settings
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    randomise(model)
    return model


def randomise(model: Any) -> None:
    """Weights large enough that distributions are far from uniform and that attention matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # States that last for many tokens.
                parameter.sub_(3.0)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.15)


def save_family(folder: Path, model: Any) -> Path:
    """Like a user's folder: weights, configuration, and a tokenizer that no test reads."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def plain_model(folder: Path) -> Any:
    """The folder's model, loaded in float64 with transformers' plain attention."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    ).eval()


def plain_logprobs(folder: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of each sequence's tokens given those before them, from the second token on."""
    model, found = plain_model(folder), []
    for ids in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        scores = torch.log_softmax(logits[:-1], dim=-1)
        found.append(scores[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))].tolist())
    return found
