"""The adapters against the packages themselves, without a host; each is skipped where its package is not installed."""

import importlib.util
import re

import pytest

from asyncrl.episodes import Task
from asyncrl.episodes.playing.players import resolve
from asyncrl.workers.user_code import NotCallable

pytestmark = pytest.mark.filterwarnings("ignore")


def task(**changes):
    plain = {"prompt": "<user>Play.", "messages": [{"role": "user", "content": "Play."}], "row": {}, "seed": 3}
    return Task(**plain | {"uid": "0-1", "sample": 0, "attempt": 0} | changes)


def assistant(text):
    return {"role": "assistant", "content": text}


def test_textarena_games_keep_their_seed_when_several_run():
    pytest.importorskip("textarena")
    from asyncrl.episodes.adapters.textarena import TextArena

    def played(beside):
        """The steps of a game in which one after the other is guessed, and another game begins in between."""
        game, other = TextArena("GuessTheNumber-v0"), TextArena("GuessTheNumber-v0")
        assert "Guess The Number" in game.reset(task())
        steps = [game.step(assistant("[1]")), game.step(assistant("no number"))]
        other.reset(task(seed=beside))
        numbers = iter(range(2, 21))
        while not steps[-1][2]:
            steps.append(game.step(assistant(f"I say [{next(numbers)}]")))
        return steps

    steps = played(beside=99)
    assert steps[0][0].startswith("The target number is higher") and "invalid move" in steps[1][0]
    assert [step[1:] for step in steps[:2]] == [(None, False)] * 2
    assert (steps[-1][0], len(played(beside=5))) == ("", len(steps))
    winner = TextArena("GuessTheNumber-v0")
    winner.reset(task())
    assert winner.step(assistant(f"[{len(steps) - 1}]")) == ("", 1.0, True)


def test_gymnasium_shows_a_board_and_takes_the_action_that_is_named_last():
    pytest.importorskip("gymnasium")
    from asyncrl.episodes.adapters.gymnasium import Gymnasium

    lake = Gymnasium("FrozenLake-v1", actions=["left", "down", "right", "up"], is_slippery=False)
    (opening,) = lake.reset(task())
    first = opening["content"]
    assert opening["role"] == "user" and first.startswith("Play.\n") and "FHFH" in first
    assert first.endswith("Answer with one action of: left, down, right, up.")
    text, reward, done = lake.step(assistant("hm"))
    assert (reward, done) == (None, False) and "no action" in text
    path = ["Up, no: DOWN", "down", "right", "right", "down", "right"]
    steps = [lake.step(assistant(text)) for text in path]
    assert [step[1:] for step in steps] == [(0.0, False)] * 5 + [(1.0, True)]
    system, parts = {"role": "system", "content": "Be brief."}, [{"type": "text", "text": "Play."}]
    assert lake.reset(task(messages=[system, {"role": "user", "content": parts}])) == [
        system,
        {"role": "user", "content": [*parts, {"type": "text", "text": first.removeprefix("Play.\n")}]},
    ]
    lake.close()
    numbered = Gymnasium("Taxi-v4", prompt="Drive.")
    assert numbered.reset(task(seed=2**40)).endswith("Answer with one action of: 0, 1, 2, 3, 4, 5.")
    assert numbered.step(assistant("action 10 or 1"))[1] == -1.0
    with pytest.raises(ValueError, match="actions that are not discrete"):
        Gymnasium("Pendulum-v1")


def test_skyrl_gym_scores_by_the_row():
    pytest.importorskip("skyrl_gym")
    from asyncrl.episodes.adapters.skyrl_gym import SkyRLGym

    row = {"reward_spec": {"ground_truth": "4"}, "prompt": [{"role": "system", "content": "s"}]}
    for answer, reward in (("#### 4", 1.0), ("#### 5", 0.0)):
        env = SkyRLGym("gsm8k")
        assert env.reset(task(row=row)) == row["prompt"]
        assert env.step(assistant(answer)) == ([], reward, True)
        env.close()
    del row["prompt"]
    assert SkyRLGym("gsm8k").reset(task(row=row)) == task().messages


def test_reasoning_gym_asks_again_and_scores_the_last_try():
    pytest.importorskip("reasoning_gym")
    from reasoning_gym import create_dataset

    from asyncrl.episodes.adapters.reasoning_gym import ReasoningGym

    env, item = ReasoningGym(task="chain_sum", tries=2), create_dataset("chain_sum", size=1, seed=3)[0]
    assert env.reset(task()).startswith(item["question"])
    assert env.step(assistant("<answer>x</answer>")) == ("That is not right. You have 1 more tries.", None, False)
    assert env.step(assistant(f"<answer>{item['answer']}</answer>")) == ("", 1.0, True)
    row = {"task": "chain_sum", "index": 2, "size": 5, "seed": 1, "options": {"min_terms": 2}}
    env, item = ReasoningGym(), create_dataset("chain_sum", size=5, seed=1, min_terms=2)[2]
    assert env.reset(task(row=row)).startswith(item["question"])
    assert env.step(assistant("no idea"))[1:] == (pytest.approx(0.0, abs=0.02), True)
    # Columns of another source are not its own.
    env, item = ReasoningGym(task="chain_sum"), create_dataset("chain_sum", size=1, seed=3)[0]
    for row in ({"index": 3}, {"task": "translate", "size": "XL", "options": ["a", "b"]}):
        assert env.reset(task(row=row)).startswith(item["question"])
    with pytest.raises(ValueError, match="the row has no task"):
        ReasoningGym().reset(task())


@pytest.mark.parametrize("name", ["textarena:TextArena", "gymnasium:Gymnasium", "skyrl_gym:SkyRLGym"])
def test_an_adapter_without_its_package_names_the_package_to_install(name):
    module, spec = name.partition(":")[0], [f"asyncrl.episodes.adapters.{name}"]
    if importlib.util.find_spec(module) is not None:
        assert callable(resolve("env", spec, {"env_id": "x"}, lambda *_: None))
        return
    with pytest.raises(NotCallable, match=re.escape(f"pip install 'asyncrl[{module.replace('_', '-')}]'")):
        resolve("env", spec, {"env_id": "x"}, lambda *_: None)
