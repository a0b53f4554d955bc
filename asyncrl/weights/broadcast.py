"""Broadcasts of whole versions from the learner to the workers of all engines, over gloo or NCCL by the same code.

An epoch is one process group with a fixed set of members, and the number of that group. The learner is rank 0, and each
engine worker is one member. The learner has a TCP store, where the members meet under a secret prefix. They form the
group and receive every bucket: first its header (version, index, size, checksum), then its bytes. A member verifies a
bucket before it passes it on. The checksum is xxh3_64 in host memory, and a sum of 64-bit words in the memory of a GPU.

Neither library reliably ends a transfer whose peer is dead or frozen. So each operation runs on a thread of its own,
and the caller stops waiting for that thread at the timeout or at ``stop``. The thread is left behind; it ends with
gloo's own timeout, or when NCCL is aborted. No caller waits for the threads that count, watch and abort: they are plain
threads, whose errors Python writes to standard error.

When an epoch ends, rank 0 writes the reason into the store, as key "over". While a member receives, it watches that key
on a second connection. So the member notices at once that the epoch is over or that the learner has died. Between two
versions no member uses the store. A group that failed is never used again.

Rank 0 may have sent a version before the last member has received it. So each member adds 1 to a counter in the store
when it has received a version or has failed. Rank 0 keeps the group open until the counter has reached all members.

Fails with BroadcastFailed naming the reason; with WeightsCorrupt naming the bucket whose bytes are wrong; with
ConfigError where NCCL or a GPU is missing. Nothing here has run on GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from xxhash import xxh3_64_intdigest

from asyncrl.core.errors import BroadcastFailed, ConfigError, WeightsCorrupt
from asyncrl.core.threads import on_daemon
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Bucket, CollectiveBackend
from asyncrl.weights.segments import compare_checksums
from asyncrl.weights.tensors import mapped, sum_of_words

c10d: Any = torch.distributed
"""torch.distributed as Any: its type stubs lack most of what is used here."""
T = TypeVar("T")

PIECE_BYTES = 64 << 20
"""Bytes that one operation transfers; the timeout is for each operation."""
LATER_S = 5.0
"""Seconds by which the library's own timeout is longer than the timeout of an operation here."""
LOOK_S = 0.1
"""Seconds between two reads of the key "over" while a member receives."""
MEET_S = 0.02
"""Seconds between two reads of the store while the members of a group meet, and while rank 0 waits for the counter."""
ANY = "0"
"""Value of network.ports for any free port."""
BACKLOG = 1024
ENDED = "this worker has ended"


class _Stopped(Exception):
    """The epoch is over; the text is the reason."""


