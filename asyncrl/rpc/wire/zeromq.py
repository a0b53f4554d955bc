"""Transport over ZeroMQ: a ROUTER for each server, a DEALER for each client.

The event loop's reader callback drives the sockets: there is no task and no future per message. A ROUTER is MANDATORY
(it reports peers that are gone), and HANDOVER lets a peer that comes back keep its routing id. Heartbeats of clients
end half-open connections. LINGER is 0 and high-water marks are finite, so nothing waits and no queue of messages grows
without bound.

A frame over MAXMSGSIZE makes ZeroMQ drop the connection silently, so senders check the limit that the peer stated.
Under CURVE a client cuts messages that are too large for the server's limit (codec.py). A peer that does not complete
the handshake in time is counted, and the receiver never sees it. If connections begin too fast, the server shuts its
listening socket for a moment (listening.py), which is counted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import zmq
import zmq.utils.z85

from asyncrl.rpc.wire.codec import CURVE_BYTES, MARK, PIECE_BYTES, cut, join
from asyncrl.rpc.wire.envelope import MAX_HEADER_BYTES
from asyncrl.rpc.wire.keys import ZAP_DOMAIN, Credentials, Doorkeeper
from asyncrl.rpc.wire.listening import Door, ListeningSocket
from asyncrl.rpc.wire.transport import ClientReceive, Frames, ServerReceive

HIGH_WATER_MARK = 16384
COPY_BELOW_BYTES = 65536
MOST_SOCKETS = 1 << 14
"""Most ZeroMQ sockets of one actor. A connection takes three: itself and two that monitor it. ZeroMQ's default of 1,023
ends at 341 peers, with an error as if descriptors were lacking. Each possible socket costs four bytes."""
BATCH = 64
"""Most messages that a socket reads in one turn of the loop, so that a thousand heartbeats do not delay everything."""
SEND_BATCH = 32
"""Most messages that wait for the next turn of the loop before they are passed to ZeroMQ."""
HEARTBEAT_MS = 10_000
"""Interval of a client's heartbeats (ms). Each costs a message in both directions on every connection, which is most of
the traffic of an idle actor."""
HANDSHAKE_MS = 30_000
"""Time for the handshake (ms). A peer that has not completed it by then is dropped, even if it still sends."""
TURNED_AWAY = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Monitor events of connections that failed in the handshake."""
BEGUN = int(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED)
"""Monitor events of a socket that listens, and of a connection that has begun."""

# Plain numbers, because operators on an enumeration cost as much as sending a frame.
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

RawSocket = Any

_monitors = itertools.count()


