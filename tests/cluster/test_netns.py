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

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listening", flush=True)
    peer, _ = listener.accept()
    while data := peer.recv(65536):
        peer.sendall(data.upper())
"""
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=20) as peer:
    for line in sys.stdin:
        peer.sendall(line.encode())
        print(peer.recv(65536).decode(), end="", flush=True)
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1)"
PIPE = subprocess.PIPE


@contextlib.contextmanager
def echoing(cluster, server, client):
    """A conversation over TCP: what is written to the client comes back in capitals."""
    where = cluster[server].address
    with cluster[server].popen([sys.executable, "-c", ECHO, where], stdout=PIPE, text=True) as listener:
        assert listener.stdout.readline() == "listening\n"
        argv = [sys.executable, "-c", TALK, where]
        with cluster[client].popen(argv, stdin=PIPE, stdout=PIPE, text=True) as talker:
            yield talker
            talker.stdin.close()
            assert talker.wait(30) == 0
        assert listener.wait(30) == 0


def say(talker, line):
    talker.stdin.write(line + "\n")
    talker.stdin.flush()


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


def test_loopback_is_each_hosts_own(cluster):
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 7000), timeout=5)"]
    with cluster["a"].popen([sys.executable, "-c", ECHO, "127.0.0.1"], stdout=PIPE, text=True) as listener:
        assert listener.stdout.readline() == "listening\n"
        refused = cluster["b"].run(reach, check=False)
        assert refused.returncode == 1 and "Connection refused" in refused.stderr
        assert cluster["a"].run(reach).returncode == 0
        assert listener.wait(30) == 0


def test_a_host_that_is_cut_off_is_unreachable_and_what_runs_there_goes_on(cluster):
    with echoing(cluster, "a", "b") as talker:
        say(talker, "one")
        assert talker.stdout.readline() == "ONE\n"
        cluster["a"].cut_off()
        say(talker, "two")
        assert cluster.ssh("a", "true", check=False).returncode == 255
        assert cluster.ssh("b", "hostname").stdout == "b\n"
        assert len(cluster["a"].processes()) == 1
        cluster["a"].reconnect()
        # TCP repeats what the cut swallowed.
        assert talker.stdout.readline() == "TWO\n"
    assert cluster.ssh("a", "hostname").stdout == "a\n"


def test_what_one_host_sends_another_is_dropped_in_one_direction_and_for_that_pair_alone(cluster):
    a, b, c = (cluster[name] for name in "abc")
    with echoing(cluster, "a", "b") as talker:
        say(talker, "before")
        assert talker.stdout.readline() == "BEFORE\n"
        b.drop_to(a)
        for one, other, answers in ((b, a, False), (a, b, False), (b, c, True), (c, b, True), (a, c, True)):
            # An answer needs both directions.
            connected = one.run([sys.executable, "-c", CONNECT, other.address], check=False)
            assert (connected.returncode == 0) == answers, (one, other)
        say(talker, "meanwhile")
        b.deliver_to(a)
        assert talker.stdout.readline() == "MEANWHILE\n"


def test_a_capture_sees_what_is_said_in_the_clear_and_nothing_of_what_is_not(cluster):
    with cluster.capture() as capture:
        with echoing(cluster, "a", "b") as talker:
            for number in range(200):
                say(talker, f"plain words {number} " + "x" * 4000)
                assert talker.stdout.readline().startswith(f"PLAIN WORDS {number} ")
        cluster.ssh("c", "cat >/dev/null; echo hidden answer", input="hidden words")
    found = capture.conversations()
    a, b, c = (cluster[name].address for name in "abc")
    to_a = [data for (source, target), data in found.items() if (source[0], target) == (b, (a, 7000))]
    from_a = [data for (source, target), data in found.items() if (source, target[0]) == ((a, 7000), b)]
    said = "".join(f"plain words {number} " + "x" * 4000 + "\n" for number in range(200))
    assert to_a == [said.encode()]
    assert from_a == [said.upper().encode()]
    of_c = b"".join(data for ways, data in found.items() if c in (end[0] for end in ways))
    assert b"SSH-2.0" in of_c and b"hidden" not in of_c


def test_a_host_without_power_says_nothing_and_boots_empty(cluster):
    host = cluster["a"]
    host.run(["touch", "/tmp/asyncrl-mark"])
    server = host.popen([sys.executable, "-c", ECHO, host.address], stdout=PIPE, text=True)
    assert server.stdout.readline() == "listening\n"
    talker = cluster["b"].popen([sys.executable, "-c", TALK, host.address], stdin=PIPE, stdout=PIPE, text=True)
    say(talker, "one")
    assert talker.stdout.readline() == "ONE\n"
    host.power_off()
    assert server.returncode == -signal.SIGKILL
    say(talker, "two")
    # No FIN, no RST: the client waits on.
    with pytest.raises(subprocess.TimeoutExpired):
        talker.wait(1)
    talker.kill()
    assert cluster.ssh("a", "true", check=False).returncode == 255
    host.power_on()
    assert "asyncrl-mark" not in cluster.ssh("a", "ls /tmp").stdout


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
