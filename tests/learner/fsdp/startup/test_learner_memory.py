"""The estimate of a rank's memory: against what autograd keeps, and the keys that it says to change."""

import logging
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import changed, make_config, save_small_model
from model_matrix import EXPERTS, FAMILIES, HYBRIDS, MIXED_LAYERS, make_family, save_family
from torch.utils.checkpoint import checkpoint

from asyncrl.config.training import ModelConfig
from asyncrl.gpu.learner_memory import (
    CAUTIOUS,
    USABLE,
    ModelShape,
    TrainingShape,
    advise,
    choose_checkpointing,
    estimate,
    shape_of_settings,
    training_shape,
)
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE, GpuShares
from asyncrl.learner.fsdp.model.policy import Policy, make_row
from asyncrl.learner.fsdp.startup import sharding
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.startup.sharding import limit_memory, plan_memory, shape_of
from asyncrl.learner.fsdp.startup.startup_check import Scoring

BF16 = torch.bfloat16
QWEN_7B = ModelShape(
    parameters=7_615_616_512,
    trained=7_615_616_512,
    layer_parameters=233_057_792,
    layers=28,
    hidden=3584,
    queries=3584,
    keys=512,
    intermediate=18944,
    vocabulary=152_064,
)
LOAD = TrainingShape(shards=8, tokens=8192, chunk=441, compute_bytes=2, checkpointing="off", offloaded=False)


def test_the_estimate_for_a_7b_model_on_8_ranks_matches_known_values():
    found = estimate(QWEN_7B, LOAD)
    assert found.weights + found.gradients + found.states == 16 * (4 * QWEN_7B.parameters // 8) // 4
    assert 45e9 < found.activations < 70e9
    assert estimate(QWEN_7B, TrainingShape(8, 8192, 441, 2, "full", False)).activations < found.activations / 8
    assert "activations" in str(found)


WIDE = {"intermediate_size": 192, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [("Qwen2", "full", torch.float32), *((family, "off", torch.bfloat16) for family in FAMILIES if family != "Gemma2")],
)
def test_estimated_activations_match_those_that_autograd_keeps(tmp_path, family, kind, dtype):
    folder = tmp_path / "model"
    if family == "Qwen2":
        save_small_model(folder, **WIDE)
    else:
        layers = {"layer_types": 2 * MIXED_LAYERS} if family.startswith("Gemma") else {}
        save_family(folder, make_family(family, tied=False, **WIDE, **layers))
    weights: set[int] = set()
    kept: dict[int, int] = {}
    held = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held, so that no other takes its place in memory.
            held.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def keeping(forward, *arguments, **options):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*arguments, **options)

    policy = load_policy(ModelConfig(path=str(folder)))
    policy.use_attention("packed")
    policy.to(dtype)
    for layer in policy.decoder_layers():
        forward = partial(checkpoint, layer.forward, use_reentrant=False) if kind == "full" else layer.forward
        layer.forward = partial(keeping, forward)
    tokens = 256
    ids = torch.randint(0, 40, (tokens,)).numpy()
    row = make_row(ids, [tokens], ids[:1] * 0, ids[:1], torch.device("cpu"))
    weights |= {p.untyped_storage().data_ptr() for p in policy.parameters()}
    policy.model.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        use_cache=False,
        sequence_lengths=torch.tensor(row.lengths),
    )
    shape = shape_of(policy)
    expected = estimate(shape, TrainingShape(1, tokens, 1, dtype.itemsize, kind, False)).activations
    if kind == "full":
        # Nothing is computed again yet.
        whole = TrainingShape(1, tokens, 1, dtype.itemsize, "off", False)
        expected -= estimate(shape, whole).activations // shape.layers
    # Windows and Gemma's activation function take a little more, which CAUTIOUS leaves room for.
    within = 0.2 if family in ("Gemma3", "Mistral") else 0.15
    assert sum(kept.values()) == pytest.approx(expected, rel=within), (sum(kept.values()), expected)


OURS = Scoring(packed=True, attention="packed", chunked=True)