class ZmqTransport:
    """The transport over ZeroMQ. One ZeroMQ context for each instance."""

    def __init__(self, credentials: Credentials, *, max_message_bytes: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._credentials = credentials
        self._peers: Mapping[str, list[str]] = credentials.peers
        """Public keys by actor name, one for each attempt."""
        self._max_message_bytes = max_message_bytes
        self._open: set[_ZmqSocket] = set()
        self._doorkeeper: Doorkeeper | None = None
        """Authenticates the clients; None without CURVE or without a server."""

    def bind(self, address: str, receive: ServerReceive, turned_away: Callable[[], None]) -> ZmqServer:
        """Bind a ROUTER (Transport.bind). Under CURVE the doorkeeper authenticates its clients. Raises OSError."""
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = 1
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._credentials.curve:
            if self._doorkeeper is None:
                self._doorkeeper = Doorkeeper(self._context, self._peers)
                self._doorkeeper.start()
            # ZeroMQ applies this limit before it authenticates a peer, so the limit is small. Clients cut larger
            # messages into pieces.
            socket.maxmsgsize = min(self._max_message_bytes, PIECE_BYTES) + CURVE_BYTES
            socket.zap_domain = ZAP_DOMAIN.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.curve_server = True
            socket.curve_publickey = self._credentials.public_key
            socket.curve_secretkey = self._credentials.secret_key
        # The limit is for body and buffers, so the header comes on top.
        max_joined_bytes = self._max_message_bytes + MAX_HEADER_BYTES if self._credentials.curve else None
        try:
            server = ZmqServer(
                socket, self._open.discard, receive, turned_away, address, max_joined_bytes=max_joined_bytes
            )
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"{address}: {error.strerror}") from None
        self._open.add(server)
        return server

    def connect(
        self, address: str, routing_id: bytes, receive: ClientReceive, lost: Callable[[], None], peer: str
    ) -> ZmqClient:
        """Connect a DEALER (Transport.connect). Under CURVE it uses the key of the peer's attempt. Raises OSError."""
        try:
            socket = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"no connection to {peer}: {error.strerror}") from None
        socket.setsockopt(zmq.IDENTITY, routing_id)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        find_half_open(socket)
        if self._credentials.curve:
            keys = self._peers.get(peer, [])
            if not keys:
                socket.close(0)
                raise OSError(f"no public key of {peer} is known to this run")
            # ``_socket`` has set the limit already, but CURVE lengthens each message.
            socket.maxmsgsize = self._max_message_bytes + CURVE_BYTES
            socket.curve_publickey = self._credentials.public_key
            socket.curve_secretkey = self._credentials.secret_key
            # ``keys[n]`` is the peer's public key at its attempt n, whose address ends in #n. Attempts beyond the last
            # key use the last key.
            socket.curve_serverkey = keys[min(_attempt(address), len(keys) - 1)].encode()
        try:
            client = ZmqClient(
                socket, self._open.discard, receive, lost, address.partition("#")[0], in_pieces=self._credentials.curve
            )
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"no connection to {peer}: {error.strerror}") from None
        self._open.add(client)
        return client

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        self._peers = dict(peers)
        if self._doorkeeper is not None:
            self._doorkeeper.admit(self._peers)

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets. Blocks for ``linger_s`` at most, until what was sent has left."""
        for item in list(self._open):
            item.close(linger_s)
        if self._doorkeeper is not None:
            self._doorkeeper.stop()
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> RawSocket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = self._max_message_bytes
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.copy_threshold = COPY_BELOW_BYTES
        return socket


def find_half_open(client: RawSocket) -> None:
    """Set up heartbeats on a client's socket, so that both sides notice a half-open connection.

    Only clients send heartbeats, and each states for how long the client may be silent (TTL). A server must not send
    any. If a peer fills its queue and leaves, the server's next heartbeat to it aborts the server's process (libzmq
    4.3.5, ``Assertion failed: !_io_error``).
    """
    client.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    client.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_MS * 3 // 2)
    client.setsockopt(zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MS)


class _ZmqSocket:
    """Reads and writes a socket from the event loop.

    ZeroMQ's file descriptor is edge-triggered, and any operation on the socket may consume the edge. So reading
    continues until the socket is empty, and each send schedules one more read in the next turn of the loop.

    A message is sent at once unless a read is scheduled. Other messages are sent together, by that read or once
    SEND_BATCH of them wait, because waking ZeroMQ's thread for each would be most of its cost.
    """

    _plain_frames: int
    """Number of frames of a message without arrays."""

    def __init__(self, socket: RawSocket, closed: Callable[[_ZmqSocket], None]) -> None:
        self._socket = socket
        self._on_closed = closed
        # Bound once, because attribute lookup on a socket is slow. zmq.Socket.send adds only options not used here.
        self._put_frame = super(zmq.Socket, socket).send  # type: ignore[misc]
        self._take_frame = socket.recv
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[Frames] = []
        """Messages for the next turn of the loop; empty unless a read is scheduled."""
        self._read_scheduled = False
        """Whether the next turn of the loop reads: something was already sent in this turn, or more may be there."""
        self._closed = False
        self._fd = socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._read)
        self._schedule_read()

    def _schedule_read(self) -> None:
        if not self._read_scheduled and not self._closed:
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Send the waiting messages, then receive at most BATCH messages."""
        self._read_scheduled = False
        self._flush()
        receive = self._receive_one
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                receive()
            except zmq.Again:
                return
            except BaseException:
                # The edge is consumed, so messages that have arrived would wait for the next one.
                self._schedule_read()
                raise
        # The batch is over: read on in the next turn, after other callbacks.
        self._schedule_read()

    def _receive_one(self) -> None:
        raise NotImplementedError

    def _frames(self, first: zmq.Frame) -> list[Any]:
        """Receive the frames after the ``first`` and return all: two as bytes, the further ones as uncopied frames."""
        take, frame = self._take_frame, first
        parts: list[Any] = [first.bytes]
        # ``more`` is an attribute of a frame; the option RCVMORE of the socket costs more than to receive the frame.
        while frame.more:
            frame = take(NOW, False)
            parts.append(frame if len(parts) > 1 else frame.bytes)
        return parts

    def _send(self, frames: Frames) -> bool:
        """Send a message now, or with others in the next turn of the loop.

        Returns False if the socket is closed or the queue is known to be full.
        """
        if self._closed:
            return False
        if not self._read_scheduled:
            self._schedule_read()
            return self._put(frames)
        # The message counts as sent. If the queue is full later, the message is lost, and its caller asks again.
        self._outgoing.append(frames)
        if len(self._outgoing) >= SEND_BATCH:
            self._flush()
        return True

    def _flush(self) -> None:
        for frames in self._outgoing:
            self._put(frames)
        self._outgoing.clear()

    def _put(self, frames: Frames) -> bool:
        """Pass a message to ZeroMQ. False if its queue is full; a message to a peer that is gone is dropped."""
        try:
            # A message without arrays is cheaper to copy than to track until ZeroMQ is done with it.
            send, copy, last = self._put_frame, len(frames) <= self._plain_frames, len(frames) - 1
            # Only the first frame can raise: ZeroMQ accepts the rest of a message that it has begun.
            for index, frame in enumerate(frames):
                send(frame, NOW if index == last else NOW_AND_MORE, copy)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            # The caller is gone and does not wait for the answer.
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def close(self, linger_s: float = 0.0) -> None:
        if not self._closed:
            self._flush()
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(int(1000 * linger_s))
            self._on_closed(self)


