"""The changes of docs/extending.md: each patch applies, works as its script shows, and touches few files of asyncrl."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
MOST_FILES = {
    "A loss or an advantage": 1,
    "An argument of reward functions": 2,
    "An engine": 2,
    "An actor": 3,
    "A message": 2,
    "A metric": 2,
}
RUN = """
import runpy
import sys
from pathlib import Path

import asyncrl

for script in sys.argv[2:]:
    runpy.run_path(script, run_name="__main__")
there = [module for module in sys.modules.values() if (getattr(module, "__name__", "") + ".").startswith("asyncrl.")]
assert all(Path(module.__file__).is_relative_to(sys.argv[1]) for module in [asyncrl, *there])
"""
"""Runs each script as a program, and sees that it was with the tree that was patched."""


def block(heading, kind):
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```", SECTIONS[heading], re.DOTALL | re.MULTILINE)
    return text


def touched(patch):
    return set(re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE))


def test_each_change_is_on_the_page_and_says_what_it_is_for():
    assert list(SECTIONS) == list(MOST_FILES)
    assert all(text.startswith("\nFor ") for text in SECTIONS.values())


@pytest.mark.parametrize("heading", MOST_FILES)
def test_a_change_touches_few_files(heading):
    files = touched(block(heading, "diff"))
    assert all(file.startswith("asyncrl/") for file in files)
    assert 1 <= len(files) <= MOST_FILES[heading]


def test_each_change_applies_alone_and_works_beside_the_others(tmp_path):
    """Beside them, for they are loaded once then."""
    shutil.copytree(ROOT / "asyncrl", tmp_path / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    patches = [block(heading, "diff") for heading in MOST_FILES]
    for flag in ("--check", "--apply"):
        for patch in patches:
            apply = ["git", "apply", flag, "-"]
            subprocess.run(apply, input=patch, text=True, cwd=tmp_path, env=alone, check=True, timeout=60)
    changed = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "asyncrl").rglob("*.py")
        if not (old := ROOT / path.relative_to(tmp_path)).exists() or old.read_bytes() != path.read_bytes()
    }
    assert changed == set().union(*map(touched, patches))
    scripts = [tmp_path / f"{heading}.py" for heading in MOST_FILES]
    for heading, script in zip(MOST_FILES, scripts, strict=True):
        script.write_text(block(heading, "python"))
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", RUN, str(tmp_path), *map(str, scripts)]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