def gpu_ranks(*memories):
    """Rank 0 of a run on GPUs of these sizes."""
    return SimpleNamespace(
        rank=0,
        shards=1,
        replicas=len(memories),
        device=torch.device("cuda"),
        all_gather=lambda values, what: np.array(memories if "memory" in what else values)[:, None],
    )


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"num_attention_heads": 4, "intermediate_size": 64}, ""),
        # As Mamba's, and as Gemma 3n's.
        ({}, "AttributeError: "),
        ({"num_attention_heads": 4, "intermediate_size": [64, 64]}, "TypeError: "),
    ],
)
def test_only_models_of_attention_are_estimated(sizes, problem, gpus_of_80_gb, caplog):
    policy = Policy(make_family("Mistral", tied=False))
    reported = SimpleNamespace(hidden_size=32, vocab_size=64, to_dict=lambda: sizes, **sizes)
    policy.model.config.get_text_config = lambda: reported
    ranks = gpu_ranks(80e9)
    with caplog.at_level(logging.INFO, "asyncrl"):
        kind = plan_memory(policy, OURS, make_config(), ranks, BF16)
    assert kind == ("full" if problem else "off")
    assert [
        record.getMessage().startswith(f"memory of the learner: not estimated: {problem}") for record in caplog.records
    ] == [bool(problem)]


@given(
    st.integers(1, 64),
    st.sampled_from([1024, 8192, 32768]),
    st.sampled_from(["off", "selective", "full"]),
    st.booleans(),
    st.floats(1e9, 300e9),
)
def test_advised_settings_fit_or_ask_for_more_ranks(shards, tokens, kind, offloaded, available):
    load = TrainingShape(shards, tokens, 441, 2, kind, offloaded)
    reported = advise(QWEN_7B, load, int(available))
    fits = estimate(QWEN_7B, load).device <= int(USABLE * int(available))
    assert (reported is None) == fits
    if reported is None or "more ranks" in reported:
        return
    fewer = re.search(r"tokens_per_microbatch = (\d+)", reported)
    then = replace(
        load,
        tokens=int(fewer[1]) if fewer else tokens,
        checkpointing="full" if "activation_checkpointing" in reported else kind,
        offloaded=offloaded or "offload" in reported,
    )
    assert then.tokens <= tokens
    assert estimate(QWEN_7B, then).device <= int(USABLE * int(available))


def test_the_cheapest_change_is_advised_first():
    assert advise(QWEN_7B, LOAD, 80 * 10**9) == 'learner.activation_checkpointing = "full"'
    small = advise(QWEN_7B, TrainingShape(1, 8192, 441, 2, "full", False), 80 * 10**9)
    assert small == "learner.tokens_per_microbatch = 1024 and learner.offload = true"
    assert "more ranks" in advise(QWEN_7B, TrainingShape(1, 1024, 441, 2, "full", True), 4 * 10**9)


def test_more_ranks_share_rows_if_the_longest_sequence_needs_it():
    """32 ranks share a row of 7B at most 4 at a time: 28 attention heads."""
    shape, room = replace(QWEN_7B, key_heads=4), 80 * 10**9
    load = TrainingShape(32, 262_144, 441, 2, "full", False, least_tokens=262_144)
    assert advise(shape, load, room) == "learner.context_parallel = 2"
    longer = replace(load, tokens=524_288, least_tokens=524_288)
    assert advise(shape, longer, room) == "learner.context_parallel = 4"
    already = replace(longer, tokens=262_144, least_tokens=262_144, context_parallel=2)
    assert advise(shape, already, room) == "learner.context_parallel = 4"
    longest = replace(load, tokens=2_097_152, least_tokens=2_097_152)
    assert "learner.context_parallel = 4 and learner.offload = true and more ranks" in advise(shape, longest, room)
    # Shorter rows are enough, or a rank is alone.
    assert "context_parallel" not in advise(shape, replace(load, least_tokens=1024), room)
    assert "context_parallel" not in advise(shape, replace(load, shards=1), room)


