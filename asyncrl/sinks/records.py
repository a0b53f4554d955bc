"""Messages between the controller and the process of the sinks over a socket pair, as a stream of MessagePack.

Order is the protocol: the controller sends Setup, then Lines and Pictures; the process sends Reports. The end of the
stream is the end of the run. Nothing is unpickled on either side. Fails with ValueError (msgspec's errors are such)
for bytes that are none of this, and for a record that is longer than MAX_RECORD_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgpack
import msgspec
from msgspec import Struct

MAX_RECORD_BYTES = 64 << 20
READ_BYTES = 1 << 16


class WandbSetup(Struct, frozen=True, array_like=True):
    """Settings of W&B as in the configuration; the key is not among them, but in the environment."""

    mode: str
    project: str
    entity: str | None


class PrometheusSetup(Struct, frozen=True, array_like=True):
    """Address at which the endpoint is bound; port 0 is any free one."""

    host: str
    port: int


class Setup(Struct, frozen=True, tag="setup", array_like=True):
    """Sinks that there are, and facts that they need to know of the run."""

    run_dir: str
    name: str
    """Name of the run."""
    config: dict[str, Any]
    """The whole configuration, as JSON has it."""
    flush_s: float
    """Longest time that the sinks get at the end of the run."""
    tensorboard: bool = False
    wandb: WandbSetup | None = None
    prometheus: PrometheusSetup | None = None


class Line(Struct, frozen=True, tag="line", array_like=True):
    """A line of metrics.jsonl."""

    line: dict[str, Any]


class Picture(Struct, frozen=True, tag="picture", array_like=True):
    """The run at one moment: a Snapshot, encoded."""

    snapshot: bytes


Record = Setup | Line | Picture


class Report(Struct, frozen=True, array_like=True):
    """State of the sinks. Counts are cumulative since the start of the process."""

    dropped: int = 0
    """Records for which the queue of a sink had no room."""
    lost: int = 0
    """Records that a sink was given and failed to take."""
    trouble: dict[str, str] = {}
    """Reason that a sink takes nothing at the moment, by sink."""
    addresses: dict[str, str] = {}
    """Place where a sink is to be found, by sink."""


T = TypeVar("T")


class Stream(Generic[T]):
    """Cuts a byte stream into records of a type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=MAX_RECORD_BYTES)

    def feed(self, data: bytes) -> Iterator[T]:
        """The records that ``data`` completes."""
        try:
            self._unpacker.feed(data)
        except msgpack.BufferFull as error:
            raise ValueError(f"a record is longer than {MAX_RECORD_BYTES} bytes") from error
        for item in self._unpacker:
            yield msgspec.convert(item, self._kind)
