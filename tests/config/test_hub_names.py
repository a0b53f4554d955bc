"""Names of the Hugging Face hub in a configuration: what is one, and the folder that stands for it."""

from pathlib import Path

import pytest

from asyncrl.config.hub import (
    HubName,
    asked_names,
    cache_folder,
    kept_pins,
    localized,
    named,
    parse,
    with_pins,
)
from asyncrl.config.load import config_from_json, config_to_json, load_config, validate_config
from asyncrl.core.errors import ConfigError

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "is_data", "expected"),
    [
        ("Qwen/Qwen3-0.6B", False, HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", False, HubName("Qwen/Qwen3-0.6B", "v1.0")),
        (f"a/b@{COMMIT}", False, HubName("a/b", COMMIT)),
        ("a/b@refs/pr/7", False, HubName("a/b", "refs/pr/7")),
        ("openai/gsm8k", True, HubName("openai/gsm8k", "main", "", True)),
        ("openai/gsm8k/main", True, HubName("openai/gsm8k", "main", "main", True)),
        ("a/b@dev/data/*.parquet", True, HubName("a/b", "dev", "data/*.parquet", True)),
        ("a/b@refs/convert/parquet/x/0.parquet", True, HubName("a/b", "refs/convert/parquet", "x/0.parquet", True)),
        ("a/b.jsonl@v1", True, HubName("a/b.jsonl", "v1", "", True)),
        ("data/prompts.jsonl", True, None),
        ("a/b/c", False, None),
        ("gsm8k", True, None),
        ("/models/x", False, None),
        ("./a/b", True, None),
        ("../a/b", True, None),
        ("~/a/b", True, None),
        ("a/b@", False, None),
        ("a//b", True, None),
        ("here/model", False, None),
        ("here/rows/file.jsonl", True, None),
        ("http://host:80/v1", False, None),
        ("hf://datasets/a/b", True, None),
        ("$MODELS/x", False, None),
    ],
)
def test_a_name_of_the_hub_or_a_path(tmp_path, monkeypatch, text, is_data, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    found = parse(text, is_data=is_data)
    assert found == expected
    if found is not None:
        assert str(found) == text


def tree(**tables):
    return {
        "model": {"path": "org/model@v1"},
        "data": {"path": "org/rows/train.jsonl"},
        "eval": {"heldout": {"data": {"path": "org/rows", "split": "test"}}, "made": {"data": {"source": "synthetic"}}},
        "learner": {"teacher": "org/teacher", "loss": "distill"},
        "rollout": {"engine": "reference", "concurrency": 8},
    } | tables


def test_the_keys_of_a_configuration_that_have_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = asked_names(validate_config(tree()))
    assert {key: str(name) for key, name in found.items()} == {
        "model.path": "org/model@v1",
        "learner.teacher": "org/teacher",
        "data.path": "org/rows/train.jsonl",
        "eval.heldout.data.path": "org/rows",
    }
    assert [key for key, name in found.items() if name.is_data] == ["data.path", "eval.heldout.data.path"]
    url = validate_config(tree(learner={"teacher": "http://host/v1", "loss": "distill"}))
    assert "learner.teacher" not in asked_names(url)
    (tmp_path / "org").mkdir()
    assert asked_names(validate_config(tree())) == {}


def test_actors_get_the_folder_of_the_commit_and_comparisons_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    pins = {"model.path": f"org/model@{COMMIT}", "eval.heldout.data.path": f"org/rows@{COMMIT}/test.jsonl"}
    config = with_pins(validate_config(tree()), pins)
    config = config_from_json(config_to_json(config))
    assert (config.model.path, config.hub.pinned) == ("org/model@v1", pins)
    local = localized(config)
    assert local.model.path == str(tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT)
    rows = tmp_path / "cache" / "datasets--org--rows" / "snapshots" / COMMIT / "test.jsonl"
    assert local.eval["heldout"].data.path == str(rows)
    assert local.data.path == config.data.path
    assert localized(local) == local
    for each in (config, local):
        assert named(each).model.path == f"org/model@{COMMIT}"
    assert named(local).eval == named(config).eval
    plain = validate_config(tree())
    assert localized(plain) is plain and named(plain) is plain and with_pins(plain, {}) is plain


def test_a_resume_keeps_the_pins_of_names_that_have_not_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pins = {"model.path": f"org/model@{COMMIT}", "data.path": f"org/rows@{COMMIT}/train.jsonl"}
    was = with_pins(validate_config(tree()), pins).model_dump(mode="json")
    assert kept_pins(validate_config(tree()), was) == pins
    moved = validate_config(tree(model={"path": "org/model@v2"}))
    assert kept_pins(moved, was) == {"data.path": pins["data.path"]}
    assert kept_pins(moved, {}) == kept_pins(moved, {"hub": {}}) == {}


def test_pins_are_refused_in_a_file_of_the_user(tmp_path):
    (tmp_path / "c.toml").write_text('model.path = "a/b"\nhub.pinned = {"model.path" = "a/c@v1"}')
    with pytest.raises(ConfigError, match="hub.pinned: is set by the launcher; to choose a commit, write"):
        load_config([tmp_path / "c.toml"])


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HF_HOME": "/h"},
        {"HF_HOME": "~/h"},
        {"XDG_CACHE_HOME": "/x"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"},
        {"HF_HUB_CACHE": "$HOME/c", "HUGGINGFACE_HUB_CACHE": "/old"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environment):
    import os
    import subprocess
    import sys

    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_", "XDG_"))}
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    ended = subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True)
    assert Path(ended.stdout.strip()) == cache_folder(environment)


def test_sources_of_a_mixture_have_pins_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    sources = [{"name": "made", "source": "synthetic"}, {"name": "rows", "path": "org/rows"}]
    config = validate_config(tree(data={"source": sources}))
    assert "data.source.rows.path" in asked_names(config)
    pins = {"data.source.rows.path": f"org/rows@{COMMIT}"}
    config = config_from_json(config_to_json(with_pins(config, pins)))
    rows = tmp_path / "cache" / "datasets--org--rows" / "snapshots" / COMMIT
    assert localized(config).data.mixture[1].path == f"{rows}"
    assert named(config).data.mixture[1].path == f"org/rows@{COMMIT}"
    assert kept_pins(config, config.model_dump(mode="json")) == pins
