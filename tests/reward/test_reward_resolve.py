import asyncio
import sys
from typing import Any

import pytest

from asyncrl.reward.scoring.frames import RewardSetup, RewardTask
from asyncrl.reward.worker import resolve
from asyncrl.runtime.workers.user_code import NotCallable

MODULE = """
async def awaited(*, completion, **_):
    return len(completion)

def everything(*, prompt, completion, row, finish_reason, bonus=0.0):
    assert (prompt, row, finish_reason) == ("p", {"answer": "1"}, "length")
    return {"length": len(completion), "bonus": bonus}

def little(completion):
    return len(completion)

def anything(**given):
    del given["row"], given["messages"]
    return {name: len(value) if isinstance(value, str) else value for name, value in given.items()}

def group(*, completions, finish_reasons):
    return [len(text) for text in completions]

def turns(*, messages):
    return len(messages)

def all_turns(*, conversations):
    return [len(messages) for messages in conversations]

def needy(*, completion, judge):
    return 0.0

def by_position(completion, /):
    return 0.0

class Judge:
    def __call__(self, *, completion):
        return 2.0

judge = Judge()
number = 3
"""


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import json\n\n1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import no_such_thing\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("my_rewards", "broken_rewards", "needs_more", "leaves", "pack"):
            del sys.modules[name]


def scored(runner: asyncio.Runner, function: str, per: str = "trajectory", **options: Any) -> Any:
    task = RewardTask("p", {"answer": "1"}, ["ab", "abc"], ["length", "length"])
    return resolve(RewardSetup(function, per, options, 1 << 30), runner)(task)


def test_a_function_is_given_what_it_accepts(runner):
    for function, per in (("little", "trajectory"), ("awaited", "trajectory"), ("group", "group")):
        assert scored(runner, f"my_rewards:{function}", per) == [(2.0, {}), (3.0, {})]
    assert scored(runner, "my_rewards:judge") == [(2.0, {}), (2.0, {})]
    assert scored(runner, "pack.inner:little") == [(2.0, {}), (3.0, {})]
    assert scored(runner, "my_rewards:everything", bonus=1) == [
        (3.0, {"length": 2.0, "bonus": 1.0}),
        (4.0, {"length": 3.0, "bonus": 1.0}),
    ]
    _, components = scored(runner, "my_rewards:anything", extra=7)[0]
    assert components == {"prompt": 1, "completion": 2, "finish_reason": 6, "extra": 7}


def test_a_function_sees_the_conversations_of_episodes(runner):
    assert scored(runner, "my_rewards:turns") == [(0.0, {}), (0.0, {})]
    assert scored(runner, "my_rewards:all_turns", per="group") == [(0.0, {}), (0.0, {})]
    said = {"role": "assistant", "content": "ab"}
    task = RewardTask("p", {}, ["ab", "abc"], ["stop", "turns"], [[said], [said, said]])
    for function, per in (("turns", "trajectory"), ("all_turns", "group")):
        assert resolve(RewardSetup(f"my_rewards:{function}", per, {}, 1 << 30), runner)(task) == [(1.0, {}), (2.0, {})]


def test_a_built_in_function_is_made_with_its_options(runner):
    assert scored(runner, "regex", pattern="b", answer_key="answer") == [(0.0, {}), (0.0, {})]


@pytest.mark.parametrize(
    ("function", "per", "options", "problems"),
    [
        ("exakt", "trajectory", {}, [("reward.function: ", "did you mean exact?")]),
        ("exact", "group", {}, [("reward.per: ", "exact scores single trajectories")]),
        ("exact", "trajectory", {"answr_key": "a"}, [("reward.options.answr_key: ", "mean answer_key?")]),
        ("exact", "trajectory", {"normalize": "upper"}, [("reward.options: ", "normalize must be one of")]),
        ("exact", "trajectory", {"normalize": []}, [("reward.options: ", "")]),
        ("regex", "trajectory", {}, [("reward.options.pattern: ", "is required by regex")]),
        ("my_reward:little", "trajectory", {}, [("reward.function: ", "'my_reward'; did you mean my_rewards")]),
        ("pack.iner:little", "trajectory", {}, [("reward.function: ", "did you mean pack.inner?")]),
        ("no.such:f", "trajectory", {}, [("reward.function: ", "there is no module 'no'")]),
        ("my_rewards:litle", "trajectory", {}, [("reward.function: ", "has no 'litle'; did you mean little?")]),
        ("my_rewards:number", "trajectory", {}, [("reward.function: ", "number of my_rewards is int")]),
        ("my_rewards.py:little", "trajectory", {}, [("reward.function: ", "there is no module 'my_rewards.py'")]),
        ("my-rewards:little", "trajectory", {}, [("reward.function: ", "MODULE:FUNCTION")]),
        ("my_rewards:", "trajectory", {}, [("reward.function: ", "MODULE:FUNCTION")]),
        ("broken_rewards:f", "trajectory", {}, [("reward.function: ", "ZeroDivisionError")]),
        ("broken_rewards:f", "trajectory", {}, [("reward.function: ", "broken_rewards.py:3")]),
        ("needs_more:f", "trajectory", {}, [("reward.function: ", "No module named 'no_such_thing'")]),
        ("leaves:f", "trajectory", {}, [("reward.function: ", "SystemExit: 3")]),
        ("my_rewards:needy", "trajectory", {}, [("reward.options.judge: ", "is required by my_rewards:needy")]),
        ("my_rewards:by_position", "trajectory", {}, [("reward.function: ", "by position only")]),
        ("my_rewards:group", "trajectory", {}, [("reward.options.completions", ""), ("reward.opt", "")]),
        ("my_rewards:little", "group", {}, [("reward.options.completion: ", "completions, row")]),
        ("my_rewards:everything", "trajectory", {"bonsu": 1}, [("reward.options.bonsu: ", "mean bonus?")]),
        ("my_rewards:everything", "trajectory", {"row": 1}, [("reward.options.row: ", "with each call")]),
    ],
)
def test_what_cannot_be_called_is_found_before_the_first_call(runner, function, per, options, problems):
    with pytest.raises(NotCallable) as caught:
        scored(runner, function, per, **options)
    assert len(caught.value.problems) == len(problems)
    for line, (begins, holds) in zip(caught.value.problems, problems, strict=True):
        assert line.startswith(begins)
        assert holds in line
