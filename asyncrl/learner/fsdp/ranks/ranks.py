"""The ranks of the learner: rendezvous, commands of rank 0, exchanges of bytes; torch.distributed without pickle.

Rank 0 opens a TCPStore on a port that it has bound itself; the other ranks learn the port from the controller. The
store is the rendezvous of the process group and carries the commands (CommandLine). A command comes before the
collectives that it announces, and holds everything that a rank needs to take part: ranks decide nothing themselves. No
collective runs between two commands, so the collective timeout does not limit the wait for the next one. A command that
cannot be decoded ends the rank, since all ranks run one release.

With learner.context_parallel several consecutive ranks get the same micro-batches (model/packed_row.py).

Micro-batches travel as buffers of bytes over gloo, which the process group has with and without CUDA.

Fails with DeadlineExceeded when ranks do not meet, or do not enter a collective, in time; otherwise with torch's
RuntimeError and a note on where. A wait that torch does not end, as under NCCL, ends the process (hang_watch.py).
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from asyncrl.learner.algorithm.batch import OptimizerUpdatePlan, StepPlan
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.fsdp.model.packed_row import join_row_group
from asyncrl.learner.fsdp.ranks.hang_watch import HangWatch, in_words

NCCL_AFTER_S = 60.0
"""Seconds after the limit when NCCL's own watchdog ends the process, if ours has not."""
LEAVE_WAIT_S = 5.0
"""Seconds that rank 0 gives the others to leave."""
_LOG = logging.getLogger(__name__)
IDLE_WAIT_S = 300.0
"""Seconds of one wait of a rank for the next command; the rank then waits again."""


class TermShape(msgspec.Struct, frozen=True):
    """Sizes of one term of an update's loss, the same on all ranks: of the policy's loss, or of the supervised one."""

    micro_batches: int
    """Micro-batches of each rank."""
    denominator: float
    """Number that divides the sum of the losses of all ranks."""
    sequences: int
    """Sequences of all ranks."""


class OptimizerUpdateShape(msgspec.Struct, frozen=True):
    """Sizes of an update, the same on all ranks. A rank has the policy's micro-batches first, then the supervised."""

    policy: TermShape
    supervised: TermShape | None = None
    coefficient: float = 0.0
    """Factor of the supervised loss in the sum of the two."""
    recorded: int = 0
    """Number of recorded sequences, the first of the policy's loss: rank 0 collects the scores of their tokens."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank, policy's and supervised ones."""
        return self.policy.micro_batches + (self.supervised.micro_batches if self.supervised is not None else 0)


def shape_of_update(update: OptimizerUpdatePlan) -> OptimizerUpdateShape:
    """Return the sizes of an update that rank 0 sends to the other ranks."""
    policy, term = TermShape(len(update.ranks[0]), update.denominator, len(update.sequences)), update.supervised
    recorded = len(update.recorded)
    if term is None:
        return OptimizerUpdateShape(policy, recorded=recorded)
    supervised = TermShape(len(term.ranks[0]), term.denominator, len(term.places))
    return OptimizerUpdateShape(policy, supervised, term.coefficient, recorded)


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step; a buffer of micro-batches follows for each rank."""

    buffer_bytes: list[int]
    """Bytes of each rank's buffer."""
    updates: list[OptimizerUpdateShape]
    temperature: float
    fresh: bool
    """Whether the weights before the step are the newest published ones."""
    warm: bool
    """Whether this is a supervised step before the first of the run."""


class Reference(msgspec.Struct, frozen=True, tag=True):
    """Take part in a scoring pass by the reference; a buffer of micro-batches follows for each rank."""

    buffer_bytes: list[int]
    """Bytes of each rank's buffer."""
    tokens: int
    """Scored tokens of the rank that has the most."""
    temperature: float


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Take part in gathering the weights."""

    purpose: Literal["version", "export"]


class ScoreProbe(msgspec.Struct, frozen=True, tag=True):
    """Take part in scoring the probe."""

    sequences: list[ProbeSequence]


class See(msgspec.Struct, frozen=True, tag=True):
    """Check whether a file is there."""

    path: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Take part in writing a checkpoint."""

    folder: str
    renew: bool
    """Whether the ranks first create a new process group for saves."""


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Take part in reading a checkpoint."""

    folder: str


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Command: let the engine have this rank's GPU until the next command."""


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """End: no more commands follow."""


