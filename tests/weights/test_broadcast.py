"""Broadcasts over gloo between real processes: versions arrive, failures are noticed, and the next epoch works."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from broadcast_peers import (
    HOST,
    PATIENCE_S,
    Answer,
    Peer,
    Version,
    group_at,
    large_tensors,
    small_tensors,
    to_receive,
)
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.core.errors import BroadcastFailed, ConfigError, WeightsCorrupt
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Bucket, CollectiveBackend, Manifest
from asyncrl.weights import broadcast as module
from asyncrl.weights.broadcast import Sender, open_store
from asyncrl.weights.tensors import sum_of_words
from tools.waiting import wait_until


class Peers:
    """Processes that are kept from test to test, and replaced after they were killed."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def take(self, count: int) -> list[Peer]:
        self._peers = [peer for peer in self._peers if not peer.ended]
        while len(self._peers) < count:
            self._peers.append(Peer.start())
        return self._peers[:count]

    def come_up(self) -> None:
        """Wait until all have started, which takes a while, and are idle."""
        for peer in self._peers:
            assert not peer.waiting
            peer.ask("renew")

    def close(self) -> None:
        self.take(0)
        for peer in self._peers:
            peer.kill()


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def idle_peers(peers: Peers) -> None:
    peers.take(3)
    peers.come_up()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender("gloo", HOST, PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def version() -> Iterator[Callable[..., Version]]:
    made: list[Version] = []

    def make(*arguments, **fields) -> Version:
        made.append(Version(*arguments, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


def begin(members: list[Peer], group: BroadcastGroup, version: Version, timeout_s: float = PATIENCE_S) -> None:
    for rank, peer in enumerate(members, start=1):
        peer.order("receive", to_receive(group, rank, version, timeout_s), 0)


def broadcast(sender: Sender, members: list[Peer], epoch: int, version: Version) -> list[Answer]:
    group = group_at(sender.port, epoch, len(members) + 1)
    begin(members, group, version)
    sender.send(group, version.version, iter(version.buckets))
    return [peer.answer() for peer in members]


def test_members_find_rank_0_in_its_range_of_ports() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        ports = f"{port}-{port + 20}"
        made = Sender("gloo", HOST, PATIENCE_S, ports)
        made.close()
        assert port < made.port <= port + 20
        with pytest.raises(OSError, match=f"no port of {port}-{port} at 127.0.0.1 is free; widen network.ports"):
            open_store(HOST, PATIENCE_S, f"{port}-{port}")


def test_the_store_binds_one_address_and_a_port_of_its_own() -> None:
    first, second = (open_store(HOST, 5.0) for _ in range(2))
    assert first.port != second.port
    # Bound to loopback alone: another local address refuses.
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", first.port))


@pytest.mark.slow
def test_a_broadcast_leaks_no_resources(peers, version) -> None:
    """The first test here: what is stuck when a broadcast fails may stay until the library's own timeout."""
    timeout_s = 2.5
    small, large = version(0, small_tensors(0)), version(1, large_tensors(1))
    learner, *members = peers.take(3)

    def used() -> list:
        for peer in (learner, *members):
            peer.order("used")
        return [peer.answer() for peer in (learner, *members)]

    use = []
    for round in range(3):
        port = learner.ask("open_sender", timeout_s)
        for epoch in (1, 2):
            begin(members, group_at(port, epoch, 3), small, timeout_s)
            assert not learner.ask("send", group_at(port, epoch, 3), 0, False).error
            assert not any(peer.answer().error for peer in members)
        begin(members, group_at(port, 2, 3), large, timeout_s)
        assert learner.ask("send", group_at(port, 2, 3), 1, True, members[1].process.pid).error
        members[1].go_on()
        assert all(peer.answer().error for peer in members)
        # The first round is not compared: torch starts threads in it and keeps them.
        if round > 0:
            time.sleep(timeout_s + module.LATER_S + 2.0)
        use.append(used())
    until = time.monotonic() + PATIENCE_S
    while use[1] != (now := used()):
        assert time.monotonic() < until, (use[1], now)
        time.sleep(0.5)


def failing(sender: Sender, group: BroadcastGroup, version: Version, buckets: Iterator[tuple[Bucket, int]]) -> str:
    with pytest.raises(BroadcastFailed) as caught:
        sender.send(group, version.version, buckets)
    assert caught.value.version == version.version
    return str(caught.value)


def test_versions_arrive_whole_over_one_group_and_members_change_with_the_epochs(peers, sender, version) -> None:
    """First at one replica of one worker, and one of two; each worker has a rank of its own."""
    members, group = peers.take(3), group_at(sender.port, 1, 4)
    for number in range(2):
        made = version(number, (small_tensors, large_tensors)[number](number))
        for peer, (first_rank, worker) in zip(members, [(1, 0), (2, 0), (2, 1)], strict=True):
            peer.order("receive", to_receive(group, first_rank, made), worker)
        sender.send(group, number, iter(made.buckets))
        assert [peer.answer() for peer in members] == [Answer(checksums=made.checksums)] * 3
    for epoch, present in enumerate((members[:1], [members[2], *members[:2]]), start=2):
        made = version(epoch, small_tensors(epoch))
        assert broadcast(sender, present, epoch, made) == [Answer(checksums=made.checksums)] * len(present)


def test_a_member_killed_in_the_middle_of_a_bucket_ends_the_broadcast_for_all(peers, sender, version) -> None:
    members, made = peers.take(3), version(0, large_tensors(0, megabytes=256))
    group = group_at(sender.port, 1, 4)
    begin(members, group, made)
    victim = members.pop()

    def gathered() -> Iterator[tuple[Bucket, int]]:
        victim.stop()
        threading.Timer(0.5, victim.process.kill).start()
        # gloo may not notice, if the victim is not next to rank 0. The learner hears of it from the parameter server.
        threading.Timer(1.0, sender.abort, ["rank 3 is gone"]).start()
        yield from made.buckets

    # Not by the timeout: nothing here takes nearly so long.
    began = time.monotonic()
    reason = failing(sender, group, made, gathered())
    answers = [peer.answer() for peer in members]
    assert {answer.kind for answer in answers} == {"BroadcastFailed"}
    assert time.monotonic() - began < PATIENCE_S / 2
    victim.kill()
    # A broken epoch is over on both sides.
    assert "epoch 1 is over" in failing(sender, group, made, iter(made.buckets)) and reason
    for rank, peer in enumerate(members, start=1):
        assert "epoch 1 is over" in peer.ask("receive", to_receive(group, rank, made), 0).error
    small = version(1, small_tensors(1))
    assert broadcast(sender, members, 2, small) == [Answer(checksums=small.checksums)] * 2


def test_a_killed_sender_is_detected(peers, version) -> None:
    *members, learner = peers.take(3)
    group = group_at(learner.ask("open_sender", PATIENCE_S), 1, 3)
    # With time to come up; the group is kept.
    begin(members, group, version(1, small_tensors(1)))
    assert not learner.ask("send", group, 1, False).error
    assert [peer.answer().error for peer in members] == ["", ""]
    begin(members, group, version(0, large_tensors(0)))
    learner.order("send_for_ever", group)
    time.sleep(0.5)
    learner.kill()
    for peer in members:
        assert "the learner is gone" in peer.answer().error


def test_a_frozen_member_fails_the_broadcast_for_all_after_the_timeout(peers, version) -> None:
    members, made = peers.take(3), version(0, large_tensors(0))
    sender = Sender("gloo", HOST, 3.0)
    try:
        # With time to come up; the group is kept.
        warm = version(0, small_tensors(0))
        assert len(broadcast(sender, members, 1, warm)) == 3
        group = group_at(sender.port, 1, 4)
        begin(members, group, made)

        def gathered() -> Iterator[tuple[Bucket, int]]:
            members[1].stop()
            yield from made.buckets

        assert "waited 3 s" in failing(sender, group, made, gathered())
        for peer in (members[0], members[2]):
            assert "waited 3 s" in peer.answer().error
        members[1].go_on()
        assert "waited 3 s" in members[1].answer().error
        assert broadcast(sender, members, 2, made) == [Answer(checksums=made.checksums)] * 3
    finally:
        sender.close()


def test_i4_a_flipped_bit_is_found_before_the_bucket_is_used(peers, sender, version) -> None:
    members, made = peers.take(2), version(7, small_tensors(7))
    bucket, descriptor = made.buckets[2]
    made.buckets[2] = msgspec.structs.replace(bucket, checksum=bucket.checksum ^ 1), descriptor
    group = group_at(sender.port, 1, 3)
    begin(members, group, made)
    # The bucket is the last one: a member that has failed is counted.
    sender.send(group, 7, iter(made.buckets))
    for peer in members:
        answer = peer.answer()
        assert answer.kind == "WeightsCorrupt" and "version 7, bucket 2: its checksum is" in answer.error
        assert not answer.checksums


def test_i4_a_member_refuses_a_bucket_of_another_version(peers, sender, version) -> None:
    [peer] = peers.take(1)
    made, other = version(3, small_tensors(3)), version(4, small_tensors(4))
    begin([peer], group_at(sender.port, 1, 2), other)
    # The member leaves after the header, before or after the sender has sent the bytes.
    with contextlib.suppress(BroadcastFailed):
        sender.send(group_at(sender.port, 1, 2), 3, iter(made.buckets[:1]))
    answer = peer.answer()
    assert answer.kind == "BroadcastFailed"
    assert "bucket 0 of version 3" in answer.error and "in place of bucket 0 of version 4" in answer.error


def test_a_broadcast_lasts_until_every_member_has_the_version(peers, sender, version) -> None:
    """A small version is in the buffers of the connections before a frozen member has received it."""
    members, group = peers.take(2), group_at(sender.port, 1, 3)
    begin(members, group, warm := version(0, small_tensors(0)))
    sender.send(group, 0, iter(warm.buckets))
    assert [peer.answer() for peer in members] == [Answer(checksums=warm.checksums)] * 2
    made = version(1, small_tensors(1))
    members[1].stop()
    begin(members, group, made)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, group, 1, iter(made.buckets))
        with pytest.raises(TimeoutError):
            sending.result(1.0)
        members[1].go_on()
        sending.result(PATIENCE_S)
    assert [peer.answer() for peer in members] == [Answer(checksums=made.checksums)] * 2


def test_rank_0_waits_for_members_until_the_timeout_or_until_it_is_stopped() -> None:
    for timeout_s, stop, error, words in (
        (0.3, False, TimeoutError, "waited 0.3 s for 2 of 2 members to receive version 4"),
        (PATIENCE_S, True, module._Stopped, "enough"),
    ):
        store = open_store(HOST, PATIENCE_S)
        epoch = module._Epoch(group_at(1, 1, 3), 0, [store, store], HOST, timeout_s)
        if stop:
            threading.Timer(0.2, epoch.stop, ["enough"]).start()
        with pytest.raises(error, match=words):
            epoch.wait_for_members(4)


def test_a_member_may_use_a_version_after_the_learner_has_ended(peers, version) -> None:
    members = peers.take(2)
    for number in range(5):
        made, sender = version(number, small_tensors(number)), Sender("gloo", HOST, PATIENCE_S)
        begin(members, group_at(sender.port, 1, 3), made)
        sender.send(group_at(sender.port, 1, 3), number, iter(made.buckets))
        sender.close()
        assert [peer.answer() for peer in members] == [Answer(checksums=made.checksums)] * 2


def test_an_idle_epoch_outlives_a_freeze_of_the_learner(peers, version) -> None:
    learner, *members = peers.take(3)
    group = group_at(learner.ask("open_sender", 2.5), 1, 3)
    for number in range(2):
        begin(members, group, version(number, small_tensors(number)), 2.5)
        assert not learner.ask("send", group, number, False).error
        assert [peer.answer().error for peer in members] == ["", ""]
        if not number:
            learner.stop()
            time.sleep(3.0)
            learner.go_on()


class CountedStore:
    def __init__(self) -> None:
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += keys == ["over"]
        return False

    def add(self, key: str, amount: int) -> int:
        return amount


def test_a_member_asks_the_store_only_while_it_receives(monkeypatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module.c10d, "PrefixStore", lambda _, store: store)
    store = CountedStore()
    epoch = module._Epoch(group_at(4711, 1, 2), 1, [store, store], HOST, PATIENCE_S)
    for version in range(2):
        time.sleep(0.05)
        looks = store.looks
        time.sleep(0.1)
        assert store.looks == looks
        received = epoch.watch(version)
        wait_until(lambda before=looks: store.looks > before + 2)
        received.set()


class FailingStore:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def check(self, keys: list[str]) -> bool:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("connection reset"), "the learner is gone"),
        (ValueError("no key"), "the watch of the store failed: ValueError('no key')"),
    ],
)
def test_a_failed_watch_ends_the_epoch(monkeypatch, error: Exception, reason: str) -> None:
    monkeypatch.setattr(module.c10d, "PrefixStore", lambda _, store: store)
    store = FailingStore(error)
    epoch = module._Epoch(group_at(4711, 1, 2), 1, [store, store], HOST, PATIENCE_S)
    epoch.watch(4)
    with pytest.raises(module._Stopped, match=re.escape(reason)):
        wait_until(epoch.check)