class ZmqServer(_ZmqSocket):
    """A ROUTER. ``max_joined_bytes`` limits a message whose pieces are joined (bytes); None without CURVE."""

    _plain_frames = 3

    def __init__(
        self,
        socket: RawSocket,
        closed: Callable[[_ZmqSocket], None],
        receive: ServerReceive,
        turned_away: Callable[[], None],
        address: str,
        *,
        max_joined_bytes: int | None,
    ) -> None:
        self._on_message = receive
        self._max_joined_bytes = max_joined_bytes
        self._turned_away = turned_away
        loop = asyncio.get_running_loop()
        self._door = Door(loop.time())
        self._listening: ListeningSocket | None = None
        self._opening: asyncio.TimerHandle | None = None
        """Timer that opens the listening socket again; None while the socket is open."""
        # Before the bind, whose event carries the descriptor of the listening socket.
        self._monitor = _Monitor(socket, TURNED_AWAY | BEGUN, self._on_event)
        super().__init__(socket, closed)
        try:
            _bind(socket, address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = socket.last_endpoint.decode().rstrip("\0")

    def _on_event(self, event: int, value: int) -> None:
        """Handle a monitor event: the socket listens (``value`` is its descriptor), or a connection began or failed."""
        if event == zmq.EVENT_LISTENING:
            # The descriptor is open as long as the server.
            self._listening = ListeningSocket(value)
        elif event == zmq.EVENT_ACCEPTED:
            self._on_accepted()
        else:
            self._turned_away()

    def _on_accepted(self) -> None:
        """Count a connection that has begun, and shut the listening socket for a moment if there are too many."""
        now = self._loop.time()
        shut_until = self._door.begin(now)
        if shut_until <= now or self._listening is None:
            return
        if self._opening is None:
            self._listening.shut()
            self._turned_away()
        else:
            # This connection was on its way when the socket was shut. It counts too, so the socket opens later.
            self._opening.cancel()
        self._opening = self._loop.call_at(shut_until, self._open_door, self._listening)

    def _open_door(self, listening: ListeningSocket) -> None:
        self._opening = None
        listening.open()

    def _receive_one(self) -> None:
        """Receive one message, join its pieces, and pass it on with the owner of the peer's key."""
        routing_id = self._take_frame(NOW)
        owner: str | None = None
        # At least one frame follows a routing id.
        header = self._take_frame(NOW, False)
        frames = self._frames(header)
        if self._max_joined_bytes is not None:
            # The doorkeeper has set the connection's User-Id.
            owner = header.get("User-Id")
            if frames[0][:1] == MARK:
                # The receiver counts a message that cannot be joined as malformed, because a table is no header.
                with contextlib.suppress(ValueError, struct.error):
                    frames = join(frames, self._max_joined_bytes)
        self._on_message(routing_id, frames, owner)

    def send(self, routing_id: bytes, frames: Frames) -> bool:
        return self._send([routing_id, *frames])

    def close(self, linger_s: float = 0.0) -> None:
        self._monitor.close()
        if self._opening is not None:
            self._opening.cancel()
        if self._listening is not None:
            self._listening.close()
        super().close(linger_s)


class ZmqClient(_ZmqSocket):
    """A DEALER. With ``in_pieces`` it cuts messages with large frames (codec.py)."""

    _plain_frames = 2

    def __init__(
        self,
        socket: RawSocket,
        closed: Callable[[_ZmqSocket], None],
        receive: ClientReceive,
        lost: Callable[[], None],
        endpoint: str,
        *,
        in_pieces: bool,
    ) -> None:
        self._on_message, self._in_pieces = receive, in_pieces
        self._monitor = _Monitor(socket, zmq.EVENT_DISCONNECTED, lambda _event, _value: lost())
        super().__init__(socket, closed)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def _receive_one(self) -> None:
        self._on_message(self._frames(self._take_frame(NOW, False)))

    def send(self, frames: Frames) -> bool:
        return self._send(cut(frames) if self._in_pieces else frames)

    def close(self, linger_s: float = 0.0) -> None:
        self._monitor.close()
        super().close(linger_s)


class _Monitor:
    """Calls ``happened`` with each of the ``events`` of a socket and its value (zmq_socket_monitor(3)).

    Its queue has no bound, because ZeroMQ's one thread for all sockets would wait for room in it. An event takes a few
    bytes, and each turn of the event loop reads all of them.
    """

    def __init__(self, socket: RawSocket, events: int, happened: Callable[[int, int], None]) -> None:
        self._monitored, self._on_event = socket, happened
        # A new name each time: ZeroMQ frees a name only some time after its socket is closed.
        endpoint = f"inproc://monitor-{next(_monitors)}"
        socket.monitor(endpoint, events)
        self._pair = socket.context.socket(zmq.PAIR)
        self._pair.rcvhwm = 0
        self._pair.connect(endpoint)
        self._fd = self._pair.getsockopt(zmq.FD)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        # The descriptor is edge-triggered: events from before the reader was added cause no edge.
        self._loop.call_soon(self._read)
        self._closed = False

    def _read(self) -> None:
        while not self._closed:
            try:
                event, _ = self._pair.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(*struct.unpack("=HI", event))

    def close(self) -> None:
        """Stop the calls. Close it before its socket; may be called again."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._monitored.disable_monitor()
            self._pair.close(0)


def _bind(socket: RawSocket, address: str) -> None:
    """Bind ``tcp://HOST:PORT``. PORT is a number, 0 for any free port, or a range FIRST-LAST.

    In a range the first free port from FIRST to LAST is taken; FIRST may be the larger one.
    """
    head, _, ports = address.rpartition(":")
    first, dash, last = ports.partition("-")
    if not dash:
        socket.bind(address if ports != "0" else f"{head}:*")
        return
    step = 1 if int(first) <= int(last) else -1
    for port in range(int(first), int(last) + step, step):
        try:
            socket.bind(f"{head}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port == int(last):
                raise
        else:
            return


def _attempt(address: str) -> int:
    """The attempt in a registered address, which is ``tcp://HOST:PORT#ATTEMPT`` under CURVE; 0 without it."""
    return int(address.partition("#")[2] or 0)