class _Epoch:
    """One rank's part in an epoch: forms the group, broadcasts buckets, and ends.

    One thread forms the group and broadcasts. ``stop`` may be called from any thread, and so may a member's ``end``.
    ``address`` is the one at which gloo listens here.
    """

    def __init__(self, group: BroadcastGroup, rank: int, store: TCPStore, address: str, timeout_s: float) -> None:
        self.group, self.rank, self.timeout_s = group, rank, timeout_s
        self.over = ""
        """Reason that this rank has left the group; empty while it is in it."""
        self._store = c10d.PrefixStore(f"{group.token}/{group.epoch}", store)
        self._address = address
        self._stopped: Future[str] = Future()
        """Result: the reason why the epoch is stopped."""
        self._process_group: Any = None
        """The group; None before ``form`` and after ``end``."""
        self._receives_or_stopped = threading.Event()
        """Set while this member receives, and once the epoch is stopped; ``watch`` waits for it."""
        self._version: int | None = None
        """Version that this member is receiving; None between versions."""
        self.device = torch.device("cuda" if group.backend == "nccl" else "cpu")
        """Device of the bytes; for NCCL the current GPU."""

    def form(self) -> None:
        """Wait until all members are there, and form the group with them; return at once if it is formed.

        If members do not come in time, rank 0 raises TimeoutError that names their ranks.
        """
        if self._process_group is not None:
            return
        try:
            self._run(self._meet, f"the members of epoch {self.group.epoch}")
        except TimeoutError as error:
            if self.rank:
                raise
            ranks = range(1, self.group.world_size)
            missing = [str(rank) for rank in ranks if not self._store.check([f"rank {rank}"])]
            raise TimeoutError(f"{error}; ranks {', '.join(missing)} did not come") from None
        self._process_group = self._run(self._form, f"the group of epoch {self.group.epoch} to be formed")

    def _meet(self) -> None:
        """Wait in the store until all members are there, or the epoch is stopped.

        ``_form`` cannot be interrupted, so it begins only when no member is missing.
        """
        self._store.set(f"rank {self.rank}", "here")
        wanted = ["begin"] if self.rank else [f"rank {rank}" for rank in range(self.group.world_size)]
        while not self._store.check(wanted):
            if self._stopped.done():
                return
            time.sleep(MEET_S)
        if self.rank == 0:
            self._store.set("begin", "")

    def _form(self) -> Any:
        """Make the process group, which blocks until every member does the same. Runs on a thread of ``_run``."""
        timeout = timedelta(seconds=self.timeout_s + LATER_S)
        if self.group.backend == "gloo":
            options = c10d.ProcessGroupGloo._Options()
            options._timeout, options._threads = timeout, 1
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
            return c10d.ProcessGroupGloo(self._store, self.rank, self.group.world_size, options)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(self._store, self.rank, self.group.world_size, options)

    def broadcast(self, memory: Tensor, what: str) -> None:
        """Copy rank 0's ``memory`` into that of all ranks (contiguous, equally large); ``what`` is for errors."""
        for piece in memory.split(PIECE_BYTES):  # type: ignore[no-untyped-call]
            self._run(lambda piece=piece: self._broadcast(piece), what)  # type: ignore[misc]

    def _broadcast(self, memory: Tensor) -> None:
        """Broadcast one piece and wait until this rank has sent or received it. Runs on a thread of ``_run``."""
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        # A local reference keeps the group: its destructor would wait, and hold the interpreter's lock.
        process_group = self._process_group
        if not memory.is_cuda:
            process_group.broadcast([memory], options).wait()
            return
        # Each thread has a current device of its own.
        with torch.cuda.device(memory.device):
            process_group.broadcast([memory], options).wait()
            torch.cuda.current_stream().synchronize()

    def _run(self, work: Callable[[], T], what: str) -> T:
        """Run blocking work on a new thread and return its result.

        Raises TimeoutError after the timeout, and _Stopped once the epoch is stopped; the thread is left behind then.
        """
        done = on_daemon(f"asyncrl: {what}", work)
        futures: list[Future[Any]] = [done, self._stopped]
        try:
            wait(futures, self.timeout_s, FIRST_COMPLETED)
            self.check()
            if not done.done():
                raise TimeoutError(f"waited {self.timeout_s:g} s for {what}")
            return done.result()
        except RuntimeError:
            # The library reports only that a connection broke. Give ``watch`` the time of ten reads for the reason.
            wait([self._stopped], 10 * LOOK_S)
            self.check()
            raise
        finally:
            # The error refers to this frame, which would keep group and memory (core/threads.py).
            del done, futures

    def check(self) -> None:
        """Raise _Stopped if the epoch is stopped."""
        if self._stopped.done():
            raise _Stopped(self._stopped.result())

    def begin_receiving(self, version: int) -> None:
        """Member: let ``watch`` read the store until ``end_receiving`` or ``end``."""
        self._version = version
        self._receives_or_stopped.set()

    def end_receiving(self) -> None:
        """Member: if it was receiving a version, add 1 to that version's counter, without waiting for the store."""
        version, self._version = self._version, None
        if version is None:
            return
        self._receives_or_stopped.clear()
        # ``stop`` may have set the event just before; without it ``watch`` would wait for ever.
        if self._stopped.done():
            self._receives_or_stopped.set()
        # On a thread, since the host of the store may be frozen.
        threading.Thread(target=self._count, args=(version,), name="asyncrl: count of members", daemon=True).start()

    def _count(self, version: int) -> None:
        """Member: add 1 to the counter of ``version``."""
        # The library raises RuntimeError if the learner has ended; then nobody reads the counter.
        with contextlib.suppress(RuntimeError):
            self._store.add(_received(version), 1)

    def wait_for_members(self, version: int) -> None:
        """Rank 0: wait until every member has received ``version`` or has failed. Raises TimeoutError, _Stopped."""
        key, members = _received(version), self.group.world_size - 1
        until = time.monotonic() + self.timeout_s
        while (count := self._store.add(key, 0)) < members:
            wait([self._stopped], MEET_S)
            self.check()
            if time.monotonic() > until:
                missing = f"{members - count} of {members} members"
                raise TimeoutError(f"waited {self.timeout_s:g} s for {missing} to receive version {version}")
        self._store.delete_key(key)

    def watch(self, store: TCPStore) -> None:
        """Thread of a member: while it receives, read the key "over", and ``stop`` the epoch once rank 0 has set it.

        Also stops it if the connection breaks, or if the watch itself fails: the member could no longer notice the end.
        ``store`` is a connection for this thread alone.
        """
        try:
            watched = c10d.PrefixStore(f"{self.group.token}/{self.group.epoch}", store)
            while True:
                self._receives_or_stopped.wait()
                if self._stopped.done():
                    return
                if watched.check(["over"]):
                    break
                time.sleep(LOOK_S)
            reason = f"the learner: {watched.get('over').decode(errors='replace')}"
        except RuntimeError:
            reason = "the learner is gone"
        except Exception as error:
            reason = f"the watch of the store failed: {error!r}"
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """Make the present operation and every later one raise _Stopped. The first reason counts. From any thread."""
        with contextlib.suppress(InvalidStateError):
            self._stopped.set_result(reason)
        self._receives_or_stopped.set()

    @contextlib.contextmanager
    def ended_by_errors(self, version: int) -> Iterator[None]:
        """Context in which every error ends the epoch; errors of the transfer become BroadcastFailed."""
        try:
            yield
        except WeightsCorrupt as error:
            self.end(str(error))
            raise
        except (_Stopped, OSError, RuntimeError) as error:
            self.end(str(error))
            raise BroadcastFailed(version, str(error)) from error
        except BaseException as error:
            self.end(f"{'it' if self.rank else 'the learner'} failed: {error!r}")
            raise

    def end(self, reason: str) -> None:
        """Leave the group for this ``reason``; later calls do nothing.

        Rank 0 writes the reason into the store for the members. A member that was receiving is counted, so that rank 0
        does not wait for it.
        """
        if self.over:
            return
        self.over = reason
        self.stop(reason)
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.set("over", reason)
        else:
            self.end_receiving()
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            # On a thread: aborting may take long, as may the destructor of a group with an operation under way.
            threading.Thread(target=process_group.abort, name="asyncrl: end of a group", daemon=True).start()


