"""The configuration and the files that the groups of a checkpoint were made with, and when they are given back."""

from __future__ import annotations

import sys

import msgspec
import pytest
from learner.learner_cases import make_state
from model_files import write_model
from run_settings import simulated_run

from asyncrl.checkpoint.contents import read_state, write_contents
from asyncrl.checkpoint.origin import Origin


def read_back(origin: Origin) -> Origin:
    return msgspec.json.decode(msgspec.json.encode(origin), type=Origin)


def test_the_origin_is_kept_in_the_checkpoint_and_an_earlier_one_has_none(tmp_path) -> None:
    config = simulated_run(rollout={"temperature": 0.5})
    write_contents(tmp_path, make_state(origin=Origin.of(config)), [], [])
    found = read_state(tmp_path).origin
    assert found == Origin.of(config)
    same = found.compare(config)
    assert (same.changes, same.gives_back, same.describe(3)) == ([], "", [])
    state = msgspec.json.decode((tmp_path / "state.json").read_bytes())
    del state["origin"]
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(state))
    unknown = read_state(tmp_path).origin.compare(config)
    assert unknown.gives_back == "the checkpoint does not hold their configuration"
    assert unknown.describe(1)[-1].startswith("1 group of the checkpoint is given back and generated again: ")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"reward": {"function": "constant"}, "learner": {"signal": "x"}}, "reward.function, learner.signal"),
        ({"learner": {"lr": 1.0, "kl": {"coefficient": 0.1}}, "staleness": {"max": 3}}, ""),
        ({"data": {"size": 4}, "run": {"seed": 2}, "learner": {"groups_per_step": 3}}, ""),
    ],
)
def test_groups_are_given_back_for_a_change_that_they_depend_on_alone(sections, reason) -> None:
    found = read_back(Origin.of(simulated_run())).compare(simulated_run(**sections))
    assert found.gives_back == reason
    *lines, last = found.describe(12)
    assert len(found.changes) == len(lines) + (not reason) and lines[0].startswith("changed: ")
    back = f"12 groups of the checkpoint are given back and generated again: {reason}"
    assert (last == back) == bool(reason)
    # Without groups nothing is given back.
    assert not any("given back" in line for line in found.describe(0))


def test_code_of_the_same_name_is_compared_by_its_file_and_never_imported(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    code = package / "rewards.py"
    code.write_text("def score(): return 1.0")
    config = simulated_run(reward={"function": "mine.rewards:score"}, learner={"loss": "mine.losses:loss"})
    before = read_back(Origin.of(config))
    assert before.files.keys() == {"reward.function"}
    assert before.compare(config).changes == []
    code.write_text("def score(): return 2.0")
    (change,) = before.compare(config).changes
    assert change.describe() == (
        f"reward.function names files whose contents differ ({code}); the change applies to groups that are generated "
        "from now on"
    )
    # Another function in another file is one change, and not two.
    (package / "others.py").write_text("def score(): return 2.0")
    (change,) = before.compare(
        simulated_run(reward={"function": "mine.others:score"}, learner={"loss": "mine.losses:loss"})
    ).changes
    assert 'is "mine.others:score"' in change.difference
    # A file that is not found here says nothing.
    code.unlink()
    assert before.compare(config).changes == []
    assert "mine" not in sys.modules


def test_a_chat_template_that_changed_in_the_models_folder_is_seen(tmp_path) -> None:
    model = write_model(tmp_path / "model")
    config = simulated_run(model={"path": str(model)})
    before = Origin.of(config)
    (model / "README.md").write_text("of no account")
    assert before.compare(config).gives_back == ""
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert before.compare(config).gives_back == "model.path"
    assert str(model) in before.compare(config).describe(0)[0]
