"""Hosts are cut off and come back, or are gone for good, while a run trains over them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.runtime.address_file import ADDRESS_FILE
from tools.chaos.audit import Expected, audit, read_lines
from tools.cluster.netns import Cluster, wait_until

GROUPS = 4
CUT_S = 30.0
"""For which a host is away; ssh and TCP have given up on some of what was said by then."""
SUPERVISION = {"heartbeat_s": 0.5, "silence_s": 5.0, "host_lost_s": 3.0, "host_grace_s": 30.0, "max_restarts": 0}
"""Nobody may die of his own fault."""


def write_config(path: Path, steps: int, ranks: int, transport: str, **supervision: float) -> None:
    """A simulated run with a rollouter for each of four hosts, whose steps take a quarter of a second."""
    tree = {
        "run": {"name": "lost", "dir": str(path.parent / "runs"), "samples_per_step": GROUPS},
        "data": {"source": "synthetic", "size": 2 * GROUPS * steps},
        "rollout": {
            "engine": "sim",
            "replicas": 4,
            "gpus_per_replica": 0,
            "samples_per_prompt": 2,
            "concurrency": 16,
            "max_tokens": 64,
            "sim": {"length_median": 24.0, "decode_step_s": 0.008, "load_s": 0.05},
        },
        "reward": {"function": "constant", "workers": 1},
        "learner": {
            "backend": "sim",
            "ranks": ranks,
            "steps": steps,
            "groups_per_step": GROUPS,
            "dynamic_sampling": False,
            "sim": {"step_s": 0.25, "publish_bytes": 1 << 20},
        },
        "checkpoint": {"every_versions": 5, "export_at_end": False},
        "weights": {"transport": transport},
        "network": {"call_timeout_s": 5.0},
        "supervision": SUPERVISION | supervision,
    }
    path.write_text("".join(f"{line}\n" for section, keys in tree.items() for line in _lines(section, keys)))


def _lines(key, value):
    if isinstance(value, dict):
        return [line for name, inner in value.items() for line in _lines(f"{key}.{name}", inner)]
    return [f"{key} = {json.dumps(value)}"]


class Launched:
    """A run over the head and the hosts a, b and c, started on the head."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        steps: int,
        ranks: int = 1,
        transport: str = "auto",
        flags: Sequence[str] = (),
        **supervision: float,
    ):
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.run_dir = folder / "runs" / "lost"
        write_config(folder / "config.toml", steps, ranks, transport, **supervision)
        (folder / "hosts").write_text("head\na\nb\nc\n")
        argv = [sys.executable, "-m", "asyncrl.cli.launch", str(folder / "config.toml")]
        argv += ["--hosts", str(folder / "hosts"), "--ssh-args", f"-F {cluster.ssh_config}", *flags]
        self.out = folder / "out.txt"
        with self.out.open("wb") as out:
            self.process = cluster.head.popen(argv, cwd=str(folder), stdout=out, stderr=subprocess.STDOUT)

    @property
    def step(self) -> int:
        """The newest step of the metrics."""
        lines = [line for line in read_lines(self.run_dir / "metrics.jsonl")[0] if line.get("kind") == "train"]
        return max((line["step"] for line in lines), default=0)

    def said(self, actor: str) -> str:
        return (self.run_dir / "logs" / "attempt_1" / f"{actor}.log").read_text()

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.out.read_text()
            return self.step >= step

        wait_until(is_there, f"step {step}", timeout=60.0)

    def host_of(self, actor: str) -> str:
        """By the controller's list of hosts."""
        hosts = json.loads((self.run_dir / "private" / ADDRESS_FILE).read_text())["hosts"]
        return next(name for name, actors in hosts.values() if actor in actors)

    def wait_for(self, event: str, times: int = 1) -> None:
        """Until the controller has said so, so many times."""
        wait_until(lambda: self.said("controller-0").count(f'"event": "{event}"') >= times, event)

    def addresses(self, actor: str) -> list[str]:
        """Those of its incarnations, as the controller has heard of them; before it has one, an actor tells none."""
        lines = [json.loads(line) for line in self.said("controller-0").splitlines() if '"registered"' in line]
        return [line["address"] for line in lines if line["actor"] == actor and line["address"]]

    def versions_served(self) -> dict[str, int]:
        """The newest weights that each replica has taken over and resumed with, by its own report."""
        served: dict[str, int] = {}
        for line in read_lines(self.run_dir / "metrics.jsonl")[0]:
            if line.get("kind") == "update" and "weights/resume_s" in line:
                served[line["replica"]] = max(served.get(line["replica"], 0), line["weights/version"])
        return served

    def is_exact(self) -> None:
        """It comes to its end, and nothing was lost or repeated."""
        assert self.process.wait(400) == 0, self.out.read_text()
        size = 2 * GROUPS * self.steps
        findings = audit(self.run_dir, Expected(steps=self.steps, groups_per_step=GROUPS, prompts=size))
        assert [str(problem) for problem in findings.problems] == []

    def is_gone_from(self, *hosts: str) -> None:
        for name in hosts:
            wait_until(lambda host=self.cluster[name]: not host.processes(), f"an end of everything on {name}")