def _received(version: int) -> str:
    """Key in the store of the counter of members that have received ``version`` or have failed."""
    return f"received {version}"


class Sender:
    """Rank 0 of every group, in the learner. One thread sends; ``abort`` may be called from another."""

    def __init__(self, backend: CollectiveBackend, host: str, timeout_s: float, ports: str = ANY) -> None:
        """Open the store at ``host``, an address of this host, on one of ``ports`` (as network.ports)."""
        if backend == "nccl" and not (torch.cuda.is_available() and c10d.is_nccl_available()):
            raise ConfigError(["weights.transport: nccl needs a GPU and NCCL here; choose another transport"])
        self.host, self._timeout_s = host, timeout_s
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._store: TCPStore | None = open_store(host, timeout_s, ports)
        self.port: int = self._store.port
        """Port at which members meet."""
        self.token = secrets.token_hex(16)
        """Secret prefix of all groups' keys; members get it from the parameter server."""
        self._epoch: _Epoch | None = None
        """The newest epoch, which may be over."""

    def send(self, group: BroadcastGroup, version: int, buckets: Iterable[tuple[Bucket, int]]) -> None:
        """Broadcast ``version`` to ``group``: each bucket as soon as ``buckets`` yields it with its descriptor.

        Blocks until every member has received all or has failed. The caller closes the descriptors. Raises
        BroadcastFailed; any error, also one of ``buckets``, ends the epoch.
        """
        epoch = self._enter(group, version)
        with epoch.ended_by_errors(version):
            epoch.form()
            for index, (bucket, descriptor) in enumerate(buckets):
                epoch.check()
                memory = mapped(descriptor, bucket.size).to(self._device)
                checksum = sum_of_words(memory) if group.backend == "nccl" else bucket.checksum
                header = np.array([version, index, bucket.size, checksum], np.uint64).view(np.int64)
                what = f"bucket {index} of version {version} to be broadcast"
                epoch.broadcast(torch.from_numpy(header).to(self._device), what)
                epoch.broadcast(memory, what)
            epoch.wait_for_members(version)

    def _enter(self, group: BroadcastGroup, version: int) -> _Epoch:
        """Return the epoch of ``group``, the present one or a new one, which ends the present one.

        Raises BroadcastFailed if the sender is closed or the epoch over, or if another ``group`` has no newer epoch.
        """
        epoch = self._epoch
        if self._store is None:
            raise BroadcastFailed(version, "the sender is closed")
        if epoch is None or epoch.group.epoch < group.epoch:
            if epoch is not None:
                epoch.end(f"epoch {epoch.group.epoch} is over, the next is {group.epoch}")
            epoch = self._epoch = _Epoch(group, 0, self._store, self.host, self._timeout_s)
        elif epoch.group != group:
            raise BroadcastFailed(version, f"{group} cannot follow {epoch.group}")
        elif epoch.over:
            raise BroadcastFailed(version, f"epoch {group.epoch} is over: {epoch.over}")
        return epoch

    def abort(self, reason: str) -> None:
        """Make a broadcast under way fail; a later epoch can still be sent to. From any thread."""
        if (epoch := self._epoch) is not None:
            epoch.stop(reason)

    def close(self) -> None:
        """End the epoch and close the store. Called on the thread that sends; may be repeated."""
        if self._epoch is not None:
            self._epoch.end("the learner has ended")
        # Without a reference the store ends, and members no longer wait for it.
        self._epoch = self._store = None


