"""Strangers: bare sockets that send frames no actor would send."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import psutil
import zmq
from every_message import EVERY_MESSAGE
from run_settings import launched_run

from asyncrl.core.errors import ProtocolError
from asyncrl.messages import Request
from asyncrl.rpc.wire.codec import Codec
from asyncrl.rpc.wire.envelope import PROTOCOL_VERSION, Header, Hello, Kind, decode_header, encode_header
from asyncrl.rpc.wire.keys import load_credentials
from tools.live_run import LiveRun, title

REPLIES = {kind.reply.__name__ for kind in EVERY_MESSAGE.values() if issubclass(kind, Request)}
SENT = {name: kind for name, kind in EVERY_MESSAGE.items() if issubclass(kind, Request) or name not in REPLIES}
"""Messages that clients send: requests and casts."""


# --- strangers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Guise:
    """The actor that a stranger pretends to be. ``keys``: its own key pair and the server's public key; None is no
    CURVE.
    """

    name: str
    incarnation: int
    run_id: str
    secret: str = ""
    keys: tuple[bytes, bytes, bytes] | None = None

    def header(self, kind: int, type: str, **fields: Any) -> bytes:
        defaults = {"protocol": PROTOCOL_VERSION, "id": 0, "in_reply_to": 0, "param_version": -1, "deadline_ms": 0}
        known = {"sender": self.name, "incarnation": self.incarnation}
        return encode_header(Header(kind=kind, type=type, **(defaults | known | fields)))

    def hello(self, id: int = 1, **fields: Any) -> list[bytes]:
        body = {"run_id": self.run_id, "name": self.name, "incarnation": self.incarnation, "secret": self.secret}
        packed = msgpack.packb(body | {"max_message_bytes": 1 << 20} | fields)
        return [self.header(Kind.HELLO, "Hello", id=id), packed]

    def call(self, type: str, body: Any, id: int, **fields: Any) -> list[bytes]:
        return [self.header(Kind.CALL, type, id=id, **({"deadline_ms": 5000} | fields)), msgpack.packb(body)]


class Knocker:
    """A DEALER of its own, without any of the code under test."""

    def __init__(self, context: zmq.Context, address: str, guise: Guise, routing_id: bytes = b"") -> None:
        self.guise = guise
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        self.socket.identity = routing_id or f"{guise.name}/{guise.incarnation}/{os.urandom(6).hex()}".encode()
        if guise.keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = guise.keys
        self.socket.connect(address)
        self.heard: list[tuple[list[Any], Any]] = []
        """Header and body of every answer."""

    def send(self, frames: Sequence[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def listen(self, timeout_s: float = 0.0) -> list[tuple[list[Any], Any]]:
        """Messages that have arrived since the last call; waits for one if necessary."""
        new = []
        while self.socket.poll(0 if new else int(timeout_s * 1000)):
            header, body, *_ = self.socket.recv_multipart()
            new.append((msgpack.unpackb(header), msgpack.unpackb(body)))
        self.heard += new
        return new

    @property
    def codes(self) -> set[str]:
        """Codes of the refusals and errors received."""
        return {body["code"] for header, body in self.heard if header[1] in (Kind.REFUSE, Kind.ERROR)}

    @property
    def entered(self) -> bool:
        """Whether it was admitted."""
        return any(header[1] in (Kind.WELCOME, Kind.REPLY) for header, _ in self.heard)

    def close(self) -> None:
        self.socket.close(0)


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A stranger that must be refused, and the code of the refusal; None if it gets no answer."""

    what: str
    guise: Guise
    says: list[list[bytes]]
    code: str | None


