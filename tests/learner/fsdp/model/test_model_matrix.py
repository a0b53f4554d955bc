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
from model_matrix import HALF, HYBRIDS, VOCABULARY, WINDOW, make_family, plain_model, randomise, save_family
from safetensors.torch import load_file
from segment_reading import weights_of

from asyncrl.learner.fsdp.model import policy as policy_module
from asyncrl.learner.fsdp.model.policy import make_row
from asyncrl.learner.fsdp.startup.startup_check import make_batch
from asyncrl.learner.fsdp.weights.probe import find_likeliest
from asyncrl.rollouter.engines.reference.model import Continuation, Model
from asyncrl.rollouter.engines.vllm.model_folder import check_layout

TOLERANCE = 1e-4
TEMPERATURE = 0.7
LENGTHS = (9, 1, 3 * WINDOW, 4)
OF_THEIR_OWN = ("Gemma2", "Gemma3", "Phi3", "Qwen3Moe", "Qwen3_5")
"""Families with which parts of the learner run that no other has: soft caps, windows of some layers, fused weights,
states."""


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


def _sampled(backend: Any, config: Any, target: Path) -> list[tuple[list[float], list[float]]]:
    """Log-probs of what the reference engine samples, by itself and by the learner in one row; and an export."""
    model, published = Model(config.model, []), backend.publish(0).result()
    check_layout(published, config.model.path)
    model.load(weights_of(published), 0)
    backend.export(target)
    prompt = np.random.default_rng(4).integers(0, VOCABULARY, WINDOW).tolist()
    sampled, sequences = list[list[float]](), list[np.ndarray]()
    for seed in range(3):

        def advance(ids: list[int], count: int) -> tuple[list[int], list[float]]:
            limit = len(prompt) + 2 * WINDOW
            sequence = Continuation(
                ids=[*ids],
                prompt=len(prompt),
                limit=limit,
                temperature=TEMPERATURE,
                seed=seed,  # noqa: B023
                stop=frozenset(),
            )
            found = model.advance(sequence, count, lambda: False)
            return sequence.ids, found.logprobs

        ids, logprobs = advance(prompt, 2 * WINDOW)
        # An aborted request continues bit for bit with what it had sampled.
        begun, first = advance(prompt, WINDOW)
        assert advance(begun, 2 * WINDOW) == (ids, logprobs[len(first) :])
        assert first == logprobs[: len(first)]
        sampled.append(logprobs)
        sequences.append(np.array(ids))
    scores = backend.policy.score(make_batch(sequences, torch.device("cpu"), None).shared, TEMPERATURE)[0].detach()
    learned = scores.split([len(ids) - 1 for ids in sequences])
    return [(own, theirs[-len(own) :].tolist()) for own, theirs in zip(sampled, learned, strict=True)]


def _with_vision(model: Any) -> Any:
    """The language model with a vision tower around it."""
    import transformers

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=model.config.to_dict(), vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    randomise(whole)
    return whole


@pytest.mark.parametrize(
    ("family", "has_vision"),
    [
        *(("Qwen3_5", False), ("Qwen3_5", True), ("Glm4Moe", False)),
        *(pytest.param(f, False, marks=pytest.mark.slow) for f in (*HYBRIDS[1:], "Qwen3Moe", "Mixtral", "DeepseekV3")),
    ],
)
def test_the_learner_scores_what_the_reference_engine_samples_and_exports_the_model(
    family: str, has_vision: bool, tmp_path: Path, run
) -> None:
    made = make_family(family, tied=False)
    folder = save_family(tmp_path / "model", _with_vision(made) if has_vision else made)
    found, _ = run(make_config(folder), _sampled, tmp_path / "export")
    for sampled, learned in found:
        assert len(sampled) == 2 * WINDOW
        assert learned == pytest.approx(sampled, abs=TOLERANCE)
    ids = torch.arange(VOCABULARY)[None]
    models = [plain_model(each) for each in (folder, tmp_path / "export")]
    logits = [model(ids, use_cache=False).logits for model in models]
    assert torch.equal(*logits)
    written, exported = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "export"))
    assert {*exported} == {name for name in written if ".visual." not in name}
    assert has_vision == (exported.keys() != written.keys())
