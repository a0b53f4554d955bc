"""Output of the commands that cannot be written: a full disk or a closed output is reported as a failure. A reader may
end at any time.
"""

import os
import shlex
import subprocess
import sys

import pytest

SIM = """
[data]
source = "synthetic"
[rollout]
engine = "sim"
replicas = 1
[learner]
backend = "sim"
"""
COMMANDS = {
    "launch": ["--version", "--help", "--help-config", "sim.toml --dry-run", "sim.toml --dry-run --json"],
    "doctor": ["--help", "sim.toml --json"],
    "export": ["--help"],
    "top": ["--help"],
}
CALLS = [(program, words) for program, calls in COMMANDS.items() for words in calls]


def call(folder, program, words, out):
    argv = [sys.executable, "-m", f"asyncrl.cli.{program}", *words.split()]
    return subprocess.run(argv, cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.parametrize(("program", "words"), CALLS)
def test_a_failure_to_print_is_reported(tmp_path, program, words):
    (tmp_path / "sim.toml").write_text(SIM)
    with open("/dev/full", "w") as full:
        done = call(tmp_path, program, words, full)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"asyncrl-{program}: ") and said.endswith(": No space left on device")


@pytest.mark.parametrize(("program", "words"), CALLS)
def test_a_reader_that_has_read_enough_ends_a_command_silently(tmp_path, program, words):
    (tmp_path / "sim.toml").write_text(SIM)
    read, write = os.pipe()
    os.close(read)
    try:
        done = call(tmp_path, program, words, write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def call_closed(folder, program, words, closed):
    line = f"{shlex.join([sys.executable, '-m', f'asyncrl.cli.{program}', *words.split()])} {closed}"
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("program", "words"), CALLS)
def test_a_closed_output_is_reported(tmp_path, program, words):
    (tmp_path / "sim.toml").write_text(SIM)
    done = call_closed(tmp_path, program, words, ">&-")
    said = f"asyncrl-{program}: what is printed cannot be written: standard output is closed\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (call_closed(tmp_path, program, words, ">&- 2>&-")).returncode == 1


@pytest.mark.parametrize(("program", "words"), CALLS)
def test_a_closed_input_changes_nothing(tmp_path, program, words):
    (tmp_path / "sim.toml").write_text(SIM)
    done, closed = (call_closed(tmp_path, program, words, how) for how in ("</dev/null", "<&-"))
    assert (closed.returncode, closed.stderr) == (done.returncode, done.stderr)
