"""A run over the head and the hosts a, b and c. Some of them are lost; no actor may die for another reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.launches import Trained

from asyncrl.rpc.controller_client import ADDRESS_FILE
from tools.cluster.netns import Cluster
from tools.waiting import wait_until

SUPERVISION = {"heartbeat_s": 0.5, "silence_s": 5.0, "host_lost_s": 3.0, "host_grace_s": 30.0, "max_restarts": 0}
FLAGS = (
    *("--rollout.replicas=4", "--rollout.concurrency=16", "--rollout.sim.decode_step_s=0.008"),
    *("--learner.sim.publish_bytes=1048576", "--checkpoint.every_versions=5", "--checkpoint.export_at_end=false"),
)


class Launched(Trained):
    """A rollouter is on each of the four hosts."""

    def host_of(self, actor: str) -> str:
        """By the controller's list of hosts."""
        hosts = json.loads((self.run_dir / "private" / ADDRESS_FILE).read_text())["hosts"]
        return next(name for name, actors, _ in hosts.values() if actor in actors)

    def wait_for(self, event: str, times: int = 1) -> None:
        """Wait until the controller has reported it this often."""
        wait_until(lambda: self.log("controller-0").count(f'"event": "{event}"') >= times, event)

    def addresses(self, actor: str) -> list[str]:
        """Addresses of an actor's incarnations in the log of the controller; those without an address are left out."""
        lines = self.events("controller-0", "registered")
        return [line["address"] for line in lines if line["actor"] == actor and line["address"]]


@pytest.fixture
def launched(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """``launched(steps, *flags, **supervision)``."""
    made: list[Launched] = []

    def launch(steps: int, *flags: str, **supervision: float) -> Launched:
        supervised = (f"--supervision.{key}={value}" for key, value in (SUPERVISION | supervision).items())
        path = os.environ.get("PYTHONPATH", "")
        made.append(Launched(cluster, tmp_path, steps, *FLAGS, *supervised, *flags, hosts="head\na\nb\nc\n", path=path))
        return made[-1]

    yield launch
    for run in made:
        if run.process.poll() is None:
            print(run.shown)
            run.process.kill()
