"""The adapters against the packages themselves, without a host; each is skipped where its package is not installed."""

import importlib.util
import re
from typing import Any

import pytest

from asyncrl.episodes import Task
from asyncrl.episodes.playing.players import resolve
from asyncrl.runtime.workers.user_code import NotCallable


def needs(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; pip install 'asyncrl[{extra}]'")


def task(**changes: Any) -> Task:
    return Task(
        **{"prompt": "Play.", "messages": [], "row": {}, "seed": 3, "uid": "0-1", "sample": 0, "attempt": 0, **changes}
    )


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def guess(game: Any, numbers: list[int]) -> list[Any]:
    steps = []
    for number in numbers:
        steps.append(game.step(said(f"I say [{number}]")))
        if steps[-1][2]:
            break
    return steps


@pytest.mark.filterwarnings("ignore")
def test_textarena_plays_a_game_whose_seed_holds_also_beside_others():
    needs("textarena", "textarena")
    from asyncrl.episodes.adapters.textarena import TextArena

    def play():
        return TextArena("GuessTheNumber-v0")

    one, other = play(), play()
    assert "Guess The Number" in one.reset(task())
    steps = [one.step(said("[1]")), one.step(said("no number"))]
    assert steps[0][0].startswith("The target number is higher")
    assert "invalid move" in steps[1][0]
    assert [step[1:] for step in steps] == [(None, False)] * 2
    other.reset(task(seed=99))
    last = guess(one, list(range(2, 21)))
    assert last[-1][0] == ""
    assert last[-1][2]
    found = {len(last)}
    for _ in range(2):
        again, beside = play(), play()
        again.reset(task())
        beside.reset(task(seed=5))
        again.step(said("[1]"))
        again.step(said("no number"))
        found.add(len(guess(again, list(range(2, 21)))))
    assert len(found) == 1
    winner = play()
    winner.reset(task())
    number = len(last) + 1
    assert winner.step(said(f"[{number}]")) == ("", 1.0, True)


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_shows_a_board_and_takes_the_action_that_is_named_last():
    needs("gymnasium", "gymnasium")
    from asyncrl.episodes.adapters.gymnasium import Gymnasium

    lake = Gymnasium("FrozenLake-v1", actions=["left", "down", "right", "up"], is_slippery=False)
    first = lake.reset(task())
    assert first.startswith("Play.\n")
    assert "FHFH" in first
    assert first.endswith("Answer with one action of: left, down, right, up.")
    text, reward, done = lake.step(said("hm"))
    assert (reward, done) == (None, False)
    assert "no action" in text
    path = ["Up, no: DOWN", "down", "right", "right", "down", "right"]
    steps = [lake.step(said(text)) for text in path]
    assert [step[1:] for step in steps] == [(0.0, False)] * 5 + [(1.0, True)]
    lake.close()
    numbered = Gymnasium("Taxi-v4", prompt="Drive.")
    assert numbered.reset(task(seed=2**40)).endswith("Answer with one action of: 0, 1, 2, 3, 4, 5.")
    assert numbered.step(said("action 10 or 1"))[1] == -1.0
    with pytest.raises(ValueError, match="actions that are no numbers"):
        Gymnasium("Pendulum-v1")


def test_skyrl_gym_scores_by_the_row():
    needs("skyrl_gym", "skyrl-gym")
    from asyncrl.episodes.adapters.skyrl_gym import SkyRLGym

    row = {"reward_spec": {"ground_truth": "4"}, "prompt": [{"role": "system", "content": "s"}]}
    for answer, reward in (("#### 4", 1.0), ("#### 5", 0.0)):
        env = SkyRLGym("gsm8k")
        assert env.reset(task(row=row)) == row["prompt"]
        assert env.step(said(answer)) == ([], reward, True)
        env.close()
    assert SkyRLGym("gsm8k").reset(task(row={"reward_spec": {"ground_truth": "4"}})) == [
        {"role": "user", "content": "Play."}
    ]


def test_reasoning_gym_asks_again_and_scores_the_last_try():
    needs("reasoning_gym", "reasoning-gym")
    from reasoning_gym import create_dataset

    from asyncrl.episodes.adapters.reasoning_gym import ReasoningGym

    env = ReasoningGym(task="chain_sum", tries=2)
    question = env.reset(task())
    assert env._item == create_dataset("chain_sum", size=1, seed=3)[0]
    assert question.startswith(env._item["question"])
    assert env.step(said("<answer>x</answer>")) == ("That is not right. You have 1 more tries.", None, False)
    assert env.step(said(f"<answer>{env._item['answer']}</answer>")) == ("", 1.0, True)
    row = {"task": "chain_sum", "index": 2, "size": 5, "seed": 1, "options": {"min_terms": 2}}
    env = ReasoningGym()
    env.reset(task(row=row))
    assert env._item == create_dataset("chain_sum", size=5, seed=1, min_terms=2)[2]
    assert env.step(said("no idea"))[1:] == (pytest.approx(0.0, abs=0.02), True)
    with pytest.raises(ValueError, match="the row has no task"):
        ReasoningGym().reset(task())


@pytest.mark.parametrize(
    ("spec", "module", "extra"),
    [
        ("textarena:TextArena", "textarena", "textarena"),
        ("gymnasium:Gymnasium", "gymnasium", "gymnasium"),
        ("skyrl_gym:SkyRLGym", "skyrl_gym", "skyrl-gym"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_without_its_package_says_what_to_install(spec, module, extra):
    adapter = f"asyncrl.episodes.adapters.{spec}"
    if importlib.util.find_spec(module) is not None:
        assert callable(resolve("env", [adapter], {"env_id": "x"}, lambda *_: None))
        return
    with pytest.raises(NotCallable, match=re.escape(f"pip install 'asyncrl[{extra}]'")):
        resolve("env", [adapter], {"env_id": "x"}, lambda *_: None)
