"""asyncrl-launch --hosts over the system's ssh: whole simulated runs on hosts that share no file system."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from cluster.launches import SECRET, Command, Launch, left, process
from hub_server import TOKEN
from model_files import write_model

from asyncrl.observe.metrics_line import read_metrics
from tools.bench.tiny_model import make_model
from tools.cluster.capture import conversations
from tools.cluster.netns import REPOSITORY, Cluster
from tools.waiting import wait_until

STEPS, LONG = 12, 240


@pytest.fixture(scope="module")
def standing(namespaces, tmp_path_factory):
    with Cluster(shared=[tmp_path_factory.mktemp("shared")]) as made:
        yield made


@pytest.fixture
def cluster(standing):
    """The one cluster of all tests here, on which each leaves no process."""
    yield standing
    found = {host.name: processes for host in standing.all_hosts if (processes := host.processes())}
    for host in standing.all_hosts:
        host.kill_all()
        for memory in host.path("/dev/shm").iterdir():
            memory.unlink()
    assert not found


@pytest.fixture
def shared(cluster, tmp_path):
    """A folder that all hosts see."""
    return Path(cluster.shared[0]) / tmp_path.name


@pytest.mark.parametrize("curve", ["auto", "off"])
def test_i6_i7_a_run_over_three_hosts_is_encrypted_and_leaves_nothing(cluster, folder, curve):
    """Off loopback all traffic uses CURVE unless that is switched off, and nothing is left on any host. All ports but
    that of ssh are the configured ones.
    """
    flags = ("--security.curve", curve, "--network.ports", "7000-7040", "--network.interface", "eth0")
    with cluster.capture() as capture:
        launch = Launch(cluster, folder, "head\na\nb  # a comment\n", *flags)
        code, shown = launch.end()
    assert code == 0, shown
    assert launch.steps_trained == list(range(1, STEPS + 1))
    config = json.loads((launch.run_dir / "config.json").read_text())
    assert config["security"]["curve"] == ("required" if curve == "auto" else "off")
    # The head has the logs of the other hosts' actors, to the last line.
    for name, host in (("rollouter-0", "a"), ("rollouter-1", "b"), ("reward-0", "a")):
        lines = [json.loads(line) for line in launch.log(name).splitlines()]
        assert lines[-1]["event"] == "ended", name
        assert f'"{name.replace("-", "/")}"' in launch.log(f"agent-{' ab'.index(host)}")
    tokens = np.array(list(SECRET.encode()), dtype="<i4").tobytes()
    said = conversations(capture)
    for secret in (SECRET.encode(), tokens):
        assert (secret in b"\n".join(said.values())) == (curve == "off")
    ends = [way for way in said if 22 not in (way[0][1], way[1][1])]
    assert ends and all(7000 <= source[1] <= 7040 or 7000 <= target[1] <= 7040 for source, target in ends)
    assert not left(cluster, folder)


@pytest.mark.parametrize("lost", [False, True])
def test_i7_the_launcher_need_not_be_one_of_the_hosts(cluster, folder, lost):
    """If the connection to the head is lost, the launcher stays until the run has ended, and reads its record."""
    launch = Launch(cluster, folder, "a\n" if lost else "a\nb\n", "--data.source", "synthetic", "--learner.steps", "60")
    launch.wait_to_show("step 2/")
    if lost:
        os.kill(process(cluster.head, "-- a /"), signal.SIGKILL)
        launch.wait_to_show("a: the connection is lost")
        assert process(cluster["a"], "asyncrl.launcher.node.agent")
    code, shown = launch.end()
    assert code == 0, shown
    if not lost:
        assert [json.loads(line) for line in launch.log("learner-0").splitlines()][-1]["event"] == "ended"
    metrics = cluster["a"].path(launch.run_dir) / "metrics.jsonl"
    assert [line["step"] for line in read_metrics(metrics, ("train",))] == list(range(1, 61))


def test_i7_ctrl_c_reaches_a_head_after_its_connection_is_lost(cluster, folder):
    """The run is preempted, with a checkpoint, as over the first connection."""
    launch = Launch(cluster, folder, "a\nb\n", "--data.source", "synthetic", "--learner.steps", "4000")
    launch.wait_to_show("step 2/")
    os.kill(process(cluster.head, "-- a /"), signal.SIGKILL)
    launch.wait_to_show("a: the connection is lost")
    launch.process.send_signal(signal.SIGINT)
    code, shown = launch.end()
    assert "a: is asked to preempt the run" in shown
    assert code == 75, shown
    ended = json.loads((cluster["a"].path(launch.run_dir) / "ended.json").read_text())
    assert ended["ended"]["reason"].startswith("preempted by SIGTERM with a checkpoint of version ")


def test_i7_ctrl_c_ends_all_hosts_in_order_and_the_run_can_be_resumed(cluster, folder):
    launch = Launch(cluster, folder, "head\na\nb\n", "--learner.steps", "80")
    launch.wait_to_show("step 4/")
    launch.process.send_signal(signal.SIGINT)
    code, shown = launch.end()
    assert code == 75, shown
    assert "draining: ending the actors in order" in shown
    assert shown[-1].startswith("preempted by Ctrl-C with a checkpoint of version ")
    assert not left(cluster, folder)
    again = Launch(cluster, folder, "head\na\nb\n", "--resume", "auto", "--learner.steps", "80")
    code, shown = again.end()
    assert code == 0, shown
    assert again.steps_trained == list(range(1, 81))
    assert not left(cluster, folder)


@pytest.mark.parametrize("when", ["reaching hosts", "run folder:", "starting: waiting for"])
def test_i7_ctrl_c_works_at_any_moment_of_the_start(cluster, folder, when):
    launch = Launch(cluster, folder, "head\na\nb\n")
    launch.wait_to_show(when)
    launch.process.send_signal(signal.SIGINT)
    code, shown = launch.end()
    assert code == 130, shown
    assert not left(cluster, folder)


@pytest.mark.parametrize("stopped", [False, True])
def test_i7_a_lost_connection_ends_nothing_and_ctrl_c_reaches_that_host(cluster, folder, stopped):
    """Through the controller. At the end the launcher asks the host for leftovers."""
    launch = Launch(cluster, folder, "head\na\nb\n", "--learner.steps", "4000" if stopped else "60")
    launch.wait_to_show("step 2/")
    os.kill(process(cluster.head, "-- b /"), signal.SIGKILL)
    launch.wait_to_show("b: the connection is lost")
    if stopped:
        launch.process.send_signal(signal.SIGINT)
    code, shown = launch.end()
    assert code == (75 if stopped else 0), shown
    assert stopped or launch.steps_trained == list(range(1, 61))
    assert any(line.startswith("b: nothing is left there") for line in shown), shown
    assert not list(cluster["b"].path(launch.run_dir).glob("private*"))


@pytest.mark.parametrize("stopped", [False, True])
def test_i7_a_killed_launcher_ends_no_actor_and_leaves_nothing(cluster, folder, stopped):
    """The run continues to its end, or until it is stopped on all hosts."""
    launch = Launch(cluster, folder, "head\na\nb\n", "--learner.steps", "4000" if stopped else "60")
    launch.wait_to_show("step 2/")
    os.kill(process(cluster.head, "asyncrl.cli.launch"), signal.SIGKILL)
    launch.process.wait(30)
    if stopped:
        code, shown = Command(cluster.head, folder, "--stop", str(launch.run_dir)).end()
        assert code == 0, shown
        assert shown[-1].startswith("preempted by asyncrl-launch --stop with a checkpoint of version ")
    wait_until(lambda: not any(host.processes() for host in cluster.all_hosts), "the end of the run", 60)
    assert stopped or launch.steps_trained == list(range(1, 61))
    assert not [path for host in cluster.all_hosts for path in host.path(launch.run_dir).glob("private*")]


def test_i7_the_next_start_removes_leftovers_of_a_killed_run(cluster, folder):
    """Leftovers of an earlier run on a host do not prevent the next start."""
    launch = Launch(cluster, folder, "head\na\nb\n", "--learner.steps", "4000")
    launch.wait_to_show("step 2/")
    for host in cluster.all_hosts:
        host.kill_all()
    launch.process.wait(30)
    assert left(cluster, folder)
    again = Launch(cluster, folder, "head\na\nb\n", "--resume", "auto", "--learner.steps", "12")
    code, shown = again.end()
    assert code == 0, shown
    assert not left(cluster, folder)


def test_a_killed_agent_ends_the_run_with_its_name(cluster, folder):
    launch = Launch(cluster, folder, "head\na\nb\n", "--learner.steps", "4000")
    launch.wait_to_show("step 2/")
    os.kill(process(cluster["b"], "asyncrl.launcher.node.agent"), signal.SIGKILL)
    code, shown = launch.end()
    assert code == 1
    assert shown[-1].startswith("agent/2 on b: killed by SIGKILL (log: ")


@pytest.mark.parametrize("host", ["head", "b"])
def test_a_frozen_agent_is_reported_with_its_host_and_ends_the_run(cluster, folder, host):
    flags = ("--learner.steps", "4000", "--supervision.silence_s", "3", "--supervision.heartbeat_s", "0.5")
    launch = Launch(cluster, folder, "head\na\nb\n", *flags)
    launch.wait_to_show("step 2/")
    os.kill(process(cluster[host], "asyncrl.launcher.node.agent"), signal.SIGSTOP)
    code, shown = launch.end()
    name = f"agent/{['head', 'a', 'b'].index(host)} on {host}"
    assert code == 1
    assert [line for line in shown if line.startswith(f"{name}: no sign of life for 5 s; ")], shown
    assert shown[-1].startswith(f"{name}: frozen, without a sign of life for "), shown


def test_a_dry_run_shows_addresses_and_commands_and_starts_nothing(cluster, folder):
    code, shown = Launch(cluster, folder, "head\na\nb\n", "--dry-run", "--exclude", "b").end()
    assert code == 0, shown
    (row,) = [line for line in shown if line.startswith("  a at 10.77.0.2 (eth0): ssh -T -F ")]
    assert row.endswith(f"-- a '{sys.executable} -m asyncrl.launcher.hosts.remote'")
    assert any(line.split()[:2] == ["rollouter/1", "a"] for line in shown)
    assert not any("10.77.0.3" in line for line in shown)
    assert not left(cluster, folder)
    assert not (folder / "runs").exists()


REWARD = """
def digits(*, completion, **_):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""
REAL = """
[run]
name = "trial"
dir = "{folder}/runs"
[model]
path = "{folder}/model"
[data]
path = "{folder}/sums.jsonl"
max_prompt_tokens = 12
[rollout]
engine = "reference"
replicas = 1
gpus_per_replica = 0
samples_per_prompt = 3
max_tokens = 8
concurrency = 6
[reward]
function = "rewards:digits"
workers = 1
[learner]
ranks = 2
steps = 2
groups_per_step = 2
lr = 1e-3
device = "cpu"
[supervision]
start_timeout_s = 200
"""


