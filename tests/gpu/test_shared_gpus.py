"""The shares that a process reads for its GPUs."""

import json

import pytest
from gpu.cards import card

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError
from asyncrl.gpu import shared_gpus
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE
from asyncrl.gpu.shared_gpus import read_shares, sharers


def test_the_launcher_names_the_other_actor(monkeypatch):
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    assert sharers() == {}
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "0:learner/0,1:learner/1")
    assert sharers() == {"0": "learner/0", "1": "learner/1"}


def test_shares_follow_from_the_model_and_the_smallest_gpu(monkeypatch, tmp_path):
    sizes = {"0": 80 << 30, "1": 24 << 30}
    monkeypatch.setattr(shared_gpus, "read_gpu", lambda gpu: card(sizes[gpu]) if gpu in sizes else None)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(names, (896, 24, 14, 4864, 151_936), strict=True))))
    config = validate_config({"model": {"path": str(tmp_path)}, "data": {"source": "synthetic"}, "lora": {"rank": 8}})
    assert read_shares(config, ["0", "1"]) == read_shares(config, ["1"]) != read_shares(config, ["0"])
    taught = validate_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"source": "synthetic"},
            "learner": {"teacher": str(tmp_path / "teacher")},
        }
    )
    with pytest.raises(ConfigError, match="the memory of .*/teacher cannot be estimated"):
        read_shares(taught, ["0"])
    with pytest.raises(ConfigError, match=r"placement\.share: the driver does not report the memory of GPU 7"):
        read_shares(config, ["7"])


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_json_gives_no_sizes(monkeypatch, tmp_path, text):
    monkeypatch.setattr(shared_gpus, "read_gpu", lambda _: card(80 << 30))
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = validate_config({"model": {"path": str(tmp_path)}, "data": {"source": "synthetic"}})
    with pytest.raises(ConfigError, match="KeyError: 'hidden_size'"):
        read_shares(config, ["0"])
