"""The taskset of verifiers in docs/episodes.md, played as it stands by its program in an environment of its own.

verifiers itself asks and scores; the endpoint, the conversation and the credit are those of a run, and the engine
speaks by a script. Nothing but loopback is reached.
"""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from session_cases import World, call_of
from whole import play, whole

from asyncrl.cli import doctor

PYTHON = os.environ.get("ASYNCRL_VERIFIERS_PYTHON", "")
PAGE = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
SECTION = PAGE.partition("### A verifiers taskset\n")[2].partition("\n## ")[0]
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", SECTION, re.DOTALL))
COMMANDS, CONFIG = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("sh", "toml"))
DOCUMENTED = "/venvs/verifiers/bin/python"
SIMULATED = ["--rollout.engine", "sim", "--learner.backend", "sim", "--episode.start_timeout_s", "300"]
TIMEOUTS = {"start_timeout_s": 300.0, "turn_timeout_s": 300.0}
"""Importing verifiers takes seconds of a core, of which others may have most."""
SHELF = '''
import verifiers.v1 as vf

__all__ = ["Shelf"]


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    async def look_up(self, key: str) -> str:
        """The entry of a key."""
        return {"bolt": "17 mm"}.get(key, "none")


class LookUp(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace):
        return float("17 mm" in trace.last_reply)

    @vf.metric
    async def answers(self, trace):
        return float(trace.num_turns)


class Shelf(vf.Taskset[LookUp]):
    def load(self):
        return [LookUp(vf.TaskData(prompt="How long is a bolt?", system_prompt="Look it up."))]


if __name__ == "__main__":
    Tools.run()
'''

LOOKS_UP = call_of("shelf_look_up", key="bolt")

needs_verifiers = pytest.mark.skipif(not PYTHON, reason="ASYNCRL_VERIFIERS_PYTHON names no interpreter with verifiers")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the user launches. A program that asks for more than loopback fails."""
    home, where = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    where.mkdir()
    for name, code in (PROGRAMS | {"shelf.py": SHELF}).items():
        (where / name).write_text(code)
    monkeypatch.chdir(where)
    monkeypatch.setenv("HOME", str(home))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("PYTHONPATH", str(where))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield where
    # A rollout leaves nothing behind.
    assert [path for path in (home / ".cache" / "verifiers").rglob("*") if path.is_file()] == []


def episodes_of(taskset):
    return {"function": None, "command": [PYTHON, "play_taskset.py", taskset], **TIMEOUTS}


def rollouts(folder, say, taskset, rows):
    """The tokenizer, the prompts that the engine was given, and a trajectory for each row."""

    async def main():
        world = World(folder.parent, say=say, episode=episodes_of(taskset), rollout={"max_tokens": 128})
        async with whole(world, folder.parent):
            played = [play(world, "unused", at, row=row) for at, row in enumerate(rows)]
            return world, await asyncio.gather(*played)

    world, trajectories = asyncio.run(main())
    return world.tokenizer, trajectories


def spoken(tokenizer, trajectory):
    """The text of each sequence's sampled tokens, after which each of its spans and log-probs is of version 0."""
    found = []
    for sequence in trajectory.sequences:
        sampled = [span for span in sequence.spans if span.role == "sampled"]
        assert {span.version for span in sampled} == {0}
        tokens = [token for span in sampled for token in sequence.tokens[span.start : span.end].tolist()]
        assert len(tokens) == len(sequence.logprobs) > 0
        found.append(tokenizer.decode(tokens, keep_special=True))
    return found


def test_the_program_is_short():
    assert list(PROGRAMS) == ["sums.py", "play_taskset.py"]
    assert len(PROGRAMS["play_taskset.py"].splitlines()) < 30


@pytest.mark.slow
@needs_verifiers
def test_the_documented_taskset_trains(folder, capsys):
    """By the commands and the configuration of the page."""
    *_, rows = COMMANDS[0].strip().splitlines()
    subprocess.run(rows.replace(DOCUMENTED, PYTHON), shell=True, check=True, timeout=300)
    written = [json.loads(row) for row in Path("tasks.jsonl").read_text().splitlines()]
    assert written == [{"prompt": f"What is {n} + {n}?", "index": n} for n in range(1000)]
    Path("mine.toml").write_text(CONFIG[0].replace(DOCUMENTED, PYTHON))
    assert doctor.main(["mine.toml", "--agent", "--json", *SIMULATED]) == 0, capsys.readouterr()
    seen = json.loads(capsys.readouterr().out)
    assert (len(seen["turns"]), seen["forks"], len(seen["sequences"])) == (1, {}, 1)
    assert (seen["ignored"], seen["relaxed"], seen["refused"], seen["outcome"]) == ([], [], {}, "stop")
    assert seen["reward"] == pytest.approx(0.1)


@pytest.mark.slow
@needs_verifiers
def test_the_task_of_a_row_is_played_and_scored_by_verifiers(folder):
    prompts = []

    def say(prompt):
        prompts.append(prompt)
        number = int(re.search(r"What is (\d+) \+ \1\?", prompt)[1])
        return {7: "14", 8: "15", 9: "I think that it must be 18"}[number]

    tokenizer, played = rollouts(folder, say, "sums", [{"index": index} for index in (7, 8, 9)])
    assert [each.reward for each in played] == pytest.approx([1.1, 0.1, 1.0])
    assert [each.components for each in played] == [
        {"right": 1.0, "short": 1.0},
        {"right": 0.0, "short": 1.0},
        {"right": 1.0, "short": 0.0},
    ]
    ends = [spoken(tokenizer, each)[0] for each in played]
    assert [each.removesuffix("<|im_end|>") for each in ends] == ["14", "15", "I think that it must be 18"]
    assert [(each.finish_reason, each.turns, each.forks) for each in played] == [("stop", 1, {})] * 3
    assert len(prompts) == 3


@pytest.mark.slow
@needs_verifiers
def test_tools_of_a_task_are_turns_of_one_sequence(folder):
    def say(prompt):
        return "It is 17 mm." if "17 mm" in prompt else LOOKS_UP

    tokenizer, (played,) = rollouts(folder, say, "shelf", [{"index": 0}])
    assert (played.reward, played.components) == (1.0, {"right": 1.0, "answers": 2.0})
    assert (played.turns, len(played.sequences), played.forks) == (2, 1, {})
    (said,) = spoken(tokenizer, played)
    assert [each for each in said.split("<|im_end|>") if each] == [LOOKS_UP, "It is 17 mm."]
    assert [message["role"] for message in played.messages] == ["system", "user", "assistant", "tool", "assistant"]