def test_learner_ranks_on_two_hosts_train_a_real_model(cluster, shared):
    """The ranks meet at the head's address, over its interface. The reward can be imported as at the launcher."""
    make_model(shared / "model")
    (shared / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{number}+{2 * number}="}) for number in range(10, 40)]
    (shared / "sums.jsonl").write_text("\n".join(rows) + "\n")
    with cluster.capture() as capture:
        flags = ("--network.ports", "7000-7040")
        launch = Launch(cluster, shared, "head\na\n", *flags, config=REAL.format(folder=shared))
        launch.wait_to_show("starting: waiting for")
        code, shown = launch.process.wait(280), launch.shown.splitlines()
    assert code == 0, shown
    # Rank 0 leaves this in the store for the other; gloo has ports of its own.
    stores = [to for (_, to), said in conversations(capture).items() if b"command/1/1" in said]
    assert stores and all(host == cluster.head.address and 7000 <= port <= 7040 for host, port in stores)
    assert launch.steps_trained == [1, 2]
    assert '"learner/1"' in launch.log("agent-1")
    for name in ("learner-1", "agent-1"):
        lines = launch.log(name).splitlines()
        assert len(set(lines)) == len(lines), f"{name}: written twice, as on a host that does not share the folder"
    assert (launch.run_dir / "export" / "model.safetensors").is_file()
    assert not list(launch.run_dir.glob("private*"))


# --- faults of hosts ---


@contextlib.contextmanager
def other_version(host):
    """Another version of asyncrl on the host."""
    (metadata,) = Path(sys.prefix).glob("lib/*/site-packages/asyncrl-*.dist-info/METADATA")
    host.run(["sh", "-c", 'sed "s/^Version: .*/Version: 9.9/" "$0" >/run/METADATA', str(metadata)])
    host.run(["mount", "--bind", "/run/METADATA", str(metadata)])
    yield
    host.run(["umount", str(metadata)])


def without(path):
    """A host with an empty folder."""

    @contextlib.contextmanager
    def state(host):
        host.run(["mount", "-t", "tmpfs", "none", str(path)])
        yield
        host.run(["umount", str(path)])

    return state


without_python, without_asyncrl = without(sys.prefix), without(REPOSITORY / "asyncrl")


@contextlib.contextmanager
def without_wandb(host):
    """A folder of that name stays, such as the one that wandb creates. The host has the data of the run."""
    prompts = host.trial.parents[1] / "prompts.jsonl"
    row = json.dumps({"prompt": SECRET})
    host.run(["sh", "-c", f"mkdir -p {prompts.parent} && for i in $(seq 400); do echo '{row}'; done > {prompts}"])
    with without(Path(sysconfig.get_path("purelib")) / "wandb")(host):
        yield


@contextlib.contextmanager
def unreachable(host):
    host.cut_off()
    yield
    host.reconnect()


@contextlib.contextmanager
def unchanged(host):
    yield


@contextlib.contextmanager
def silent(host):
    """A host that accepts ssh and then does not answer."""
    host.run(["sh", "-c", 'printf "#!/bin/sh\\nexec sleep 1000\\n" >/run/python && chmod +x /run/python'])
    host.run(["mount", "--bind", "/run/python", os.path.realpath(sys.executable)])
    yield
    host.run(["umount", os.path.realpath(sys.executable)])
    host.kill_all()


@contextlib.contextmanager
def refusing(host):
    """A host that knows no key."""
    keys = host.path("/run/cluster-ssh/authorized_keys")
    admitted = keys.read_text()
    keys.write_text("")
    yield
    keys.write_text(admitted)


@contextlib.contextmanager
def another_folder(host):
    host.run(["sh", "-c", 'mkdir -p "$0" && echo mine >"$0/notes"', str(host.trial)])
    yield
    assert host.run(["cat", f"{host.trial}/notes"]).stdout == "mine\n"


@pytest.mark.parametrize(
    ("hosts", "flags", "state", "code", "message"),
    [
        ("head\nnowhere\n", (), unchanged, 1, "nowhere: ssh: Could not resolve hostname nowhere"),
        ("head\nb\n", (), without_python, 1, f"b: no Python can run there at {sys.executable}"),
        ("head\nb\n", (), without_asyncrl, 1, "b: no asyncrl of this version is installed for "),
        ("head\nb\n", (), other_version, 1, "b: asyncrl 9.9 is installed there, "),
        ("head\na\nb\n", ("--supervision.start_timeout_s", "20"), unreachable, 1, "b: "),
        ("head\nb\n", ("--supervision.start_timeout_s", "12"), silent, 1, "b: not reached within 12 s"),
        ("head\nb\n", (), refusing, 1, "b: ssh: root@10.77.0.3: Permission denied (publickey)"),
        ("head\nb\n", (), another_folder, 2, "b: {run} is there already and is not part of this run"),
        ("head\nb slots=4\n", (), unchanged, 2, "b: slots=4 in the hostfile, but 0 GPUs are there"),
        ("head\nb\n", ("--network.host", "10.77.0.1"), unchanged, 78, "network.host: is for a run on one host"),
        (
            "b\na\n",
            ("--sinks.wandb.mode", "offline"),
            without_wandb,
            78,
            "b: sinks.wandb.mode: the package wandb is not installed",
        ),
        ("head\nb\nnowhere\n", (), without_python, 1, "b, nowhere: 2 of 3 hosts cannot take part"),
    ],
)
def test_a_fault_of_a_host_is_reported_in_one_message(cluster, folder, hosts, flags, state, code, message):
    host = cluster["b"]
    host.trial = folder / "runs" / "trial"
    with state(host):
        ended, shown = Launch(cluster, folder, hosts, *flags).end()
    assert ended == code, shown
    assert message.format(run=host.trial) in shown[-1], shown
    assert any(line.startswith("asyncrl-launch: ") for line in shown)
    assert not list((folder / "runs").glob("*"))


SERVE = """
import pathlib, sys
from hub_server import HubServer
hub = HubServer()
hub.put("models", "org/model", {file.name: file.read_bytes() for file in pathlib.Path(sys.argv[1]).iterdir()})
hub.gate("models", "org/model")
with hub.running("10.77.0.1"):
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""


def test_each_host_downloads_the_model_to_its_own_cache(cluster, folder, monkeypatch):
    """The hub is on the head. Only the launcher has the token, and no host has it in a command line or in a file."""
    model = write_model(folder / "model")
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'tests'}:{REPOSITORY}"}
    argv = [sys.executable, "-c", SERVE, str(model)]
    pipe = subprocess.PIPE
    hub = cluster.head.popen(argv, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True)
    try:
        variables = {"HF_ENDPOINT": hub.stdout.readline().strip(), "HF_HOME": str(folder / "cache")}
        for key, value in (variables | {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}).items():
            monkeypatch.setenv(key, value)
        launch = Launch(cluster, folder, "head\na\nb\n", "--model.path", "org/model")
        launch.wait_to_show("run folder:")
        words = [line for host in cluster.all_hosts for line in host.processes().values()]
        code, shown = launch.end()
    finally:
        hub.communicate()
    assert code == 0, shown
    assert launch.steps_trained == list(range(1, STEPS + 1))
    pinned = json.loads((launch.run_dir / "config.json").read_text())["hub"]["pinned"]["model.path"]
    snapshot = folder / "cache" / "hub" / "models--org--model" / "snapshots" / pinned.partition("@")[2]
    for host in (cluster.head, cluster["a"], cluster["b"]):
        assert (host.path(snapshot) / "model.safetensors").exists()
        written = [file for file in host.path(folder / "runs").rglob("*") if file.is_file()]
        assert not [file for file in written if TOKEN.encode() in file.read_bytes()]
    assert words and not [line for line in words if TOKEN in line]
    assert not left(cluster, folder)


def test_missing_files_and_ports_of_hosts_are_found_before_the_start(cluster, folder):
    """The head's copy of the model is truncated, the other host has none, and its range of ports is too small."""
    weights = write_model(folder / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    flags = ("--model.path", str(folder / "model"), "--network.ports", "7000-7003")
    code, shown = Launch(cluster, folder, "head\nb\n", *flags).end()
    assert code == 78, shown
    for text in (
        f"head: model.path: {folder}/model: model.safetensors is cut off: it has ",
        f"b: model.path: {folder}/model is not a folder here; fix: ",
        "head: network.ports: 4 of 4 ports in 7000-7003 are free at 10.77.0.1, and its actors need ",
    ):
        assert [line.strip().startswith(text) for line in shown].count(True) == 1, shown
    assert not left(cluster, folder)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("needed", "start_s"), [(1, 30), (2, 12)])
def test_blocked_ports_are_reported_and_the_host_may_join_later(cluster, folder, needed, start_s):
    """The deadline of the start names the actors that are not ready. The run continues if it can do without them; their
    host leaves once its agent has given up, and may join when its ports are open.

    A run that continues needs all other actors by the deadline; one that fails may name some of them too.
    """
    blocked = "ip rule {} ipproto tcp dport 7000-7040 blackhole"
    cluster["b"].run(blocked.format("add").split())
    flags = ("--network.ports", "7000-7040", "--data.source", "synthetic")
    flags += ("--supervision.start_timeout_s", str(start_s))
    flags += ("--rollout.min_replicas", str(needed), "--learner.sim.step_s", "0.25", "--learner.steps", str(LONG))
    try:
        launch = Launch(cluster, folder, "head\na\nb\n", *flags)
        if needed == 1:
            launch.wait_to_show("b has left the run without having taken part: ")
            assert max(launch.steps_trained, default=0) < LONG
        else:
            code, shown = launch.end()
    finally:
        cluster["b"].run(blocked.format("delete").split())
    if needed == 1:
        (folder / "more").write_text("b\n")
        options = ("--hosts", str(folder / "more"), "--ssh-args", f"-F {cluster.ssh_config}")
        joining = Command(cluster.head, folder, "--join", str(launch.run_dir), *options)
        joining.wait_to_show("b serves from now on (it has rollouter/2)")
        code, shown = launch.end()
        assert code == 0, shown
        assert launch.steps_trained == list(range(1, LONG + 1))
        assert any("rollouter/1 is resting: not ready 30 s after its start" in line for line in shown), shown
        assert joining.end()[0] == 0, joining.shown
    else:
        assert code == 1, shown
        assert "rollouter/1" in shown[-1]
    assert not left(cluster, folder)
