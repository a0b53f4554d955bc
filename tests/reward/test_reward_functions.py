"""Reward functions: the built-in ones, how a user's is found and what it is given, and shaping."""

import asyncio
import re
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.training import OverlongPenalty, RewardConfig
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.reward.functions import (
    constant,
    exact,
    math_verify,
    overlong_penalty,
    reasoning_gym,
    regex,
    shaped,
)
from asyncrl.reward.reward_worker import RewardSetup, resolve
from asyncrl.workers.user_code import NotCallable

NUMBER = {"normalize": "number"}
GSM8K = {"pattern": r"####\s*(-?[\d.,]+)"}


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, " 42\n", "42", 1),
        ({}, "42", 42, 1),
        ({}, "Forty two", "forty two", 0),
        ({}, "b", ["a", "b"], 1),
        ({"normalize": "none"}, " 42", "42", 0),
        ({"normalize": "text"}, "  Forty\n two ", "forty two", 1),
        (NUMBER, "$1,234.50.", "1234.5", 1),
        (NUMBER, "-0.0", "0", 1),
        (NUMBER, "1e3", "1000", 1),
        (NUMBER, "1e999999999999", "1000", 0),
        (NUMBER, "12", "1,2", 0),
        (NUMBER, "nan", "NaN", 1),
        (NUMBER, "9" * 5000, "9", 0),
        ({"answer_key": "solution"}, "42", "42", 1),
        (GSM8K, "so #### 7\nno, #### 8", "8", 1),
        (GSM8K, "so #### 7\nno, #### 8", "7", 0),
        (GSM8K | {"match": "first"}, "so #### 7\nno, #### 8", "7", 1),
        (GSM8K, "no answer", "7", 0),
        (GSM8K | NUMBER, "#### 1,000.", "1000", 1),
        (GSM8K | {"answer_pattern": GSM8K["pattern"]}, "#### 5", "2 + 3 is #### 5", 1),
        ({"pattern": r"\d+"}, "is 12", "12", 1),
        ({"pattern": r"(a|b)(?P<answer>\d)"}, "b3", "3", 1),
        ({"pattern": r"<a>(.*?)</a>"}, "<a>1\n2</a>", "1\n2", 1),
        ({"pattern": r"x(\d)?"}, "x", "1", 0),
    ],
)
def test_exact_and_regex(options, completion, answer, expected):
    function = (regex if "pattern" in options else exact)(**options)
    assert function(completion=completion, row={options.get("answer_key", "answer"): answer}) == expected


def test_an_answer_inside_an_object_is_named_with_dots():
    row = {"reward_model": {"style": "rule", "ground_truth": "42"}, "a.b": "7", "a": {"b": "8"}}
    assert exact(answer_key="reward_model.ground_truth")(completion="42", row=row) == 1
    assert exact(answer_key="a.b")(completion="7", row=row) == 1
    there = r"no column 'reward_model.x' .* it has \['a.b', 'a.b', 'reward_model.ground_truth', 'reward_model.style'\]"
    with pytest.raises(ValueError, match=there):
        exact(answer_key="reward_model.x")(completion="42", row=row)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is $\\frac{2}{4}$.", "\\frac{1}{2}", 1),
        ("\\boxed{x(x+1)}", "x^2+x", 1),
        ("so it is 1,234", "1234", 1),
        ("\\boxed{3}", "$4$", 0),
        ("", "4", 0),
        ("\\boxed{" * 30, "4", 0),
        ("\\boxed{7}", ["6", "7"], 1),
    ],
)
def test_math_verify(completion, answer, expected):
    assert math_verify()(completion=completion, row={"answer": answer}) == expected


@pytest.mark.parametrize(
    ("make", "row", "named"),
    [
        (exact, {"question": "?"}, r"has \['question'\]"),
        (lambda: regex(pattern="a"), {"answer": None}, "no answer"),
        (math_verify, {"answer": []}, "no answer"),
        (math_verify, {"answer": "$$"}, r"row\['answer'\]"),
        (lambda: regex(pattern="a", answer_pattern="#(.)"), {"answer": "5"}, "answer_pattern"),
        (reasoning_gym, {"answer": "1"}, "task, options, item"),
    ],
)
def test_a_row_that_cannot_be_judged_is_an_error_and_not_a_zero(make, row, named):
    with pytest.raises(ValueError, match=named):
        make()(completion="a", row=row)


