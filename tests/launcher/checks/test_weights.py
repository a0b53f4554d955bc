"""Folders that are whole and cannot be trained: quantized weights, adapters, files that transformers does not load."""

import json

import pytest
from model_files import write_model, write_weights
from run_settings import simulated_run

from asyncrl.config.load import validate_config
from asyncrl.launcher.checks.model import check_model, measure
from asyncrl.launcher.checks.scoring_models import check_scoring_models
from asyncrl.text.tokenizer import load_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def with_config(**settings):
    return lambda model: (model / "config.json").write_text(json.dumps({"eos_token_id": 1} | settings))


def quantized(**settings):
    return with_config(quantization_config=settings)


def stored_as(dtype, name):
    return lambda model: write_weights(model / WEIGHTS, dtype=dtype, name=name)


def with_files(*names, without=()):
    def spoil(model):
        for name in without:
            (model / name).unlink()
        for name in names:
            is_settings = name == "adapter_config.json"
            (model / name).write_text('{"base_model_name_or_path": "org/base"}' if is_settings else "x")

    return spoil


def renamed(name):
    return lambda model: (model / WEIGHTS).rename(model / name)


QUANTIZED = [
    (quantized(quant_method="fp8", fmt="e4m3"), "config.json has quantization_config: the method is fp8"),
    (quantized(load_in_4bit=True), "the method is bitsandbytes"),
    (quantized(quant_algo="NVFP4"), "the method is NVFP4"),
    (quantized(bits=3), "the method is unknown"),
    (with_config(compression_config={"quant_method": "compressed-tensors"}), "config.json has compression_config"),
    (with_config(text_config={"quantization_config": {"quant_method": "fp8"}}), "the method is fp8"),
    (stored_as("F8_E4M3", "model.layers.0.mlp.up_proj.weight"), "up_proj.weight is F8_E4M3"),
    (stored_as("F8_E5M2", "w"), "w is F8_E5M2"),
    (stored_as("I8", "model.layers.0.mlp.up_proj.weight"), "up_proj.weight is I8"),
    (stored_as("U8", "model.layers.0.mlp.experts.gate_up_proj_blocks"), "gate_up_proj_blocks is U8"),
    (stored_as("U8", "model.layers.0.mlp.up_proj.weight_packed"), "weight_packed is U8"),
    (stored_as("I8", "model.layers.0.mlp.up_proj.qweight"), "qweight is I8"),
]


@pytest.mark.parametrize(("spoil", "said"), QUANTIZED)
def test_quantized_weights_are_refused_with_the_method_and_the_next_step(model, spoil, said):
    spoil(model)
    finding, size = check_model(str(model))
    assert (finding.result, finding.key, size) == ("fail", "model.path", None)
    assert "its weights are quantized" in finding.detail and said in finding.detail
    assert "the release of this model that is not quantized" in finding.fix


@pytest.mark.parametrize(
    ("spoil", "said", "to_do"),
    [
        (
            with_files("adapter_config.json", "adapter_model.safetensors"),
            "holds a model and an adapter of org/base (adapter_config.json, adapter_model.safetensors)",
            "merge_and_unload",
        ),
        (with_files("adapter_model.safetensors"), "the adapter would be ignored", "move adapter_model.safetensors"),
        (
            with_files("adapter_config.json", "adapter_model.bin", without=[WEIGHTS]),
            "holds an adapter of org/base and no model",
            "give the folder of the base",
        ),
        (
            with_files("adapter_config.json", "adapter_model.safetensors", without=[WEIGHTS, "config.json"]),
            "holds an adapter of org/base and no model",
            "merge_and_unload",
        ),
        (
            with_files("model-Q4_K_M.gguf", without=[WEIGHTS, "config.json"]),
            "holds its weights in GGUF only (model-Q4_K_M.gguf)",
            "config.json and model.safetensors",
        ),
        (
            renamed("consolidated.safetensors"),
            "no weights that transformers would load, which are model.safetensors or pytorch_model.bin",
            "Hugging Face format",
        ),
        (with_files("training_args.bin", without=[WEIGHTS]), "it holds training_args.bin", "Hugging Face format"),
        (with_files(without=[WEIGHTS]), "there are no weights", "copy or download"),
    ],
)
def test_unsupported_weights_are_refused_by_name_with_the_next_step(model, spoil, said, to_do):
    spoil(model)
    finding, size = check_model(str(model))
    assert (finding.result, size) == ("fail", None)
    assert said in finding.detail and to_do in finding.fix


@pytest.mark.parametrize(
    "keep",
    [
        with_config(quantization_config=None),
        with_config(quantization_config={}),
        # Masks and positions of older checkpoints are integers, and no weights.
        stored_as("U8", "gpt_neox.layers.0.attention.bias"),
        stored_as("BOOL", "model.masked_weight"),
        stored_as("I8", "model.embeddings.position_ids"),
    ],
)
def test_weights_that_are_not_quantized_pass(model, keep):
    keep(model)
    assert check_model(str(model))[0].result == "ok"


def test_only_weights_that_transformers_loads_are_counted(model):
    whole = measure(model)
    write_weights(model / "consolidated.safetensors", (9, 9))
    (model / "pytorch_model.bin").write_bytes(bytes(1000))
    (model / "training_args.bin").write_bytes(bytes(1000))
    assert measure(model) == whole
    (model / WEIGHTS).unlink()
    assert measure(model).bytes == 1000
    with_config(transformers_weights="consolidated.safetensors")(model)
    assert measure(model).parameters == 81


@pytest.mark.parametrize(
    ("key", "learner"),
    [
        ("learner.kl.path", lambda path: {"kl": {"coefficient": 0.1, "path": path}}),
        ("learner.teacher", lambda path: {"loss": "distill", "teacher": path}),
    ],
)
@pytest.mark.parametrize("spoil", [QUANTIZED[0][0], with_files("adapter_config.json", "adapter_model.safetensors")])
def test_the_same_checks_apply_to_the_reference_and_the_teacher(tmp_path, model, key, learner, spoil):
    other = write_model(tmp_path / "other")
    spoil(other)
    rollout = {"gpus_per_replica": 0, "max_tokens": 100}
    tree = {"model": {"path": str(model)}, "data": {"source": "synthetic", "size": 4}, "rollout": rollout}
    config = validate_config(tree | {"learner": learner(str(other))})
    (finding,) = check_scoring_models(config, load_tokenizer(str(model)))
    assert (finding.result, finding.key) == ("fail", key)
    assert str(other) in finding.detail and finding.fix
    # A run that trains nothing loads neither.
    assert check_scoring_models(simulated_run(), load_tokenizer(str(model))) == []