def strangers(own: Guise, known: Guise | None) -> list[Stranger]:
    """``own`` has a right key (or the secret); ``known`` is an actor that the server has heard of, with its key."""
    call = own.call("Resolve", {"name": "controller/0"}, 2)
    found = [
        Stranger(what="another run", guise=own, says=[own.hello(run_id="another")], code="run_id"),
        Stranger(what="no HELLO", guise=own, says=[call], code="hello_required"),
        Stranger(
            what="another protocol",
            guise=own,
            says=[[own.header(1, "Hello", protocol=PROTOCOL_VERSION + 1, id=1), b"\x80"]],
            code="protocol",
        ),
        Stranger(what="two names", guise=own, says=[own.hello(name="other/0")], code="name"),
    ]
    if known is not None:
        old = replace(known, incarnation=1)
        found.append(Stranger(what="an old incarnation", guise=old, says=[old.hello()], code="incarnation"))
    if own.keys is None:
        return found + [
            Stranger(what=f"secret {secret!r}", guise=own, says=[own.hello(secret=secret)], code="secret")
            for secret in ("", "guess", own.secret[:-1])
        ]
    another = replace(own, name="another/0")
    found.append(Stranger(what="another's name", guise=another, says=[another.hello()], code="key"))
    fresh, server_key = zmq.curve_keypair(), own.keys[2]
    found += [
        Stranger(what=what, guise=replace(own, keys=keys), says=[own.hello(), call], code=None)
        for what, keys in (
            ("no key", None),
            ("a fresh key", (*fresh, zmq.curve_keypair()[0])),
            ("the server's public key and an unlisted pair", (*fresh, server_key)),
            ("the server's public key as his own", (server_key, fresh[1], server_key)),
            ("the server's public key with a right one that is not his", (own.keys[0], fresh[1], server_key)),
        )
    ]
    return found


def knock(context: zmq.Context, address: str, people: Sequence[Stranger], patience_s: float) -> dict[str, str]:
    """Try all of them at once. Returns unexpected outcomes by stranger."""
    knockers = [Knocker(context, address, one.guise) for one in people]
    for knocker, one in zip(knockers, people, strict=True):
        for frames in one.says:
            knocker.send(frames)
    until = time.monotonic() + patience_s
    while time.monotonic() < until and any(
        one.code not in knocker.codes for knocker, one in zip(knockers, people, strict=True) if one.code
    ):
        for knocker in knockers:
            knocker.listen()
        time.sleep(0.02)
    # A stranger that must get no answer has had the time of the others, and this.
    time.sleep(0.3)
    problems = {}
    for knocker, one in zip(knockers, people, strict=True):
        knocker.listen()
        if knocker.entered:
            problems[one.what] = f"was let in at {address}: {knocker.heard}"
        elif (one.code is None and knocker.heard) or (one.code is not None and one.code not in knocker.codes):
            problems[one.what] = f"expected {one.code}, heard {knocker.heard} at {address}"
        knocker.close()
    return problems


# --- the visible parts of a live run ----------------------------------------------------------------------

SIM_RUN = launched_run(
    rollout={"sim": {"length_median": 16.0, "decode_step_s": 0.002, "load_s": 0.002}},
    learner={"steps": 60, "sim": {"step_s": 0.15, "publish_bytes": 4096}},
    staleness={"max": 1},
    checkpoint={"every_versions": 20},
    weights={"transport": "shm"},
    supervision={"heartbeat_s": 0.5},
)
"""Seconds of work, at a version per step."""
KNOWN = {"controller": "learner/0"} | dict.fromkeys(
    ("dataloader", "parameter_server", "reward", "learner"), "rollouter/0"
)
"""One caller of each role, who calls all the time."""


def guise_of(private: Path, name: str, server: str, incarnation: int = 2) -> Guise:
    """The actor ``name`` of a run, as seen by ``server``; 2 is its successor in a live run."""
    own, theirs = load_credentials(private, name, 0), load_credentials(private, server, 0)
    keys = (own.public_key, own.secret_key, theirs.public_key) if own.curve else None
    return Guise(name=name, incarnation=incarnation, run_id=own.run_id, secret=own.secret, keys=keys)


def actors_of(run: LiveRun) -> dict[str, int]:
    """Pid by name of the actors and the agent, which have servers."""
    found = {}
    for process in run.processes():
        words = title(process).split()
        if words[:1] == ["asyncrl"] and "/" in words[1]:
            found[words[1]] = process.pid
        elif "asyncrl.launcher.node.agent" in words:
            found["agent/0"] = process.pid
    return found