Command = Train | Reference | Gather | ScoreProbe | See | Save | LoadCheckpoint | Rest | StopRank
DECODER = msgspec.msgpack.Decoder(Command)


def pack(batches: Sequence[MicroBatch]) -> np.ndarray:
    """Serialise one or more micro-batches into a buffer, uint8, in NumPy's file format.

    First come the lengths of all arrays, int64 [fields, micro-batches]. Then one array for each field of MicroBatch
    holds that field of all micro-batches, one after the other. Few large arrays are faster: reading the header of an
    array takes longer than copying a row of tokens.
    """
    columns = [[getattr(batch, item.name) for batch in batches] for item in fields(MicroBatch)]
    stream = io.BytesIO()
    np.save(stream, np.array([[len(array) for array in column] for column in columns]))
    for column in columns:
        np.save(stream, np.concatenate(column))
    return np.frombuffer(stream.getbuffer(), np.uint8)


def unpack(buffer: np.ndarray) -> list[MicroBatch]:
    """Return the micro-batches of a buffer that ``pack`` made, with the same types, shapes and bits."""
    stream = io.BytesIO(buffer.data)
    columns = [np.split(np.load(stream), np.cumsum(lengths)[:-1]) for lengths in np.load(stream)]
    return [MicroBatch(*arrays) for arrays in zip(*columns, strict=True)]


def of_step(plan: StepPlan, row_group: int) -> list[MicroBatch]:
    """Return a row group's micro-batches of a step, update by update; in each the policy's, then the supervised."""
    terms = [term for update in plan.updates for term in (update, update.supervised) if term is not None]
    return [batch for term in terms for batch in term.ranks[row_group]]