@pytest.fixture
def launched(cluster, tmp_path):
    made = []

    def launch(steps: int, **options: Any) -> Launched:
        made.append(Launched(cluster, tmp_path, steps, **options))
        return made[-1]

    yield launch
    for run in made:
        if run.process.poll() is None:
            print(run.out.read_text())
            run.process.kill()


@pytest.mark.timeout(600)
def test_training_goes_on_while_a_host_is_cut_off_and_after_another_is_gone(cluster, launched):
    """I1, I5, I7: what was out there is granted again, what comes back is fenced, and the ledger is exact."""
    # By a broadcast all pause together, so that one who does not answer could keep the others waiting.
    run = launched(steps=320, transport="gloo", host_grace_s=60.0)
    run.wait_for_step(5)
    needed = run.host_of("reward/0")
    back, gone = (name for name in ("a", "b", "c") if name != needed)

    names = {run.host_of(name): name for name in (f"rollouter/{i}" for i in range(4))}
    away = names[back]
    cluster[back].cut_off()
    until = time.monotonic() + CUT_S
    run.wait_for("host is lost")
    run.wait_for_step(run.step + 16)
    wait_until(lambda: time.monotonic() >= until, "the end of the cut", 2 * CUT_S)
    cluster[back].reconnect()
    run.wait_for("host is back")
    # Its actor, killed there and started again, makes itself known: twice, as each does.
    wait_until(lambda: run.said("controller-0").count(f'"actor": "{away}", "address"') == 4, f"a new {away}")

    cluster[gone].power_off()
    run.wait_for("host is lost", times=2)
    settled = run.step + 16
    run.wait_for_step(settled)
    run.is_exact()
    # Whoever lives goes on to take over new weights and to resume with them: nobody was left paused, nobody stale.
    served = run.versions_served()
    assert {host for host, name in names.items() if served[name] > settled} == {"head", needed, back}, served
    told = run.out.read_text()
    for host in (back, gone):
        where = f"{host} (agent/{' abc'.index(host)})"
        assert told.count(f"host {where} is lost: nothing is heard of it; dead with it: {names[host]}\n") == 1
        assert told.count(f"host {where} is back; fenced, and started again there: {names[host]}\n") == (host == back)
    run.is_gone_from(back, needed)


def test_ranks_wait_for_the_host_of_one_of_them_and_start_again_together(cluster, launched):
    """I1: the gang goes on from a checkpoint once the host is back."""
    # The rank that is left is killed once, which counts.
    run = launched(steps=40, ranks=2, max_restarts=1)
    run.wait_for_step(8)
    far = run.host_of("learner/1")
    assert far != "head"
    cluster[far].cut_off()
    run.wait_for("host is lost")
    wait_until(lambda: '"actor": "learner/0", "exit_code": -9' in run.said("controller-0"), "the end of the other rank")
    cluster[far].reconnect()
    run.is_exact()
    run.is_gone_from("a", "b", "c")


def test_a_run_whose_host_does_not_come_back_names_it(cluster, launched):
    run = launched(steps=400, host_grace_s=4.0)
    run.wait_for_step(5)
    needed = run.host_of("reward/0")
    cluster[needed].power_off()
    assert run.process.wait(120) == 1
    said = run.out.read_text()
    reason = f"its host {needed} (agent/{'head a b c'.split().index(needed)}) has been lost for 4 s"
    assert f"{reason} (supervision.host_grace_s)" in said, said
    run.is_gone_from(*{"a", "b", "c"} - {needed})
