"""The agent that plays for time: by itself, and a whole run of it on the simulated engine."""

import asyncio
import random
from statistics import median

import pytest
from inprocess import System
from run_files import groups
from run_settings import sim_config
from virtual import run_virtual

from asyncrl.core.errors import EpisodeOver
from asyncrl.episodes.playing.client import Reply, Task
from asyncrl.episodes.rehearsal import lognormal, play, text


def played(sample=0, attempt=0, most=1000, **options):
    """Its reward, the conversation that was asked for last, and its seconds; it is over after ``most`` answers."""
    asked = []

    class Client:
        async def chat(self, messages):
            if len(asked) >= most:
                raise EpisodeOver("enough")
            asked.append([dict(message) for message in messages])
            return Reply("so", None, [], "stop", 1, 1)

    async def main():
        begins = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
        task = Task(prompt="<p>", messages=begins, row={}, seed=7, uid="0-1", sample=sample, attempt=attempt)
        reward = await play(task, Client(), **options)
        return reward, asked[-1], asyncio.get_running_loop().time()

    return run_virtual(main())


def test_equal_tasks_are_played_alike_and_siblings_differ():
    assert played() == played(attempt=1)
    siblings = [played(sample) for sample in range(16)]
    assert len({seconds for *_, seconds in siblings}) == 16
    assert {reward for reward, *_ in siblings} == {0.0, 1.0}


def test_turns_observations_and_tools_follow_the_options():
    options = {"turns": 5, "turns_sigma": 0, "tool_s": 2, "tool_sigma": 0, "observation": 30, "observation_sigma": 0}
    reward, asked, seconds = played(**options)
    assert [message["role"] for message in asked] == ["system", "user", *["assistant", "user"] * 4]
    assert asked[1]["content"] == "p"
    assert [len(message["content"]) for message in asked[3::2]] == [30] * 4
    assert seconds == pytest.approx(4 * 2)
    over, asked, _ = played(most=3, **options)
    assert (over, len(asked)) == (reward, 6), "one that is over has its reward"
    chance = random.Random(1)
    assert median(lognormal(chance, 3.0, 1.0) for _ in range(4000)) == pytest.approx(3.0, rel=0.1)
    assert [len(text(chance, size)) for size in (0.0, 1, 7.4, 500)] == [1, 1, 7, 500]


def test_attempts_fail_by_themselves():
    def fails(attempt):
        try:
            played(attempt=attempt, failure=0.5)
        except RuntimeError:
            return True
        return False

    assert {fails(attempt) for attempt in range(16)} == {True, False}
    with pytest.raises(RuntimeError, match="the tool of turn"):
        played(failure=1.0)


def test_a_run_rehearses_agents_without_a_model(tmp_path):
    options = {"turns": 3.0, "tool_s": 0.02, "observation": 40.0, "failure": 0.1, "http": True}
    config = sim_config(
        run={"samples_per_step": 100},
        data={"template": "chat"},
        episode={"function": "asyncrl.episodes.rehearsal:play", "options": options, "workers": 1},
        rollout={"replicas": 1, "max_tokens": 24, "retry_backoff_s": 0.01, "max_attempts": 8},
        learner={"steps": 2},
    )
    system = System(config, tmp_path / "run")
    assert asyncio.run(system.run()).phase == "done"
    trajectories = [each for group in groups(tmp_path / "run") for each in group["trajectories"]]
    assert {each["reward"] for each in trajectories} == {0.0, 1.0}
    assert max(len(each["messages"]) for each in trajectories) >= 5
    # The template only ever extends: each conversation is one sequence.
    assert {len(each["sequences"]) for each in trajectories} == {1}
