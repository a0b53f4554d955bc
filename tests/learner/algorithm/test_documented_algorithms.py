"""The functions of docs/algorithms.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.algorithm.user_functions import problems_of

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("module", ["my_loss", "my_advantage"])
def test_an_example_runs_unchanged(module, tmp_path, monkeypatch) -> None:
    (settings,) = [tomllib.loads(text)["learner"] for kind, text in BLOCKS if kind == "toml" and module in text]
    name = settings[module.removeprefix("my_")].partition(":")[2]
    (code,) = [text for kind, text in BLOCKS if kind == "python" and f"def {name}(" in text]
    assert len(code.splitlines()) < 25
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert problems_of(LearnerConfig(**settings), 4) == []
