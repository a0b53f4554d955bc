"""Tiny models, and their weights published as sealed memory, for the tests of the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from asyncrl.learner.fsdp.weights.assembly import publish
from asyncrl.messages.weights import Manifest
from asyncrl.weights.held_version import HeldVersion

VOCAB = 96
EOS = 95


def make_model(seed: int, *, tied: bool = False):
    """A Qwen2 with two layers and weights large enough that its distributions are far from uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.normal_(0.5, 0.2)
    return model


def sharp_model(seed: int, *, tied: bool = False):
    """As confident of its next token as a trained model, so that the temperature has an effect."""
    model = make_model(seed, tied=tied)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    return model


def save_model(folder: Path, model) -> str:
    """Write it as transformers does. Returns the folder."""
    model.save_pretrained(folder)
    return str(folder)


def logprobs_of(model, ids: Sequence[int]) -> list[float]:
    """Log-prob of each token given those before it, from the second on."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].double()
    scores = torch.log_softmax(logits[:-1], dim=-1)
    return scores[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))].tolist()


class Publisher:
    """Versions in sealed memory, as the learner publishes them, until ``close``."""

    def __init__(self) -> None:
        self._held: list[HeldVersion] = []

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, buckets: int = 2) -> Manifest:
        """A version in ``buckets`` segments."""
        names = list(tensors)
        size = -(-len(names) // buckets)
        parts = (names[start : start + size] for start in range(0, len(names), size))
        self._held.append(publish(({name: tensors[name].detach() for name in part} for part in parts), version))
        return self._held[-1].manifest

    def publish_model(self, version: int, model) -> Manifest:
        """All parameters of a model, tied ones once."""
        return self.publish(version, parameters_of(model))

    def close(self) -> None:
        for version in self._held:
            version.close()


def parameters_of(model) -> dict[str, torch.Tensor]:
    """Checkpoint names to tensors, tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