class Receiver:
    """Receives all broadcasts of one engine worker. One thread receives; ``close`` may be called from another."""

    def __init__(self) -> None:
        self._epoch: _Epoch | None = None
        """The epoch joined last, which may be over."""
        self._ended = threading.Event()
        """Set by ``close``."""

    def receive(self, part: BroadcastPart, worker: int) -> Generator[Tensor]:
        """Join the group if necessary, and yield the verified bytes of every bucket, in order: uint8 [size].

        ``worker`` is the number of this worker within its replica, from 0. Raises BroadcastFailed, WeightsCorrupt. If
        the caller does not take all buckets, the worker leaves the group.
        """
        epoch = self._enter(part, worker)
        with epoch.ended_by_errors(part.version):
            epoch.begin_receiving(part.version)
            epoch.form()
            buckets = part.manifest.buckets
            for index, bucket in enumerate(buckets):
                memory = self._bucket(epoch, part, index, bucket.size)
                if index == len(buckets) - 1:
                    # Every bucket is received: the epoch may end while the caller uses the last one.
                    epoch.end_receiving()
                yield memory

    def _enter(self, part: BroadcastPart, worker: int) -> _Epoch:
        """Return the epoch of ``part``, the present one or a new one with its own connections to the store.

        Raises BroadcastFailed if the epoch is over, the learner cannot be reached, or this receiver is closed.
        """
        rank, group, epoch = part.first_rank + worker, part.group, self._epoch
        if self._ended.is_set():
            raise BroadcastFailed(part.version, ENDED)
        if epoch is not None and (epoch.group, epoch.rank) == (group, rank):
            if epoch.over:
                raise BroadcastFailed(part.version, f"epoch {group.epoch} is over: {epoch.over}")
            return epoch
        if epoch is not None:
            epoch.end("it has left for another group")
        try:
            store, watched = (_connect(group, part.timeout_s) for _ in range(2))
            address = _address_towards(group.host, group.port)
        except (OSError, RuntimeError) as error:
            raise BroadcastFailed(part.version, f"the learner cannot be reached: {error}") from error
        epoch = self._epoch = _Epoch(group, rank, store, address, part.timeout_s)
        threading.Thread(target=epoch.watch, args=(watched,), name="asyncrl: end of an epoch", daemon=True).start()
        # Another thread may have called ``close`` meanwhile.
        if self._ended.is_set():
            epoch.end(ENDED)
            raise BroadcastFailed(part.version, ENDED)
        return epoch

    @staticmethod
    def _bucket(epoch: _Epoch, part: BroadcastPart, index: int, size: int) -> Tensor:
        """Receive a bucket. Raises RuntimeError for an unexpected header, WeightsCorrupt for wrong bytes."""
        what = f"bucket {index} of version {part.version}"
        header = torch.zeros(4, dtype=torch.int64, device=epoch.device)
        epoch.broadcast(header, what)
        version, number, bytes_, checksum = header.cpu().numpy().view(np.uint64).tolist()
        if (version, number, bytes_) != (part.version, index, size):
            came = f"bucket {number} of version {version} with {bytes_} bytes"
            raise RuntimeError(f"{came} came in place of {what} with {size} bytes")
        if epoch.group.backend == "nccl":
            memory = torch.empty(size, dtype=torch.uint8, device=epoch.device)
            epoch.broadcast(memory, what)
            if (found := sum_of_words(memory)) != checksum:
                problem = f"its sum is {found:#018x} instead of {checksum:#018x}"
                raise WeightsCorrupt(problem, version=version, bucket=index)
            return memory
        # numpy allocates huge pages, torch does not: a page fault for each 4 KiB costs more than the transfer.
        memory = torch.from_numpy(np.empty(size, np.uint8))
        epoch.broadcast(memory, what)
        compare_checksums(xxh3_64_intdigest(memory.numpy().data), checksum, version=version, index=index)
        return memory

    def close(self) -> None:
        """Leave the group, which fails a broadcast under way, and refuse later ones.

        May be called from any thread, and repeated.
        """
        self._ended.set()
        if self._epoch is not None:
            self._epoch.end(ENDED)