def listening(pids: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    """(host, port) of every TCP socket that these processes listen at, by pid."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("tcp")
            found[pid] = sorted({(*each.laddr,) for each in sockets if each.status == psutil.CONN_LISTEN})
    return {pid: here for pid, here in found.items() if here}


def secrets_of(private: Path) -> dict[str, str]:
    """Every secret of a run by the file that holds it."""
    found = {}
    for path in private.iterdir():
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            if isinstance(content, dict) and "secret" in content:
                found[path.name] = content["secret"]
    return found


# --- messages ---------------------------------------------------------------------------------------------


def sample(kind: Any) -> Any:
    """A small valid value of an annotation, arrays included."""
    info = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    match info:
        case msgspec.inspect.StructType(cls=cls, fields=fields) | msgspec.inspect.DataclassType(cls=cls, fields=fields):
            return cls(**{one.name: sample(one.type) for one in fields if one.name != "failure"})
        case msgspec.inspect.CustomType():
            return np.arange(6, dtype=np.int32)
        case msgspec.inspect.IntType(ge=ge):
            return max(ge or 0, 3)
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BytesType():
            return b"0-7"
        case msgspec.inspect.ByteArrayType():
            return bytearray(b"0-7")
        case msgspec.inspect.StrType():
            return "0-7"
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return [sample(item)] * 2
        case msgspec.inspect.TupleType(item_types=items):
            return tuple(sample(item) for item in items)
        case msgspec.inspect.DictType(value_type=value):
            return {"a": sample(value)}
        case msgspec.inspect.UnionType(types=types):
            return sample(next(one for one in types if not isinstance(one, msgspec.inspect.NoneType)))
        case msgspec.inspect.AnyType():
            return ["x", {"y": 1.5}]
    raise AssertionError(info)


@dataclass
class Mutator:
    """Frames that no actor would send, made from valid ones. The same seed gives the same frames."""

    guise: Guise
    seed: int
    next_id: int = 10

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        codec = Codec()
        self._bodies = {name: [bytes(f) for f in codec.encode(sample(kind))] for name, kind in SENT.items()}
        self._codec = codec
        # Under CURVE a server accepts frames of 256 KiB: a longer one ends the connection and is not read.
        self._long = 500_000 if self.guise.keys is None else 200_000

    def message(self) -> list[bytes]:
        """A correct message of a random type."""
        name = self._random.choice(list(self._bodies))
        self.next_id += 1
        kind = Kind.CALL if issubclass(SENT[name], Request) else Kind.CAST
        header = self.guise.header(kind, name, id=self.next_id, deadline_ms=self._random.choice((1, 50, 2000)))
        return [header, *self._bodies[name]]

    def malformed(self) -> list[bytes]:
        """Never empty, and never a valid message of this guise."""
        while True:
            frames = self.mutated()
            if not self._is_valid(frames):
                return frames

    def mutated(self) -> list[bytes]:
        """Any bytes; they may even be valid."""
        while not (frames := self._random.choice(self._WAYS)(self, self.message())):
            pass
        return frames

    def _is_valid(self, frames: list[bytes]) -> bool:
        try:
            header = decode_header(frames[0])
            if header.kind == Kind.HELLO:
                hello = self._codec.decode(Hello, frames[1])
                return (hello.name, hello.run_id) == (self.guise.name, self.guise.run_id)
            if header.kind not in (Kind.CALL, Kind.CAST) or header.type not in SENT:
                return False
            self._codec.decode(SENT[header.type], frames[1], frames[2:])
        except (ProtocolError, IndexError):
            return False
        return True

    def _flip(self, frames: list[bytes]) -> list[bytes]:
        at = self._random.randrange(len(frames))
        frame = bytearray(frames[at])
        for _ in range(self._random.choice((1, 1, 2, 5, 20)) if frame else 0):
            frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return [*frames[:at], bytes(frame), *frames[at + 1 :]]

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        at = self._random.randrange(len(frames))
        return [*frames[:at], frames[at][: self._random.randrange(len(frames[at]) + 1)], *frames[at + 1 :]]

    def _swap_bodies(self, frames: list[bytes]) -> list[bytes]:
        return [frames[0], *self.message()[1:]]

    def _number_of_frames(self, frames: list[bytes]) -> list[bytes]:
        more = [self._bytes(20) for _ in range(self._random.randrange(50))]
        return (frames[: self._random.randrange(len(frames) + 1)] + more)[:50]

    def _noise(self, _frames: list[bytes]) -> list[bytes]:
        return [self._bytes(300) for _ in range(self._random.randrange(1, 6))]

    def _absurd_length(self, frames: list[bytes]) -> list[bytes]:
        # array, map, str, bin and ext of up to 4 GiB, at the beginning or in the middle.
        code = self._random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
        length = self._random.choice((0xFFFFFFFF, 0x7FFFFFFF, 100_000_000, 70_000))
        bomb = code + struct.pack(">I", length)
        at, frame = (0, frames[0]) if self._random.random() < 0.3 else (1, frames[1])
        cut = self._random.randrange(len(frame) + 1)
        return [*frames[:at], frame[:cut] + bomb + frame[cut:], *frames[at + 1 :]]

    def _nested(self, frames: list[bytes]) -> list[bytes]:
        deep = self._random.choice((b"\x91", b"\x81\xa1a", b"\xdc\xff\xff")) * self._random.choice((100, 2000, 50_000))
        at = self._random.randrange(2)
        field_first = b"\x81\xa4line" if self._random.random() < 0.5 else b""
        return [*frames[:at], field_first + deep, *frames[at + 1 :]]

    def _bad_header(self, frames: list[bytes]) -> list[bytes]:
        fields = msgpack.unpackb(frames[0])
        for number in range(self._random.choice((1, 1, 3))):
            # One long value at most: two would exceed a frame, and end the connection.
            values = _STRANGE if number else (*_STRANGE, "x" * self._long)
            fields[self._random.randrange(len(fields))] = self._random.choice(values)
        return [msgpack.packb(fields), *frames[1:]]

    def _bad_body(self, frames: list[bytes]) -> list[bytes]:
        return [frames[0], msgpack.packb(self._bent(msgpack.unpackb(frames[1]))), *frames[2:]]

    def _bad_array(self, frames: list[bytes]) -> list[bytes]:
        name = self._random.choice(("Deliver", "Publish", "AnnounceBroadcast"))
        dtype = self._random.choice(("int32", "float64", "bool", "object", "bfloat16", "O", "", 7, None))
        shape = self._random.choice(([6], [1 << 47] * 8, [-1], [0, 1 << 47, 1 << 47], [3, 2], 6, [[6]], [1.0], []))
        index = self._random.choice((0, 1, -1, 1 << 40, True, "0", 99))
        place = [dtype, shape, index]

        def put(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: put(item) for key, item in value.items()}
            if isinstance(value, list):
                # A place, or a list that may hold some.
                return place if value[1:2] == [[6]] else [put(item) for item in value]
            return value

        body, *buffers = self._bodies[name]
        kept = buffers[: self._random.randrange(len(buffers) + 1)]
        header = self.guise.header(Kind.CALL, name, id=self.next_id, deadline_ms=50)
        return [header, msgpack.packb(put(msgpack.unpackb(body))), *kept]

    def _wrong_kind(self, frames: list[bytes]) -> list[bytes]:
        kind = self._random.choice((Kind.WELCOME, Kind.REFUSE, Kind.REPLY, Kind.ERROR, Kind.CANCEL))
        header = self.guise.header(kind, "", in_reply_to=self._random.choice((0, 5, self.next_id, 2**63)))
        return [header, *frames[1:]]

    def _bent(self, value: Any) -> Any:
        if self._random.random() < 0.15:
            return self._random.choice(_STRANGE)
        if isinstance(value, dict):
            return {key: self._bent(item) for key, item in value.items() if self._random.random() > 0.05}
        if isinstance(value, list):
            return [self._bent(item) for item in value]
        return value

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(most + 1))

    _WAYS = (
        *(_flip, _flip, _cut, _swap_bodies, _number_of_frames, _noise, _absurd_length, _nested),
        *(_bad_header, _bad_body, _bad_body, _bad_array, _wrong_kind),
    )


_STRANGE = (
    *(-1, -(2**63), 2**64 - 1, 2**63, 0, 1.5, float("nan"), float("inf"), 1e308, None, True, "", "\0", b"\xff\xfe"),
    *([], {}, [[[[]]]], list(range(3000)), {"a": {"b": {}}}, {None: 1, 1.5: 2}),
    *(msgpack.ExtType(5, b"abc"), msgpack.Timestamp(2**33, 999_999_999)),
)
