from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from learner.learner_cases import VOCABULARY, save_small_model
from torch.nn import functional

from asyncrl.config.training import LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.fsdp.model import head
from asyncrl.learner.fsdp.model.policy import Policy, empty_policy, load_policy, make_row
from asyncrl.learner.fsdp.startup import startup_check as check
from asyncrl.learner.fsdp.startup.startup_check import Scoring, choose_scoring

LENGTHS = [9, 1, 30, 4]
CPU = torch.device("cpu")


@pytest.fixture
def loaded(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=str(folder)))


def _sequences(seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, n + 1) for n in LENGTHS]


def _packed_row(sequences: list[np.ndarray]):
    lengths = [len(s) - 1 for s in sequences]
    inputs, targets = (np.concatenate([s[part] for s in sequences]) for part in (slice(None, -1), slice(1, None)))
    return make_row(inputs, lengths, np.arange(sum(lengths)), targets, CPU)


def _reference(model, sequences: list[np.ndarray], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From the model's own logits, one sequence at a time, in float64."""
    scores, entropies = [], []
    for s in sequences:
        logits = model(torch.from_numpy(s[None, :-1])).logits[0].double() / temperature
        logp = functional.log_softmax(logits, dim=-1)
        scores.append(logp[torch.arange(len(s) - 1), torch.from_numpy(s[1:])])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(scores), torch.cat(entropies)


@pytest.mark.parametrize(("attention", "chunked"), [("packed", True), ("loaded", False), ("plain", True)])
def test_a_packed_row_scores_as_its_sequences_alone(attention, chunked, tmp_path, monkeypatch) -> None:
    folder = save_small_model(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    loaded = load_policy(ModelConfig(path=str(folder)))
    # Chunks of 7 positions: several, the last one shorter.
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * 7)
    sequences = _sequences()
    with torch.no_grad():
        scores, entropies = _reference(loaded.model, sequences, 0.7)
    Scoring(packed=True, attention=attention, chunked=chunked).apply(loaded)
    found, found_entropies = loaded.score(_packed_row(sequences), 0.7)
    torch.testing.assert_close(found.double(), scores, atol=2e-5, rtol=0)
    torch.testing.assert_close(found_entropies.double(), entropies, atol=2e-5, rtol=0)
    assert not found_entropies.requires_grad


def test_the_check_takes_the_fastest_way_that_is_right(loaded) -> None:
    choice = choose_scoring(loaded, LearnerConfig(), seed=0)
    assert choice.scoring == Scoring(packed=True, attention="packed", chunked=True, shared=True)
    assert (choice.packed, choice.single) == (["packed", "loaded", "plain"], "loaded")
    alone = choose_scoring(loaded, LearnerConfig(packing="off"), seed=0)
    assert alone.scoring == Scoring(packed=False, attention="loaded", chunked=True)


def _leak(loaded: Policy, monkeypatch) -> None:
    """Let the model take a row for one long sequence, as with a mask of ones."""
    backbone = loaded.model.model
    forward = backbone.forward

    def leaking(*args, **kwargs):
        kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        if "sequence_lengths" in kwargs:
            kwargs["sequence_lengths"] = (sum(kwargs["sequence_lengths"]),)
        return forward(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", leaking)


def test_the_check_sees_attention_that_leaks(loaded, monkeypatch) -> None:
    _leak(loaded, monkeypatch)
    scoring = choose_scoring(loaded, LearnerConfig(), seed=0).scoring
    assert (scoring.packed, scoring.attention) == (False, "loaded")
    assert "one sequence" in scoring.warnings[0]
    with pytest.raises(ConfigError, match=r"learner\.packing"):
        choose_scoring(loaded, LearnerConfig(packing="required"), seed=0)


def test_own_attention_is_given_up_where_a_layer_needs_more(loaded, monkeypatch) -> None:
    def refuse(*_args, **_kwargs):
        raise NotImplementedError("needs s_aux")

    from asyncrl.learner.fsdp.model import attention

    monkeypatch.setattr(attention, "packed_attention", refuse)
    scoring = choose_scoring(loaded, LearnerConfig(), seed=0).scoring
    monkeypatch.undo()
    attention.register()
    assert scoring == Scoring(True, "loaded", True, scoring.warnings)
    assert "s_aux" in scoring.warnings[0]


def test_the_check_sees_a_model_that_scales_its_logits(loaded, monkeypatch) -> None:
    forward = loaded.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(loaded.model, "forward", scaled)
    scoring = choose_scoring(loaded, LearnerConfig(), seed=0).scoring
    assert scoring == Scoring(True, "packed", False, scoring.warnings, shared=True)
    assert "whole logits" in scoring.warnings[0]


def test_the_check_does_not_pass_what_is_not_a_number(loaded, monkeypatch) -> None:
    monkeypatch.setattr(
        check, "score_rows", lambda _policy, rows: torch.full((sum(len(row.targets) for row in rows),), float("nan"))
    )
    scoring = choose_scoring(loaded, LearnerConfig(), seed=0).scoring
    assert (scoring.packed, scoring.chunked) == (False, False)


@pytest.mark.parametrize("load", [load_policy, empty_policy])
def test_a_model_that_is_not_there_names_its_key(load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere is no folder"):
        load(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no config\.json"):
        load(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match=r"model\.path: .* cannot be loaded"):
        load(ModelConfig(path=str(tmp_path)))


def test_the_layers_are_found(loaded, folder) -> None:
    assert len(loaded.decoder_layers()) == 2
    loaded.model._no_split_modules = ["Qwen2DecoderLayer", "Qwen2MLP"]
    assert [type(m).__name__ for m in loaded.decoder_layers()] == ["Qwen2DecoderLayer"] * 2
    loaded.model._no_split_modules = None
    assert [type(m).__name__ for m in loaded.decoder_layers()] == ["Qwen2DecoderLayer"] * 2
    empty = empty_policy(ModelConfig(path=str(folder)))
    names = [name for name, _ in empty.named_parameters()]
    assert names == [name for name, _ in loaded.named_parameters()]
    assert {p.device.type for p in empty.parameters()} == {"meta"}
