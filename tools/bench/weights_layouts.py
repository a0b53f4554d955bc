"""Layouts of real models for the benchmark of weights: names, shapes and dtypes, without values."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.messages.weights import TensorSpec
from asyncrl.weights.segments import fill_buckets, layout

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder-only transformer in bfloat16 with a head of its own."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


LAYOUTS = {
    "1M": Decoder(4, 128, 384, 4, 2, 32, 512),
    "10M": Decoder(8, 288, 864, 9, 3, 32, 4096),
    "100M": Decoder(12, 640, 1792, 10, 2, 64, 32_000),
    # Qwen2.5-0.5B and Qwen3-1.7B, untied.
    "630M": Decoder(24, 896, 4864, 14, 2, 64, 151_936),
    "2B": Decoder(28, 2048, 6144, 16, 8, 128, 151_936),
}


def tensors_of(model: Decoder) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """(name, dtype, shape), by layer."""
    width, dtype = model.width, "bfloat16"
    units: list[list[tuple[str, str, tuple[int, ...]]]] = [
        [("model.embed_tokens.weight", dtype, (model.vocabulary, width))]
    ]
    for layer in range(model.layers):
        own = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (model.heads * model.head_dim, width),
            "self_attn.k_proj.weight": (model.kv_heads * model.head_dim, width),
            "self_attn.v_proj.weight": (model.kv_heads * model.head_dim, width),
            "self_attn.o_proj.weight": (width, model.heads * model.head_dim),
            "mlp.gate_proj.weight": (model.feed_forward, width),
            "mlp.up_proj.weight": (model.feed_forward, width),
            "mlp.down_proj.weight": (width, model.feed_forward),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        units.append([(f"{own}.{name}", dtype, shape) for name, shape in shapes.items()])
    units.append([("model.norm.weight", dtype, (width,)), ("lm_head.weight", dtype, (model.vocabulary, width))])
    return units


def buckets_of(model: Decoder) -> list[tuple[list[TensorSpec], int]]:
    """Specs and size of each bucket, as the learner would fill them."""
    units = tensors_of(model)
    sizes = [layout(unit)[1] for unit in units]
    return [layout([tensor for i in bucket for tensor in units[i]]) for bucket in fill_buckets(sizes, BUCKET_BYTES)]
