"""Model, tokenizer, chat template and prompts, on real files."""

import asyncio
import json

import pytest
from chat_models import CHATML, write_chat_model
from model_files import write_chat_template, write_model, write_weights
from run_settings import simulated_run

from asyncrl.config.algorithm import LoraConfig
from asyncrl.config.load import validate_config
from asyncrl.dataloader.prompts import load_dataset
from asyncrl.launcher.checks import inputs, process
from asyncrl.launcher.checks.findings import KnownPrompts
from asyncrl.launcher.checks.inputs import check_inputs, read_inputs
from asyncrl.launcher.checks.model import check_model, check_served, check_window, digest, measure
from asyncrl.launcher.checks.needs import ModelSize


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def write_index(folder, places):
    """The index of a model in shards; its one file becomes the only shard."""
    if (folder / WEIGHTS).exists():
        (folder / WEIGHTS).rename(folder / SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


# --- weights ---


def test_the_size_of_a_model_is_the_sum_of_its_files(model):
    finding, size = check_model(str(model))
    assert finding.result == "ok" and size is not None and size.parameters == 20
    assert size.bytes == (model / "model.safetensors").stat().st_size
    assert check_model(None)[0].result == "ok"
    before = digest(model)
    (model / "README.md").write_text("of no account")
    assert digest(model) == before
    (model / "model.safetensors").rename(model / "one.safetensors")
    write_weights(model / "two.safetensors", (3, 3), name="v")
    write_index(model, {"w": "one.safetensors", "v": "two.safetensors"})
    assert measure(model).parameters == 29 and digest(model) != before
    for file in model.glob("*.safetensors*"):
        file.unlink()
    # Files of torch are counted by their size.
    (model / "pytorch_model.bin").write_bytes(bytes(1000))
    (model / "config.json").write_text('{"eos_token_id": 1, "torch_dtype": "bfloat16"}')
    assert measure(model) == ModelSize(parameters=500, bytes=1000)


def test_a_name_of_the_hub_gets_the_command_that_downloads_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct"
    for path in ("Qwen/Qwen2.5-0.5B-Instruct", "https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct"):
        found, _ = check_model(path)
        assert found.result == "fail" and f"{path} is not a folder here" in found.detail
        assert found.fix == f"run `{command}` and set model.path to Qwen2.5-0.5B-Instruct"
    for path in ("/models/x", "models", "./Qwen/x", "../Qwen"):
        assert "hf download" not in check_model(path)[0].fix


def test_adapters_are_counted_for_numbered_layers(model):
    shapes = {"model.layers.0.q_proj": (6, 4), "model.layers.1.mlp.up_proj": (8, 4), "lm_head": (9, 4)}
    (model / "model.safetensors").unlink()
    for name, shape in shapes.items():
        write_weights(model / f"{name}.safetensors", shape, name=f"{name}.weight")
    write_weights(model / "bias.safetensors", (6, 1), name="model.layers.0.q_proj.bias")
    places = {f"{name}.weight": f"{name}.safetensors" for name in shapes}
    write_index(model, places | {"model.layers.0.q_proj.bias": "bias.safetensors"})
    assert measure(model).adapters == 0
    assert measure(model, LoraConfig(rank=2)).adapters == 2 * (6 + 4) + 2 * (8 + 4)
    _, size = check_model(str(model), LoraConfig(rank=2, targets=["mlp.up_proj", "lm_head"]))
    assert size is not None and (size.adapters, size.trained) == (2 * (8 + 4), 2 * (8 + 4))


WEIGHTS, SHARD = "model.safetensors", "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: (m / "config.json").unlink(), "there is no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda m: (m / WEIGHTS).unlink(), "there are no weights"),
        (lambda m: write_weights(m / WEIGHTS, cut=3), "model.safetensors is cut off: it has "),
        (lambda m: write_weights(m / WEIGHTS, cut=60), "and its header alone takes "),
        (lambda m: (m / WEIGHTS).write_bytes(b"123"), "model.safetensors is cut off: it has 3 bytes"),
        (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"more"), "and its header describes"),
        (lambda m: (m / WEIGHTS).write_text("version https://git-lfs"), "git-lfs"),
        (lambda m: (m / WEIGHTS).write_bytes(bytes([3, *[0] * 7]) + b"{}x"), "cannot be read"),
        (lambda m: write_index(m, {"w": SHARD, "v": "b.safetensors"}), "files that are missing: b.safetensors"),
        (lambda m: write_index(m, {"w": SHARD, "v": SHARD}), f"{SHARD} lacks v, which its index lists"),
        (lambda m: write_index(m, ["w"]), "weight_map does not map"),
    ],
)
def test_an_incomplete_model_names_the_missing_files(model, spoil, said):
    spoil(model)
    finding, size = check_model(str(model))
    assert (finding.result, finding.key, size) == ("fail", "model.path", None)
    assert said in finding.detail and str(model) in finding.detail and finding.fix


