"""A new small model with one token a character, and its warm-up: supervised training on demonstrations.

The quickstart and the recipes of tools.learn make their models here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

INITIAL_STD = 0.05
"""Standard deviation of the initial weights: with transformers' 0.02 a model this narrow is slow to start learning."""
IGNORED = -100
"""The label of a token that is not learned."""
BETAS = (0.9, 0.99)


def make_tokenizer(
    end: str, characters: str, special: Sequence[str] = (), words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """One token for each character, special token and word, and the end token with id 0.

    A parser reads ``words``, so they are no special tokens. An unknown character is an error.
    """
    vocabulary = {end: 0} | {token: at for at, token in enumerate((*special, *words, *characters), start=1)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if special:
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in (end, *special)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


def make_model(settings: Any, vocabulary: int) -> Qwen2ForCausalLM:
    """A Qwen2 of the sizes in ``settings`` with seeded initial weights, float32.

    Its embeddings are not tied, which vLLM on CPU needs.
    """
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
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
    """Write both in the layout of a Hugging Face model folder."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(
    model: Qwen2ForCausalLM, settings: Any, batches: Iterable[Sequence[tuple[list[int], list[int]]]]
) -> Iterator[float]:
    """Train ``model`` in place on batches of token ids and labels; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=0.0)
    for step, rows in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / settings.rise)
        ids, labels = (_padded([row[part] for row in rows], fill) for part, fill in ((0, 0), (1, IGNORED)))
        # Padding is on the right, behind everything that is learned: causal attention needs no mask.
        loss: Any = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    """int64 [batch, length]."""
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])
