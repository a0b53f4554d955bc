"""Faults between the hosts of a round: open connections are cut and slowed, clocks step, and all faults end."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.chaos.hosts import Conditions, Hosts
from tools.chaos.plan import Link
from tools.wall_clocks import LOOK_S, WallClocks

PIPE = subprocess.PIPE
SERVE = """
import socket, sys, threading
def answer(peer):
    while data := peer.recv(1 << 20):
        peer.sendall(b"%d;" % len(data))
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listening", flush=True)
    while True:
        threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=60) as peer:
    for line in sys.stdin:
        size, began, got = int(line), time.monotonic(), 0
        peer.sendall(bytes(size))
        heard = b""
        while got < size:
            heard += peer.recv(65536)
            *whole, heard = heard.split(b";")
            got += sum(map(int, whole))
        print(time.monotonic() - began, flush=True)
"""
SHORT_S = 1.5
"""Time within which an answer arrives, or does not."""


class Talk:
    """A connection between two hosts that is open from the start."""

    def __init__(self, cluster, client, server):
        argv = [sys.executable, "-c", ASK, cluster[server].address]
        self.process = cluster[client].popen(argv, stdin=PIPE, stdout=PIPE, text=True)
        assert self.ask(1) >= 0.0

    def say(self, size):
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()

    def hear(self):
        return float(self.process.stdout.readline())

    def ask(self, size):
        """Seconds until this many bytes have arrived and the answer is back."""
        self.say(size)
        return self.hear()

    def is_silent(self):
        """Whether the answer fails to arrive within ample time."""
        return not select.select([self.process.stdout], [], [], SHORT_S)[0]


@pytest.fixture
def hosts(cluster):
    (folder,) = cluster.shared
    return Hosts(WallClocks(Path(folder)), cluster)


@pytest.fixture
def talk(cluster):
    with contextlib.ExitStack() as ending:

        def connect(client, server):
            listener = cluster[server].popen(
                [sys.executable, "-c", SERVE, cluster[server].address], stdout=PIPE, text=True
            )
            ending.callback(listener.stdout.close)
            ending.callback(listener.wait, 30)
            ending.callback(listener.kill)
            assert listener.stdout.readline() == "listening\n"
            made = Talk(cluster, client, server)
            ending.callback(made.process.stdout.close)
            ending.callback(made.process.wait, 30)
            ending.callback(made.process.stdin.close)
            return made

        yield connect


def test_a_partition_blocks_open_connections_until_it_ends(hosts, talk):
    between, beside = talk("a", "b"), talk("a", "c")
    for deaf in ({("a", "b")}, {("b", "a")}, {("a", "b"), ("b", "a")}):
        hosts.become(Conditions(deaf=frozenset(deaf)))
        between.say(1)
        assert between.is_silent()
        beside.ask(1)
        hosts.become(Conditions())
        # The bytes that TCP has kept arrive.
        between.hear()
        between.ask(1)
    hosts.become(Conditions(deaf=frozenset({("a", "b"), ("a", "c")})))
    hosts.become(Conditions(deaf=frozenset({("a", "c")})))
    between.ask(1)
    beside.say(1)
    assert beside.is_silent(), "the other one continues"
    hosts.become(Conditions())
    beside.hear()


def test_a_slow_link_is_slow_in_both_directions_until_it_ends(hosts, talk):
    away, back, beside = talk("a", "b"), talk("b", "a"), talk("b", "c")
    size = 1 << 20
    hosts.become(Conditions(slow={"a": Link(delay_ms=50.0, rate_mbit=4.0, loss=0.0)}))
    # Eight megabits. A fraction of one passes at once: no machine is so fast.
    assert away.ask(size) > 1.5
    assert back.ask(size) > 1.5
    beside.ask(size)
    hosts.become(Conditions())
    for host in ("a", "b"):
        shown = hosts.cluster[host].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        assert "tbf" not in shown and "netem" not in shown
    away.ask(size)


def test_the_clock_of_one_host_is_ahead_and_steps_back(hosts, cluster):
    show = [sys.executable, "-c", "import time; print(time.time())"]

    def ahead(name):
        time.sleep(2 * LOOK_S)
        said = cluster[name].run(show, env={"PYTHONPATH": hosts.clocks.path, "PATH": "/usr/bin:/bin"}).stdout
        return float(said) - time.time()

    hosts.become(Conditions(ahead_s={"a": 3600.0}))
    assert ahead("a") == pytest.approx(3600.0, abs=30) and ahead("b") == pytest.approx(0.0, abs=30)
    hosts.become(Conditions(ahead_s={"b": -3600.0}))
    assert ahead("a") == pytest.approx(0.0, abs=30) and ahead("b") == pytest.approx(-3600.0, abs=30)
    hosts.become(Conditions())
    assert ahead("b") == pytest.approx(0.0, abs=30)
