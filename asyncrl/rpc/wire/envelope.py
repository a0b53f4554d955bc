"""The envelope: the header of every message, and the bodies of the messages that open a connection.

Frames on the wire: ``[header] [body] [buffer]*``, behind the routing id on a ROUTER. The header is a MessagePack array.
New fields are only added at its end, so an older reader ignores them. docs/protocol.md describes all of it.

Fails with ProtocolError; when the sender speaks another version of the protocol, the error says which.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asyncrl.core.errors import ProtocolError

PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 4096
MAX_NAME_LENGTH = 200
NIL = b"\xc0"
"""The body of a kind that has none."""


Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Count = Annotated[int, Meta(ge=0)]


class Kind(IntEnum):
    """The purpose of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    CALL = 4
    REPLY = 5
    ERROR = 6
    CAST = 7
    CANCEL = 8
    ASK = 9
    HELD = 10
    NOT_HELD = 11


# gc=False: it holds nothing that could be part of a cycle, and there is one for each message.
class Header(Struct, frozen=True, array_like=True, gc=False):
    """The first frame."""

    protocol: int
    kind: Annotated[int, Meta(ge=int(Kind.HELLO), le=int(Kind.NOT_HELD))]
    """A Kind."""
    id: Count
    """Counts up from 1 on each connection for HELLO, CALL and ASK; the ASK's for HELD and NOT_HELD; 0 otherwise."""
    in_reply_to: Count
    """Id of the message that WELCOME, REFUSE, REPLY and ERROR answer and CANCEL cancels, or of the CALL for ASK, HELD
    and NOT_HELD; 0 otherwise."""
    sender: str
    """Name of the sender, ROLE/INDEX."""
    incarnation: Count
    """Incarnation of the sender: of two of one name the larger is the living one."""
    param_version: Annotated[int, Meta(ge=-1)]
    """The newest weights that the sender knows of; -1 before any."""
    deadline_ms: Count
    """Time that the caller still waits (ms); 0 if it does not wait."""
    type: str
    """Name of the message in the body; empty for CANCEL, ASK, HELD and NOT_HELD."""
    answered_below: Count = 0
    """Every call with a smaller id has been answered: stored replies to them may be dropped."""


class Hello(Struct, frozen=True, kw_only=True):
    """Opens a connection; nothing but a HELLO is served before its WELCOME."""

    run_id: Name
    name: Name
    incarnation: Count
    max_message_bytes: Count
    secret: Name = ""
    """The run's secret; empty under CURVE."""


class Welcome(Struct, frozen=True, kw_only=True):
    """The answer to a HELLO that was accepted."""

    run_id: str
    name: str
    incarnation: int
    max_message_bytes: int
    credit: int
    """Calls that may be unanswered on this connection at once."""


class Refuse(Struct, frozen=True, kw_only=True):
    """The answer to a HELLO that was not. ``code``: protocol, run_id, secret, name, key, incarnation,
    connections."""

    code: str
    ours: str
    theirs: str


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of an ERROR."""

    code: str
    """Stable: hello_required, not_ready, over_credit, unknown_type, forbidden, invalid, too_large, cancelled,
    deadline, or an exception's ``code`` or name."""
    message: str
    retryable: bool = False
    actor: str = ""


class OtherProtocol(ProtocolError):
    """A header of another protocol version. ``version`` is the sender's, ``id`` its message's where readable."""

    def __init__(self, version: int, id: int) -> None:
        self.version, self.id = version, id
        super().__init__(f"protocol version {version} where this side speaks {PROTOCOL_VERSION}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    """The first frame of a message."""
    return _encoder.encode(header)


def decode_header(frame: bytes) -> Header:
    """Read a first frame. Raises OtherProtocol or ProtocolError."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(frame)} bytes is over {MAX_HEADER_BYTES}")
    try:
        header = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # A header of another version may have other fields: of such a one no more than its version is looked at.
        _raise_other_protocol(frame)
        raise ProtocolError(f"unreadable header: {error}") from None
    if header.protocol != PROTOCOL_VERSION:
        raise OtherProtocol(header.protocol, header.id)
    return header


def _raise_other_protocol(frame: bytes) -> None:
    try:
        fields = msgspec.msgpack.decode(frame, type=list)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if fields and type(fields[0]) is int and fields[0] != PROTOCOL_VERSION:
        id = fields[2] if len(fields) > 2 and type(fields[2]) is int else 0
        raise OtherProtocol(fields[0], max(0, id))
