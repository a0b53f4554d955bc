"""The model and its tokenizer, in the layout of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tools.quickstart.settings import Settings
from tools.quickstart.task import CHARACTERS

END = "<end>"
INITIAL_STD = 0.05
"""Standard deviation of the initial weights: with transformers' 0.02 a model this narrow is slow to start learning."""


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character, and an end token with id 0. A character that it does not know is an error."""
    vocabulary = {END: 0} | {character: i for i, character in enumerate(characters, start=1)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def make_model(settings: Settings) -> Qwen2ForCausalLM:
    """A Qwen2 with seeded initial weights, float32. Its embeddings are not tied, which vLLM on CPU needs."""
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(settings.characters) + 1,
            hidden_size=settings.width,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.positions,
            initializer_range=INITIAL_STD,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            dtype="float32",
        )
    )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