def test_i5_errors_of_threads_that_no_caller_waits_for_are_written(monkeypatch) -> None:
    written: list[tuple[str, str]] = []
    hook = lambda failed: written.append((failed.thread.name, str(failed.exc_value)))  # noqa: E731
    monkeypatch.setattr(threading, "excepthook", hook)
    monkeypatch.setattr(module.c10d, "PrefixStore", lambda _, store: store)
    store = CountedStore()
    epoch = module._Epoch(group_at(4711, 1, 2), 1, [store, store], HOST, PATIENCE_S)

    class Group:
        def abort(self) -> None:
            raise OSError("no end")

    epoch._process_group = Group()
    epoch.end("enough")
    wait_until(lambda: written)
    assert written == [("asyncrl: end of a group", "no end")]


class FilledEpoch:
    """Gives a receiver a header and a bucket."""

    device = torch.device("cpu")

    def __init__(self, backend: CollectiveBackend, header: list[int], content: bytes) -> None:
        self.group = msgspec.structs.replace(group_at(4711, 1, 2), backend=backend)
        self._parts = [np.array(header, np.uint64).view(np.uint8), np.frombuffer(content, np.uint8)]

    def broadcast(self, memory: torch.Tensor, what: str) -> None:
        memory.view(torch.uint8).copy_(torch.from_numpy(self._parts.pop(0).copy()))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_i4_a_bucket_whose_sum_differs_from_its_header_is_refused(backend: CollectiveBackend) -> None:
    content = bytes(range(256)) + b"tail"
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    right = sum_of_words(memory) if backend == "nccl" else xxhash.xxh3_64_intdigest(content)
    manifest = Manifest(version=3, buckets=[])
    part = BroadcastPart(manifest=manifest, group=group_at(4711, 1, 2), first_rank=1, timeout_s=1.0)

    def received(checksum: int) -> torch.Tensor:
        epoch = FilledEpoch(backend, [3, 0, len(content), checksum], content)
        return module.Receiver._bucket(epoch, part, 0, len(content))

    assert torch.equal(received(right), memory)
    for wrong in (right ^ 1, right ^ 1 << 63, 0):
        with pytest.raises(WeightsCorrupt, match="version 3, bucket 0: its (checksum|sum) is"):
            received(wrong)


