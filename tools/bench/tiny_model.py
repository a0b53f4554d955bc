"""A small Qwen2 with random weights and one token a character, made on the fly."""

from __future__ import annotations

from pathlib import Path

from tools.quickstart.settings import Settings

CHARACTERS = "".join(map(chr, range(32, 127)))
"""The token of a character is its place, from 1 on."""
END = 0
SIZES = Settings(intermediate=256, kv_heads=2, positions=1024)


def make_model(folder: Path) -> None:
    """Write a model with its tokenizer: 3 layers, width 128, heads of 32 dimensions."""
    from tools import small_model

    model = small_model.make_model(SIZES, len(CHARACTERS) + 1)
    small_model.save(model, small_model.make_tokenizer("<eos>", CHARACTERS), folder)
