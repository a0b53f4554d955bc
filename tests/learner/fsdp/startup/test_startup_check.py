"""The check at start, first part, and models that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.training import LearnerConfig, ModelConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.startup import startup_check as check
from asyncrl.learner.fsdp.startup.loading import empty_policy, load_policy
from asyncrl.learner.fsdp.startup.startup_check import Scoring, choose_scoring, sharing_cost


@pytest.fixture
def loaded(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=str(folder)))


def test_the_check_selects_the_fastest_correct_method(loaded) -> None:
    choice = choose_scoring(loaded, LearnerConfig(), seed=0)
    assert choice.scoring == Scoring(packed=True, attention="packed", chunked=True, shared=True)
    assert (choice.packed, choice.single) == (["packed", "loaded", "plain"], "loaded")
    alone = choose_scoring(loaded, LearnerConfig(packing="off"), seed=0)
    assert alone.scoring == Scoring(packed=False, attention="loaded", chunked=True)


def test_rounding_is_measured_on_the_model_and_does_not_count_as_a_leak(loaded) -> None:
    # Log-probs of thousands of nats: their rounding alone is far above a bound that suits others.
    loaded.model.get_output_embeddings().weight.data *= 3000
    choice = choose_scoring(loaded, LearnerConfig(), seed=0)
    assert choice.scoring == Scoring(packed=True, attention="packed", chunked=True, shared=True)
    assert max(map(abs, choice.truth)) > 1000


def _leaks(loaded: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes a row for one long sequence, as with a mask of ones."""
    backbone = loaded.model.model
    forward = backbone.forward

    def leaking(*args, **kwargs):
        kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        if "sequence_lengths" in kwargs:
            kwargs["sequence_lengths"] = (sum(kwargs["sequence_lengths"]),)
        return forward(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", leaking)


def _needs_sinks(loaded: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args, **_kwargs):
        raise NotImplementedError("needs s_aux")

    monkeypatch.setattr(attention, "packed_attention", refuse)


def _scales_logits(loaded: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = loaded.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(loaded.model, "forward", scaled)


def _is_no_number(loaded: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check, "score_rows", lambda _, rows: torch.full((sum(len(row.targets) for row in rows),), float("nan"))
    )


@pytest.mark.parametrize(
    ("ails", "packed", "way", "chunked", "reported"),
    [
        (_leaks, False, "loaded", True, "one sequence"),
        (_needs_sinks, True, "loaded", True, "s_aux"),
        (_scales_logits, True, "packed", False, "whole logits"),
        (_is_no_number, False, "plain", False, "whole logits"),
    ],
)
def test_the_check_detects_each_fault_of_a_model(
    ails: Callable[..., None], packed: bool, way: str, chunked: bool, reported: str, loaded, monkeypatch
) -> None:
    ails(loaded, monkeypatch)
    scoring = choose_scoring(loaded, LearnerConfig(), seed=0).scoring
    if not packed:
        with pytest.raises(ConfigError, match=r"learner\.packing"):
            choose_scoring(loaded, LearnerConfig(packing="required"), seed=0)
    monkeypatch.undo()
    attention.register()
    assert (scoring.packed, scoring.attention, scoring.chunked) == (packed, way, chunked)
    assert reported in scoring.warnings[0]


@pytest.mark.parametrize("load", [load_policy, empty_policy])
def test_a_missing_model_is_named_with_its_key(load, tmp_path: Path) -> None:
    for path, files, reported in (
        (tmp_path / "nowhere", {}, "nowhere is no folder"),
        (tmp_path, {}, r"holds no config\.json"),
        (tmp_path, {"config.json": json.dumps({"model_type": "no-such-model"})}, "cannot be loaded"),
    ):
        for name, text in files.items():
            (path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"model\.path: .*{reported}"):
            load(ModelConfig(path=str(path)))


def test_the_check_finds_the_layers_of_a_model(loaded) -> None:
    for named in (["Qwen2DecoderLayer", "Qwen2MLP"], None):
        loaded.model._no_split_modules = named
        assert [type(m).__name__ for m in loaded.decoder_layers()] == ["Qwen2DecoderLayer"] * 2


@pytest.mark.parametrize(
    ("shared", "samples", "packing", "expected"),
    [
        (True, 8, "auto", ""),
        (False, 1, "auto", ""),
        (False, 8, "off", ""),
        (False, 8, "auto", "computes each prompt 8 times a group"),
        (False, 8, "auto", "A prompt of 512 tokens (data.max_prompt_tokens) costs 3,584 more tokens a group"),
    ],
)
def test_the_cost_names_the_prompt_and_the_samples(shared: bool, samples: int, packing: str, expected: str) -> None:
    scoring = Scoring(packed=True, attention="packed", chunked=True, shared=shared)
    found = sharing_cost(scoring, samples=samples, prompt_tokens=512, packing=packing)
    assert expected in found and bool(found) == bool(expected)
