"""Model, data, reward and folders, on real files."""

import json
import time

import pytest
from doctor.model_files import write_model, write_weights

from asyncrl.config.load import validate_config
from asyncrl.config.training import ModelConfig, RewardConfig
from asyncrl.disk import free_bytes, nearest_folder
from asyncrl.doctor.inputs import check_data, check_reward
from asyncrl.doctor.model import check_model, digest, measure
from asyncrl.doctor.needs import DiskNeed, ModelSize
from asyncrl.doctor.storage import check_folder, same_disk


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def test_a_whole_model_is_measured(model):
    finding, size = check_model(ModelConfig(path=str(model)))
    assert finding.result == "ok", finding
    assert size is not None and size.parameters == 20
    assert size.bytes == (model / "model.safetensors").stat().st_size
    assert check_model(ModelConfig())[0].result == "ok"


def test_several_files_are_counted_together(model):
    (model / "model.safetensors").rename(model / "one.safetensors")
    write_weights(model / "two.safetensors", (3, 3))
    index = {"weight_map": {"w": "one.safetensors", "v": "two.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert measure(model).parameters == 29
    (model / "two.safetensors").unlink()
    finding, _ = check_model(ModelConfig(path=str(model)))
    assert finding.result == "fail" and "two.safetensors" in finding.detail


def test_files_of_torch_are_counted_by_their_size(model):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bytes(1000))
    (model / "config.json").write_text('{"eos_token_id": 1, "torch_dtype": "bfloat16"}')
    assert measure(model) == ModelSize(parameters=500, bytes=1000)


@pytest.mark.parametrize(
    ("spoil", "result", "said"),
    [
        (lambda m: (m / "config.json").unlink(), "fail", "config.json: No such file"),
        (lambda m: (m / "config.json").write_text("{"), "fail", "config.json is not valid JSON"),
        (lambda m: (m / "model.safetensors").unlink(), "fail", "there are no weights"),
        (lambda m: write_weights(m / "model.safetensors", cut=3), "fail", "is cut off"),
        (lambda m: (m / "model.safetensors").write_text("version https://git-lfs"), "fail", "git-lfs"),
        (lambda m: (m / "tokenizer.json").write_text("{"), "fail", "tokenizer.json cannot be read"),
        (lambda m: (m / "config.json").write_text("{}"), "warn", "names no end of a sequence"),
    ],
)
def test_a_model_that_is_not_whole_says_what_is_missing(model, spoil, result, said):
    spoil(model)
    finding, _ = check_model(ModelConfig(path=str(model)))
    assert finding.result == result and said in finding.detail and finding.fix
    assert check_model(ModelConfig(path="/nowhere"))[0].detail == "/nowhere is not a folder here"


def test_a_digest_tells_models_apart(model, tmp_path):
    before = digest(model)
    (model / "README.md").write_text("of no account")
    assert digest(model) == before
    write_weights(model / "model.safetensors", (5, 5))
    assert digest(model) != before


def data(tmp_path, lines, **settings):
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    return validate_config(
        {
            "data": {"path": str(tmp_path / "data.jsonl")} | settings,
            "rollout": {"engine": "sim"},
            "learner": {"backend": "sim"},
            "eval": {"held": {"data": {"source": "synthetic"}}},
        }
    )


@pytest.mark.parametrize(
    ("lines", "settings", "result", "said"),
    [
        (['{"prompt": "hello"}', "never read"], {}, "ok", "a prompt of 5 tokens"),
        (["{"], {}, "fail", "data.jsonl:1: is not valid JSON"),
        (["{"], {"on_bad_row": "skip"}, "warn", "it is left out"),
        (['{"question": "hello"}'], {}, "fail", "has no column 'prompt'"),
        (['{"prompt": "a long one"}'], {"max_prompt_tokens": 3}, "warn", "over 3"),
        (['{"prompt": [{"role": "user", "content": "x"}]}'], {}, "fail", 'need template = "chat"'),
        ([""], {}, "fail", "holds no row"),
        ([""], {"path": "/nowhere/x.jsonl"}, "fail", "no such file"),
    ],
)
def test_the_first_row_is_read_as_the_dataloader_does(tmp_path, lines, settings, result, said):
    trained, held = check_data(data(tmp_path, lines, **settings))
    assert trained.result == result and said in trained.detail and trained.detail.startswith("data: ")
    assert held.result == "ok" and held.detail.startswith("eval.held.data: ")


REWARDS = """
import os, sys, time
print("noise on standard output", flush=True)
def good(*, completion, row): return 1.0
def greedy(*, completion, more): return 1.0
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)")
    (tmp_path / "hangs.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("rewards:good", ""),
        ("rewards:greedy", "reward.options.more: is required"),
        ("rewards:goood", "did you mean good?"),
        ("rewardz:good", "did you mean rewards?"),
        ("ends:reward", "importing ends:reward: "),
        ("exakt", "did you mean exact?"),
    ],
)
def test_the_reward_function_is_found_as_the_pool_does(rewards, function, said):
    found = check_reward(RewardConfig(function=function))
    assert found.result == ("fail" if said else "ok"), found
    assert said in found.detail


def test_a_module_that_hangs_is_given_up(rewards):
    begun = time.monotonic()
    found = check_reward(RewardConfig(function="hangs:reward"), timeout_s=2.0)
    assert found.result == "fail" and "takes more than 2 s" in found.detail
    assert time.monotonic() - begun < 60


def test_room_and_rights(tmp_path):
    here = tmp_path / "not" / "there" / "yet"
    assert nearest_folder(here) == tmp_path and same_disk(here, tmp_path)
    free = free_bytes(here)
    for least, wanted, result in ((1, 1, "ok"), (1, free * 2, "warn"), (free * 2, free * 2, "fail")):
        assert check_folder("run_dir", "run.dir", here, DiskNeed(least=least, wanted=wanted)).result == result
    (tmp_path / "file").write_text("")
    for path, said in ((tmp_path / "file" / "x", "is not a folder"), ("/proc/1/x", "cannot be written to")):
        found = check_folder("run_dir", "run.dir", type(tmp_path)(path), DiskNeed(least=0, wanted=0))
        assert found.result == "fail" and said in found.detail and "run.dir" in found.fix
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]
