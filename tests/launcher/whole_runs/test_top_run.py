"""asyncrl-top on living runs: it comes and goes as it likes, and names the stage that was made slow."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import msgspec
import pytest
from terminals import Terminal

from asyncrl.messages.monitor import Snapshot
from tools.waiting import wait_until

pytestmark = pytest.mark.slow
TOP = (sys.executable, "-m", "asyncrl.cli.top")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


def printed(run, flag):
    done = subprocess.run([*TOP, str(run.run_dir), flag], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout if done.returncode == 0 else ""


@needs_tmux
def test_repeated_attaching_and_detaching_does_not_affect_a_run(launch, tmp_path):
    """By its folder's place, and by its address from another folder, with a copy of its keys."""
    run = launch("--learner.steps", "4000", "--data.size", "16000")
    run.wait_to_show("step 1/")
    # By then each actor has its title.
    wait_until(lambda: run.is_running, "the run")
    before = run.processes()
    keys = shutil.copytree(run.run_dir / "private", tmp_path / "keys")
    address = json.loads((keys / "controller.json").read_text())["address"].removeprefix("tcp://")
    for end in ("q", "kill", "hang up"):
        size = (200, 50) if end == "kill" else (80, 24)
        argv, cwd = ([*TOP, address, "--keys", keys], "/") if end == "kill" else ([*TOP], tmp_path)
        with Terminal(*size, argv, cwd=cwd, env={}) as terminal:
            text = terminal.until("live")
            if end != "hang up":
                text = terminal.until("groups/s")
                assert "trial" in text and "rollouters" in text and "learner" in text
            if end == "q":
                terminal.press("q")
                terminal.ended()
            elif end == "kill":
                os.kill(terminal.pid(), signal.SIGKILL)
    assert run.processes() == before
    found = msgspec.json.decode(printed(run, "--json"), type=Snapshot)
    assert found.run.name == "trial" and not any(actor.restarts for actor in found.actors)
    run_json = json.loads((keys / "run.json").read_text())
    (keys / "run.json").write_text(json.dumps(run_json | {"run_id": "another"}))
    said = f"tcp://{address}: these keys do not fit the run there (run_id: ours another, theirs"
    done = subprocess.run([*TOP, address, "--keys", keys, "--once"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr and "copy its RUN/private again" in done.stderr
    assert run.processes() == before
    run.process.send_signal(signal.SIGINT)
    code, lines = run.end()
    assert code == 75, lines
    page = subprocess.run([*TOP, str(run.run_dir), "--replay", "--once"], capture_output=True, text=True, check=True)
    assert "preempted" in page.stdout.splitlines()[0] and "preempted: by Ctrl-C with a checkpoint" in page.stdout
    steps = run.steps_trained
    assert steps == list(range(1, len(steps) + 1))
    logs = "".join(path.read_text() for path in (run.run_dir / "logs").rglob("*.log"))
    assert '"level": "error"' not in logs and '"level":"error"' not in logs


SLOW = {
    "reward": ("--reward.function", "slow_reward:score", "--reward.options", "{}"),
    "gate": ("--staleness.max", "0", "--learner.sim.step_s", "0.7", "--rollout.sim.decode_step_s", "0.03"),
}


@pytest.mark.parametrize("stage", SLOW)
def test_a_slowed_stage_is_marked_as_the_bottleneck(launch, tmp_path, monkeypatch, stage):
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\n\ndef score(completion):\n    time.sleep(0.3)\n    return float(len(completion) % 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch(*SLOW[stage])
    run.wait_to_show("step 3/")
    seen = []

    def named():
        seen.extend(re.findall(r"^ ?◆ (\w+): ", printed(run, "--once"), re.MULTILINE))
        # Twice in a row: not while the queues still fill.
        return len(seen) > 1 and seen[-1] == seen[-2]

    wait_until(named, lambda: f"a verdict; so far {seen}")
    assert seen[-1] == stage, seen