def test_an_error_of_the_buckets_reaches_every_member(peers, sender, version) -> None:
    members, made = peers.take(2), version(0, small_tensors(0))

    def gathered(error: Exception) -> Iterator[tuple[Bucket, int]]:
        yield made.buckets[0]
        raise error

    for epoch, (error, raised, words) in enumerate(
        [
            (OSError("no bucket came"), BroadcastFailed, "the learner: no bucket came"),
            (KeyError("a weight"), KeyError, r"the learner: the learner failed: KeyError\('a weight'\)"),
        ],
        start=1,
    ):
        group = group_at(sender.port, epoch, 3)
        begin(members, group, made)
        with pytest.raises(raised):
            sender.send(group, 0, gathered(error))
        for peer in members:
            assert re.search(words, peer.answer().error)


@pytest.mark.parametrize("where", ["gathering", "sending", "forming"])
def test_abort_from_another_thread(peers, sender, version, where: str) -> None:
    members, made = peers.take(2), version(0, large_tensors(0))
    group = group_at(sender.port, 1, 3 if where != "forming" else 4)
    begin(members, group, made)
    aborting = threading.Timer(1.0, sender.abort, ["enough"])
    if where == "forming":
        aborting.start()

    def gathered() -> Iterator[tuple[Bucket, int]]:
        yield made.buckets[0]
        aborting.start()
        if where == "sending":
            members[1].stop()
            yield made.buckets[1]
        aborting.join()
        yield made.buckets[1]

    began = time.monotonic()
    assert "enough" in failing(sender, group, made, gathered())
    assert time.monotonic() - began < PATIENCE_S / 2
    members[1].go_on()
    for peer in members:
        assert "the learner: enough" in peer.answer().error
    assert broadcast(sender, members, 2, made) == [Answer(checksums=made.checksums)] * 2


