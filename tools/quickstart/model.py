"""The quickstart's model and its tokenizer."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools import small_model
from tools.quickstart.settings import Settings
from tools.quickstart.task import CHARACTERS
from tools.small_model import save

__all__ = ["END", "make_model", "make_tokenizer", "save"]

END = "<end>"


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character, and an end token with id 0."""
    return small_model.make_tokenizer(END, characters)


def make_model(settings: Settings) -> Qwen2ForCausalLM:
    """A new model."""
    return small_model.make_model(settings, len(settings.characters) + 1)
