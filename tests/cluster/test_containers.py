"""Hosts that start a run by themselves, as pods do (launch/containers/hosts.sh): whole runs over three hosts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cluster.launches import CONFIG, RUN_S

from tools.chaos.audit import read_lines
from tools.cluster.netns import REPOSITORY, Cluster

SCRIPT = REPOSITORY / "launch" / "containers" / "hosts.sh"
LAUNCH = [sys.executable, "-m", "asyncrl.cli.launch"]


@pytest.fixture
def cluster(namespaces, tmp_path):
    (tmp_path / "shared").mkdir()
    with Cluster(["a", "b"], shared=[tmp_path / "shared"]) as made:
        yield made


def test_a_run_over_hosts_that_call_the_script(cluster, tmp_path):
    folder = tmp_path / "shared"
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": ""}}\n' for n in range(48)))
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id")], check=True)
    env = os.environ | {"ASYNCRL_SSH_KEY": str(folder), "PYTHONPATH": str(REPOSITORY)}
    names = [host.address for host in cluster.all_hosts]
    command = [*LAUNCH, str(folder / "config.toml")]
    pipe = subprocess.PIPE
    others = [
        host.popen([str(SCRIPT), str(rank), *names, "--"], env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for rank, host in enumerate(cluster.all_hosts)
        if rank
    ]
    head = cluster.head.run([str(SCRIPT), "0", *names, "--", *command], cwd=folder, env=env, timeout=RUN_S, check=False)
    said = [each.communicate(timeout=30)[0] for each in others]
    assert head.returncode == 0, head.stdout + head.stderr + "".join(said)
    assert [each.returncode for each in others] == [0, 0]
    lines = read_lines(folder / "runs" / "trial" / "metrics.jsonl")[0]
    assert max(line["step"] for line in lines if line["kind"] == "train") == 12
    hosts = {word for name in names for word in [name] if name in head.stdout}
    assert len(hosts) > 1, head.stdout
