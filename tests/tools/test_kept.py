"""Tools that start processes: no process outlives its tool, in any way of ending."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOOL = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tools import kept

def main():
    folder, then = Path(sys.argv[1]), sys.argv[2]
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
    started = [subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=own)
        for own in (False, True)]
    for process in started:
        process.stdout.readline()
    (folder / "ready").touch()
    try:
        if then == "stay":
            time.sleep(1000)
    finally:
        (folder / "cleaned").touch()
    return 3

if __name__ == "__main__":
    sys.exit(kept.run(main))
"""
STARTS_NOTHING = {
    "tools/code_figures.py": "git ls-files alone, which ends by itself",
    "tools/configuration_page.py": "prints a page",
    "tools/page_tables.py": "writes pages",
    "tools/quickstart/__main__.py": "becomes asyncrl-launch",
    "tools/synchronous.py": "one process",
    "tools/top_picture.py": "one process",
}
STARTED_BY_A_TOOL = {
    "tools/bench/fanout_host.py",
    "tools/bench/learner_side.py",
    "tools/bench/ray_side.py",
    "tools/bench/scale_host.py",
    "tools/bench/served.py",
    "tools/bench/trl_side.py",
    "tools/bench/weights_sender.py",
    "tools/chaos/users.py",
    "tools/cluster/capture.py",
    "tools/cluster/inside.py",
    "tools/gpu_check/learner_rate.py",
}
TOOLS = {"bench scale": ("tools.bench", "scale", "--replicas", "4"), "chaos": ("tools.chaos",)}
"""Those with the most processes. All tools that start processes are kept in the same way."""


def family(pid: int) -> list[psutil.Process]:
    """Processes below this one."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def living(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "tool.py").write_text(TOOL)
    started = []

    def start(then):
        argv = [sys.executable, str(tmp_path / "tool.py"), str(tmp_path), then]
        # As a shell without job control starts a process in the background.
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)})
        signal.signal(signal.SIGINT, ignored)
        started.append(process)
        wait_until((tmp_path / "ready").exists)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_tool_cleans_up_at_a_signal_and_leaves_nothing(tool, tmp_path, number):
    process = tool("stay")
    below = family(process.pid)
    assert len(below) == 4
    process.send_signal(number)
    assert process.wait(60) == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert (tmp_path / "cleaned").exists()
    assert living(below) == []


def test_a_tool_that_is_killed_leaves_nothing(tool):
    process = tool("stay")
    below = family(process.pid)
    assert len(below) == 4
    process.kill()
    wait_until(lambda: living(below) == [], within_s=120.0)


def test_a_tool_that_ends_leaves_nothing_and_keeps_its_exit_code(tool):
    process = tool("end")
    below = family(process.pid)
    assert process.wait(60) == 3
    assert living(below) == []


@pytest.mark.parametrize("name", TOOLS)
def test_no_process_outlives_its_tool(name, tmp_path):
    """With SIGTERM, as ``timeout`` sends it."""
    (tmp_path / "tmp").mkdir()
    log = (tmp_path / "log").open("wb")
    argv = [sys.executable, "-m", *TOOLS[name]]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        # The warden, the tool and its processes.
        wait_until(lambda: len(family(process.pid)) > 2 or process.poll() is not None, within_s=120.0)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        # More of them may start meanwhile.
        time.sleep(1.0)
        below = family(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(240)
        assert living(below) == []
    finally:
        process.kill()
        process.wait()
        log.close()


def test_each_tool_is_kept_or_starts_no_process():
    found = {}
    for path in sorted((ROOT / "tools").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                found[str(path.relative_to(ROOT))] = "kept.run(" in ast.unparse(node)
    not_kept = {path for path, is_kept in found.items() if not is_kept}
    assert not_kept == STARTS_NOTHING.keys() | STARTED_BY_A_TOOL
