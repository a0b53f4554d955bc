"""The agent that plays for time: by itself, and a whole run of it on the simulated engine."""

import asyncio
import random
from statistics import median

import pytest
from inprocess import System, sim_config
from run_files import groups
from virtual import run_virtual

from asyncrl.episodes.playing.client import Reply
from asyncrl.episodes.playing.task import Task
from asyncrl.episodes.rehearsal import lognormal, play, text
from asyncrl.errors import EpisodeOver


class Client:
    """Answers at once; over after ``most`` answers."""

    def __init__(self, most=1000):
        self.asked, self.most = [], most

    async def chat(self, messages):
        if len(self.asked) >= self.most:
            raise EpisodeOver("enough")
        self.asked.append([dict(message) for message in messages])
        return Reply("so", None, [], "stop", 1, 1)


def task(seed=7, sample=0, attempt=0):
    return Task(prompt="p", messages=[], row={}, seed=seed, uid="0-1", sample=sample, attempt=attempt)


def played(given=None, most=1000, **options):
    """Its reward, the conversation that was asked for last, and its seconds."""
    client = Client(most)

    async def main():
        began = asyncio.get_running_loop().time()
        reward = await play(given or task(), client, **options)
        return reward, asyncio.get_running_loop().time() - began

    reward, seconds = run_virtual(main())
    return reward, client.asked[-1], seconds


def test_the_same_task_is_played_alike_and_siblings_are_not():
    assert played() == played() == played(task(attempt=1))
    assert len({played(task(sample=sample))[1:][1] for sample in range(8)}) == 8
    assert {played(task(sample=sample))[0] for sample in range(16)} == {0.0, 1.0}


def test_turns_observations_and_tools_are_what_the_options_say():
    _, asked, seconds = played(turns=5, turns_sigma=0, tool_s=2, tool_sigma=0, observation=30, observation_sigma=0)
    assert [message["role"] for message in asked] == ["user", *["assistant", "user"] * 4]
    assert [len(message["content"]) for message in asked[2::2]] == [30] * 4
    assert seconds == pytest.approx(4 * 2)


def test_the_median_of_many_is_the_one_that_was_asked_for():
    chance = random.Random(1)
    assert median(lognormal(chance, 3.0, 1.0) for _ in range(4000)) == pytest.approx(3.0, rel=0.1)
    assert [len(text(chance, size)) for size in (0.0, 1, 7.4, 500)] == [1, 1, 7, 500]


def test_attempts_fail_by_themselves():
    def fails(attempt):
        try:
            played(task(attempt=attempt), failure=0.5)
        except RuntimeError:
            return True
        return False

    assert {fails(attempt) for attempt in range(16)} == {True, False}
    with pytest.raises(RuntimeError, match="the tool of turn"):
        played(failure=1.0)


def test_an_episode_that_is_over_has_its_reward():
    reward, asked, _ = played(turns=9, turns_sigma=0, most=3)
    assert reward == played(turns=9, turns_sigma=0)[0]
    assert len(asked) == 5


def test_a_run_rehearses_agents_without_a_model(tmp_path):
    options = {"turns": 3.0, "tool_s": 0.02, "observation": 40.0, "failure": 0.1, "http": True}
    config = sim_config(
        run={"samples_per_step": 100},
        data={"template": "chat"},
        episode={"function": "asyncrl.episodes.rehearsal:play", "options": options, "workers": 1},
        rollout={"replicas": 1, "max_tokens": 24, "retry_backoff_s": 0.01, "max_attempts": 8},
        learner={"steps": 3},
    )
    system = System(config, tmp_path / "run")
    assert asyncio.run(system.run()).phase == "done"
    played_groups = groups(tmp_path / "run")
    assert len(played_groups) == 12
    trajectories = [each for group in played_groups for each in group["trajectories"]]
    assert {each["reward"] for each in trajectories} == {0.0, 1.0}
    assert max(len(each["messages"]) for each in trajectories) >= 5
    for each in trajectories:
        # The template only ever extends: each conversation is one sequence.
        assert len(each["sequences"]) == 1
