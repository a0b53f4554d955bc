"""A small Qwen2 with random weights and one token a character, made on the fly."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.messages.weights import Manifest
from asyncrl.weights.held_version import HeldVersion
from asyncrl.weights.segments import Segment, layout

CHARACTERS = "".join(chr(code) for code in range(32, 127))
EOS = "<eos>"


def make_model(folder: Path) -> None:
    """Write a model with its tokenizer: 3 layers, width 128, heads of 32 dimensions."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: id for id, token in enumerate([*CHARACTERS, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{EOS}"}}')
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def publish(folder: Path) -> HeldVersion:
    """The model's weights as version 0, in one sealed segment."""
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    specs, size = layout([(name, weight.dtype.name, weight.shape) for name, weight in weights.items()])
    segment = Segment("asyncrl-bench", size)
    try:
        for spec, weight in zip(specs, weights.values(), strict=True):
            segment.write(spec.offset, weight.tobytes())
        bucket = segment.seal(specs)
    except BaseException:
        os.close(segment.fd)
        raise
    return HeldVersion(Manifest(version=0, buckets=[bucket]), [segment.fd])