class Ranks:
    """Connects this rank with the others, for collectives. All ranks create it together; it blocks until all have."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        port: int,
        *,
        device: torch.device,
        timeout_s: float,
        replicas: int = 1,
        context_parallel: int = 1,
        store: TCPStore | None = None,
    ) -> None:
        """Join the rendezvous at ``host``:``port``. Raises DeadlineExceeded when a rank is late.

        ``store`` is given on rank 0 alone: the store that weights.broadcast.open_store has opened there. ``replicas``,
        the copies of the model, and ``context_parallel``, the ranks that share rows, are divisors of ``world_size``.
        """
        assert (store is not None) == (rank == 0)
        self.rank, self.world_size, self.device = rank, world_size, device
        self.replicas, self.shards = replicas, world_size // replicas
        """Copies of the model, and ranks per copy; the first copy is on the first ranks."""
        self.timeout_s = timeout_s
        if host in ("127.0.0.1", "localhost", "::1"):
            # Otherwise gloo looks up this host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            self._store = store if store is not None else self._client(host, port)
            # Waiting and interrupting need clients of their own: a waiting client blocks its connection.
            self._command_client = self._client(host, port)
            self._interrupter = self._client(host, port)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s + (NCCL_AFTER_S if device.type == "cuda" else 0.0)),
                device_id=device if device.type == "cuda" else None,
            )
        except (DistNetworkError, DistStoreError) as error:
            raise DeadlineExceeded(
                f"learner/{rank}",
                f"the {world_size} ranks",
                f"rendezvous at {host}:{port}",
                timeout_s,
                str(error),
            ) from error
        self.row_group = join_row_group(context_parallel, timeout_s)
        """The ranks that share this rank's rows; None if it has rows of its own."""
        self.commands = CommandLine(rank, world_size, client=self._command_client, interrupter=self._interrupter)
        """Carries the commands of rank 0; exists until ``close``."""
        self._watch: HangWatch | None = None
        """The watch for hangs; None if there is one rank, and after ``close``."""
        if world_size > 1:
            self._watch = HangWatch(rank, world_size, self._client(host, port), device=device, timeout_s=timeout_s)

    def _client(self, host: str, port: int) -> TCPStore:
        """Open a new connection to the ranks' store."""
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.timeout_s), wait_for_workers=False)

    def scatter(self, buffers: Sequence[np.ndarray] | None, size: int, what: str) -> np.ndarray:
        """Send each rank its buffer from rank 0. Returns this rank's, uint8.

        Rank 0 passes all ``buffers``, in order of rank; each other rank passes None and the ``size`` of its own.
        """
        with self.waiting(what):
            if buffers is not None:
                sent = [dist.isend(torch.from_numpy(buffers[r]), r) for r in range(1, self.world_size)]
                for work in sent:
                    assert work is not None
                    work.wait()
                return buffers[0]
            buffer = torch.empty(size, dtype=torch.uint8)
            dist.recv(buffer, 0)
            return buffer.numpy()

    def collect(self, own: np.ndarray, sizes: Sequence[int] | None, what: str) -> list[np.ndarray]:
        """Send arrays to rank 0, which gets those of all ranks, in order; the other ranks get an empty list.

        ``own`` is float32 [2, size of the rank]. Rank 0 passes all ``sizes``, each other rank None. An empty array is
        not sent.
        """
        with self.waiting(what):
            if sizes is None:
                if own.size:
                    dist.send(torch.from_numpy(own), 0)
                return []
            found = [own]
            for rank, size in enumerate(sizes[1:], start=1):
                found.append(np.empty((2, size), np.float32))
                if size:
                    dist.recv(torch.from_numpy(found[-1]), rank)
            return found

    def all_gather(self, values: Sequence[float], what: str) -> np.ndarray:
        """Exchange equally many numbers among all ranks. Returns float64 [world size, len(values)] on each."""
        with self.waiting(what):
            own = torch.tensor(values, dtype=torch.float64)
            gathered = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(gathered, own)
            return torch.stack(gathered).numpy()

    def agree(self, problem: str | None, what: str) -> list[str]:
        """Exchange problems, each rank its own or None. Returns all of them on each rank, in order; [] without any."""
        answers = self.exchange((problem or "").encode(), what)
        return [answer.decode() for answer in answers if answer]

    @property
    def replica(self) -> int:
        """The copy of the model that this rank belongs to."""
        return self.rank // self.shards

    def another_group(self, timeout_s: float, *, members: int | None = None) -> dist.ProcessGroup | None:
        """All ranks together: create a process group of the first ``members`` ranks, for collectives on another thread.

        By default all ranks are members. Returns None if there is one member only, and on ranks that are not members.
        """
        members = members or self.world_size
        if members == 1:
            return None
        with self.waiting("another process group"):
            group = dist.new_group(range(members), backend="gloo", timeout=timedelta(seconds=timeout_s))
        return group if isinstance(group, dist.ProcessGroup) else None

    def exchange(
        self, data: bytes, what: str, group: dist.ProcessGroup | None = None, timeout_s: float | None = None
    ) -> list[bytes]:
        """All ranks together: exchange ``data``. Returns that of every rank, in order of rank.

        With a ``group`` from ``another_group``, whose limit is ``timeout_s``, any thread may call this. The collectives
        of the training may then run on another thread, but nothing else may use the group meanwhile.
        """
        if self.world_size == 1:
            return [data]
        with self.waiting(what, timeout_s):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
            longest = max(int(size) for size in sizes)
            if longest == 0:
                return [b""] * self.world_size
            # all_gather needs tensors of one size, so the data of each rank are padded to the longest.
            own = torch.zeros(longest, dtype=torch.uint8)
            own.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            gathered = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(gathered, own, group=group)
            return [bytes(padded[: int(size)].numpy()) for padded, size in zip(gathered, sizes, strict=True)]

    @contextmanager
    def waiting(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Context around collectives, which ``what`` names: watches for hangs, and names the ranks in errors.

        A timeout becomes DeadlineExceeded; any other RuntimeError gets a note with ``what``. ``timeout_s`` is given if
        the process group has another limit than learner.collective_timeout_s.
        """
        blamed: list[str] = []
        try:
            with self._watch.wait(what) if self._watch is not None else nullcontext():
                try:
                    yield
                except RuntimeError:
                    # Read here: the watch answers for the present wait, which ends with this block.
                    blamed = self._watch.blamed() if self._watch is not None else []
                    raise
        except RuntimeError as error:
            # torch raises RuntimeError for timeouts as for other failures; only the text differs.
            if "timed out" in str(error).lower():
                raise DeadlineExceeded(
                    f"learner/{self.rank}",
                    in_words(blamed),
                    what,
                    timeout_s or self.timeout_s,
                    "see their logs" + ("" if timeout_s else "; the limit is learner.collective_timeout_s"),
                ) from error
            error.add_note(f"learner/{self.rank} of {self.world_size} ranks, {what}")
            raise

    def note_progress(self) -> None:
        """Record progress between two of many collectives in a wait, so that the limit holds for each of them."""
        if self._watch is not None:
            self._watch.note_progress()

    def close(self) -> None:
        """Leave the group. Rank 0, which holds the store, lets the others leave first, for a limited time."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.rank:
            self._command_client.set(f"left/{self.rank}", "")
        else:
            try:
                self._command_client.wait(
                    [f"left/{rank}" for rank in range(1, self.world_size)], timedelta(seconds=LEAVE_WAIT_S)
                )
            except DistStoreError:
                _LOG.warning("not all ranks of the learner left within %.0f s", LEAVE_WAIT_S)
        dist.destroy_process_group()
        del self.commands, self._store, self._command_client, self._interrupter


class CommandLine:
    """Carries the commands of rank 0 to all other ranks, in order, through the store of their rendezvous.

    Each rank has one, which one thread uses, except for ``interrupt``. Command n for rank r is the value of the key
    ``command/r/n``. A rank waits for its next key without a limit, in repeated waits of IDLE_WAIT_S; no collective runs
    meanwhile. The wait ends at once when the key is set, when the connection to rank 0 breaks, or when ``interrupt``
    sets the key. Invariant: each command is received once, in order, however late, and then deleted from the store.
    """

    def __init__(self, rank: int, world_size: int, *, client: TCPStore, interrupter: TCPStore) -> None:
        """``next`` blocks the connection of ``client`` while it waits, so ``interrupt`` uses ``interrupter``."""
        self._rank, self._world_size = rank, world_size
        self._client, self._interrupter = client, interrupter
        self._count = 0
        """Index, from 1, of the newest command that this rank has sent, or has begun to wait for; 0 before any."""
        self._interrupted = threading.Event()

    def send(self, command: Command) -> None:
        """Rank 0: send a command to every other rank."""
        self._count += 1
        body = msgspec.msgpack.encode(command)
        for rank in range(1, self._world_size):
            self._client.set(_key(rank, self._count), body)  # type: ignore[arg-type]

    def next(self) -> Command | None:
        """Ranks above 0: wait for the next command and return it; None once interrupted.

        Raises ActorFailed when rank 0 is gone.
        """
        self._count += 1
        key = _key(self._rank, self._count)
        while not self._interrupted.is_set():
            try:
                self._client.wait([key], timedelta(seconds=IDLE_WAIT_S))
                body = bytes(self._client.get(key))
                # The receiver deletes the key: rank 0 does not wait until a command is received.
                self._client.delete_key(key)
                # ``interrupt`` sets an empty value.
                return DECODER.decode(body) if body else None
            except DistStoreError:
                # The wait of IDLE_WAIT_S has ended without a command: wait again.
                continue
            except DistNetworkError as error:
                raise ActorFailed("learner/0", f"gone while learner/{self._rank} awaited its next command") from error
        return None

    def interrupt(self) -> None:
        """From any thread: let ``next`` return None, at once if it is waiting."""
        self._interrupted.set()
        # ``compare_set`` keeps a command that rank 0 has set, so that no command is lost. ``next`` counts up before it
        # waits. So it either waits for the first of the two keys, or is about to wait for the second.
        for count in (self._count, self._count + 1):
            self._interrupter.compare_set(_key(self._rank, count), "", "")


def _key(rank: int, count: int) -> str:
    return f"command/{rank}/{count}"
