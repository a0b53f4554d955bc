"""asyncrl-doctor over ssh: it finds faults of a cluster, by host and by pair of hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from model_files import write_model

from tools.cluster.netns import REPOSITORY

ANSWER_S = 120
PORTS = "5000-5100"
SIM = """
[data]
source = "synthetic"
[rollout]
engine = "sim"
replicas = 4
concurrency = 8
[learner]
backend = "sim"
[network]
ports = "{ports}"
[run]
dir = "{runs}"
"""
TRAINED = """
[model]
path = "{model}"
[data]
source = "synthetic"
[rollout]
engine = "reference"
gpus_per_replica = 0
[learner]
ranks = 3
device = "cpu"
[run]
dir = "{runs}"
"""
ORPHAN = """
import os, setproctitle, time
if os.fork():
    os._exit(0)
os.setsid()
setproctitle.setproctitle("asyncrl rollouter/0 gone")
time.sleep(600)
"""


@pytest.fixture
def examine(cluster, tmp_path):
    """Call the doctor on the head. Returns (exit code, findings)."""

    def call(hosts, *argv, config=SIM, runs=None, env=None, **values):
        (tmp_path / "hosts").write_text("\n".join(hosts) + "\n")
        toml = tmp_path / "config.toml"
        toml.write_text(config.format(runs=runs or tmp_path / "shared" / "runs", ports=PORTS, **values))
        command = [sys.executable, "-m", "asyncrl.cli.doctor", str(toml), "--hosts", str(tmp_path / "hosts")]
        command += ["--ssh-args", f"-F {cluster.ssh_config}", "--json", "--timeout", str(ANSWER_S), *argv]
        # As the launcher does, the doctor takes the NCCL settings that it finds to every host.
        environment = os.environ | (env or {})
        done = cluster.head.run(command, env=environment, timeout=5 * ANSWER_S, check=False, cwd=REPOSITORY)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    yield call
    for host in cluster.hosts.values():
        if host.is_on:
            assert not [words for words in host.processes().values() if "asyncrl.launcher.doctor" in words]
    assert not list(tmp_path.rglob(".asyncrl-doctor-*"))


def of(found, check, host=None):
    return [one for one in found if one["check"] == check and host in (None, one["host"])]


def failed(found):
    return {(one["host"], one["check"]) for one in found if one["result"] == "fail"}


def test_a_healthy_cluster_passes_and_a_host_can_be_excluded(cluster, examine):
    code, found = examine(["a slots=0", "b", "head"])
    assert code == 0, failed(found)
    for host in ("head", "a", "b"):
        assert of(found, "ssh", host)[0]["detail"] == f"answers as {host}"
        assert of(found, "interface", host)[0]["detail"] == f"{cluster[host].address} at eth0"
        (reach,) = of(found, "reach", host)
        assert reach["result"] == "ok" and all(other in reach["detail"] for other in {"head", "a", "b"} - {host})
        assert of(found, "versions", host)[0]["result"] == "ok"
    assert {one["host"] for one in of(found, "clock")} == {"a", "b"}
    assert of(found, "data")[0]["host"] == "head"
    assert "9 actors" in of(found, "placement")[0]["detail"]
    cluster["b"].power_off()
    code, found = examine(["head", "a", "b", "c"], "--exclude", "b")
    assert code == 0, failed(found)
    assert {one["host"] for one in of(found, "ssh")} == {"head", "a", "c"}


def test_an_unreachable_host_and_one_with_another_asyncrl_are_named(cluster, examine):
    package = cluster["b"].path("/root/other/asyncrl-9.9.9.dist-info")
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: asyncrl\nVersion: 9.9.9\n")
    cluster["b"].path("/root/.bashrc").write_text("export PYTHONPATH=/root/other\n")
    cluster["c"].power_off()
    code, found = examine(["a", "b", "c"])
    assert code == 1
    assert failed(found) == {("c", "ssh"), ("b", "versions")}, found
    (lost,) = of(found, "ssh", "c")
    assert "ssh: connect to host 10.77.0.4 port 22" in lost["detail"] and "`ssh c`" in lost["fix"]
    assert [one["check"] for one in found if one["host"] == "c"] == ["ssh"]
    (version,) = of(found, "versions", "b")
    assert "asyncrl 9.9.9 (" in version["detail"] and "on a" in version["detail"]
    assert of(found, "placement")[0]["result"] == "warn"
    assert [one["detail"] for one in of(found, "reach")] == ["reaches b", "reaches a"]


def test_a_path_blocked_in_one_direction_is_named(cluster, examine):
    a, b = cluster["a"], cluster["b"]
    shut = f"from {a.address} iif eth0 ipproto tcp dport {PORTS}"
    b.run(["sh", "-ec", f"ip rule add pref 10 lookup local; ip rule del pref 0; ip rule add pref 5 {shut} blackhole"])
    code, found = examine(["a", "b", "c"], env={"NCCL_SOCKET_IFNAME": "lo"})
    assert code == 1
    assert failed(found) == {("a", "reach"), *((host, "nccl") for host in "abc")}, found
    (closed,) = of(found, "reach", "a")
    assert closed["detail"].startswith("a to b is closed: port 5000 of 10.77.0.3: ")
    assert closed["detail"].endswith("; b to a is open")
    assert f"open TCP ports {PORTS} of b for a" in closed["fix"]
    assert [one["result"] for one in of(found, "reach") if one["host"] != "a"] == ["ok", "ok"]


def test_ranks_on_several_hosts_need_a_shared_checkpoint_folder(cluster, examine, tmp_path):
    model = write_model(tmp_path / "shared" / "model")
    code, found = examine(["a", "b", "c"], "--checkpoint.dir", "/tmp/checkpoints", config=TRAINED, model=model)
    assert code == 1
    assert {("b", "checkpoint_dir"), ("c", "checkpoint_dir")} <= failed(found), found
    assert "is not the folder that a sees" in of(found, "checkpoint_dir", "b")[0]["detail"]
    _, found = examine(["a", "b", "c"], config=TRAINED, model=model)
    assert not {one for one in failed(found) if one[1] == "checkpoint_dir"}, found
    assert len(of(found, "checkpoint_dir")) == 3 and {one["result"] for one in of(found, "model")} == {"ok"}


def test_leftovers_on_a_host_are_removed_there(cluster, examine):
    a = cluster["a"]
    a.run(["sh", "-ec", "mkdir -p /tmp/runs/old/private; touch /tmp/runs/old/private/lock"])
    a.popen([sys.executable, "-c", ORPHAN], stdout=subprocess.DEVNULL).wait(30)
    _, found = examine(["a", "b"], runs="/tmp/runs")
    (reported,) = of(found, "leftovers", "a")
    assert reported["result"] == "warn" and "/tmp/runs/old/private" in reported["detail"]
    assert "asyncrl rollouter/0 gone" in reported["detail"] and "--fix" in reported["fix"]
    assert of(found, "leftovers", "b")[0]["detail"] == "none"
    _, found = examine(["a", "b"], "--fix", runs="/tmp/runs")
    (reported,) = of(found, "leftovers", "a")
    assert reported["result"] == "ok" and reported["detail"].startswith("removed ")
    assert not a.path("/tmp/runs/old/private").exists()
    assert "asyncrl rollouter/0 gone" not in a.processes().values()