@pytest.mark.parametrize(("task", "options"), [("chain_sum", {"min_terms": 2}), ("rearc", {})])
def test_reasoning_gym_scores_as_the_library_does(task, options):
    from reasoning_gym import create_dataset

    dataset = create_dataset(task, size=3, seed=3, **options)
    reward = reasoning_gym()
    for index, item in enumerate(dataset):
        row = {"task": task, "options": options, "item": item, "index": index, "size": 3, "seed": 3}
        # As the row arrives: without its tuples.
        row = msgspec.msgpack.decode(msgspec.msgpack.encode(row))
        answer = item["answer"]
        assert reward(completion=f"<answer>0</answer> no <answer>{answer}</answer>", row=row) == 1
        assert reward(completion=f" {answer}\n", row=row) == 1
        wrong = f"{answer}1"
        assert reward(completion=wrong, row=row) == dataset.score_answer(wrong, item) < 1


def test_reasoning_gym_scores_the_item_that_the_row_holds():
    row = {"task": "chain_sum", "options": {}, "item": {"question": "2 + 2 =", "answer": "4", "metadata": {}}}
    # The item that is made again is another one here, and not the one that was asked.
    for more in ({}, {"index": 0, "size": 2, "seed": 1}):
        assert reasoning_gym()(completion="4", row={**row, **more}) == 1


def test_the_constant_reward_is_equal_for_equal_texts_and_varies_over_others():
    assert constant()(prompt="p", completion="c") == 1.0
    reward = constant(value=0.5, spread=0.5)
    rewards, again = ([reward(prompt="p", completion=str(number)) for number in range(200)] for _ in range(2))
    assert rewards == again
    assert 0 <= min(rewards) < 0.1 and 0.9 < max(rewards) <= 1


# --- a user's function ---

MODULE = """
async def awaited(*, completion, **_):
    return len(completion)

def everything(*, prompt, completion, row, finish_reason, bonus=0.0):
    assert (prompt, row, finish_reason) == ("p", {"answer": "1"}, "length")
    return {"length": len(completion), "bonus": bonus}

def little(completion):
    return len(completion)

def anything(**given):
    texts = {name: len(value) for name, value in given.items() if isinstance(value, str)}
    return texts | {name: value for name, value in given.items() if isinstance(value, int)}

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
        return len(completion)

judge = Judge()
number = 3
"""
FILES = {
    "my_rewards.py": MODULE,
    "broken_rewards.py": "import json\n\n1 / 0\n",
    "leaves.py": "raise SystemExit(3)\n",
    "lazy_rewards.py": "def __getattr__(name):\n    import package_that_is_not_there\n",
    "pack_without_file/inner.py": "",
    "pack/__init__.py": "",
    "pack/inner.py": MODULE,
}


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Scores two completions by a function that lies in the working folder."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    with asyncio.Runner() as runner:

        def score(function, per="trajectory", conversations=(), **options):
            said = zip(("ab", "abc"), conversations or ([], []), strict=True)
            completions = [Completion(text=a, finish_reason="length", tokens=1, messages=b) for a, b in said]
            task = Score(uid="0-1", prompt="p", row={"answer": "1"}, completions=completions)
            return resolve(RewardSetup(function, per, options, 1 << 30), runner)(task)

        yield score
    for name in set(sys.modules) - known:
        if f"{name.partition('.')[0]}.py" in FILES or name.startswith("pack"):
            del sys.modules[name]


def test_a_function_receives_the_arguments_that_it_declares(scored):
    for function in ("my_rewards:little", "my_rewards:awaited", "my_rewards:judge", "pack.inner:little"):
        assert scored(function) == [(2.0, {}), (3.0, {})]
    assert scored("my_rewards:group", "group") == [(2.0, {}), (3.0, {})]
    assert scored("my_rewards:everything", bonus=1) == [
        (3.0, {"length": 2.0, "bonus": 1.0}),
        (4.0, {"length": 3.0, "bonus": 1.0}),
    ]
    _, components = scored("my_rewards:anything", extra=7)[0]
    assert components.items() >= {"prompt": 1, "completion": 2, "finish_reason": 6, "extra": 7}.items()
    assert scored("regex", pattern="b", answer_key="answer") == [(0.0, {}), (0.0, {})]
    said = {"role": "assistant", "content": "ab"}
    for function, per in (("my_rewards:turns", "trajectory"), ("my_rewards:all_turns", "group")):
        assert scored(function, per) == [(0.0, {}), (0.0, {})]
        assert scored(function, per, [[said], [said, said]]) == [(1.0, {}), (2.0, {})]


