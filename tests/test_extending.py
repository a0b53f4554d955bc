"""The recipes of docs/extending.md: each one's code has its place, works as its script shows, and touches few files.

A recipe names places by definitions, so that it survives moved lines.
"""

import ast
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
    "An argument of reward functions": 1,
    "An engine": 2,
    "An actor": 3,
    "A message": 2,
    "A metric": 2,
    "A configuration key": 1,
}
PIECE = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|"
    r"In `(?P<file>[^`]+)`(?:, in `(?P<scope>[^`]+)`)?(?:, (?P<where>before|after) `(?P<anchor>[^`]+)`)?):\n\n"
    r"```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
SCRIPT = re.compile(r"^Try it:\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
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
"""Runs each script as a program, and checks that it imported the tree with the recipes."""


def pieces(heading):
    return list(PIECE.finditer(SECTIONS[heading]))


def names(node):
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    return {getattr(node, "name", None)}


def find(body, name):
    (found,) = [node for node in body if name in names(node)] or [None]
    if found is None:
        (found, *_) = [node for node in body if ast.unparse(node).startswith(name)]
    return found


def insert(source, piece):
    """``source`` with the code of the piece at its place."""
    lines = source.splitlines()
    code = piece["code"].rstrip().splitlines()
    imports = []
    while code and re.match(r"(from|import) ", code[0]):
        imports.append(code.pop(0))
    scope = ast.parse(source)
    depth = 0
    for name in (piece["scope"] or "").split("."):
        if name:
            scope, depth = find(scope.body, name), depth + 1
    code = ["    " * depth + line if line else line for line in code]
    if piece["anchor"] is None:  # the end of a table
        at, gap = scope.end_lineno - 1, 0
    else:
        node = find(scope.body, piece["anchor"])
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        at = first - 1 if piece["where"] == "before" else node.end_lineno
        gap = 2 - depth if isinstance(scope, ast.Module | ast.ClassDef) else 0
    blank = [""] * gap
    lines[at:at] = [*code, *blank] if piece["where"] == "before" else [*blank, *code]
    if imports:
        last = max(node.end_lineno for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom))
        lines[last:last] = imports
    return "\n".join(lines) + "\n"


def test_the_page_has_every_recipe():
    assert list(SECTIONS) == list(MOST_FILES)


@pytest.mark.parametrize("heading", MOST_FILES)
def test_a_recipe_touches_few_files(heading):
    files = {piece["new"] or piece["file"] for piece in pieces(heading)}
    assert all(file.startswith("asyncrl/") for file in files)
    assert 1 <= len(files) <= MOST_FILES[heading]
    blocks = re.findall(r"^```python", SECTIONS[heading], re.MULTILINE)
    assert len(blocks) == len(pieces(heading)) + len(SCRIPT.findall(SECTIONS[heading])), "a block has no place"


def test_all_recipes_apply_together_and_their_scripts_run(tmp_path):
    shutil.copytree(ROOT / "asyncrl", tmp_path / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    for heading in MOST_FILES:
        for piece in pieces(heading):
            path = tmp_path / (piece["new"] or piece["file"])
            assert path.exists() == (piece["new"] is None), path
            path.write_text(piece["code"] if piece["new"] else insert(path.read_text(), piece))
    scripts = [tmp_path / f"{heading}.py" for heading in MOST_FILES]
    for heading, script in zip(MOST_FILES, scripts, strict=True):
        (text,) = SCRIPT.findall(SECTIONS[heading])
        script.write_text(text)
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", RUN, str(tmp_path), *map(str, scripts)]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