# --- the store ---


def open_store(host: str, timeout_s: float, ports: str = ANY) -> TCPStore:
    """Rank 0: open a store on a free one of ``ports``, bound to the address ``host`` alone.

    Its ``port`` is the one that was bound. Raises OSError if none is free.
    """
    with listen(host, ports) as listener:
        port = listener.getsockname()[1]
        # The store takes over the bound descriptor, so no other process can get the port in between.
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def listen(host: str, ports: str = ANY) -> socket.socket:
    """Open a socket that listens at the highest free one of ``ports`` (as network.ports), bound to ``host`` alone.

    The lowest port is the controller's and is taken last, because a restarted controller needs it again. Raises OSError
    naming the range if no port in it is free.
    """
    low, _, high = ports.partition("-")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in reversed(range(int(low), int(high or low) + 1)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As ZeroMQ does: a connection that has just ended does not block the port, and two listeners cannot share
            # a port. For port 0 the option is off, so that the kernel chooses a port that is wholly free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise OSError(errno.EADDRINUSE, f"no port of {ports} at {host} is free; widen network.ports")


def _connect(group: BroadcastGroup, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)


def _address_towards(host: str, port: int) -> str:
    """Return the address of this host from which a connection to ``host`` starts."""
    with socket.create_connection((host, port), timeout=10.0) as connection:
        address: str = connection.getsockname()[0]
        return address