def test_sender_names_the_ranks_that_did_not_come(peers, version) -> None:
    [peer], made = peers.take(1), version(0, small_tensors(0))
    sender = Sender("gloo", HOST, 4.0)
    try:
        group = group_at(sender.port, 1, 4)
        begin([peer], group, made)
        assert "waited 4 s for the members of epoch 1; ranks 2, 3 did not come" in failing(
            sender, group, made, iter(made.buckets)
        )
        assert "waited 4 s for the members of epoch 1" in peer.answer().error
    finally:
        sender.close()


def test_i6_a_stranger_and_a_wrong_token_get_nothing(peers, sender, version) -> None:
    strangers = [socket.create_connection((HOST, sender.port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: learner\r\nAccept: everything there is\r\n\r\n")
    strangers[1].close()
    member, thief = peers.take(2)
    made = version(0, small_tensors(0))
    group = msgspec.structs.replace(group_at(sender.port, 1, 2), token=sender.token)
    forged = msgspec.structs.replace(group, token=sender.token[::-1])
    thief.order("receive", to_receive(forged, 1, made, 2.0), 0)
    begin([member], group, made)
    sender.send(group, 0, iter(made.buckets))
    assert member.answer().checksums == made.checksums
    assert "waited 2 s for the members of epoch 1" in thief.answer().error
    for stranger in strangers:
        stranger.close()


def test_receiver_is_closed_while_it_waits(peers, sender, version) -> None:
    [peer], made = peers.take(1), version(0, large_tensors(0))
    # Before the group is formed: no process sends.
    answer = peer.ask("close_meanwhile", to_receive(group_at(sender.port, 1, 2), 1, made), 0, 0.3)
    assert answer.kind == "BroadcastFailed"
    assert "this worker has ended" in answer.error
    assert "this worker has ended" in peer.ask("receive", to_receive(group_at(sender.port, 1, 2), 1, made), 0).error


def test_a_missing_learner_is_an_error_at_once(peers, version) -> None:
    [peer], made = peers.take(1), version(0, small_tensors(0))
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    assert (
        "the learner cannot be reached" in peer.ask("receive", to_receive(group_at(port, 1, 2), 1, made, 3.0), 0).error
    )
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_sender_without_a_gpu_refuses_nccl() -> None:
    with pytest.raises(ConfigError, match="weights.transport: nccl needs a GPU and NCCL here"):
        Sender("nccl", HOST, 1.0)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 10_000), st.integers(0, 7))
def test_i4_a_flipped_bit_changes_the_sum_of_words(content: bytes, at: int, bit: int) -> None:
    flipped = bytearray(content)
    flipped[at % len(content)] ^= 1 << bit
    memory, other = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (content, flipped))
    assert sum_of_words(memory) != sum_of_words(other)
    assert 0 <= sum_of_words(memory) < 1 << 64


@given(st.binary(min_size=1, max_size=100))
@example(b"\xff" * 8)
@example(b"\xff" * 15)
@example(b"\x00" * 7 + b"\x80" + b"\xff" * 8 + b"\x01\xff\x02")
@example(b"\x01\x02\x03")
def test_the_sum_of_words_adds_unsigned_words_and_the_remaining_bytes(content: bytes) -> None:
    whole = len(content) // 8 * 8
    words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, whole, 8)]
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    assert sum_of_words(memory) == (sum(words) + sum(content[whole:])) % (1 << 64)
