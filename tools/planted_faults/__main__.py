"""Measure the power of the tests: plant known faults in a copy of the tree, one at a time, and see which test fails.

    python -m tools.planted_faults
    python -m tools.planted_faults --only gate-counts-from-newest-version seal-without-incarnation
    python -m tools.planted_faults --tests tests/dataloader

For each fault the tool runs the test of the module's name, then the tests that import the module, then the tests that
import an importer of it. A test catches a fault if it fails with the fault and passes without it. The tool prints a
line for each fault. The exit code is 1 if a fault is not caught.

Fails before any test if a fault of the table (faults.py) does not fit the code. Its text must occur once, and the
changed file must compile.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import kept
from tools.code_figures import Module
from tools.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "shared")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")
WORKERS = ("-n", "2")
FAILED, INTERRUPTED, NO_TESTS = 1, 2, 5
"""Exit codes of pytest; a test file that cannot be imported interrupts it."""
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+(?:\[.*\])?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a fault. ``test`` caught it; empty if it was not caught."""

    fault: Fault
    test: str
    seconds: float
    remark: str = ""


def find(fault: Fault, root: Path) -> Path:
    """Return the file of a fault. Raises ValueError if its text does not occur once or the result does not compile."""
    files = {path: path.read_text() for path in sorted((root / "asyncrl").rglob("*.py"))}
    found = [path for path, text in files.items() for _ in range(text.count(fault.right))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise ValueError(f"{fault.name}: its text is to occur once, and does: {places}")
    try:
        ast.parse(files[found[0]].replace(fault.right, fault.wrong))
    except SyntaxError as error:
        raise ValueError(f"{fault.name}: {found[0].relative_to(root)} would not compile: {error}") from None
    return found[0]


def nearest_tests(file: Path, root: Path) -> Iterator[list[str]]:
    """Return test files in stages: of the module's name, importers, importers of importers."""
    helpers = set((root / "tests").rglob("*.py"))
    imports = {path: _imports(path) for path in [*(root / "asyncrl").rglob("*.py"), *helpers]}

    def importing(files: set[Path]) -> set[Path]:
        names = {name for path in files for name in _names(path, root)}
        return {path for path, imported in imports.items() if imported & names}

    direct = importing({file})
    found = importing(direct)
    while more := importing(found & helpers) - found:
        found |= more
    namesake = {path for path in direct if path.stem == f"test_{file.stem}"}
    for files in (namesake, direct - namesake, found - direct):
        tests = [path for path in files if path.name.startswith("test_") and path.parent.name != "cluster"]
        if tests:
            yield sorted(str(path.relative_to(root)) for path in tests)


def _names(path: Path, root: Path) -> set[str]:
    """Return the names for imports. Helpers of tests can also be imported by their file name."""
    folder, *parts = path.relative_to(root).with_suffix("").parts
    if folder == "tests":
        return {".".join(parts), parts[-1]}
    return {".".join(part for part in (folder, *parts) if part != "__init__")}


@cache
def _imports(path: Path) -> set[str]:
    return Module(path, path.read_text()).imports()


def judge(fault: Fault, tree: Path, stages: Sequence[Sequence[str]]) -> Verdict:
    """Plant a fault in ``tree``, run the tests of each stage until one fails, and remove the fault.

    Raises RuntimeError if pytest itself fails.
    """
    file = find(fault, tree)
    right, began, remark = file.read_text(), time.monotonic(), ""
    for tests in stages:
        _write(file, right.replace(fault.right, fault.wrong))
        try:
            failed = _failures(tree, "-x", *WORKERS, *tests)
        finally:
            _write(file, right)
        anyway = _failures(tree, *failed) if failed else []
        if caught := [test for test in failed if test not in anyway]:
            return Verdict(fault, caught[0], time.monotonic() - began)
        if failed:
            remark = f"{failed[0]} fails without it, too"
    return Verdict(fault, "", time.monotonic() - began, remark)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    # Python takes a compiled file for current if size and second of the source are equal.
    Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)


def _failures(tree: Path, *arguments: str) -> list[str]:
    """Return the failing tests of a run of pytest with these arguments."""
    command = [sys.executable, *PYTEST, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, NO_TESTS):
        return []
    failed: list[str] = _FAILED_TEST.findall(done.stdout)
    if not failed or done.returncode not in (FAILED, INTERRUPTED):
        raise RuntimeError(f"pytest ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failed


def line(verdict: Verdict) -> str:
    by = verdict.test or verdict.remark or f"breaks {verdict.fault.breaks}"
    caught = "caught" if verdict.test else "NOT caught"
    return f"{verdict.fault.name:42} {caught:10} {verdict.seconds:6.1f} s  {by}"


def run(faults: Sequence[Fault], root: Path, tests: Sequence[str]) -> list[Verdict]:
    """Plant each fault in a copy of ``root``. Raises ValueError if one does not fit."""
    places = [find(fault, root) for fault in faults]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=LEFT_BEHIND)
        for fault, place in zip(faults, places, strict=True):
            stages = [tests] if tests else [*nearest_tests(place, root)]
            verdicts.append(judge(fault, tree, stages))
            print(line(verdicts[-1]), flush=True)
    return verdicts


def main(arguments: Sequence[str] | None = None, *, faults: Sequence[Fault] = FAULTS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.planted_faults", description="Plant faults, run the tests.")
    names = [fault.name for fault in faults]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names, help="these faults alone")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=[], help="these tests, instead of those near")
    asked = parser.parse_args(arguments)
    chosen = [fault for fault in faults if fault.name in asked.only]
    verdicts = run(chosen, root, asked.tests)
    caught = sum(bool(verdict.test) for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} faults are caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    # SIGTERM ends it like Ctrl-C, so the copy is removed.
    sys.exit(kept.run(main))
