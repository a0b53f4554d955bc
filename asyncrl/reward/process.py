"""One worker process, seen from the pool: started, spoken to, watched, ended.

Works by callbacks of the event loop alone. Invariant: ``on_end`` is called exactly once for each process
that was started, after it has been reaped, and nothing else is called after that. Must be made in a thread
that outlives the process, for Linux ends a child with the thread that started it. Fails with OSError when
there is no process to be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec
import psutil

from asyncrl.reward.frames import (
    MAX_RESULT_BYTES,
    NO_MEMORY_EXIT,
    NO_SOCKET_EXIT,
    READ_BYTES,
    FrameReader,
    Ready,
    Result,
    Setup,
    framed,
)
from asyncrl.reward.output import Output

REAP_INTERVAL_S = 0.005
REAP_GRACE_S = 1.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

SOCKET_CLOSED = "closed the socket of its worker process, which was not its own"

_setup_encoder = msgspec.msgpack.Encoder()


class WorkerProcess:
    """A process that runs ``python -m asyncrl.reward.worker``, in a process group of its own.

    ``on_ready`` gets its Ready, ``on_result`` each Result, ``on_end`` what became of it, in words. ``output`` is what
    it prints, ``max_output_bytes`` of it a call, and drained by this object; ``on_output`` says that there is more.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        max_output_bytes: int,
        on_output: Callable[[WorkerProcess], None],
        on_ready: Callable[[WorkerProcess, Ready], None],
        on_result: Callable[[WorkerProcess, Result], None],
        on_end: Callable[[WorkerProcess, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_ready, self._on_result, self._on_end = on_ready, on_result, on_end
        self._on_output = on_output
        self._ready_decoder = msgspec.msgpack.Decoder(Ready)
        self._result_decoder = msgspec.msgpack.Decoder(Result)
        self._frames = FrameReader(MAX_RESULT_BYTES)
        self._outgoing = memoryview(b"")
        self._is_ready = False
        self._fault = ""
        self.killed = False
        self.output = Output(max_output_bytes)
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -u: what is printed is out before the task is answered.
                    [sys.executable, "-u", "-m", "asyncrl.reward.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self.output.write_fd,
                    stderr=self.output.write_fd,
                    env={**os.environ, **ONE_THREAD},
                    pass_fds=[theirs.fileno()],
                    # Of its own, so that nothing that the function starts and lets go of is missed at the end; its
                    # session stays the actor's, by which the node agent finds what a killed actor leaves behind.
                    process_group=0,
                )
            except BaseException:
                self._socket.close()
                self.output.close()
                raise
            finally:
                self.output.started()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_reader(self.output.read_fd, self._drain)
        self.send(_setup_encoder.encode(setup))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it can no longer be spoken to."""
        return self._socket.fileno() < 0

    def send(self, *bodies: bytes) -> None:
        """Send frames, as one write where the socket takes it."""
        if self.ended:
            return
        frames = framed(*bodies)
        if self._outgoing:
            self._outgoing = memoryview(b"".join((self._outgoing, frames)))
            return
        sent = self._write(frames)
        if sent < len(frames) and not self.ended:
            self._outgoing = memoryview(frames)[sent:]
            self._loop.add_writer(self._socket, self._write_on)

    def _read(self) -> None:
        while not self.ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            try:
                for frame in self._frames.feed(data):
                    self._take(frame)
            except (ValueError, msgspec.MsgspecError) as error:
                # The function has written to a descriptor that is not its own.
                self.kill(f"sent what is no result: {error}")
            if len(data) < READ_BYTES:
                return

    def hang_up(self) -> None:
        """Let an idle process end by itself."""
        if not self.ended:
            self._hang_up()

    def kill(self, reason: str) -> None:
        """End the process and all that it has started, now. ``reason`` is what ``on_end`` will say."""
        self._fault = self._fault or reason
        self.killed = True
        kill_living(self.descendants())
        self._kill_group()
        if not self.ended:
            self._hang_up()

    def descendants(self) -> list[psutil.Process]:
        """The processes that it has started, as far as they still belong to it."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _kill_group(self) -> None:
        """As long as it is not reaped no other group can have its number."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _drain(self) -> None:
        if not self.output.drain(rounds=1):
            # Closed by everybody who held it.
            self._loop.remove_reader(self.output.read_fd)
        self._on_output(self)

    def _take(self, frame: bytes | bytearray) -> None:
        if self.ended:
            return
        if self._is_ready:
            self._on_result(self, self._result_decoder.decode(frame))
        else:
            ready = self._ready_decoder.decode(frame)
            self._is_ready = True
            self._on_ready(self, ready)

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._hang_up()
            return 0

    def _write_on(self) -> None:
        self._outgoing = self._outgoing[self._write(self._outgoing) :]
        if not self._outgoing and not self.ended:
            self._loop.remove_writer(self._socket)

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._outgoing = memoryview(b"")
        self._socket.close()
        self._loop.call_soon(self._reap, self._loop.time() + REAP_GRACE_S)

    def _reap(self, kill_at: float) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            # Whom it has left behind; its number is its own until it is reaped.
            self._kill_group()
            code = self._process.wait()
            self._loop.remove_reader(self.output.read_fd)
            self.output.drain()
            self._on_end(self, self._fault or _describe_exit(code))
            self.output.close()
            return
        if self._loop.time() >= kill_at:
            # It has closed its socket but lives on; from here on, it is only a matter of time.
            self._fault = self._fault or f"{SOCKET_CLOSED}; the process was killed"
            kill_living(self.descendants())
            self._kill_group()
        self._loop.call_later(REAP_INTERVAL_S, self._reap, kill_at)


def kill_living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Send SIGKILL to those that still live, and return them. One that has taken over a number is not meant."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                living.append(process)
    return living


def _describe_exit(code: int) -> str:
    if code == NO_SOCKET_EXIT:
        return SOCKET_CLOSED
    if code == NO_MEMORY_EXIT:
        return "left its worker process without memory (reward.max_memory_bytes)"
    if code == -signal.SIGKILL:
        return "died with its worker process (SIGKILL, as by the kernel when memory runs out)"
    if code >= 0:
        return f"ended its worker process (exit code {code})"
    with contextlib.suppress(ValueError):
        return f"died with its worker process ({signal.Signals(-code).name})"
    return f"died with its worker process (signal {-code})"
