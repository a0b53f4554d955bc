"""The division of a GPU's memory between a rank and an engine: tables of models and cards, and properties."""

import contextlib
from dataclasses import replace

import pytest
from draws import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.engine_memory import EngineShape, estimate_engine
from asyncrl.gpu.learner_memory import ModelShape, TrainingShape, estimate, shape_of_settings
from asyncrl.gpu.memory_shares import (
    ASLEEP_BYTES,
    LEAST_SEQUENCES,
    PROCESS_BYTES,
    UNCOUNTED,
    WANTED_SEQUENCES,
    Demand,
    advise_sharing,
    plan_sharing,
    share_gpu,
    sharers_of,
)

GIB = 1 << 30


def qwen(hidden, layers, heads, keys, intermediate, *, tied=True, **more):
    """The config.json of a model of the Qwen2.5 family."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": intermediate,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
        "model_type": "qwen2",
        **more,
    }


CARDS = {24: 23_034, 48: 46_068, 80: 81_559}
"""Memory (MiB) of an L4, an L40S and an H100."""
MODELS = {
    "0.5B": qwen(896, 24, 14, 2, 4864),
    "1.5B": qwen(1536, 28, 12, 2, 8960),
    "3B": qwen(2048, 36, 16, 2, 11008),
    "7B": qwen(3584, 28, 28, 4, 18944, tied=False),
}


def configured(rank=0, **tables):
    tree = {"model": {"path": "/m"}, "data": {"source": "synthetic"}, "lora": {"rank": rank}}
    return validate_config(tree | {"rollout": {"gpus_per_replica": 1}} | tables)


def test_config_json_of_a_mixture_of_experts_gives_what_a_token_passes():
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    shape = shape_of_settings(qwen(2048, 48, 32, 4, 6144, tied=False, vocab_size=151_936, **sizes))
    # Qwen3-30B-A3B.
    assert shape.parameters == pytest.approx(30_532_122_624, rel=1e-3)
    assert (shape.intermediate, shape.chosen_experts) == (8 * 768, 8)
    # Mixtral-8x7B has experts of the width of an MLP.
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}
    shape = shape_of_settings(qwen(4096, 32, 32, 8, 14336, tied=False, **mixtral))
    assert shape.parameters == pytest.approx(46_702_792_704, rel=1e-3)
    # Experts have no adapters: only q, k, v and o have.
    adapted = shape_of_settings(qwen(4096, 32, 32, 8, 14336, tied=False, **mixtral), 16)
    assert adapted.trained == 16 * 32 * 2 * (4096 + 4096 + 4096 + 1024)


def test_layers_without_experts_are_counted_as_dense():
    """GLM-4-MoE begins with dense layers and has shared experts, and Qwen3-MoE may have dense layers in between."""
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    glm = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    first = shape_of_settings(qwen(64, 4, 4, 2, 256, **sizes, **glm))
    every = shape_of_settings(qwen(64, 4, 4, 2, 256, **sizes, **glm | {"first_k_dense_replace": 0}))
    expert = 3 * 64 * 32
    assert every.parameters - first.parameters == 5 * expert + 4 * 64 - 3 * 64 * 256
    assert first.intermediate == every.intermediate == 3 * 32
    between = shape_of_settings(qwen(64, 4, 4, 2, 256, **sizes, num_experts=4, decoder_sparse_step=2))
    listed = shape_of_settings(qwen(64, 4, 4, 2, 256, **sizes, num_experts=4, mlp_only_layers=[0, 2]))
    assert between == listed
    all_sparse = shape_of_settings(qwen(64, 4, 4, 2, 256, **sizes, num_experts=4))
    assert all_sparse.parameters - listed.parameters == 2 * (4 * expert + 4 * 64 - 3 * 64 * 256)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688), ("7B", 7_615_616_512)],
)
def test_config_json_gives_the_number_of_parameters_to_a_thousandth(name, parameters):
    assert shape_of_settings(MODELS[name]).parameters == pytest.approx(parameters, rel=1e-3)
    # The text model of one that also sees images.
    assert shape_of_settings({"text_config": MODELS[name]}).parameters == pytest.approx(parameters, rel=1e-3)


def test_only_adapters_are_counted_as_trained():
    shape = shape_of_settings(MODELS["0.5B"], 8)
    full = shape_of_settings(MODELS["0.5B"])
    # 8 x (rows + columns) of q, k, v, o, gate, up and down in each of 24 layers.
    assert shape.trained == 8 * 24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert (shape.parameters - shape.trained, full.trained) == (full.parameters, full.parameters)


@pytest.mark.parametrize(
    ("gigabytes", "model", "rank", "fits"),
    [
        (24, "0.5B", 0, True),
        (24, "1.5B", 32, True),
        (24, "1.5B", 0, False),
        (24, "3B", 32, True),
        (24, "7B", 32, False),
        (48, "1.5B", 0, True),
        (48, "3B", 32, True),
        (48, "3B", 0, False),
        (80, "1.5B", 0, True),
        (80, "3B", 0, True),
        (80, "7B", 32, True),
        (80, "7B", 0, False),
    ],
)
def test_models_fit_on_a_gpu_as_estimated(gigabytes, model, rank, fits):
    # The driver reports less than the name of a card says.
    total, config = CARDS[gigabytes] << 20, configured(rank)
    if not fits:
        with pytest.raises(
            ConfigError, match=r"placement\.share: .* do not fit on one GPU of .*; (set|take) "
        ) as caught:
            plan_sharing(config, MODELS[model], total)
        assert "the engine at least" in str(caught.value)
        return
    shares = plan_sharing(config, MODELS[model], total)
    assert shares.rank + shares.engine + 2 * PROCESS_BYTES / total < 1
    assert shares.cached_tokens >= LEAST_SEQUENCES * config.longest_sequence
    assert f"{shares.rank:.0%} of the memory" in str(shares) and f"{shares.engine:.0%}" in str(shares)


def test_a_small_model_keeps_its_activations_on_a_large_card_only():
    kinds = [plan_sharing(configured(), MODELS["0.5B"], size * GIB).checkpointing for size in (24, 80)]
    assert kinds == ["full", "off"]
    asked = configured(learner={"activation_checkpointing": "selective"})
    assert plan_sharing(asked, MODELS["0.5B"], 80 * GIB).checkpointing == "selective"


def test_a_copy_of_the_weights_is_planned_if_it_costs_no_activations_and_no_sequences():
    def planned(size, **tables):
        return plan_sharing(configured(**tables), MODELS["1.5B"], size * GIB)

    shares, lone = planned(80), planned(80, learner={"ranks": 2})
    assert shares.has_copy and "weights stay on the GPU" in str(shares)
    assert not lone.has_copy and "weights" not in str(lone)
    # The copy is memory of its own, outside of both shares.
    copied = 2 * shape_of_settings(MODELS["1.5B"]).parameters
    assert shares.rank + shares.engine + (2 * PROCESS_BYTES + copied) / (80 * GIB) < 1
    for tables in ({"placement": {"share": "time_slice"}}, {"rank": 8}):
        assert not planned(80, **tables).has_copy
    config, copies = configured(), []
    for size in range(30, 60, 2):
        with contextlib.suppress(ConfigError):
            found = plan_sharing(config, MODELS["1.5B"], size * GIB)
            copies.append(found.has_copy)
            assert not found.has_copy or found.cached_tokens >= WANTED_SEQUENCES * config.longest_sequence
    assert set(copies) == {True, False}


def test_a_user_may_set_the_share_of_the_engine():
    def with_share(share):
        return configured(rollout={"gpus_per_replica": 1, "vllm": {"gpu_memory_utilization": share}})

    assert plan_sharing(with_share(0.3), MODELS["0.5B"], 80 * GIB).engine == 0.3
    with pytest.raises(ConfigError, match=r"; set no rollout\.vllm\.gpu_memory_utilization$"):
        plan_sharing(with_share(0.9), MODELS["0.5B"], 80 * GIB)

    # The exact value, which vLLM also gets.
    assert plan_sharing(with_share(0.29), MODELS["0.5B"], 80 * GIB).engine == 0.29


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"num_experts": 128}, "num_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": None}, "TypeError"),
        ({"intermediate_size": [64, 128]}, "TypeError"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_model_whose_memory_is_unknown_shares_no_gpu(changed, word):
    with pytest.raises(ConfigError, match=rf'placement\.share: the memory of /m .*{word}.* set it to "never"'):
        plan_sharing(configured(), MODELS["0.5B"] | changed, 80 * GIB)
    with pytest.raises(ConfigError, match="KeyError: 'hidden_size'"):
        plan_sharing(configured(), {}, 80 * GIB)
    with pytest.raises(ConfigError, match=rf"the memory of /teacher .*{word}"):
        plan_sharing(configured(), MODELS["0.5B"], 80 * GIB, {"/teacher": MODELS["0.5B"] | changed})


@pytest.mark.parametrize(
    ("tokens", "length", "named"),
    [
        # A row is as long as the longest sequence at least.
        (8192, 40_000, ""),
        (2048, 40_000, ""),
        (65_536, 3000, "learner.tokens_per_microbatch = 32768"),
    ],
)
def test_advised_keys_have_the_promised_effect(tokens, length, named):
    def with_tokens(tokens):
        return configured(
            learner={"tokens_per_microbatch": tokens, "activation_checkpointing": "full"},
            data={"source": "synthetic", "max_prompt_tokens": length // 2},
            rollout={"gpus_per_replica": 1, "max_tokens": length // 2},
        )

    with pytest.raises(ConfigError) as caught:
        plan_sharing(with_tokens(tokens), MODELS["1.5B"], 48 * GIB)
    assert named in str(caught.value) and ("tokens_per_microbatch" in str(caught.value)) is bool(named)
    if named:
        plan_sharing(with_tokens(32768), MODELS["1.5B"], 48 * GIB)


def test_other_uses_of_memory_are_counted():
    alone = plan_sharing(configured(), MODELS["0.5B"], 80 * GIB)
    # Groups over NCCL with an engine on another GPU.
    other = plan_sharing(configured(rollout={"gpus_per_replica": 1, "replicas": 2}), MODELS["0.5B"], 80 * GIB)
    assert alone.engine - other.engine == pytest.approx(0.02, abs=0.011)
    # A teacher's embedding, head and two layers in float32: 6.2 GB more than a policy with adapters.
    small = configured(32, learner={"activation_checkpointing": "full"})
    bare, taught = (plan_sharing(small, MODELS["0.5B"], 24 * GIB, scoring) for scoring in ({}, {"/t": MODELS["7B"]}))
    assert taught.rank * 24 * GIB > 7.0e9 > bare.rank * 24 * GIB
    # Soft caps are not estimated.
    capped = MODELS["0.5B"] | {"attn_logit_softcapping": 50.0}
    assert plan_sharing(configured(), capped, 80 * GIB).checkpointing == "full"


@pytest.mark.parametrize("name", UNCOUNTED)
def test_engine_options_that_change_its_memory_are_refused(name):
    config = configured(rollout={"gpus_per_replica": 1, "vllm": {"extra": {name: 1}}})
    with pytest.raises(ConfigError, match=rf"rollout\.vllm\.extra\.{name}: changes the memory of .*; leave it out"):
        plan_sharing(config, MODELS["0.5B"], 80 * GIB)


def test_in_time_slices_rank_and_engine_each_get_almost_all_memory():
    config = configured(placement={"share": "time_slice"})
    shares = plan_sharing(config, MODELS["3B"], CARDS[80] << 20)
    assert min(shares.rank, shares.engine) > 0.9 and str(shares).endswith(", in turn")
    # The rank alone needs 60 GB of these 69 GB.
    with pytest.raises(ConfigError, match=r'set placement\.share = "time_slice"$'):
        plan_sharing(configured(), MODELS["3B"], 64 * GIB)
    assert plan_sharing(config, MODELS["3B"], 64 * GIB).in_turn


def test_names_of_sharers_by_gpu():
    assert sharers_of("") == {}
    assert sharers_of("0:rollouter/0,GPU-5a:learner/1") == {"0": "rollouter/0", "GPU-5a": "learner/1"}


LOAD = TrainingShape(shards=1, tokens=8192, chunk=441, compute_bytes=2, checkpointing="full", offloaded=False)
SHAPES = st.builds(shape_of_settings, st.sampled_from([*MODELS.values()]), st.sampled_from([0, 8, 64]))
LOADS = st.builds(
    TrainingShape,
    shards=st.sampled_from([1, 2, 8]),
    tokens=st.sampled_from([1024, 8192, 65536]),
    chunk=st.just(441),
    compute_bytes=st.sampled_from([2, 4]),
    checkpointing=st.just("full"),
    offloaded=st.booleans(),
    least_tokens=st.sampled_from([0, 1500, 8192]),
)
ENGINES = st.builds(
    EngineShape,
    gpus=st.sampled_from([1, 2]),
    step_tokens=st.just(16384),
    sequences=st.sampled_from([16, 256]),
    longest=st.sampled_from([1024, 32768]),
    compute_bytes=st.just(2),
    utilization=st.sampled_from([None, 0.2, 0.5, 0.9]),
)
ASKED = st.sampled_from([None, "off", "selective", "full"])
EXTRA = st.sampled_from([0, 1 << 30])
DEMANDS = st.builds(
    Demand, SHAPES, LOADS, ENGINES, ASKED, in_turn=st.booleans(), group_bytes=EXTRA, scoring_bytes=EXTRA
)


@settings(max_examples=examples(200))
@given(demand=DEMANDS, gigabytes=st.integers(8, 192))
def test_each_side_gets_its_estimated_memory_and_both_fit_on_the_gpu(demand, gigabytes):
    total = gigabytes * GIB
    shares = share_gpu(total, demand)
    if shares is None:
        # More memory never fits less, and the advice is not empty.
        assert share_gpu(total // 2, demand) is None
        assert advise_sharing(total, demand).startswith(("set ", "take a larger GPU"))
        return
    outside = 2 * PROCESS_BYTES + demand.group_bytes
    assert shares.in_turn is demand.in_turn
    if demand.in_turn:
        # A sleeping engine keeps a part.
        assert shares.rank * total + ASLEEP_BYTES + outside <= total and shares.engine * total + outside <= total
    else:
        assert shares.rank * total + shares.engine * total + outside <= total
    assert (
        estimate(demand.shape, replace(demand.load, checkpointing=shares.checkpointing)).device <= shares.rank * total
    )
    need = estimate_engine(demand.shape, demand.engine)
    assert shares.cached_tokens * need.token <= shares.cache_bytes
    assert need.without_cache + shares.cache_bytes <= shares.engine * total
    assert demand.asked in (None, shares.checkpointing)
    assert demand.engine.utilization in (None, shares.engine)


@settings(max_examples=examples(100))
@given(demand=DEMANDS, gigabytes=st.integers(8, 192))
def test_no_advised_change_is_needless(demand, gigabytes):
    total = gigabytes * GIB
    assume(share_gpu(total, demand) is None)
    advice = advise_sharing(total, demand)
    assume(advice.startswith("set "))
    changed = follow(demand, advice.removeprefix("set ").split(" and "))
    assert share_gpu(total, changed) is not None
    words = advice.removeprefix("set ").split(" and ")
    for word in words:
        assert share_gpu(total, follow(demand, [other for other in words if other != word])) is None


def follow(demand: Demand, words: list[str]) -> Demand:
    """Make the changes that an advice names."""
    for word in words:
        key, _, value = word.partition(" = ")
        if key == "learner.activation_checkpointing":
            demand = replace(demand, asked="full")
        elif key == "placement.share":
            assert value == '"time_slice"'
            demand = replace(demand, in_turn=True)
        elif key == "no rollout.vllm.gpu_memory_utilization":
            demand = replace(demand, engine=replace(demand.engine, utilization=None))
        elif key == "learner.tokens_per_microbatch":
            assert int(value) >= demand.load.least_tokens
            demand = replace(demand, load=replace(demand.load, tokens=int(value)))
        elif key == "learner.offload":
            demand = replace(demand, load=replace(demand.load, offloaded=True))
        else:
            assert word == "lora.rank = 32"
            shape: ModelShape = demand.shape
            demand = replace(demand, shape=replace(shape, trained=shape.parameters // 100))
    return demand
