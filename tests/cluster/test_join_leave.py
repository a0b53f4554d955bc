"""Hosts join a run while it trains over others, and leave it again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from cluster.launches import Command, Trained, left, process
from recordings import read_recording
from trace_files import generation, load

from asyncrl.observe.explain.history import explain
from tools.cluster.netns import Cluster
from tools.waiting import wait_until

BROKEN = """
import os, sys
if "asyncrl.cli.actor" in sys.orig_argv:
    os._exit(78)
"""


class Run(Trained):
    """A run that hosts join and leave."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, *flags: str, hosts: str = "head\na\n"):
        supervision = ("--supervision.host_lost_s=4", "--supervision.drain_s=4", "--checkpoint.every_versions=10")
        super().__init__(cluster, folder, steps, *supervision, *flags, hosts=hosts)

    def join(self, *hosts: str, **options: Any) -> Command:
        file = self.folder / "more"
        file.write_text("".join(f"{host}\n" for host in hosts))
        argv = ["--join", str(self.run_dir), "--hosts", str(file), "--ssh-args", f"-F {self.cluster.ssh_config}"]
        return Command(self.cluster.head, self.folder, *argv, **options)

    def leave(self, host: str, *flags: str) -> Command:
        return Command(self.cluster.head, self.folder, "--leave", host, str(self.run_dir), *flags)


def test_i1_i6_i7_a_host_joins_serves_and_leaves_during_a_run(cluster, folder):
    """A refused command says why."""
    run = Run(cluster, folder, 300, "--supervision.max_restarts=0")
    run.wait_to_show("step 2/")
    private = run.run_dir / "private"
    assert (private.stat().st_mode & 0o777, (private / "launcher-0.0.json").stat().st_mode & 0o777) == (0o700, 0o600)
    joining = run.join("c")
    joining.wait_to_show("c serves from now on (it has rollouter/2)")
    (there,) = json.loads((private / "members.json").read_text())["hosts"]
    assert [there["agent"], *there["actors"]] == ["agent/2", "rollouter/2"] and len(there["keys"]) == 2
    assert (private / "members.json").stat().st_mode & 0o777 == 0o600
    # Only the new host has its secrets.
    secret = json.loads((cluster["c"].path(run.run_dir) / "private-2" / "rollouter-2.0.json").read_text())["secret"]
    assert not [
        file for file in run.run_dir.rglob("*") if file.is_file() and secret in file.read_text(errors="replace")
    ]
    assert not [line for line in cluster["c"].processes().values() if secret in line]

    head, nobody, again = run.leave("head"), run.leave("nowhere"), run.join("c")
    refused = [command.end()[0] for command in (head, nobody, again)]
    assert refused == [2, 2, 2]
    [reported] = [
        line for line in head.shown.splitlines() if "head cannot leave: the run cannot continue without " in line
    ]
    assert all(f"{role}/0" in reported for role in ("controller", "dataloader", "learner", "parameter_server"))
    assert "no host nowhere takes part in this run; there are head (agent/0), a (agent/1), c (agent/2)" in nobody.shown
    assert "c takes part in this run already, as c (agent/2)" in again.shown

    leaving = run.leave("c")
    code, shown = leaving.end()
    assert code == 0, shown
    assert shown[-1] == "c has left the run: rollouter/2 have ended, and the run continues without them"
    code, shown = joining.end()
    assert (code, shown[-1]) == (0, "c has left the run")
    assert not cluster["c"].processes()
    run.wait_for_step(4)
    run.is_exact()

    (last,) = run.events("rollouter-2", "ended")
    assert last["counters"]["rollout/sampled_tokens"] > 0
    taken = [
        line["transport"] for line in run.events("parameter_server-0", "committed") if line["replica"] == "rollouter/2"
    ]
    assert set(taken) == {"stream"}
    assert run.events("rollouter-2", "nothing more is begun")[0]["unfinished"] == 0
    # It was watched and recorded like the others while it was there.
    recorded = read_recording(run.run_dir)
    there = [{actor.name: actor for actor in snapshot.actors} for snapshot in recorded]
    guests = {"agent/2", "rollouter/2"}
    # The controller learns its host from its first message.
    hosts = [{actors[name].host for actors in there if name in actors} - {""} for name in guests]
    assert hosts[0] == hosts[1] and len(hosts[0]) == 1
    assert any(actors["rollouter/2"].condition == "ready" for actors in there if "rollouter/2" in actors)
    assert not guests & there[0].keys()
    assert there[-1].keys() == {*there[0], "agent/0", "agent/1"}
    assert generation({"rollouter/2": load(run.run_dir / "trace" / "trace-001.json")["rollouter/2"]})
    (uid, *_) = run.events("rollouter-2", "generated")
    assert "leased to rollouter/2" in explain(run.run_dir, uid["uid"])
    over = run.join("c")
    assert over.end()[0] == 2
    assert "the run in it has ended" in over.shown
    assert not left(cluster, folder)


def test_i1_i7_joined_hosts_are_treated_like_any_other(cluster, folder):
    """A successor of the controller knows them. They die, are lost and come back; others leave before them."""
    run = Run(cluster, folder, 200, "--rollout.replicas=3", hosts="head\na\nb\n")
    run.wait_to_show("step 2/")
    joining = run.join("c")
    joining.wait_to_show("c serves from now on (it has rollouter/3)")
    os.kill(process(cluster.head, "asyncrl controller/0"), signal.SIGKILL)
    # Its successor does not know yet which rollouters serve.
    code, shown = run.leave("b", "--within", "0").end()
    assert code == 0, shown
    run.wait_to_show("b has left the run")
    run.is_gone_from("b")
    run.wait_for_step(4)
    os.kill(process(cluster["c"], "asyncrl rollouter/3"), signal.SIGKILL)
    joining.wait_to_show("rollouter/3 died (killed by SIGKILL) and is started again")

    cluster["c"].cut_off()
    run.wait_to_show("host c (agent/3) is lost")
    run.wait_for_step(4)
    cluster["c"].reconnect()
    run.wait_to_show("host c (agent/3) is back")
    wait_until(lambda: run.events("controller-0", "registered")[-1]["actor"] == "rollouter/3", "a new rollouter/3")
    joining.process.send_signal(signal.SIGINT)
    code, shown = joining.end()
    assert code == 130, shown
    assert shown[-1] == "c has left the run"
    run.wait_for_step(2)
    run.is_exact()
    assert not [host for host in cluster.all_hosts if host.processes()]


def test_a_host_that_cannot_serve_does_no_harm(cluster, folder):
    """It is let go with the reason. A killed launcher leaves its hosts in the run. All end with the run."""
    run = Run(cluster, folder, 180)
    run.wait_to_show("step 2/")
    there = cluster["b"].path("/root/broken")
    there.mkdir()
    (there / "sitecustomize.py").write_text(BROKEN)
    broken = run.join("b", path="/root/broken")
    code, shown = broken.end()
    assert code == 78, shown
    assert shown[-1].startswith("rollouter/2: ended with exit code 78, which a restart would not mend (log: ")
    joining = run.join("c")
    joining.wait_to_show("c serves from now on (it has rollouter/3)")
    os.kill(process(cluster.head, "asyncrl.cli.launch --join"), signal.SIGKILL)
    run.wait_for_step(4)
    assert process(cluster["c"], "asyncrl rollouter/3")
    run.is_exact()
    run.is_gone_from("a", "b", "c")
