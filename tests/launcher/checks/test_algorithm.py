"""The loss and the advantage of the user, tried on made-up groups before a run begins."""

import asyncio

import pytest

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.launcher.checks.user_code import check_algorithm
from asyncrl.learner.algorithm.user_functions import problems_of

MODULE = """
import os

print("importing")
os.write(1, b"from C")

def mine(batch, *, scale=1.0):
    return -scale * batch.advantages * batch.logprobs, {}

def wrong(batch):
    return batch.weights[:1], {}

def constant(batch):
    return batch.advantages, {}

def flat(groups):
    return [[0.0] * len(group.rewards) for group in groups]

def short(groups):
    return []

def by_parts(groups, *, n):
    for group in groups:
        assert len(group.rewards) == n and "form" in group.components
    return [group.components["form"] + group.components.get("answer") for group in groups]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "users_algorithm.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")


def check(limit_s=120.0, **learner):
    config = Config.model_construct(**(dict(Config()) | {"learner": LearnerConfig(**learner)}))
    return asyncio.run(check_algorithm(config, limit_s=limit_s))


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"loss": "bypas"}, ["learner.loss: there is no built-in loss 'bypas'; did you mean bypass?"]),
        ({"loss": "users_algorithm:constant"}, ["learner.loss: users_algorithm:constant has no gradient"]),
        ({"loss": "distill"}, ["learner.teacher: the loss distill needs one"]),
        ({"teacher": "folder"}, ["learner.teacher: the loss decoupled asks for none"]),
        ({"loss_options": {"clip_low": "0.2"}}, ["learner.loss_options: decoupled failed: TypeError"]),
        (
            {"loss": "gspo", "correction": {"weight": "token"}},
            ['learner.correction.weight: is "token", but the loss gspo'],
        ),
        (
            {"loss": "users_algorithm:wrong", "advantage": "users_algorithm:short"},
            [
                "learner.advantage: users_algorithm:short failed",
                "learner.loss: users_algorithm:wrong returned losses of shape (1,) for 5",
            ],
        ),
    ],
)
def test_an_unusable_setting_is_named_by_its_key(learner, said):
    problems = problems_of(LearnerConfig(**learner), 4)
    assert len(problems) == len(said) and all(words in one for words, one in zip(said, problems, strict=True)), problems


def test_the_groups_have_the_size_of_the_run_and_components_by_any_name():
    for size, said in ((4, []), (3, ["AssertionError"])):
        problems = problems_of(LearnerConfig(advantage="users_algorithm:by_parts", advantage_options={"n": 4}), size)
        assert len(problems) == len(said) and all(words in one for words, one in zip(said, problems, strict=True))


def test_the_trial_has_its_own_process_and_defaults_are_not_tried():
    finding = check(loss="users_algorithm:mine", loss_options={"scale": 2.0}, advantage="users_algorithm:flat")
    assert (finding.result, finding.detail) == ("ok", "users_algorithm:mine with users_algorithm:flat can be called")
    assert check() is None and check(backend="sim", loss="nothing") is None
    finding = check(loss="leaves:mine")
    assert finding.result == "fail" and "the process that tries leaves:mine with" in finding.detail
    finding = check(limit_s=1.0, loss="hangs:mine")
    assert finding.result == "warn" and "did not end within 1 s" in finding.detail