def test_masks_of_truncated_sampling_are_counted():
    free = make_config()
    truncated = changed(free, rollout={"top_k": 20, "engine": "reference"})
    plain, masked = (estimate(QWEN_7B, training_shape(each, QWEN_7B, 2)).logits for each in (free, truncated))
    assert masked == plain * 13 // 12


QWEN_HALF_B = ModelShape(
    parameters=494_032_768,
    trained=494_032_768,
    layer_parameters=14_912_384,
    layers=24,
    hidden=896,
    queries=896,
    keys=128,
    intermediate=4864,
    vocabulary=151_936,
)


@pytest.mark.parametrize(
    ("shape", "shards", "tokens", "gigabytes", "kind"),
    [
        (QWEN_HALF_B, 1, 8192, 80, "off"),
        (QWEN_HALF_B, 1, 32_768, 80, "off"),
        (QWEN_HALF_B, 1, 65_536, 80, "selective"),
        (QWEN_HALF_B, 1, 131_072, 80, "full"),
        (QWEN_HALF_B, 1, 8192, 24, "selective"),
        (QWEN_HALF_B, 1, 8192, 16, "full"),
        (QWEN_7B, 8, 8192, 80, "selective"),
        (QWEN_7B, 1, 8192, 80, "full"),
    ],
)
def test_activation_checkpointing_is_the_lightest_that_fits(shape, shards, tokens, gigabytes, kind):
    load = TrainingShape(shards, tokens, 441, 2, "off", False)
    available = gigabytes * 10**9
    assert choose_checkpointing(shape, load, available) == kind
    if kind != "full":
        assert estimate(shape, replace(load, checkpointing=kind)).device <= CAUTIOUS * available


@given(st.integers(1, 64), st.sampled_from([1024, 8192, 32768]), st.floats(1e9, 300e9), st.floats(0, 100e9))
def test_more_memory_never_increases_recomputation(shards, tokens, available, more):
    load = TrainingShape(shards, tokens, 441, 2, "off", False)
    order = ["full", "selective", "off"]
    less, much = (order.index(choose_checkpointing(QWEN_7B, load, int(room))) for room in (available, available + more))
    assert less <= much


@pytest.fixture
def gpus_of_80_gb(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))


def test_the_smallest_gpu_decides_for_all_ranks(gpus_of_80_gb, caplog):
    policy = Policy(make_family("Mistral", tied=False))
    for kind in ("off", "selective", "full"):
        asked = make_config(budget=1 << 20, activation_checkpointing=kind)
        assert plan_memory(policy, OURS, asked, gpu_ranks(80e9), BF16) == kind
    config = make_config(budget=1 << 20)
    assert plan_memory(policy, OURS, config, gpu_ranks(80e9), BF16) == "off"
    with caplog.at_level(logging.INFO, "asyncrl"):
        assert plan_memory(policy, OURS, config, gpu_ranks(80e9, 1e7), BF16) == "full"
    assert "activation checkpointing full" in caplog.text


def test_a_sequence_longer_than_a_row_gets_its_own_row(gpus_of_80_gb):
    policy, short = Policy(make_family("Mistral", tied=False)), make_config(budget=1024)
    long, taught = (changed(short, **{section: {"max_tokens": 1 << 25}}) for section in ("rollout", "sft"))
    kinds = [plan_memory(policy, OURS, config, gpu_ranks(80e9), BF16) for config in (short, long, taught)]
    assert kinds == ["off", "full", "full"]


@pytest.mark.parametrize(
    ("family", "scoring"),
    [
        *((family, OURS) for family in (*EXPERTS, *HYBRIDS, "Gemma2")),
        ("Qwen2", Scoring(packed=True, attention="plain", chunked=True)),
        ("Qwen2", Scoring(packed=False, attention="loaded", chunked=True)),
        ("Qwen2", Scoring(packed=True, attention="packed", chunked=False)),
    ],
)
def test_an_unknown_model_gets_full_activation_checkpointing(family, scoring, gpus_of_80_gb):
    policy = Policy(make_family(family, tied=False))
    assert plan_memory(policy, scoring, make_config(), gpu_ranks(80e9), BF16) == "full"


