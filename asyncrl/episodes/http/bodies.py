"""Bodies of requests: JSON that nobody has checked yet, up to tens of megabytes of it. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import msgspec

from asyncrl.episodes.http.dialects.dialect import Body
from asyncrl.errors import ChatRefused
from asyncrl.outcome import BadOutcome, read_number

LARGE_BODY = 256 << 10
"""Bytes from which on a body is read in a thread."""
COMPLETION = re.compile(r"(?:chatcmpl-|resp_|msg_)?(call)?(\d{1,18})", re.ASCII)
"""An id that was given to an answer."""
_RAW_OBJECT, _RAW_LIST = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(list[msgspec.Raw])


class InvalidJson(ValueError):
    """The body is no JSON object."""


def decoded(raw: bytearray) -> Body:
    """The body as an object. Raises InvalidJson."""
    try:
        body = msgspec.json.decode(raw) if len(raw) < LARGE_BODY else _decoded_in_parts(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidJson("the body is no JSON object")
    return body


def digest(raw: bytearray, salt: str) -> bytes:
    """A digest, the same for the same body and salt."""
    made = hashlib.blake2b(salt.encode(errors="surrogateescape"), digest_size=16)
    made.update(raw)
    return made.digest()


def reward_of(body: Body, node_of_call: Callable[[int], int | None]) -> tuple[float, int | None]:
    """The value of a reward, and the node it is for; None: the one answered last. Raises ChatRefused."""
    for name in body.keys() - {"value", "completion"}:
        raise ChatRefused(name, "is not a field that is known here")
    value, completion = body.get("value"), body.get("completion")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ChatRefused("value", "must be a finite number")
    try:
        reward = read_number(value, "is")
    except BadOutcome as error:
        raise ChatRefused("value", str(error)) from None
    if completion is None:
        return reward, None
    found = COMPLETION.fullmatch(completion) if isinstance(completion, str) else None
    node = None if found is None else node_of_call(int(found[2])) if found[1] else int(found[2])
    if node is None:
        raise ChatRefused("completion", f"{completion!r} is not the id of an answer of this episode")
    return reward, node


def _decoded_in_parts(raw: bytearray) -> Body:
    """The body, decoded element by element: the interpreter, which a decoder holds, is free in between."""
    body: Body = {}
    for name, value in _RAW_OBJECT.decode(raw).items():
        if memoryview(value)[0] == ord("["):
            body[name] = [msgspec.json.decode(each) for each in _RAW_LIST.decode(value)]
        else:
            body[name] = msgspec.json.decode(value)
    return body
