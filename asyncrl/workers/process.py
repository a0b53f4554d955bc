"""One worker process, as its actor sees it: starts it, exchanges frames (worker.py), reads its output, ends it.

Works by callbacks of the event loop. Invariant: ``on_end`` is called exactly once for each started process, after it
was reaped, and is the last callback. Create it in a thread that outlives the process: Linux ends a warden with
the thread that started it. Fails with OSError if no process can be started.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import psutil

from asyncrl.rpc.linux import children_of, kill_child, kill_group, session_members
from asyncrl.workers import warden
from asyncrl.workers.confinement import Confinement
from asyncrl.workers.isolation import NOT_ISOLATED_EXIT
from asyncrl.workers.worker import NO_MEMORY_EXIT, NO_SOCKET_EXIT, READ_BYTES, FrameReader, framed

REAP_INTERVAL_S = 0.005
REAP_GRACE_S = 1.0
"""Seconds that a process has to end after its socket was closed, before it is killed."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

SOCKET_CLOSED = "closed the socket of its worker process, which was not its own"
PIPE_BYTES = 1 << 20
"""Requested size of a pipe; the kernel may grant less to a user with many pipes."""
ROUNDS = 64
"""Most reads of one ``drain``, so that a worker that prints without end does not block the others."""


class WorkerProcess:
    """A confined process that runs ``python -m MODULE FD [RUN]``, below a warden (warden.py) or in its own session.

    With RUN, the folder of the run, it isolates itself (isolation.py). ``setup`` is the first frame to it. ``on_frame``
    gets the body of each frame from it, of at most ``max_frame_bytes``; if it raises ValueError, the process is killed.
    The owner may replace ``on_frame`` at any time. ``on_output`` is called when there is new ``output``, which keeps at
    most ``max_output_bytes`` for each call of the user's code. ``on_end`` gets the reason of the end in words, in which
    ``memory_key`` is named as the configuration's memory limit.
    """

    def __init__(
        self,
        module: str,
        setup: bytes,
        *,
        confined: Confinement,
        max_frame_bytes: int,
        max_output_bytes: int,
        memory_key: str,
        own_session: bool = False,
        on_output: Callable[[WorkerProcess], None],
        on_frame: Callable[[bytes | bytearray], None],
        on_end: Callable[[WorkerProcess, str], None],
    ) -> None:
        own_end, child_end = socket.socketpair()
        self._loop, self._socket, self.on_frame = asyncio.get_running_loop(), own_end, on_frame
        self._frames = FrameReader(max_frame_bytes)
        self._outgoing = memoryview(b"")
        """Bytes that wait until the socket has room."""
        self._on_output, self._on_end = on_output, on_end
        self._memory_key, self._own_session = memory_key, own_session
        self._fault = ""
        """Reason that the process was killed; empty before that."""
        self.killed = False
        """Whether ``kill`` was called."""
        self.exit_code: int | None = None
        """Exit code, negative for a signal; None until just before ``on_end`` is called."""
        self._worker_pid: int | None = None
        """Pid of the worker below its warden; None before it is known."""
        arguments = [str(child_end.fileno()), *confined.arguments]
        run = ["-m", module, *arguments] if own_session else warden.command(module, *arguments)
        with child_end, contextlib.ExitStack() as cleanup:
            cleanup.callback(self._socket.close)
            self.output = Output(max_output_bytes)
            cleanup.callback(self.output.close)
            try:
                self._process = subprocess.Popen(
                    # -u: unbuffered, so that printed text arrives before the answer to the task.
                    [sys.executable, "-u", *run],
                    stdin=subprocess.DEVNULL,
                    stdout=self.output.write_fd,
                    stderr=self.output.write_fd,
                    env=confined.env() | ONE_THREAD,
                    pass_fds=[child_end.fileno()],
                    # A process group of its own, so that signals to the actor's group do not end it. It stays in the
                    # actor's session, so that the node agent finds it after the actor is killed. A keeper ends its
                    # processes by itself, and ``_reap`` does if it fails, so it may have its own session.
                    process_group=None if own_session else 0,
                    start_new_session=own_session,
                )
            finally:
                self.output.started()
            cleanup.pop_all()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_reader(self.output.read_fd, self._drain)
        self.send(setup)

    @property
    def pid(self) -> int:
        """Pid of the worker; that of its warden until the warden has started the worker."""
        if self._worker_pid is None and not self._own_session and self._process.returncode is None:
            # While the worker lives, it is the only child of the warden.
            self._worker_pid = next(iter(children_of(self._process.pid)), None)
        return self._worker_pid or self._process.pid

    def kill(self, reason: str) -> None:
        """Kill the process and its descendants, through its warden if it has one. ``on_end`` gets the first ``reason``.

        A process that survives is killed directly later (``_reap``).
        """
        self._fault = self._fault or reason
        self.killed = True
        # Until it is reaped, no other process or group can have its pid.
        if self._process.returncode is None:
            if self._own_session:
                self._kill_hard()
            else:
                warden.end(self._process.pid)
        self.hang_up()

    # --- the socket ---

    @property
    def ended(self) -> bool:
        """Whether the socket is closed, so that no frames can be sent."""
        return self._socket.fileno() < 0

    def send(self, *bodies: bytes) -> None:
        """Send a frame for each of ``bodies``, with one write if the socket has room; the rest when it has."""
        if self.ended:
            return
        frames = framed(*bodies)
        if self._outgoing:
            self._outgoing = memoryview(b"".join((self._outgoing, frames)))
            return
        sent = self._write(frames)
        if sent < len(frames) and not self.ended:
            self._outgoing = memoryview(frames)[sent:]
            self._loop.add_writer(self._socket, self._write_rest)

    def _read(self) -> None:
        """Receive frames and pass them to ``on_frame``; hang up when the process has closed its end."""
        while not self.ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.hang_up()
                return
            try:
                for frame in self._frames.feed(data):
                    if not self.ended:
                        self.on_frame(frame)
            except ValueError as error:
                # The user's code has written to a descriptor that is not its own.
                self.kill(f"sent an invalid frame: {error}")
            if len(data) < READ_BYTES:
                return

    def _write(self, data: bytes | memoryview) -> int:
        """Send what the socket takes now. Returns the number of bytes; on an error, hangs up and returns 0."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.hang_up()
            return 0

    def _write_rest(self) -> None:
        self._outgoing = self._outgoing[self._write(self._outgoing) :]
        if not self._outgoing and not self.ended:
            self._loop.remove_writer(self._socket)

    def hang_up(self) -> None:
        """Close the socket, so that an idle process ends by itself."""
        if self.ended:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._outgoing = memoryview(b"")
        self._socket.close()
        self._loop.call_soon(self._reap, self._loop.time() + REAP_GRACE_S)

    # --- the end ---

    def descendants(self) -> list[psutil.Process]:
        """All present descendants of the process (of the warden, if it has one)."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _kill_hard(self) -> None:
        # Descendants first, because they can be found only while the process lives.
        kill_living(self.descendants())
        kill_group(self._process.pid)

    def _drain(self) -> None:
        """Read new output and call ``on_output``; stop watching the pipe at its end."""
        if not self.output.drain(rounds=1):
            # Every process that could write has closed the pipe.
            self._loop.remove_reader(self.output.read_fd)
        self._on_output(self)

    def _reap(self, kill_at: float, pause_s: float = REAP_INTERVAL_S, *, is_first: bool = True) -> None:
        """Once either side has closed the socket: reap the process if it has ended, else look again after ``pause_s``.

        A process that still lives at ``kill_at`` (loop time, s) is killed, repeatedly until it ends. The first kill
        goes through its warden if it has one; later ones are direct. A keeper, which has a session of its own, ends its
        own processes; every other process has a warden.
        """
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            # Kill processes that a killed keeper or warden has left in its group. Nothing else has its pid until it is
            # reaped.
            kill_group(self._process.pid)
            # A keeper that ends with 0 has ended its session itself; any other end may leave processes in it.
            if self._own_session and (ended.si_code, ended.si_status) != (os.CLD_EXITED, 0):
                for pid in session_members(self._process.pid):
                    kill_child(pid)
            self.exit_code = code = self._process.wait()
            self._loop.remove_reader(self.output.read_fd)
            self.output.drain()
            self._on_end(self, self._fault or describe_exit(code, self._memory_key))
            self.output.close()
            return
        if (now := self._loop.time()) >= kill_at:
            # Its socket is closed, by either side, but the process lives.
            self._fault = self._fault or f"{SOCKET_CLOSED}; the process was killed"
            if is_first and not self._own_session:
                warden.end(self._process.pid)
                kill_at = now + warden.END_S
            else:
                self._kill_hard()
                kill_at = now + REAP_GRACE_S
            # Look less often after each kill: the end may take long, as on a hung file system.
            is_first, pause_s = False, min(2 * pause_s, REAP_GRACE_S)
        self._loop.call_later(pause_s, partial(self._reap, kill_at, pause_s, is_first=is_first))


