"""The probe: what the learner's weights make of a few fixed sequences, and that asking leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner.learner_cases import TEMPERATURE, VOCABULARY, make_config, train
from segment_reading import read_manifest
from torch.distributed.tensor import DTensor

from asyncrl.config.training import ModelConfig
from asyncrl.learner.algorithm.probe_sequences import LENGTH, ProbeSequence, from_prompts
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.weights.probe import PLACES, score_probe

TOLERANCE = 1e-4


def chosen() -> list[ProbeSequence]:
    """Sequences of all lengths."""
    random = np.random.default_rng(3)
    lengths = (1, 2, 5, 9, 17, 40)
    prompts = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    return from_prompts(prompts, LENGTH)


def _train_and_publish(backend, config, start: Path) -> list[tuple[list[Any], Any, dict[str, bytes]]]:
    """Two steps without a probe, and the same with one before, between and after them."""
    backend.save(start).result(60)
    found = []
    for probing in (False, True):
        backend.load(start)
        probes = [backend.probe(chosen())] if probing else []
        metrics = []
        for step in range(2):
            metrics.append(train(backend, config, step))
            if probing:
                probes.append(backend.probe(chosen()))
        # No rank holds more of the weights than its share.
        assert all(isinstance(parameter, DTensor) for parameter in backend.policy.parameters())
        with backend.publish(1, probes[-1] if probing else None).result() as publication:
            assert publication.manifest.probe is (probes[-1] if probing else None)
            weights = {spec.name: bytes(view) for spec, view in read_manifest(publication.manifest)}
        found.append((metrics, probes, weights))
    probes.append(backend.probe(chosen()))
    assert backend.probe([]) is None
    return found


@pytest.mark.parametrize(
    ("ranks", "extra"),
    [(1, {"packing": "off", "activation_checkpointing": "full"}), (2, {}), (2, {"context_parallel": 2})],
)
def test_the_probe_scores_match_the_published_weights_and_do_not_change_training(
    ranks, extra, folder, tmp_path, run_well
) -> None:
    import transformers

    config = make_config(folder, ranks=ranks, budget=50, lr=3e-3, **extra)
    (metrics, _, weights), (again, probes, same) = run_well(config, _train_and_publish, tmp_path / "start")
    assert again == metrics
    assert same == weights
    at_start, _, after, published = probes
    np.testing.assert_array_equal(after.logprobs, published.logprobs)
    assert np.abs(after.logprobs - at_start.logprobs).max() > 1e-2

    sequences = chosen()
    assert after.tokens.tolist() == [token for sequence in sequences for token in sequence.tokens]
    assert after.lengths.tolist() == [len(sequence.tokens) for sequence in sequences]
    # The candidates of a prompt of 9 tokens are the places after 5 to 8.
    assert [number for number, _ in after.places.tolist()] == [0, 1, 2, 2, *[3] * 4, *[4] * 4, *[5] * 4]
    assert after.places.tolist()[:4] == [[0, 1], [1, 1], [2, 3], [2, 4]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(model.state_dict()[name].shape)
        for name, data in weights.items()
    }
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        logits = [model(torch.tensor([sequence.tokens])).logits[0].float() for sequence in sequences]
    expected = [
        torch.log_softmax(own[:-1], -1).gather(-1, torch.tensor(sequence.tokens[1:])[:, None])[:, 0]
        for own, sequence in zip(logits, sequences, strict=True)
    ]
    assert np.abs(after.logprobs - torch.cat(expected).numpy()).max() < TOLERANCE
    # Sampled is at the run's temperature.
    for (number, place), tokens, logprobs in zip(
        after.places.tolist(), after.likeliest, after.likeliest_logprobs, strict=True
    ):
        whole = torch.log_softmax(logits[number][place - 1] / TEMPERATURE, -1)
        assert sorted(tokens.tolist()) == list(range(VOCABULARY))
        assert np.abs(logprobs - whole[torch.from_numpy(tokens).long()].numpy()).max() < TOLERANCE
        assert np.all(np.diff(logprobs) <= 0)
        # No candidate has a larger entropy than what is chosen.
        begin = sequences[number].begin
        entropies = torch.distributions.Categorical(logits=logits[number]).entropy()[begin - 1 : -1]
        if len(entropies) > PLACES:
            assert entropies[place - begin] >= entropies.topk(PLACES).values[-1] - TOLERANCE


def test_the_probe_of_a_large_vocabulary_has_the_likeliest_tokens(folder) -> None:
    policy = load_policy(ModelConfig(path=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.learner.fsdp.weights.probe.LIKELIEST", 4)
        probe = score_probe(policy, chosen(), temperature=TEMPERATURE, packed=True, device=torch.device("cpu"))
    assert probe.likeliest.shape == probe.likeliest_logprobs.shape == (len(probe.places), 4)
    assert (np.exp(probe.likeliest_logprobs).sum(axis=1) < 1).all()