# --- what the engine takes ---


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"max_position_embeddings": 2048}, True),
        ({"max_position_embeddings": 2047}, False),
        ({"text_config": {"max_position_embeddings": 128}}, False),
        ({}, True),
        # Positions that are stretched are the engine's to judge.
        ({"max_position_embeddings": 128, "rope_scaling": {"factor": 4.0}}, True),
    ],
)
def test_the_longest_sequence_must_fit_into_the_models_positions(model, changes, fits):
    """1,024 tokens of prompt and as many of response."""
    (model / "config.json").write_text(json.dumps(changes))
    rollout = {"gpus_per_replica": 0}
    config = validate_config({"model": {"path": str(model)}, "data": {"source": "synthetic"}, "rollout": rollout})
    found = check_window(config)
    assert (found is None) == fits
    if found is not None:
        assert (found.result, found.key) == ("fail", "data.max_prompt_tokens")
        assert "take 2048 tokens" in found.detail and "rollout.max_tokens = 1024" in found.detail


def test_a_configured_context_must_fit_into_the_models_positions(model):
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    rollout = {"gpus_per_replica": 0, "vllm": {"max_model_len": 4096}}
    config = validate_config({"model": {"path": str(model)}, "data": {"source": "synthetic"}, "rollout": rollout})
    found = check_window(config)
    assert (found.result, found.key) == ("fail", "rollout.vllm.max_model_len")
    assert "4096 is more than the model's max_position_embeddings = 2048" in found.detail


LONG = {"rope_type": "longrope"}
GPT2 = {"architectures": ["GPT2LMHeadModel"]}


@pytest.mark.parametrize(
    ("changes", "lora", "words"),
    [
        (GPT2, {"rank": 8}, "vLLM's GPT2LMHeadModel takes no adapters"),
        (GPT2, {"rank": 8, "publish": "merged"}, None),
        (GPT2, {}, None),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"rank": 8}, None),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, {}, None),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "are dynamic"),
        ({"rope_parameters": LONG | {"original_max_position_embeddings": 2047}}, {}, "past 2047 tokens"),
        ({"rope_parameters": LONG | {"original_max_position_embeddings": 2048}}, {}, None),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 2047}, {}, "its context has 2048"),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, {}, "gemma2 with a tied head alone"),
        ({"model_type": "gemma2"}, {}, None),
        ({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}, {}, "is a mixture of experts"),
        ({"text_config": {"n_routed_experts": 64}}, {}, "is a mixture of experts"),
        ({"model_type": "olmo2", "num_experts": None}, {}, None),
        ({"text_config": {"linear_conv_kernel_dim": 4}}, {}, "is a hybrid"),
        ({"model_type": "lfm2", "conv_L_cache": 3}, {}, "is a hybrid"),
        ({"model_type": "falcon_h1", "mamba_d_conv": 4}, {}, "is a hybrid"),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, {}, None),
    ],
)
def test_models_that_vllm_cannot_serve_or_computes_differently_are_refused_by_name(model, changes, lora, words):
    (model / "config.json").write_text(json.dumps(changes))
    settings = {"model": {"path": str(model)}, "data": {"source": "synthetic"}, "lora": lora}
    found = check_served(validate_config(settings | {"rollout": {"gpus_per_replica": 0}}))
    assert (found is None) == (words is None)
    if found is not None:
        assert (found.result, found.key) == ("fail", "lora.publish" if lora else "model.path")
        assert words in found.detail and ('lora.publish to "merged"' in found.fix) == bool(lora)
    if not lora:
        assert check_served(validate_config(settings | {"rollout": {"engine": "reference"}})) is None


