"""The learner of each family: what it makes of packed rows, its gradient, and what it publishes, against transformers'
plain model of the same folder in float64, one sequence at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import make_config
from model_matrix import HALF, VOCABULARY, WINDOW, make_family, plain_model, save_family
from safetensors.torch import load_file
from segment_reading import weights_of

from asyncrl.learner.fsdp.model import policy as policy_module
from asyncrl.learner.fsdp.model.policy import make_row
from asyncrl.learner.fsdp.weights.probe import find_likeliest

TOLERANCE = 1e-4
TEMPERATURE = 0.7
LENGTHS = (9, 1, 3 * WINDOW, 4)
OF_THEIR_OWN = ("Gemma2", "Gemma3", "Phi3", "Qwen3Moe")
"""Families with which parts of the learner run that no other has: soft caps, windows of some layers, fused weights."""


def _sequences() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, VOCABULARY, n + 1) for n in LENGTHS]


def _learned(backend: Any, config: Any) -> dict[str, Any]:
    """On every way that the learner takes by itself: log-probs, entropies, the gradient of their sum, the weights."""
    sequences, policy = _sequences(), backend.policy
    inputs, targets = (np.concatenate([s[part] for s in sequences]) for part in (slice(None, -1), slice(1, None)))
    row = make_row(inputs, LENGTHS, np.arange(sum(LENGTHS)), targets, torch.device("cpu"))
    everywhere = find_likeliest(lambda entropies: torch.arange(len(entropies)), TEMPERATURE, VOCABULARY)
    with torch.no_grad():
        _, _, tokens, logprobs = policy(row, 1.0, everywhere)
    scores, entropies = policy.score(row, TEMPERATURE)
    scores.sum().backward()
    return {
        "way": (backend.packed, policy.model.config._attn_implementation, policy.chunked),
        "scores": scores.detach(),
        "likeliest": logprobs.gather(-1, (tokens == row.targets[:, None]).int().argmax(-1, keepdim=True))[:, 0],
        "entropies": entropies.detach(),
        "gradient": {name.removeprefix("model."): p.grad.to_local().clone() for name, p in policy.named_parameters()},
        "weights": weights_of(backend.publish(0).result()),
    }


def _plain(folder: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model = plain_model(folder)
    scores, entropies = [], []
    for s in _sequences():
        logits = model(torch.from_numpy(s[None, :-1]), use_cache=False).logits[0] / TEMPERATURE
        logp = torch.log_softmax(logits, dim=-1)
        scores.append(logp[torch.arange(len(s) - 1), torch.from_numpy(s[1:])])
        entropies.append(-(logp.exp() * logp).sum(-1).detach())
    torch.cat(scores).sum().backward()
    return torch.cat(scores).detach(), torch.cat(entropies), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "tied"),
    [pytest.param(*each, marks=[] if each[0] in OF_THEIR_OWN else pytest.mark.slow) for each in HALF],
)
def test_the_learner_matches_the_plain_model(family: str, tied: bool, tmp_path: Path, run, monkeypatch) -> None:
    # Chunks of 7 positions.
    monkeypatch.setattr(policy_module, "CHUNK_BYTES", 4 * VOCABULARY * 7)
    folder = save_family(tmp_path / "model", make_family(family, tied=tied))
    found, _ = run(make_config(folder), _learned)
    assert found["way"] == (True, "asyncrl_packed", True)

    scores, entropies, gradient = _plain(folder)
    torch.testing.assert_close(found["scores"].double(), scores, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found["likeliest"].double(), scores, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found["entropies"].double(), entropies, atol=TOLERANCE, rtol=0)
    assert found["gradient"].keys() == gradient.keys()
    for name, expected in gradient.items():
        scale = float(expected.abs().max()) + 1e-9
        torch.testing.assert_close(found["gradient"][name].double(), expected, atol=1e-4 * scale, rtol=0, msg=name)

    written = load_file(folder / "model.safetensors")
    assert found["weights"].keys() == written.keys()
    assert ("lm_head.weight" in written) == (not tied)
    for name, tensor in written.items():
        assert torch.equal(found["weights"][name], tensor), name
