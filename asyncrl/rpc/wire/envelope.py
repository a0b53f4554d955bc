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

PROTOCOL_VERSION = 4
MAX_HEADER_BYTES = 4096
MAX_NAME_LENGTH = 200
NIL = b"\xc0"
"""Body of the kinds of message that have no content."""


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
    """For HELLO, CALL and ASK a number that counts up from 1; for HELD and NOT_HELD the ASK's id; 0 otherwise."""
    in_reply_to: Count
    """Id of the message that a WELCOME, REFUSE, REPLY or ERROR answers or a CANCEL cancels. For ASK, HELD and NOT_HELD
    the id of the CALL; 0 otherwise."""
    sender: str
    """Name of the sender, ROLE/INDEX."""
    incarnation: Count
    """Incarnation of the sender. If two senders have the same name, the one with the larger number is alive."""
    param_version: Annotated[int, Meta(ge=-1)]
    """The newest weights that the sender knows of; -1 before any."""
    deadline_ms: Count
    """For CALL the time that the caller still waits (ms); 0 otherwise."""
    type: str
    """Name of the message type of the body; empty for CANCEL, ASK, HELD and NOT_HELD."""
    answered_below: Count = 0
    """For CALL and ASK: every call with a smaller id is over for the caller, so the server drops its stored reply."""


class Hello(Struct, frozen=True, kw_only=True):
    """Opens a connection. The server serves nothing but a HELLO before it has answered WELCOME."""

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
    """Largest number of unanswered calls on this connection."""


class Refuse(Struct, frozen=True, kw_only=True):
    """The answer to a HELLO that was not accepted, or to a message of another protocol or with a wrong key."""

    code: str
    """The property that differs: protocol, run_id, secret, name, key, incarnation or connections."""
    ours: str
    """Value that the server expects."""
    theirs: str
    """Value that the client sent."""


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of an ERROR."""

    code: str
    """hello_required, not_ready, over_credit, unknown_type, forbidden, invalid, too_large, cancelled, deadline, or an
    exception's ``code`` or class name. Codes do not change between versions."""
    message: str
    retryable: bool = False
    """Whether the same call may succeed later."""
    actor: str = ""
    """The actor that answers."""


class OtherProtocol(ProtocolError):
    """A header of another protocol version. ``version`` is the sender's; ``id`` is the message's, 0 if unreadable."""

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
        # A header of another version may have other fields; its version is the first field in any case.
        _raise_other_protocol(frame)
        raise ProtocolError(f"unreadable header: {error}") from None
    if header.protocol != PROTOCOL_VERSION:
        raise OtherProtocol(header.protocol, header.id)
    return header


def _raise_other_protocol(frame: bytes) -> None:
    """Raise OtherProtocol if the frame is an array whose first item is another protocol version."""
    try:
        fields = msgspec.msgpack.decode(frame, type=list)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if fields and type(fields[0]) is int and fields[0] != PROTOCOL_VERSION:
        id = fields[2] if len(fields) > 2 and type(fields[2]) is int else 0
        raise OtherProtocol(fields[0], max(0, id))