@pytest.mark.parametrize(
    ("changes", "share", "gpus", "is_refused"),
    [
        ({"model_type": "bloom"}, "time_slice", 1, True),
        ({"model_type": "falcon", "alibi": True}, "time_slice", 1, True),
        ({"model_type": "falcon", "alibi": False}, "time_slice", 1, False),
        ({"model_type": "qwen2"}, "time_slice", 1, False),
        ({"model_type": "bloom"}, "always", 1, False),
        ({"linear_conv_kernel_dim": 4}, "time_slice", 1, False),
        # An engine on CPU keeps its memory when it sleeps.
        ({"model_type": "bloom"}, "time_slice", 0, False),
    ],
)
def test_a_model_whose_positions_a_sleep_would_lose_is_refused_in_time_slices(model, changes, share, gpus, is_refused):
    (model / "config.json").write_text(json.dumps(changes))
    settings = {"model": {"path": str(model)}, "data": {"source": "synthetic"}, "placement": {"share": share}}
    found = check_served(validate_config(settings | {"rollout": {"gpus_per_replica": gpus}}))
    assert (found is not None) == is_refused
    if found is not None:
        assert (found.result, found.key) == ("fail", "model.path")
        assert "ALiBi" in found.detail and "placement.share" in found.fix


# --- tokenizer and template ---


def config_of(model, **tables):
    return simulated_run(model={"path": str(model)}, **tables)


def finding(config, check, *, with_rows=False):
    found = read_inputs(config, with_rows=with_rows).findings
    return next((one for one in found if one.check == check), None)


def without_unk(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "[NONE]"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "result", "said"),
    [
        (lambda m: (m / "tokenizer.json").write_text("{"), "fail", "tokenizer.json cannot be read"),
        (lambda m: (m / "tokenizer.json").unlink(), "fail", "holds no tokenizer: no tokenizer.json"),
        (lambda m: (m / "config.json").write_text("{}"), "warn", "has no end-of-sequence token"),
        # It matters only if a row has such a word.
        (without_unk, "ok", "can be read"),
    ],
)
def test_the_tokenizer_is_checked(model, spoil, result, said):
    spoil(model)
    found = finding(config_of(model), "tokenizer", with_rows=True)
    assert (found.result, found.key, bool(found.fix)) == (result, "model.path", result != "ok")
    assert said in found.detail and str(model) in found.detail


def test_a_stop_token_must_be_one_of_the_model(model):
    config = config_of(model)
    stops = config.rollout.model_copy(update={"stop_token_ids": [1, 99_999]})
    (found,) = read_inputs(config.model_copy(update={"rollout": stops}), with_rows=False).findings
    assert (found.result, found.key) == ("fail", "rollout.stop_token_ids")
    assert found.detail.startswith("99999: no token of the model")


def test_a_prompt_outside_the_vocabulary_is_named_with_line_text_and_fix(model, tmp_path):
    without_unk(model)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a b"}\n')
    rows = {"source": "jsonl", "path": str(tmp_path / "p.jsonl")}
    found = finding(config_of(model, data=rows), "data", with_rows=True)
    assert found.result == "fail" and f"{tmp_path}/p.jsonl:2: {model}/tokenizer.json cannot encode 'b'" in found.detail
    assert "needs an unk_token that is in the vocabulary" in found.detail
    assert found.fix == 'mend it, or leave such rows out with data.on_bad_row = "skip"'
    found = finding(config_of(model, data=rows | {"on_bad_row": "skip"}), "data", with_rows=True)
    said = f'are left out (data.on_bad_row = "skip"); the first: {tmp_path}/p.jsonl:2: '
    assert found.result == "warn" and said in found.detail


LINES = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDED = "{% for m in messages %}{{ m.role + ' ' + m.content + ' </s>' }}{% endfor %}"
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
PLAYING = {"episode": {"function": "m:f"}}


@pytest.mark.parametrize(
    ("template", "result", "said"),
    [
        (None, "fail", "has no chat template, and episodes are chats"),
        ("{% if %}", "fail", "cannot be compiled"),
        ("{{ raise_exception('never') }}", "fail", "refuses every conversation: the chat template refuses"),
        (LINES, "warn", "each answer starts a new sequence for turns of the kinds tool, "),
        (ENDED, "ok", "contexts are extended"),
    ],
)
def test_the_chat_template_of_episodes_is_checked(model, template, result, said):
    if template is not None:
        write_chat_template(model, template)
    found = finding(config_of(model, **PLAYING), "chat")
    assert (found.result, found.key, bool(found.fix)) == (result, "model.path", result != "ok") and said in found.detail
    assert finding(config_of(model), "chat") is None


