"""Bytes of a model's files that a rank reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.fsdp.startup.shard_plan import converts_rows, layer_of, obstacle, own_rows, read_together, refusal


@given(rows=st.integers(1, 200), shards=st.integers(1, 40))
def test_each_row_belongs_to_one_rank_as_in_torch_chunk(rows: int, shards: int) -> None:
    parts = [own_rows(rows, rank, shards) for rank in range(shards)]
    assert [row for part in parts for row in part] == list(range(rows))
    chunks = torch.arange(rows).chunk(shards)
    assert [list(part) for part in parts[: len(chunks)]] == [chunk.tolist() for chunk in chunks]


NAMES = st.builds(
    "{}.{}.{}".format, st.sampled_from(["model.layers", "vision.blocks"]), st.integers(0, 12), st.sampled_from("abc")
)


@given(targets=st.dictionaries(NAMES | st.text("abc.", max_size=5), NAMES | st.sampled_from(["embed", "norm"])))
def test_tensors_of_one_layer_are_read_together_and_each_once(targets: dict[str, str]) -> None:
    groups = read_together(targets)
    assert sorted(name for group in groups for name in group) == sorted(targets)
    layers = [{layer_of(targets[name]) for name in group} for group in groups]
    assert all(len(each) == 1 for each in layers)
    assert len({next(iter(each)) for each in layers}) == len(layers)


def test_the_layer_of_a_weight() -> None:
    assert layer_of("model.layers.3.mlp.experts.7.w1.weight") == "model.layers.3"
    assert layer_of("lm_head.weight") == "lm_head.weight"
    assert layer_of("norm.2") == "norm.2"


STACK, JOIN = ("MergeModulelist", 0), ("Concatenate", 1)


@pytest.mark.parametrize(
    ("operations", "rows", "shards", "keeps"),
    [
        ([], 1, 8, True),
        ([STACK], 8, 8, True),
        ([STACK], 8, 5, False),  # the last rank has none
        ([STACK, JOIN], 8, 2, True),
        ([STACK, ("Concatenate", 0)], 8, 2, False),
        ([STACK, ("Transpose", 1)], 8, 2, False),
        ([("MergeModulelist", 1)], 8, 2, False),
        ([("Chunk", 0)], 8, 2, False),
    ],
)
def test_conversions_that_keep_rows_apart_are_recognised(operations, rows: int, shards: int, keeps: bool) -> None:
    assert converts_rows(operations, rows, shards) is keeps


@pytest.mark.parametrize(
    ("files", "settings", "reported"),
    [
        (["model.safetensors"], {}, None),
        (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], {}, None),
        (["pytorch_model.bin"], {}, "neither"),
        (["model.safetensors"], {"transformers_weights": "other.safetensors"}, "names the file"),
    ],
)
def test_an_obstacle_to_reading_a_model_in_shards_is_named(
    files: list[str], settings: dict, reported: str | None
) -> None:
    found = obstacle(files, settings)
    assert (found is None) if reported is None else (found is not None and reported in found)


@pytest.mark.parametrize(
    ("files", "settings", "reported"),
    [
        (["model.safetensors"], {"quantization_config": None}, None),
        (["pytorch_model.bin"], {}, None),
        (["model.safetensors"], {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        (["model.safetensors", "adapter_config.json"], {}, "adapter"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(files: list[str], settings: dict, reported: str | None) -> None:
    found = refusal(files, settings)
    assert (found is None) if reported is None else (found is not None and reported in found)
