"""The wheel: built from a copy of the package, installed where the source tree cannot be imported, and run there.

Nothing is downloaded. The dependencies come from this environment, whose folder is on the path of the new one. Its
.pth files, for example of an editable install of asyncrl, have no effect there.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from asyncrl.observe.metrics_line import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "asyncrl")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
STEPS = 3
SMALL = (
    "--run.name",
    "tiny",
    "--rollout.replicas",
    "1",
    "--learner.groups_per_step",
    "2",
    "--learner.sim.step_s",
    "0.05",
)


def run(*words, cwd):
    """The output of the command, without this environment's paths to Python modules."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", made, source)
    run(sys.executable, *PIP, *build, cwd=source)
    (found,) = made.glob("asyncrl-*.whl")
    return found


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """Commands of an environment that has the wheel, and only the dependencies of this one."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, *PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return home / "bin"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    """Data files too: py.typed, the files of a report, and the chart library with its license."""
    folder = ROOT / "asyncrl"
    ours = {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == ours
    assert {"asyncrl/py.typed", "asyncrl/observe/report/report.css", "asyncrl/observe/uplot/LICENSE"} <= names


def test_the_installed_wheel_does_not_import_the_source_tree(bin_folder, tmp_path):
    code = "import asyncrl, importlib.util as u; print(asyncrl.__file__, u.find_spec('tools'), u.find_spec('harness'))"
    file, *others = run(bin_folder / "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(bin_folder.parent) and others == ["None", "None"]


@pytest.mark.parametrize(
    "command", ["asyncrl-launch", "asyncrl-doctor", "asyncrl-top", "asyncrl-view", "asyncrl-export", "asyncrl-eval"]
)
def test_each_command_prints_its_help(bin_folder, tmp_path, command):
    assert f"usage: {command}" in run(bin_folder / command, "--help", cwd=tmp_path)


def test_a_run_trains_from_its_toml_to_its_end(bin_folder, tmp_path):
    shutil.copy(ROOT / "configs" / "sim-64.toml", tmp_path)
    run(bin_folder / "asyncrl-launch", "sim-64.toml", *SMALL, "--learner.steps", STEPS, cwd=tmp_path)
    folder = tmp_path / "runs" / "tiny"
    steps = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    shown = json.loads(run(bin_folder / "asyncrl-top", "tiny", "--replay", "--json", cwd=tmp_path))
    assert shown["run"]["phase"] == "done"
    run(bin_folder / "asyncrl-top", "tiny", "--report", "report.html", cwd=tmp_path)
    assert "<style>" in (tmp_path / "report.html").read_text()