def kill_living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Send SIGKILL to those processes that still live, and return them.

    A new process with an old pid is spared, and so is a process that this user may not kill.
    """
    living = []
    for process in processes:
        # AccessDenied: it runs as another user, as by sudo.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                living.append(process)
    return living


def describe_exit(code: int, memory_key: str) -> str:
    """Describe the end of a worker process that its actor did not kill, as a verb phrase about the user's code.

    ``memory_key`` is the key of its memory limit in the configuration.
    """
    if code == NO_SOCKET_EXIT:
        return SOCKET_CLOSED
    if code == NO_MEMORY_EXIT:
        return f"left its worker process without memory ({memory_key})"
    if code == NOT_ISOLATED_EXIT:
        return "could not be isolated (security.isolate_user_code)"
    if code == -signal.SIGKILL:
        return "died with its worker process (SIGKILL, as by the kernel when memory runs out)"
    if code >= 0:
        return f"ended its worker process (exit code {code})"
    with contextlib.suppress(ValueError):
        return f"died with its worker process ({signal.Signals(-code).name})"
    return f"died with its worker process (signal {-code})"


class Output:
    """Reads the output of a worker and its children, also beyond the limit, so that a full pipe does not stop them.

    Standard output and standard error are one pipe. ``write_fd`` is the end for the process. Invariant: the first
    ``limit`` bytes of each call are kept, in order. The rest is discarded unread and counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        # Incremental, because a character may arrive in two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._bytes_left = limit
        self._dropped = 0
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.read_fd, self.write_fd = os.pipe()
        except OSError:
            os.close(self._nowhere)
            raise
        os.set_blocking(self.read_fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.used = False
        """Whether ``drain`` has ever read: no output has come before that."""

    def started(self) -> None:
        """Close the writing end here, after the process has inherited it."""
        os.close(self.write_fd)

    def drain(self, rounds: int = ROUNDS) -> bool:
        """Read the output that is there, in at most ``rounds`` reads. Returns False at the end of the output."""
        try:
            for _ in range(rounds):
                if not self._read_once():
                    return False
        except BlockingIOError:
            pass
        return True

    def _read_once(self) -> int:
        """Read once, and keep the data, or discard it beyond the limit. Returns the number of bytes; 0 at the end."""
        self.used = True
        if self._bytes_left:
            data = os.read(self.read_fd, min(self._bytes_left, PIPE_BYTES))
            self._kept += data
            self._bytes_left -= len(data)
            return len(data)
        # Beyond the limit: the kernel moves the data to /dev/null without a copy.
        size = os.splice(self.read_fd, self._nowhere, PIPE_BYTES)
        self._dropped += size
        return size

    def take(self, *, end_of_call: bool) -> tuple[str, int]:
        """Return the text kept since the last call of ``take``, and a number of discarded bytes.

        With ``end_of_call`` that is the number of bytes that the user's code printed beyond the limit in this call.
        The limit then begins again. Without it the number is 0.
        """
        text = self._decoder.decode(self._kept, final=end_of_call)
        self._kept.clear()
        dropped = 0
        if end_of_call:
            dropped, self._dropped, self._bytes_left = self._dropped, 0, self._limit
        return text, dropped

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.read_fd)
        os.close(self._nowhere)
