"""The model card shows nothing that only a host or its user should know."""

import pytest

from asyncrl.cli.model_card import license_of, model_card, shown_keys
from asyncrl.config.load import validate_config

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\ntags: [x]\n---\n# Model", "mit"),
        ("---\r\ntags: [x]\r\nlicense: apache-2.0\r\n---\r\n", "apache-2.0"),
        ("---\ntags: [x]\n---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("", None),
    ],
)
def test_the_license_is_that_of_the_base_model(card, license):
    assert license_of(card) == license


def configured(**tables):
    base = {"rollout": {"engine": "reference", "concurrency": 8}, "model": {"path": "/home/me/models/base"}}
    return validate_config(base | {"data": {"path": "org/rows"}} | tables)


def test_secrets_addresses_and_places_of_folders_are_left_out():
    config = configured(
        episode={"command": ["python", "agent.py", "--key", "sk-hidden"]},
        learner={"teacher": "http://10.0.0.7/v1", "loss": "distill", "lr": 2e-5},
        reward={"options": {"api_key": "sk-hidden", "url": "https://x", "inner": {"TOKEN": "sk-hidden", "top": 3}}},
        sft={"data": "/home/me/talk.jsonl", "warm_steps": 1},
        hub={"pinned": {"data.path": f"org/rows@{COMMIT}/train.jsonl"}},
    )
    shown = dict(shown_keys(config))
    assert shown["model.path"] == "base" and shown["sft.data"] == "talk.jsonl"
    assert shown["data.path"] == f"org/rows@{COMMIT}/train.jsonl"
    assert shown["reward.options"] == {"inner": {"top": 3}} and shown["learner.lr"] == 2e-5
    assert not {"episode.command", "learner.teacher", "data.template"} & shown.keys()
    card = model_card(config, [], step=7, version=7, base="", is_adapter=False)
    assert "hidden" not in card and "/home" not in card and "10.0.0.7" not in card
    assert "base_model" not in card and 'datasets: ["org/rows"]' in card and "No metrics are left." in card
