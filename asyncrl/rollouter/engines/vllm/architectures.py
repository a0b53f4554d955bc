"""Architectures that vLLM computes otherwise than the learner, or serves no adapters of.

Each is refused by its name and with the reason, before anything starts; an unknown one is left to the probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config import Config

ALWAYS_TIED = ("gemma2",)
"""Values of model_type for which vLLM loads no head, only the embedding."""
WITHOUT_ADAPTERS = (
    *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM"),
    *("DbrxForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM", "GPT2LMHeadModel"),
    *("GPTJForCausalLM", "Gemma3nForCausalLM", "HrmTextForCausalLM", "IQuestLoopCoderForCausalLM"),
    *("KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    *("OrionForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM"),
    "Zamba2ForCausalLM",
)
"""Values of architectures whose class in vLLM takes no adapters (it has no SupportsLoRA). vLLM itself, which the engine
asks at its start, takes seconds to import."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """The reason why a model cannot be trained with vLLM, a remedy, and the key to change."""

    detail: str
    fix: str
    key: str = "model.path"


def judge(config: Config, model: dict[str, Any]) -> Unserved | None:
    """The part of a model's config.json that does not fit; None for none."""
    longest = config.rollout.engine_context or config.longest_sequence
    text = model.get("text_config") or model
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if kind == "dynamic":
        told = "its rotary positions are dynamic: the learner stretches them by the length of each row, vLLM always"
        return Unserved(told, "choose a model with another rope_type")
    if kind == "longrope" and isinstance(original, int) and longest > original:
        told = (
            f"its rotary positions are longrope: past {original} tokens the learner uses the long factors in rows that "
            f"long alone, and vLLM in all, because its context has {longest}"
        )
        fix = f"lower data.max_prompt_tokens and rollout.max_tokens (and those of eval) to {original} together"
        return Unserved(told, fix)
    if any("experts" in key and isinstance(count, int) and count > 1 for key, count in text.items()):
        told = (
            "it is a mixture of experts: on CPUs no update reaches the packed experts of vLLM, and elsewhere learner "
            "and vLLM would choose experts each for themselves, since the routes are not replayed"
        )
        fix = 'choose a dense model, or rollout.engine = "reference", which computes with the learner\'s code'
        return Unserved(told, fix)
    if text.get("model_type") in ALWAYS_TIED and not text.get("tie_word_embeddings", True):
        told = f"its head is not tied to its embedding, and vLLM knows {text['model_type']} with a tied head alone"
        return Unserved(told, "choose the model with tie_word_embeddings = true")
    named = [name for name in model.get("architectures") or () if name in WITHOUT_ADAPTERS]
    if named and config.publishes_adapter:
        fix = 'set lora.publish to "merged": engines then get whole weights with the adapters added in'
        return Unserved(f"vLLM's {named[0]} takes no adapters", fix, key="lora.publish")
    return None
