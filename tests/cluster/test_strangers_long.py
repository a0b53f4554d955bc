"""I6 at length: 100,000 invalid frames and crowds of connections, at every port of a live run."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from rpc.wire.knocking import SIM_RUN, Guise, Knocker, Mutator, actors_of, guise_of, listening

from tools.live_run import LiveRun, LogTail

BATCH = 100
MAX_MESSAGE_BYTES = 8 << 20
MORE_BYTES = 64 << 20
"""Growth that an actor may show after the first part of the frames: its own work, and full queues."""
CONNECTIONS = 200
PATIENCE_S = 120.0


class Victim:
    """One actor of the run and its attacker: a peer with its own right key, or a client without HELLO."""

    def __init__(self, context: zmq.Context[Any], name: str, pid: int, address: str, guise: Guise, seed: int) -> None:
        self.name, self.address, self.guise = name, address, guise
        self.process = psutil.Process(pid)
        self.sent = self.number = 0
        self.slowest = 0.0
        self.rss = 0
        self._asked = 0.0
        self._mutator = Mutator(guise, seed)
        self._peer, self._stranger, self._canary = (Knocker(context, address, guise) for _ in range(3))
        self._peer.send(guise.hello())
        self._canary.send(guise.hello())
        self.until(lambda: self._canary.entered, "its WELCOME")

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.name}: {what} did not come"
            self._canary.listen(0.05)

    def torment(self) -> None:
        """Send a few more frames, as many as the socket takes, from welcomed and unwelcome clients."""
        for _ in range(BATCH):
            who = self._peer if self.sent % 4 else self._stranger
            if not who.send(self._mutator.malformed()):
                # The stranger never reads its answers; the peer does so now and then.
                self._peer.listen()
                return
            self.sent += 1

    def look(self) -> None:
        """Whether the actor still answers, and how soon."""
        if self._asked == 0.0:
            self.number += 1
            self._asked = time.monotonic()
            self._canary.send(self.guise.call("NoSuchType", {}, self.number, deadline_ms=60_000))
        self._canary.listen()
        if any(header[3] == self.number for header, _ in self._canary.heard[-3:]):
            self.slowest = max(self.slowest, time.monotonic() - self._asked)
            self._asked = 0.0
        assert self._asked == 0.0 or time.monotonic() - self._asked < PATIENCE_S, f"{self.name} does not answer"

    def answers(self) -> None:
        """It has handled every earlier frame."""
        self.until(lambda: self.look() or self._asked == 0.0, "its answer")

    def storm(self, context: zmq.Context[Any]) -> None:
        """Calls beyond the credit, CANCEL of unknown calls, repeated HELLO, and connections by the dozen."""
        for id in range(10**6, 10**6 + 6000):
            self._peer.send(self.guise.call("Resolve", {"name": "nobody/0"}, id, deadline_ms=20_000))
            self._peer.send([self.guise.header(8, "", in_reply_to=id + 3000), b"\xc0"])
            if id % 100 == 0:
                self._peer.listen()
        for _ in range(20):
            crowd = [Knocker(context, self.address, self.guise) for _ in range(10)]
            for one in crowd:
                for id in range(5):
                    one.send(self.guise.hello(id))
            time.sleep(0.02)
            for one in crowd:
                one.close()
        big = Knocker(context, self.address, self.guise)
        cut_off = big.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        big.send([os.urandom(MAX_MESSAGE_BYTES + 1), b""])
        assert cut_off.poll(int(PATIENCE_S * 1000)), f"{self.name} listens to a frame over its limit"
        big.socket.disable_monitor()
        cut_off.close(0)
        big.close()
        self.answers()

    @property
    def growth(self) -> int:
        """Bytes since ``rss`` was noted."""
        return int(self.process.memory_info().rss) - self.rss

    def close(self) -> None:
        for one in (self._peer, self._stranger, self._canary):
            one.close()


@contextlib.contextmanager
def loiterers(victims: list[Victim]) -> Iterator[list[socket.socket]]:
    """Connections to every actor that never send a message, or only malformed ones."""
    found = []
    try:
        for victim in victims:
            host, _, port = victim.address.removeprefix("tcp://").rpartition(":")
            for number in range(CONNECTIONS):
                found.append(socket.create_connection((host, int(port))))
                found[-1].sendall((b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64))[number % 4])
        yield found
    finally:
        for one in found:
            one.close()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("curve", "frames"), [("required", 100_000), ("off", 20_000)])
def test_i6_floods_of_frames_and_connections_do_not_harm_a_run(tmp_path: Path, curve: str, frames: int) -> None:
    # The run is stopped when all frames are handled, however long that takes.
    tree = SIM_RUN | {
        "security": {"curve": curve},
        "network": {"max_message_bytes": MAX_MESSAGE_BYTES},
        "learner": SIM_RUN["learner"] | {"steps": 100_000, "sim": {"step_s": 0.1, "publish_bytes": 4096}},
    }
    run = LiveRun(tree, tmp_path)
    context: zmq.Context[Any] = zmq.Context()
    victims: list[Victim] = []
    try:
        run.until(lambda: run.step >= 2, "a few steps", 120)
        actors = actors_of(run)
        open_ports = listening(list(actors.values()))
        for seed, (name, pid) in enumerate(actors.items()):
            [(host, port)] = open_ports[pid]
            guise = guise_of(run.run_dir / "private", name, name)
            victims.append(Victim(context, name, pid, f"tcp://{host}:{port}", guise, seed))
        with loiterers(victims):
            _until_sent(victims, frames * 3 // 10)
            for victim in victims:
                victim.answers()
                victim.storm(context)
                victim.rss = victim.process.memory_info().rss
            step = run.step
            _until_sent(victims, frames)
            for victim in victims:
                victim.answers()
            growth = {victim.name: victim.growth for victim in victims}
            assert max(growth.values()) < MORE_BYTES, growth
            slowest = {victim.name: victim.slowest for victim in victims}
            run.until(lambda: run.step > step, "training to continue", 60)
        assert actors_of(run) == actors, "an actor had to be restarted"
        print(
            f"growth (MiB) { {n: g >> 20 for n, g in growth.items()} }, slowest answer (s) {slowest}, steps {run.step}"
        )
        run.stop()
    finally:
        for victim in victims:
            victim.close()
        context.destroy(linger=0)
        run.close()
    for victim in victims:
        lines = LogTail(run, victim.name).read()
        assert [line for line in lines if line["event"] == "handler failed"] == []
        [ended] = [line for line in lines if line["event"] == "ended" and "counters" in line]
        assert "errors/handler" not in ended["counters"]
        assert ended["counters"]["wire/malformed"] > victim.sent / 4
        assert ended["counters"]["wire/strangers"] > victim.sent / 16
    assert run.left() == []


@pytest.mark.timeout(600)
def test_i6_noise_at_the_ports_of_torch_and_of_a_broadcast_leaves_a_run_unharmed(tmp_path: Path) -> None:
    """The network has to control who may call these ports (docs/security.md); they survive noise."""
    learner = SIM_RUN["learner"] | {"ranks": 2, "steps": 100_000}
    tree = SIM_RUN | {"security": {"curve": "required"}, "weights": {"transport": "gloo"}, "learner": learner}
    run = LiveRun(tree, tmp_path)
    held: list[socket.socket] = []
    try:
        run.until(lambda: run.step >= 5, "a few steps", 120)
        actors = actors_of(run)
        names = {pid: name for name, pid in actors.items()}

        def with_more() -> set[str]:
            """Processes with further open ports: the stores and the links of the first rank, and gloo's."""
            return {names[pid] for pid, found in listening(list(actors.values())).items() if len(found) > 1}

        wanted = {"learner/0", "rollouter/0", "rollouter/1"}
        run.until(lambda: with_more() >= wanted, "a broadcast to both rollouters", 60)
        assert with_more() == wanted
        ports = listening(list(actors.values()))
        for host, port in [one for found in ports.values() for one in found]:
            assert host == "127.0.0.1"
            for noise in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(5000),
                bytes(64),
                b"\xff" * 64,
                b"axw1" + bytes(32),
            ):
                held.append(socket.create_connection((host, port)))
                with contextlib.suppress(OSError):
                    held[-1].sendall(noise)
        step = run.step
        run.until(lambda: run.step > step + 10, "training to continue", 120)
        assert actors_of(run) == actors, "an actor had to be restarted"
        run.stop()
    finally:
        for one in held:
            one.close()
        run.close()
    assert run.left() == []


def _until_sent(victims: list[Victim], frames: int) -> None:
    while (before := sum(victim.sent for victim in victims)) < frames:
        for victim in victims:
            victim.torment()
            victim.look()
        if sum(victim.sent for victim in victims) < before + BATCH:
            # Their queues are full, and they need processor time to read them.
            time.sleep(0.05)
