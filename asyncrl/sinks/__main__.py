"""The process of the sinks: ``python -m asyncrl.sinks FD TEMPORARY``.

Reads records from the socket FD and hands each to the lane of every sink; it does nothing that could wait for a
sink. Ends with the socket, that is with the run or with the controller: the sinks then have ``flush_s`` to bring out
what they hold, all that they have started is killed, and the folder TEMPORARY is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil
import setproctitle

from asyncrl.sinks.lane import Lane, Sink
from asyncrl.sinks.records import READ_BYTES, Line, Record, Report, Setup, Stream
from asyncrl.snapshot import Snapshot

REPORT_S = 1.0
NICENESS = 10
"""Niceness of the process: training comes first."""
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Serve the controller at the other end of the socket whose file descriptor is the first argument; the second is
    the folder for temporary files.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    # So that what a service of a library leaves behind is ours to end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Schedulers signal the whole job; the run's end is what counts here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    os.nice(NICENESS)
    setproctitle.setproctitle("asyncrl sinks")
    try:
        with contextlib.suppress(ConnectionError):
            _serve(connection)
    finally:
        _end_descendants()
        # The controller does so too, but may be dead.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
    # Threads that hang in a library, and what libraries do at the end of a process, are not waited for.
    sys.stderr.flush()
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    records: Stream[Record] = Stream(Record)
    snapshots = msgspec.msgpack.Decoder(Snapshot)
    lanes: list[Lane] = []
    flush_s = 0.0
    told = Report()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        if poll.poll(REPORT_S * 1000):
            data = connection.recv(READ_BYTES)
            if not data:
                break
            for record in records.feed(data):
                if isinstance(record, Setup):
                    flush_s = record.flush_s
                    lanes = [Lane(sink) for sink in _sinks(record)]
                    for lane in lanes:
                        lane.start()
                else:
                    item = record if isinstance(record, Line) else snapshots.decode(record.snapshot)
                    for lane in lanes:
                        lane.put(item)
        told = _tell(connection, lanes, told)
    until = time.monotonic() + flush_s
    for lane in lanes:
        lane.end()
    for lane in lanes:
        if not lane.join(max(0.0, until - time.monotonic())):
            lane.trouble = lane.trouble or "did not end in time"
    _tell(connection, lanes, told)


def _sinks(setup: Setup) -> Sequence[Sink]:
    """Sinks that are configured. Each imports its library when it is opened."""
    from asyncrl.sinks.prometheus import PrometheusSink
    from asyncrl.sinks.tensorboard import TensorBoardSink
    from asyncrl.sinks.wandb import WandbSink

    sinks: list[Sink] = []
    if setup.tensorboard:
        sinks.append(TensorBoardSink(setup))
    if setup.wandb is not None:
        sinks.append(WandbSink(setup, setup.wandb))
    if setup.prometheus is not None:
        sinks.append(PrometheusSink(setup, setup.prometheus))
    return sinks


def _tell(connection: socket.socket, lanes: Sequence[Lane], told: Report) -> Report:
    """Send a report, if it has changed. The controller always listens."""
    report = Report(
        dropped=sum(lane.dropped for lane in lanes),
        lost=sum(lane.lost for lane in lanes),
        trouble={lane.name: lane.trouble for lane in lanes if lane.trouble},
        addresses={lane.name: lane.address for lane in lanes if lane.address},
    )
    if report != told:
        connection.sendall(msgspec.msgpack.encode(report))
    return report


def _end_descendants() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
