"""Hosts are cut off and come back, or are lost for good, while a run trains over them."""

from __future__ import annotations

import time

import pytest
from cluster.lost import launched as launched

from asyncrl.observe.metrics_line import read_metrics
from tools.waiting import wait_until

CUT_S = 30.0
"""Time for which a host is away; ssh and TCP have given up on some messages by then."""


def versions_served(run) -> dict[str, int]:
    """The newest weights that each replica has loaded and resumed with, by its own report."""
    served: dict[str, int] = {}
    for line in read_metrics(run.run_dir / "metrics.jsonl", ("update",)):
        if "weights/resume_s" in line:
            served[line["replica"]] = max(served.get(line["replica"], 0), line["weights/version"])
    return served


@pytest.mark.timeout(600)
def test_i1_i5_i7_training_continues_while_a_host_is_cut_off_and_after_another_is_lost(cluster, launched):
    """Groups leased there are leased again, what comes back is fenced, and the ledger is exact."""
    # In a broadcast all replicas pause together, so one that does not answer could delay the others.
    run = launched(320, "--weights.transport=gloo", host_grace_s=60.0)
    run.wait_for_step(5)
    needed = run.host_of("reward/0")
    back, gone = (name for name in ("a", "b", "c") if name != needed)

    names = {run.host_of(name): name for name in (f"rollouter/{i}" for i in range(4))}
    away = names[back]
    cluster[back].cut_off()
    until = time.monotonic() + CUT_S
    run.wait_for("host is lost")
    run.wait_for_step(16)
    wait_until(lambda: time.monotonic() >= until, "the end of the cut", 2 * CUT_S)
    cluster[back].reconnect()
    run.wait_for("host is back")
    # The actor killed and restarted there registers: twice, as every actor does.
    wait_until(lambda: run.log("controller-0").count(f'"actor": "{away}", "address"') == 4, f"a new {away}")

    cluster[gone].power_off()
    run.wait_for("host is lost", times=2)
    run.wait_for_step(16)
    settled = run.step
    run.is_exact()
    # Live replicas load new weights and resume with them: none is left paused, none stale.
    served = versions_served(run)
    assert {host for host, name in names.items() if served[name] > settled} == {"head", needed, back}, served
    reported = run.shown
    for host in (back, gone):
        where = f"{host} (agent/{' abc'.index(host)})"
        assert reported.count(f"host {where} is lost: nothing is heard of it; dead with it: {names[host]}\n") == 1
        assert reported.count(f"host {where} is back; fenced, and started again there: {names[host]}\n") == (
            host == back
        )
    run.is_gone_from(back, needed)


def test_i1_ranks_wait_for_the_host_of_one_of_them_and_restart_together(cluster, launched):
    """The ranks resume from a checkpoint once the host is back."""
    # The rank that is left is killed once, which counts.
    run = launched(40, "--learner.ranks=2", max_restarts=1)
    run.wait_for_step(8)
    far = run.host_of("learner/1")
    assert far != "head"
    cluster[far].cut_off()
    run.wait_for("host is lost")
    wait_until(lambda: '"actor": "learner/0", "exit_code": -9' in run.log("controller-0"), "the end of the other rank")
    cluster[far].reconnect()
    run.is_exact()
    run.is_gone_from("a", "b", "c")


def test_a_run_names_the_host_that_does_not_come_back(cluster, launched):
    run = launched(400, host_grace_s=4.0)
    run.wait_for_step(5)
    needed = run.host_of("reward/0")
    cluster[needed].power_off()
    assert run.process.wait(120) == 1
    said = run.shown
    reason = f"its host {needed} (agent/{'head a b c'.split().index(needed)}) has been lost for 4 s"
    assert f"{reason} (supervision.host_grace_s)" in said, said
    run.is_gone_from(*{"a", "b", "c"} - {needed})
