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
from session_cases import World
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
"""Importing verifiers takes seconds of a core, and the machine may be busy."""
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="ASYNCRL_VERIFIERS_PYTHON names no interpreter with verifiers")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the user launches. A program that asks for more than loopback fails."""
    home, where = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    where.mkdir()
    for name, code in PROGRAMS.items():
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


def test_the_documented_program_is_short():
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
    def say(prompt):
        number = int(re.search(r"What is (\d+) \+ \1\?", prompt)[1])
        return {7: "14", 8: "15", 9: "I think that it must be 18"}[number]

    async def main():
        episode = {"function": None, "command": [PYTHON, "play_taskset.py", "sums"], **TIMEOUTS}
        world = World(folder.parent, say=say, episode=episode, rollout={"max_tokens": 128})
        async with whole(world, folder.parent):
            played = [play(world, "unused", at, row={"index": index}) for at, index in enumerate((7, 8, 9))]
            return world, await asyncio.gather(*played)

    world, played = asyncio.run(main())
    assert [each.reward for each in played] == pytest.approx([1.1, 0.1, 1.0])
    assert [list(each.components.values()) for each in played] == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert [(each.finish_reason, each.turns, each.forks) for each in played] == [("stop", 1, {})] * 3
    for trajectory, said in zip(played, ("14", "15", "I think that it must be 18"), strict=True):
        [sequence] = trajectory.sequences
        assert [(span.version, span.role) for span in sequence.spans] == [(0, "sampled")]
        assert len(sequence.tokens) == len(sequence.logprobs)
        assert world.tokenizer.decode(sequence.tokens.tolist()) == said
    assert len(world.submitted) == 3
