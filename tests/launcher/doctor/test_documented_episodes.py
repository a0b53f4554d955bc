"""The examples of docs/episodes.md, played as they stand: those that need nothing but asyncrl and the OpenAI client."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from asyncrl.cli import doctor

PAGE = (Path(__file__).parents[3] / "docs" / "episodes.md").read_text()
EXAMPLES = re.findall(r"```python\n# (\w+\.py)\n((?:(?!```).)*)```\n\n```toml\n(.*?)```", PAGE, re.DOTALL)
SIMULATED = ["--data.source", "synthetic", "--rollout.engine", "sim", "--learner.backend", "sim"]
TURNS = {"guess.py": 8, "game.py": 3, "library.py": 2, "agent.py": 2}


def test_the_docs_have_one_episode_of_each_kind():
    assert [name for name, _, _ in EXAMPLES] == list(TURNS)


@pytest.mark.parametrize(("name", "code", "config"), EXAMPLES, ids=list(TURNS))
def test_an_example_plays_and_never_forks(name, code, config, tmp_path, monkeypatch, capsys):
    assert len(code.splitlines()) < 30
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # The example's python has openai.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    Path(name).write_text(code)
    Path("mine.toml").write_text(config)
    assert doctor.main(["mine.toml", "--agent", "--json", *SIMULATED]) == 0, capsys.readouterr()
    seen = json.loads(capsys.readouterr().out)
    assert (len(seen["turns"]), seen["forks"], len(seen["sequences"])) == (TURNS[name], {}, 1)
    assert (seen["reward"] is None) == (name == "library.py")
