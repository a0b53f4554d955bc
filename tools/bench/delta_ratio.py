"""The size of the delta between two consecutive versions, by learning rate.

A Qwen2 with random weights is trained on random tokens with the learner's AdamW (fp32 masters, betas 0.9 and 0.95, no
decay); after each step its weights are cast to bfloat16, as for a publication, and encoded against those before. The
masters begin on values that bfloat16 can hold, as those of a model from a checkpoint do. AdamW's first steps are its
longest, so the first ratio is the largest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from asyncrl.weights.delta import decode, encode

ITEM_BYTES = 2
VOCABULARY = 4096
SEQUENCES, LENGTH = 8, 64


def delta_ratio(lrs: Sequence[float] = (1e-6, 1e-5, 1e-4), *, steps: int = 20, width: int = 384) -> dict[str, Any]:
    """Figures by learning rate: encoded bytes by bytes after the first and the last step, and the fraction changed.

    ``encode_bytes_per_s`` and ``decode_bytes_per_s`` are of bytes of weights, on one thread. A ratio of 1 stands for a
    delta that did not pay. Takes half a second for each step on two cores.
    """
    return {f"{lr:g}": _measure(lr, steps, width) for lr in lrs}


def _measure(lr: float, steps: int, width: int) -> dict[str, float]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model: Any = transformers.Qwen2ForCausalLM(config)
    model.float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def cast() -> np.ndarray:
        parts = [parameter.detach().bfloat16().view(torch.int16).flatten() for parameter in model.parameters()]
        return torch.cat(parts).numpy().view(np.uint8)

    ratios, changed, encode_s, decode_s = [], [], [], []
    before = cast()
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        after = cast()
        began = time.perf_counter()
        encoded = encode(before.data, after.data, ITEM_BYTES)
        encode_s.append(time.perf_counter() - began)
        if encoded is not None:
            out = np.empty_like(after)
            began = time.perf_counter()
            decode(encoded, before.data, out.data)
            decode_s.append(time.perf_counter() - began)
            assert np.array_equal(out, after)
        ratios.append(1.0 if encoded is None else len(encoded) / after.size)
        changed.append(float(np.mean(before.view(np.uint16) != after.view(np.uint16))))
        before = after
    return {
        "first_ratio": ratios[0],
        "last_ratio": ratios[-1],
        "median_ratio": median(ratios),
        "first_changed": changed[0],
        "last_changed": changed[-1],
        "bytes": float(before.size),
        "encode_bytes_per_s": before.size / median(encode_s),
        "decode_bytes_per_s": before.size / median(decode_s) if decode_s else 0.0,
    }