def test_bytes_need_no_model_and_a_template_that_hangs_is_reported_in_time(model):
    found = finding(simulated_run(**PLAYING), "chat")
    assert found.result == "ok" and "'json'" in found.detail
    write_chat_template(model, SLOW)
    config = config_of(model, chat={"check_timeout_s": 0.2}, **PLAYING)
    found = {one.check: one for one in asyncio.run(check_inputs(config, with_rows=False)).findings}
    assert found["chat"].result == "fail" and "did not end within 0.2 s" in found["chat"].detail
    assert found["tokenizer"].result != "fail"


def test_prompts_that_need_a_chat_template_are_refused_without_one(model):
    config = config_of(model, data={"template": "chat"})
    read = read_inputs(config, with_rows=True)
    _, found = read.findings
    # The trial of the reward function has rows all the same.
    assert len(read.samples) == 3
    assert (found.result, found.key) == ("fail", "data.template") and "has no chat template" in found.detail
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert finding(config, "data", with_rows=True).result == "ok"


# --- prompts ---


HELLO = '{"prompt": "hello"}'
SKIP = {"on_bad_row": "skip"}
HELD = {"source": "synthetic", "max_prompt_tokens": 1024}


def data(tmp_path, lines, **settings):
    (tmp_path / "data.jsonl").write_bytes("\n".join(lines).encode() + b"\n")
    trained = {"source": "jsonl", "path": str(tmp_path / "data.jsonl")} | settings
    return simulated_run(data=trained, eval={"held": {"data": HELD}})


@pytest.mark.parametrize(
    ("lines", "settings", "result", "said"),
    [
        (["\ufeff" + HELLO], {}, "ok", "1 row can be read; the longest prompt has 5 tokens"),
        ([HELLO] * 56 + ["{", HELLO, "[]"], {}, "fail", "1 more bad rows"),
        (
            [HELLO] * 56 + ["{"],
            SKIP,
            "warn",
            '1 of 57 (1.8 %) rows cannot be used and are left out (data.on_bad_row = "skip"); the first:',
        ),
        (["{"], SKIP, "fail", "holds no usable row ({folder}/data.jsonl:1: is not valid JSON"),
        ([HELLO] * 56 + ['{"prompt": " "}'], {}, "fail", "data.jsonl:57: prompt: is empty"),
        (['{"question": "hello"}'], {}, "fail", "has no column 'prompt'"),
        ([HELLO, '{"prompt": "a long one"}'], {"max_prompt_tokens": 5}, "warn", "1 of 2 (50 %) prompts have more than"),
        ([HELLO], {"max_prompt_tokens": 3}, "fail", "every prompt is over data.max_prompt_tokens = 3"),
        (['{"prompt": [{"role": "user", "content": "x"}]}'], {}, "fail", 'need template = "chat"'),
        ([""], {}, "fail", "holds no row"),
        ([""], {"path": "/nowhere/x.jsonl"}, "fail", "no such file"),
    ],
)
def test_all_rows_are_read_as_the_dataloader_does(tmp_path, lines, settings, result, said):
    found = read_inputs(data(tmp_path, lines, **settings), with_rows=True).findings
    trained, held = [one for one in found if one.check == "data"]
    assert trained.result == result and trained.key.partition(".")[0] == "data", trained
    assert said.format(folder=tmp_path) in trained.detail and bool(trained.fix) == (result != "ok"), trained
    assert held.result == "ok" and held.key == "eval.held.data"


@pytest.mark.parametrize(
    ("lines", "settings", "result", "said"),
    [
        ([HELLO] * 3, {}, "ok", "read up to {x}:1 and tokenized up to {x}:1 in 0 s, and the run reads the rest"),
        ([HELLO], {}, "ok", "1 row can be read; the longest prompt has 5 tokens"),
        # Only few rows were read, and later ones may be usable.
        ([HELLO] * 2, {"max_prompt_tokens": 3}, "warn", "the longest has 5 tokens; not read beyond {x}:1"),
        (["{", HELLO], SKIP, "warn", "is not valid JSON"),
        (["{", HELLO], {}, "fail", "{x}:1: is not valid JSON"),
    ],
)
def test_a_large_set_is_read_until_its_time_is_over(tmp_path, monkeypatch, lines, settings, result, said):
    monkeypatch.setattr(inputs, "SETS_S", 0.0)
    found = read_inputs(data(tmp_path, lines, **settings), with_rows=True).findings
    (trained,) = [one for one in found if one.check == "data" and one.key.startswith("data")]
    assert trained.result == result and said.replace("{x}", f"{tmp_path}/data.jsonl") in trained.detail