@pytest.mark.parametrize(
    ("function", "per", "options", "problem"),
    [
        ("exakt", "trajectory", {}, "function: .* did you mean exact?"),
        ("exact", "group", {}, "per: exact scores single trajectories"),
        ("exact", "trajectory", {"answr_key": "a"}, "options.answr_key: .* mean answer_key?"),
        ("exact", "trajectory", {"normalize": "upper"}, "options: normalize must be one of none, strip, text, number"),
        ("regex", "trajectory", {}, "options.pattern: is required by regex"),
        ("regex", "trajectory", {"pattern": "("}, "options: .*not a regular expression"),
        ("regex", "trajectory", {"pattern": "a", "answer_pattern": "["}, "options: answer_pattern"),
        ("regex", "trajectory", {"pattern": "a", "match": "all"}, "options: .*first"),
        ("constant", "trajectory", {"duration_s": -1}, "options: duration_s"),
        ("my_reward:little", "trajectory", {}, "function: .*'my_reward'; did you mean my_rewards"),
        ("pack.iner:little", "trajectory", {}, "function: .*did you mean pack.inner?"),
        ("no.such:f", "trajectory", {}, "function: .*there is no module 'no'"),
        ("my_rewards:litle", "trajectory", {}, "function: .*has no 'litle'; did you mean little?"),
        ("my_rewards:number", "trajectory", {}, "function: .*number of my_rewards is int"),
        ("my_rewards:", "trajectory", {}, "function: .*MODULE:FUNCTION"),
        ("broken_rewards:f", "trajectory", {}, "function: .*ZeroDivisionError.*broken_rewards.py:3"),
        ("leaves:f", "trajectory", {}, "function: .*SystemExit: 3"),
        ("lazy_rewards:f", "trajectory", {}, "function: .*ModuleNotFoundError: .*lazy_rewards.py:2"),
        ("builtins:prnt", "trajectory", {}, "function: module builtins has no 'prnt'; did you mean print"),
        ("pack_without_file:f", "trajectory", {}, "function: module pack_without_file has no 'f'"),
        ("my_rewards:needy", "trajectory", {}, "options.judge: is required by my_rewards:needy"),
        ("my_rewards:by_position", "trajectory", {}, "function: .*by position only"),
        ("my_rewards:group", "trajectory", {}, "options.completions\noptions.finish_reasons"),
        ("my_rewards:little", "group", {}, "options.completion: .*completions, row"),
        ("my_rewards:everything", "trajectory", {"bonsu": 1}, "options.bonsu: .*mean bonus?"),
        ("my_rewards:everything", "trajectory", {"row": 1}, "options.row: .*with each call"),
    ],
)
def test_a_function_that_cannot_be_called_is_found_before_the_first_call(scored, function, per, options, problem):
    with pytest.raises(NotCallable) as caught:
        scored(function, per, **options)
    lines = caught.value.problems
    assert len(lines) == 1 + problem.count("\n")
    for line, match in zip(lines, problem.split("\n"), strict=True):
        assert re.match(f"reward.{match}", line)


# --- shaping ---


@given(tokens=st.integers(0, 300), margin=st.integers(1, 99), scale=st.floats(0, 10))
def test_the_penalty_is_dapo_equation_13(tokens, margin, scale):
    penalty = overlong_penalty(tokens, 100, OverlongPenalty(margin_tokens=margin, scale=scale))
    if tokens <= 100 - margin:
        assert penalty == 0
    else:
        assert penalty == pytest.approx(scale * max((100 - margin - tokens) / margin, -1.0))


def test_only_the_penalty_changes_a_reward_and_only_in_training():
    completions = [Completion(text="abc", finish_reason="length", tokens=90)]
    made = Scores(rewards=[3.0], components=[{}], run_s=0.0)
    for truncated, uid, reward, parts in (
        ("penalty", "0-1", 2.0, {"overlong_penalty": -1.0}),
        ("penalty", "gsm@0-1", 3.0, {}),
        ("mask", "0-1", 3.0, {}),
    ):
        config = RewardConfig(function="exact", truncated=truncated, overlong={"margin_tokens": 20, "scale": 2.0})
        found = shaped(made, Score(uid=uid, prompt="p", row={}, completions=completions), config.penalty, 100)
        assert (found.rewards, found.components) == ([reward], [parts])