def test_ranks_that_share_rows_compute_a_part_of_the_longest_sequence():
    config = changed(make_config(budget=1024, ranks=8, context_parallel=4), rollout={"max_tokens": 99_999})
    one, shape = changed(config, learner={"context_parallel": 1}), replace(QWEN_7B, key_heads=4)
    load, alone = (training_shape(each, shape, 2) for each in (config, one))
    assert alone.tokens == alone.least_tokens == config.longest_sequence
    assert load.tokens == load.least_tokens == -(-config.longest_sequence // 4)
    assert estimate(shape, load).activations == pytest.approx(estimate(shape, alone).activations / 4, rel=1e-3)
    # Three ranks repeat the keys of 4 heads, so that there are 12.
    repeated = replace(load, checkpointing="off", context_parallel=3)
    more = estimate(shape, repeated).activations - estimate(shape, replace(repeated, context_parallel=1)).activations
    assert more == repeated.tokens * shape.layers * 2 * 2 * 2 * shape.keys


def test_muon_keeps_one_state_of_the_layers():
    adamw, muon = (estimate(QWEN_7B, replace(LOAD, muon=muon)).states for muon in (False, True))
    assert adamw - muon == pytest.approx(4 * 28 * QWEN_7B.layer_parameters / 8, rel=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, *(family for family in EXPERTS if family != "DeepseekV3")])
@pytest.mark.parametrize("kind", ["off", "selective", "full"])
def test_the_estimate_from_config_json_is_no_lower_than_that_of_the_model(family, kind):
    model = make_family(family, tied=False, intermediate_size=192)
    load = TrainingShape(1, 512, 441, 2, kind, False)
    exact = estimate(shape_of(Policy(model)), load).device
    planned = estimate(shape_of_settings(model.config.to_dict()), load).device
    # Biases and norms are left out.
    assert exact * 0.97 <= planned <= exact * 1.5


def test_a_model_that_compresses_its_keys_is_not_estimated_from_config_json():
    settings = make_family("DeepseekV3", tied=False).config.to_dict()
    with pytest.raises(ValueError, match="kv_lora_rank"):
        shape_of_settings(settings)


def test_a_rank_may_not_take_more_than_its_share_of_a_shared_gpu(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    shares = GpuShares(rank=0.3, engine=0.55, checkpointing="full", cached_tokens=1000, cache_bytes=1 << 30)
    monkeypatch.setattr(sharding, "read_shares", lambda _, gpus: {"GPU-5a": shares}[gpus[0]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5a")
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    first, second = (torch.device("cuda", index) for index in range(2))
    limit_memory(second, make_config())
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "GPU-5a:rollouter/0")
    for device in (torch.device("cpu"), first):
        limit_memory(device, make_config())
    assert limits == []
    assert limit_memory(second, make_config()) is shares
    assert limits == [(0.3, second)]


def test_the_engine_gets_the_memory_that_activation_checkpointing_leaves(gpus_of_80_gb, monkeypatch):
    policy = Policy(make_family("Mistral", tied=False))
    planned = GpuShares(rank=0.5, engine=0.4, checkpointing="selective", cached_tokens=1, cache_bytes=1)
    assert plan_memory(policy, OURS, make_config(), gpu_ranks(80e9), BF16) == "off"
    assert plan_memory(policy, OURS, make_config(), gpu_ranks(80e9), BF16, planned) == "selective"
    # A rank that has its GPU alone follows the one that keeps least.
    ranks = gpu_ranks(80e9, 80e9)
    ranks.all_gather = lambda values, what: np.array([values, [2.0]] if "checkpointing" in what else [[80e9], [80e9]])
    assert plan_memory(policy, OURS, make_config(), ranks, BF16) == "full"
    asked = make_config(activation_checkpointing="off")
    assert plan_memory(policy, OURS, asked, gpu_ranks(80e9), BF16, planned) == "off"