def test_the_first_prompt_of_each_set_is_shown_as_the_model_gets_it(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "x" * 99}) + "\n" + HELLO + "\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "a\x1b[2J" + "b" * 900}) + "\n")
    training = {
        "source": "jsonl",
        "path": str(tmp_path / "data.jsonl"),
        "template": "chat",
        "system": "Add.",
        "max_prompt_tokens": 60,
    }
    held = {"data": {"source": "jsonl", "path": str(tmp_path / "eval.jsonl"), "max_prompt_tokens": 2000}}
    found = read_inputs(simulated_run(data=training, eval={"held": held}), with_rows=True).findings
    shown = {one.key: one.detail for one in found if one.check == "prompt"}
    assert shown["data"] == r'the first has 35 tokens: "system: Add.\nuser: hello\nassistant:"'
    text = shown["eval.held.data"]
    assert text.startswith(r'the first has 935 tokens: "system: Add.\nuser: a\x1b[2Jbbb') and len(text) < 600
    assert text.endswith('b\\nassistant:"') and "[... 515 characters ...]" in text


def test_a_chat_template_that_is_not_used_is_named(tmp_path):
    config = config_of(write_chat_model(tmp_path, CHATML))
    for template, is_named in (("plain", True), ("chat", False)):
        given = config.model_copy(update={"data": config.data.model_copy(update={"template": template})})
        (shown,) = (one for one in read_inputs(given, with_rows=True).findings if one.check == "prompt")
        said = 'the chat template of the model is not used: data.template = "plain"'
        assert (shown.result, said in shown.detail) == ("ok", is_named)


def test_samples_are_rows_of_each_set_with_their_places(tmp_path):
    rows = [json.dumps({"prompt": f"p{number}", "answer": number}) for number in range(5)]
    (first, *_, last) = samples = read_inputs(data(tmp_path, ["", *rows]), with_rows=True).samples
    assert [sample.key for sample in samples] == ["data"] * 3 + ["eval.held.data"]
    assert first.place == f"{tmp_path}/data.jsonl:2" and first.row == {"prompt": "p0", "answer": 0}
    assert (first.prompt, last.place) == ("p0", "synthetic:1")


def test_a_mixture_is_checked_source_by_source(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{HELLO}\n{HELLO}\n")
    (tmp_path / "b.jsonl").write_text("{}\n")
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    found = read_inputs(simulated_run(data={"source": sources}), with_rows=True)
    assert [(each.key, each.result) for each in found.findings if each.check == "data"] == [
        ("data.source.a", "ok"),
        ("data.source.b", "fail"),
    ]
    assert [(sample.key, sample.source) for sample in found.samples] == [("data.source.a", "a")] * 2
    assert "data.source.b.on_bad_row" in found.findings[-1].fix


def test_a_file_that_has_grown_since_the_run_was_left_is_known(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{HELLO}\n")
    config = simulated_run(data={"source": "auto", "path": str(path), "follow": True})
    known = KnownPrompts(fingerprint=load_dataset(config.data).fingerprint, count=1)
    path.write_text(f"{HELLO}\n{HELLO}\n")
    assert all(each.result == "ok" for each in read_inputs(config, with_rows=True, known=known).findings)
    path.write_text(f'{{"prompt": "bye"}}\n{HELLO}\n')
    assert any(each.result == "fail" for each in read_inputs(config, with_rows=True, known=known).findings)


def test_a_separate_process_checks_the_inputs_alike_and_its_death_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LONGEST_ANSWER_BYTES", 256 << 10)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = data(tmp_path, [HELLO, "{"])
    assert asyncio.run(check_inputs(config)) == read_inputs(config, with_rows=True)
    for code, limit_s, result, said in (
        ("import os, sys; print('last', file=sys.stderr, flush=True); os._exit(3)", 60.0, "fail", "3: last"),
        ("import time; time.sleep(600)", 0.5, "warn", "not read within 0.5 s"),
        ("def read(): return 'x' * 300_000", 60.0, "fail", "it wrote more than 256.0 KiB"),
        # As of a loop that prints: its last line alone is read.
        ("import sys; sys.stderr.write('lasts ' * 100_000); sys.exit(3)", 60.0, "fail", "code 3: sts lasts"),
    ):
        (tmp_path / "instead.py").write_text(code)
        monkeypatch.setattr(inputs, "READ", "instead:read")
        (found,) = asyncio.run(check_inputs(config, limit_s=limit_s)).findings
        assert found.result == result and said in found.detail and found.key == "data, eval.held.data"
