"""The objective is the configured one: at a resume each key has a class, and each change is named with its effect."""

import json
from collections import Counter

import pytest
from run_settings import simulated_run

from asyncrl.config.keys import known_keys
from asyncrl.config.load import config_to_json
from asyncrl.config.resuming import TABLE, Applies, applies, changes, differences

KEYS = [key for key, *_ in known_keys()]


def tree_of(config):
    """The configuration in the form of a checkpoint."""
    return json.loads(config_to_json(config))


def test_every_key_of_the_configuration_has_one_class():
    entries = [entry for entries in TABLE.values() for entry in entries.split()]
    assert [entry for entry, count in Counter(entries).items() if count > 1] == []
    # A key of a source has the class of the same key of [data], unless only sources have it.
    shared = {key: key.replace("source.NAME.", "") for key in KEYS if key.startswith("data.source.NAME.")}
    as_named = {key: shared[key] if shared.get(key) in KEYS else key for key in KEYS}
    of_key = {
        key: [entry for entry in entries if entry == name or (entry[-1] == "*" and name.startswith(entry[:-1]))]
        for key, name in as_named.items()
    }
    wrong = {key: found for key, found in of_key.items() if len(found) != 1}
    assert wrong == {}, "name each of these keys once in TABLE of asyncrl/config/resuming.py"
    unused = set(entries) - {entry for found in of_key.values() for entry in found}
    assert unused == set(), "TABLE names keys that are not in the configuration"
    assert all(applies(key) for key in KEYS)
    with pytest.raises(KeyError, match=r"rollout\.min_tokens is not in TABLE"):
        applies("rollout.min_tokens")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        (
            {"learner": {"lr": 1e-5, "steps": 200}},
            [
                ("learner.steps", Applies.NOW, "was 100, is 200"),
                ("learner.lr", Applies.NOW, "was 1e-06, is 1e-05"),
            ],
        ),
        (
            {
                "rollout": {"temperature": 0.5, "stop": ["\n"]},
                "data": {"system": "Answer briefly.", "template": "chat"},
            },
            [
                ("data.template", Applies.GENERATED, 'was "plain", is "chat"'),
                ("data.system", Applies.GENERATED, 'was unset, is "Answer briefly."'),
                ("rollout.temperature", Applies.GENERATED, "was 1.0, is 0.5"),
                ("rollout.stop", Applies.GENERATED, r'was [], is ["\n"]'),
            ],
        ),
        (
            {"reward": {"options": {"value": 2.0}, "truncated": "penalty", "overlong": {"scale": 2.0}}},
            [
                ("reward.options", Applies.GENERATED, 'was {}, is {"value": 2.0}'),
                ("reward.truncated", Applies.GENERATED, 'was "score", is "penalty"'),
                ("reward.overlong.scale", Applies.GENERATED, "was 1.0, is 2.0"),
            ],
        ),
        # The learner computes the divergence when it trains a group.
        (
            {"learner": {"kl": {"coefficient": 0.1}, "correction": {"reject": {"limit": 1.0}}}},
            [
                (
                    "learner.correction.reject",
                    Applies.NOW,
                    'was unset, is {"estimator": "k3", "over": "mean", "limit": 1.0}',
                ),
                ("learner.kl.coefficient", Applies.NOW, "was 0.0, is 0.1"),
            ],
        ),
        ({"data": {"size": 8}}, [("data.size", Applies.PROMPTS, "was 1024, is 8")]),
        # These say which run is resumed, and how.
        ({"run": {"name": "x", "dir": "y"}, "resume": {"allow": ["batch"]}}, []),
    ],
)
def test_a_changed_key_is_named_with_both_values_and_its_effect(sections, expected):
    found = changes(tree_of(simulated_run()), simulated_run(**sections))
    assert [(change.key, change.applies, change.difference) for change in found] == expected
    assert all(change.applies.value in change.describe() for change in found)


def test_an_evaluation_set_that_is_added_or_removed_is_one_change():
    data = {"source": "synthetic"}
    was = simulated_run(eval={"a": {"data": data}, "b": {"data": data}})
    now = simulated_run(eval={"a": {"data": data, "n": 2}, "c": {"data": data}})
    found = changes(tree_of(was), now)
    assert [change.key for change in found] == ["eval.a.n", "eval.b", "eval.c"]
    assert [change.difference[:12] for change in found[1:]] == ['was {"data":', "was unset, i"]


def test_a_key_unknown_to_an_earlier_release_counts_as_its_default():
    tree = tree_of(simulated_run())
    del tree["rollout"]["temperature"], tree["trace"]
    assert changes(tree, simulated_run()) == []
    (found,) = changes(tree, simulated_run(rollout={"temperature": 0.5}))
    assert found.difference == "was 1.0, is 0.5"


def test_a_changed_key_of_a_source_is_named_with_the_source():
    rows, others = {"name": "rows", "path": "r.jsonl"}, {"name": "others", "source": "synthetic"}
    was = simulated_run(data={"source": [rows, others]})
    changed = {"weight": 2.0, "template": "chat", "reward": "exact", "shuffle": False, "size": 8}
    now = simulated_run(data={"source": [rows, others | changed]})
    assert {change.key: change.applies for change in changes(tree_of(was), now)} == {
        "data.source.others.size": Applies.PROMPTS,
        "data.source.others.template": Applies.GENERATED,
        "data.source.others.shuffle": Applies.NOW,
        "data.source.others.weight": Applies.PROMPTS,
        "data.source.others.reward": Applies.GENERATED,
    }
    (found,) = changes(tree_of(was), simulated_run(data={"source": [rows]}))
    assert (found.key, found.applies) == ("data.source.others", Applies.PROMPTS)
    (found,) = changes(tree_of(simulated_run()), was)
    assert (found.key, found.applies) == ("data.source", Applies.PROMPTS)


def test_keys_that_a_checkpoint_fits_only_unchanged_are_compared_in_the_order_of_the_table():
    now = simulated_run(learner={"groups_per_step": 4}, rollout={"samples_per_prompt": 2})
    was = {"rollout": {"samples_per_prompt": 8}, "learner": {"groups_per_step": 2}, "lora": {"alpha": 1.0}}
    # The checkpoint of an earlier release may lack keys. Without adapters their scale does not matter.
    assert differences(was, now) == [("learner.groups_per_step", 2, 4), ("rollout.samples_per_prompt", 8, 2)]
    assert differences({}, now) == differences(tree_of(now), now) == []
