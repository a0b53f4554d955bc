"""Records the traffic over the bridge of a test cluster: frames, and the bytes of each TCP connection in order.

    python capture.py INTERFACE FILE   write frames to FILE, "recording" to stdout, until standard input ends;
                                       then the number of frames that were lost

A test that finds nothing must be sure that no frame was lost, so lost frames raise an error.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC, PACKET_STATISTICS = 263, 1, 1, 6
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
QUEUE_BYTES = 256 << 20
LONGEST_FRAME = 1 << 17
_LENGTH = struct.Struct("<I")

End = tuple[str, int]
"""Address and port."""


def record(interface: str, file: str) -> int:
    """Write every frame after its length."""
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as frames,
        Path(file).open("wb") as out,
    ):
        frames.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
        frames.bind((interface, ETH_P_ALL))
        member = struct.pack("iHH8s", socket.if_nametoindex(interface), PACKET_MR_PROMISC, 0, b"")
        frames.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, member)
        frames.setblocking(False)
        print("recording", flush=True)
        ended = False
        while not ended:
            ended = sys.stdin in select.select([frames, sys.stdin], [], [])[0]
            while True:
                try:
                    frame = frames.recv(LONGEST_FRAME)
                except BlockingIOError:
                    break
                out.write(_LENGTH.pack(len(frame)) + frame)
        _, lost = struct.unpack("II", frames.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        print(lost, flush=True)
    return 0


def conversations(file: Path) -> dict[tuple[End, End], bytes]:
    """Return the bytes of a record that were sent over TCP from one end to the other, in order and without repeats.

    A later connection over the same ports is appended to the earlier one.
    """
    streams: dict[tuple[End, End], bytearray] = {}
    starts: dict[tuple[End, End], int] = {}
    waiting: dict[tuple[End, End], dict[int, bytes]] = {}
    for frame in _frames(file):
        segment = _segment(frame)
        if segment is None:
            continue
        way, sequence, is_first, payload = segment
        stream = streams.setdefault(way, bytearray())
        if is_first or way not in starts:
            starts[way] = (sequence + is_first - len(stream)) % 2**32
            waiting[way] = {}
        if payload:
            waiting[way][(sequence + is_first - starts[way]) % 2**32] = payload
        for offset, late in sorted(waiting[way].items()):
            if offset > len(stream):
                break
            stream += late[len(stream) - offset :]
            del waiting[way][offset]
    return {way: bytes(stream) for way, stream in streams.items() if stream}


def _frames(file: Path) -> Iterator[bytes]:
    """Return the frames of ``record`` in the order of arrival."""
    with file.open("rb") as source:
        while length := source.read(_LENGTH.size):
            yield source.read(*_LENGTH.unpack(length))


def _segment(frame: bytes) -> tuple[tuple[End, End], int, bool, bytes] | None:
    """Return (sender and receiver, sequence number, first, payload) of a TCP segment over IPv4."""
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    packet = frame[14 : 14 + struct.unpack_from("!H", frame, 16)[0]]
    segment = packet[(packet[0] & 15) * 4 :]
    source, target, sequence = struct.unpack_from("!HHI", segment)
    ends = (
        (str(ipaddress.IPv4Address(packet[12:16])), source),
        (str(ipaddress.IPv4Address(packet[16:20])), target),
    )
    return ends, sequence, bool(segment[13] & 2), segment[(segment[12] >> 4) * 4 :]


if __name__ == "__main__":
    sys.exit(record(sys.argv[1], sys.argv[2]))
