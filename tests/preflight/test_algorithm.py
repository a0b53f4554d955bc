from __future__ import annotations

import asyncio

import pytest

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.learner.algorithm.loss.trial import problems_of
from asyncrl.preflight.trials import check_algorithm

MODULE = """
import os, sys

print("importing")

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
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_algorithm.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")


def check(limit_s=120.0, **learner):
    config = Config.model_construct(**(dict(Config()) | {"learner": LearnerConfig(**learner)}))
    return asyncio.run(check_algorithm(config, limit_s=limit_s))


def test_what_can_be_called_is_found_and_without_keys_nothing_is_tried():
    finding = check(loss="users_algorithm:mine", loss_options={"scale": 2.0}, advantage="users_algorithm:flat")
    assert (finding.result, finding.detail) == ("ok", "users_algorithm:mine with users_algorithm:flat can be called")
    assert check() is None
    assert check(backend="sim", loss="nothing") is None


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"loss": "bypas"}, "learner.loss: there is no built-in loss 'bypas'; did you mean bypass?"),
        ({"loss": "users_algorithm:constant"}, "learner.loss: users_algorithm:constant has no gradient"),
        ({"loss": "distill"}, "learner.teacher: the loss distill needs one"),
        ({"teacher": "folder"}, "learner.teacher: the loss decoupled asks for none"),
        (
            {"loss": "gspo", "correction": {"weight": "token"}},
            'learner.correction.weight: is "token", but the loss gspo',
        ),
    ],
)
def test_a_key_that_cannot_be_used_is_named(learner, said, monkeypatch):
    monkeypatch.syspath_prepend("")
    (problem,) = problems_of(LearnerConfig(**learner))
    assert said in problem


def test_all_that_cannot_be_called_is_named_and_a_module_that_ends_its_process_fails():
    finding = check(loss="users_algorithm:wrong", advantage="users_algorithm:short")
    assert finding.result == "fail"
    assert "learner.loss: users_algorithm:wrong returned losses of shape (1,) for 5" in finding.detail
    assert "learner.advantage: users_algorithm:short failed on made-up groups" in finding.detail
    finding = check(loss="leaves:mine")
    assert finding.result == "fail" and "the process that tries them ended" in finding.detail


def test_a_module_that_hangs_when_it_is_imported_is_a_warning():
    finding = check(limit_s=3.0, loss="hangs:mine")
    assert finding.result == "warn"
    assert "were not tried within 3 s" in finding.detail
