"""Users' code that steals, in workers as a run has them: as this user, as another, where there are no namespaces."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.operation import SecurityConfig
from asyncrl.core.errors import ConfigError
from asyncrl.workers import confinement
from asyncrl.workers.confinement import confine, users_environment, why_not
from asyncrl.workers.isolation import private_folders

ROBBED = Path(__file__).with_name("robbed.py")
ROOT = Path(__file__).parents[2]
ORDINARY = 4321
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces && exec"

isolated = pytest.mark.skipif(
    bool(asyncio.run(why_not(Path("/nowhere")))), reason="this system has no namespaces for its users"
)


def env() -> dict[str, str]:
    """The same modules for an interpreter that any user may run."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def interpreter(**user: Any) -> str:
    """One that this user may run."""
    for python in (sys.executable, shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")):
        try:
            subprocess.run([str(python), "-c", "import msgspec"], check=True, env=env(), stderr=-3, cwd="/", **user)
        except (OSError, subprocess.SubprocessError):
            continue
        return str(python)
    pytest.skip("there is no interpreter that another user may run")


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own is closed to other users.
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def rob(folder: Path, mode: str, way: str, *before: str, **user: Any) -> Any:
    argv = [*before, interpreter(**user), "-B", str(ROBBED), str(folder), mode, way]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env(), cwd="/", **user)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def as_another(folder: Path) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    os.chown(folder, ORDINARY, ORDINARY)
    return {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}


@isolated
@pytest.mark.parametrize(("user", "way"), [("this", "keeper"), ("another", "reward")])
def test_a_thief_gets_only_the_variables_that_the_user_names(folder: Path, way: str, user: str) -> None:
    given = {} if user == "this" else as_another(folder)
    assert rob(folder, "required", way, **given) == {"reported": [], "got": {"environment": ["SANDBOX"]}}


@isolated
def test_a_host_without_namespaces_warns_the_user_and_plays(folder: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    before = (unshare, "--user", "--map-root-user", "sh", "-c", f'{NO_NAMESPACES} "$@"', "sh")
    said = rob(folder, "auto", "reward", *before)
    (reported,) = said["reported"]
    assert reported.startswith("users' code is not isolated on this host (a user namespace: No space left on device)")
    assert "docs/security.md" in reported
    # The same thief then gets the keys, and no more of the environment.
    assert said["got"]["environment"] == ["SANDBOX"]
    assert "descriptors" not in said["got"]
    assert {"keys", "listed", "linked", "moved", "environment of another"} < said["got"].keys()


def test_required_isolation_is_refused_on_hosts_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(run_dir: Path) -> str:
        return "a user namespace: Operation not permitted"

    monkeypatch.setattr(confinement, "why_not", refused)
    with pytest.raises(
        ConfigError, match=r"security\.isolate_user_code: .* \(a user namespace: Operation not permitted"
    ):
        asyncio.run(confine(SecurityConfig(isolate_user_code="required"), tmp_path, pytest.fail))


def test_private_folders_of_all_hosts_and_of_other_runs_are_hidden(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def make(*names: str) -> None:
        for name in names:
            (runs / name).mkdir(parents=True)
            if not name.startswith("users"):
                (runs / name / "lock").touch()

    make("mine/private", "mine/private-3", "other/private", "other/private-1", "users/private")
    (runs / "mine" / "private.txt").touch()
    names = ["mine/private", "mine/private-3", "other/private", "other/private-1"]
    assert private_folders(runs / "mine") == [str(runs / name) for name in names]
    # Those who come later too, from the next worker on.
    (runs / "mine" / "private-7").mkdir()
    make("other/private-2", "third/private")
    names += ["mine/private-7", "other/private-2", "third/private"]
    assert private_folders(runs / "mine") == sorted(str(runs / name) for name in names)


HIDES = """
import os, sys
from pathlib import Path
from asyncrl.workers.isolation import isolate, private_folders
isolate(private_folders(Path(sys.argv[1])))
print(os.path.exists(sys.argv[2]))
"""


@isolated
def test_the_private_folder_of_a_run_with_an_undecodable_name_is_hidden(tmp_path: Path) -> None:
    lock = tmp_path / os.fsdecode(b"caf\xe9") / "private" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    ran = subprocess.run(
        [sys.executable, "-c", HIDES, str(tmp_path / "mine"), str(lock)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, "False\n"), ran.stderr


def test_only_listed_or_named_environment_variables_pass() -> None:
    passing = {
        "PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "PYTHONPATH": "/p", "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "0",
        "TOKENIZERS_PARALLELISM": "false", "https_proxy": "http://proxy", "OMP_NUM_THREADS": "2", "TMPDIR": "/t",
        "XDG_CACHE_HOME": "/x", "XDG_STATE_HOME": "/x",
    }  # fmt: skip
    kept = {
        "ASYNCRL_PRIVATE": "x", "WANDB_API_KEY": "x", "HF_TOKEN": "x", "HUGGINGFACE_HUB_TOKEN": "x", "JUDGE": "x",
        "HF_API_KEYS": "x", "AWS_SECRET_ACCESS_KEY": "x", "SSH_AUTH_SOCK": "/s", "DATABASE_URL": "x", "PYTHON_KEY": "x",
    }  # fmt: skip
    assert users_environment(passing | kept) == passing
    assert users_environment(passing | kept, ["HF_TOKEN", "JUDGE", "ABSENT"]) == passing | {
        "HF_TOKEN": "x",
        "JUDGE": "x",
    }
