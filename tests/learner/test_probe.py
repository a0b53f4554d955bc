"""The probe: what the learner's weights make of a few fixed sequences, and that asking leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import VOCABULARY, RankPool, make_config, random_groups, run_alone, save_small_model
from segment_reading import read_manifest
from torch.distributed.tensor import DTensor

from asyncrl.learner.algorithm.batch import build_step
from asyncrl.learner.probe import LENGTH, SEQUENCES, draw_probe, probe_length


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def run(request) -> Callable[..., Any]:
    def play(config, main, *arguments):
        if config.learner.ranks == 1:
            return run_alone(config, main, *arguments)
        found, followers = request.getfixturevalue("pair").run(config, main, *arguments)
        assert followers == [None]
        return found

    return play


def test_it_is_the_same_in_every_run_of_a_seed_and_stays_in_the_vocabulary() -> None:
    tokens = draw_probe(3, VOCABULARY, LENGTH)
    assert (tokens.shape, tokens.dtype) == ((SEQUENCES, LENGTH), np.int32)
    assert np.array_equal(tokens, draw_probe(3, VOCABULARY, LENGTH))
    assert not np.array_equal(tokens, draw_probe(4, VOCABULARY, LENGTH))
    assert 0 <= tokens.min() <= tokens.max() < VOCABULARY
    assert len(np.unique(tokens)) > VOCABULARY // 2


@pytest.mark.parametrize(("prompt", "response", "length"), [(512, 512, LENGTH), (16, 17, LENGTH), (8, 8, 15)])
def test_it_fits_into_the_smallest_context_that_an_engine_may_have(folder, prompt, response, length) -> None:
    config = make_config(folder)
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"max_prompt_tokens": prompt}),
            "rollout": config.rollout.model_copy(update={"max_tokens": response}),
        }
    )
    assert probe_length(config) == length
    assert draw_probe(0, VOCABULARY, length).shape == (SEQUENCES, length)


def _train_and_publish(backend, config, probing: bool) -> tuple[list[Any], Any, dict[str, bytes]]:
    """Two steps, with or without a probe before, between and after them."""
    probes = [backend.probe()] if probing else []
    metrics = []
    for step in range(2):
        groups = random_groups(step, 4)
        plan = build_step(groups, version=0, config=config, world_size=config.learner.ranks, packed=backend.packed)
        metrics.append(backend.train(plan))
        if probing:
            probes.append(backend.probe())
    # No rank holds more of the weights than its share.
    assert all(isinstance(parameter, DTensor) for parameter in backend._policy.parameters())
    with backend.publish(1, probes[-1] if probing else None) as publication:
        assert publication.manifest.probe is (probes[-1] if probing else None)
        weights = {spec.name: bytes(view) for spec, view in read_manifest(publication.manifest)}
    if probing:
        probes.append(backend.probe())
    return metrics, probes, weights


@pytest.mark.parametrize(
    ("ranks", "extra"),
    [(1, {}), (1, {"packing": "off", "activation_checkpointing": "full"}), (2, {}), (2, {"dtype": "bfloat16"})],
)
def test_it_is_what_the_published_weights_make_of_it_and_training_goes_on_as_if_never_asked(
    ranks, extra, folder, run
) -> None:
    import transformers

    config = make_config(folder, ranks=ranks, budget=50, lr=3e-3, **extra)
    metrics, _, weights = run(config, _train_and_publish, False)
    again, probes, same = run(config, _train_and_publish, True)
    assert again == metrics
    assert same == weights
    at_start, _, after, published = probes
    np.testing.assert_array_equal(after.logprobs, published.logprobs)
    assert np.abs(after.logprobs - at_start.logprobs).max() > 1e-2

    assert np.array_equal(after.tokens, draw_probe(config.run.seed, VOCABULARY, LENGTH))
    assert (after.logprobs.shape, after.logprobs.dtype) == ((SEQUENCES, LENGTH - 1), np.float32)
    dtype = torch.bfloat16 if extra.get("dtype") == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    state = {
        name: torch.frombuffer(bytearray(data), dtype=dtype).view(model.state_dict()[name].shape)
        for name, data in weights.items()
    }
    model.load_state_dict(state, strict=False)
    tokens = torch.from_numpy(after.tokens).long()
    with torch.no_grad():
        expected = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert np.abs(after.logprobs - expected.numpy()).max() < tolerance
