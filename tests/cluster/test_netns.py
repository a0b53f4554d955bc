"""The cluster of namespaces keeps what it promises to the tests that stand on it."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.cluster.capture import conversations
from tools.cluster.netns import HERE, REPOSITORY, Cluster, remove_abandoned, wait_until, why_not


def test_each_host_has_its_own_folders_and_all_have_python_and_what_is_shared(cluster, tmp_path):
    for host in cluster.hosts.values():
        for folder in ("/tmp", "/var/tmp", "/root", "/home", "/run", "/dev/shm"):
            host.run(["sh", "-c", f"echo {host.name} > {folder}/asyncrl-mark"])
    for host in cluster.hosts.values():
        assert host.path("/tmp/asyncrl-mark").read_text() == f"{host.name}\n"
        assert host.run(["cat", "/root/asyncrl-mark", "/dev/shm/asyncrl-mark"]).stdout == f"{host.name}\n" * 2
        assert not host.path(tmp_path / "secret").exists()
    for folder in ("/tmp", "/var/tmp", "/root", "/home", "/run", "/dev/shm"):
        assert not Path(folder, "asyncrl-mark").exists()
        assert cluster.head.run(["test", "-e", f"{folder}/asyncrl-mark"], check=False).returncode == 1

    (tmp_path / "of_the_test").write_text("seen")
    assert cluster.head.run(["cat", str(tmp_path / "of_the_test")]).stdout == "seen"
    assert cluster["a"].run(["test", "-e", str(tmp_path / "of_the_test")], check=False).returncode == 1
    cluster["a"].run(["touch", "from_a"], cwd=tmp_path / "shared")
    assert cluster["b"].run(["ls", str(tmp_path / "shared")]).stdout == "from_a\n"
    for host in cluster.all_hosts:
        cluster.ssh(host.name, f"cd {HERE} && {sys.executable} -c 'import asyncrl.messages, zmq'")


MAKE_AND_DIE = f"""
import os, signal, sys
sys.path[:0] = [{str(REPOSITORY)!r}]
from tools.cluster.netns import Cluster
cluster = Cluster(["a", "b"])
cluster.ssh("a", "nohup setsid sleep 1000 >/dev/null 2>&1 &")
cluster["b"].popen(["sleep", "2000"])
if sys.argv[1] == "raise":
    with cluster:
        print(cluster.folder, os.stat(f"/proc/{{cluster['a']._init}}/ns/net").st_ino, flush=True)
        raise SystemExit("a test fails")
print(cluster.folder, os.stat(f"/proc/{{cluster['a']._init}}/ns/net").st_ino, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def living(namespace: int, folder: str) -> list[str]:
    """Processes in a network namespace or that name a folder, and mounts that name it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if (entry / "ns/net").stat().st_ino == namespace or (os.fsencode(folder) in words):
                found.append(words.decode())
    return found + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_nothing_is_left_however_the_test_ends(namespaces, how):
    """I7."""
    links = Path("/proc/net/dev").read_text().count(":")
    died = subprocess.run([sys.executable, "-c", MAKE_AND_DIE, how], capture_output=True, text=True, timeout=60)
    assert died.returncode == (1 if how == "raise" else -signal.SIGKILL), died.stderr
    folder, namespace = died.stdout.split()
    wait_until(lambda: not living(int(namespace), folder), "the end of all that was in the hosts")
    assert Path("/proc/net/dev").read_text().count(":") == links
    assert Path(folder).exists() == (how == "kill")
    removed = remove_abandoned()
    assert (Path(folder) in removed) == (how == "kill")
    assert not Path(folder).exists()


def test_a_living_cluster_is_not_taken_for_an_abandoned_one(cluster):
    assert cluster.folder not in remove_abandoned()
    with Cluster(["x"]) as other:
        assert other.ssh("x", "hostname").stdout == "x\n"
        # Same addresses, other network.
        assert other["x"].address == cluster["a"].address
    assert cluster.ssh("a", "hostname").stdout == "a\n"


def test_it_says_why_it_cannot_be(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "making namespaces needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("tools.cluster.netns.SETGROUPS", tmp_path / "setgroups")
    (tmp_path / "setgroups").write_text("deny\n")
    assert why_not() == "sshd needs the root of more than one user"
    (tmp_path / "setgroups").write_text("allow\n")
    monkeypatch.setattr("shutil.which", lambda tool, path=None: None if tool in ("ip", "sshd") else tool)
    assert "not installed: ip, sshd" in (why_not() or "")


def segment(sequence: int, payload: bytes, first: bool = False) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", 5, 6, sequence % 2**32, 0, 5 << 4, 2 if first else 16, 0, 0, 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 0, 0, 64, 6, 0, bytes([10, 0, 0, 1]), bytes(4))
    # Short frames are padded to 60 bytes; the padding is no payload.
    return (bytes(12) + b"\x08\x00" + ip + tcp + payload).ljust(60, b"\0")


@given(
    parts=st.lists(st.binary(min_size=1, max_size=20), max_size=12),
    start=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_conversation_is_put_together_from_segments_in_any_order_and_more_than_once(parts, start, data):
    whole, pieces = b"".join(parts), []
    for part in parts:
        begin = sum(map(len, parts[: len(pieces)]))
        pieces.append(segment(start + 1 + begin, part))
    order = data.draw(st.permutations([*pieces, *data.draw(st.lists(st.sampled_from(pieces or [b""]), max_size=5))]))
    found = conversations(iter([segment(start, b"", first=True), *order]))
    assert found == ({(("10.0.0.1", 5), ("0.0.0.0", 6)): whole} if whole else {})
