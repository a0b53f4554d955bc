"""The way of new weights: from the learner through the parameter server to the rollouters."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncrl.messages import Count, Done, Message, Request
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.senders import LEARNER, ROLLOUTER


class TensorSpec(Struct, gc=False, frozen=True, array_like=True):
    """A parameter in a bucket, under its Hugging Face checkpoint name."""

    name: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    offset: Count
    """Byte offset in the bucket; aligned to 64."""


class Delta(Struct, gc=False, frozen=True, kw_only=True):
    """A bucket encoded against the same bucket of version ``base``; see weights/delta.py."""

    base: Count
    path: str
    """Path as Bucket.path."""
    size: Count


class Bucket(Struct, gc=False, frozen=True, kw_only=True):
    """A run of parameters."""

    path: str
    """/proc/PID/fd/N of a sealed memfd, readable by processes of the same user on the same host; empty where the bytes
    are to be fetched."""
    size: Count
    checksum: int
    """xxh3_64 over the whole bucket."""
    tensors: list[TensorSpec]
    delta: Delta | None = None
    """The same bytes in fewer, for a replica that holds the base."""


class Probe(Struct, gc=False, frozen=True, kw_only=True):
    """Log-probs of a few sequences under the learner's weights of a version; an engine that serves them agrees.

    S sequences of T tokens together, and in them C places at each of which the K likeliest next tokens are told.
    """

    tokens: np.ndarray
    """int32 [T], one sequence after the other."""
    lengths: np.ndarray
    """int32 [S], sums to T."""
    logprobs: np.ndarray
    """float32 [T - S]: of each token but a sequence's first, given those before it, at temperature 1 (nats)."""
    places: np.ndarray
    """int32 [C, 2]: a sequence, and the number of its tokens before the place."""
    likeliest: np.ndarray
    """int32 [C, K]."""
    likeliest_logprobs: np.ndarray
    """float32 [C, K]: at the run's temperature (nats)."""


class Manifest(Struct, gc=False, frozen=True, kw_only=True):
    """A complete set of weights: every parameter of the model exactly once."""

    version: Count
    buckets: list[Bucket]
    probe: Probe | None = None


class BucketLayout(Struct, gc=False, frozen=True, kw_only=True):
    """A bucket before it is filled; the same in every version."""

    size: Count
    tensors: list[TensorSpec]


CollectiveBackend = Literal["nccl", "gloo"]
Transport = Literal["nccl", "gloo", "shm", "stream"]


class CollectiveGroup(Struct, gc=False, frozen=True, kw_only=True):
    """The members of a broadcast. Rank 0 is the learner; a replica has ``workers`` consecutive ranks."""

    backend: CollectiveBackend
    epoch: Count
    """Number of the membership. A group is used for as long as nobody joins, leaves or fails."""
    world_size: Annotated[int, Meta(ge=2)]
    host: str
    """Host on which the learner waits for the members."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: str = ""
    """Token that a caller shows there."""


class Collective(Struct, gc=False, frozen=True, kw_only=True):
    """A replica's part in a broadcast."""

    group: CollectiveGroup
    first_rank: Annotated[int, Meta(ge=1)]
    """Rank of the replica's first worker."""
    buckets: list[BucketLayout]
    probe: Probe | None = None


class Offer(Struct, gc=False, frozen=True, kw_only=True):
    """A version for one replica, and the way to it: ``manifest`` under shm and stream, else ``collective``."""

    version: Count
    transport: Transport
    manifest: Manifest | None = None
    collective: Collective | None = None
    share: bool = False
    """Whether, under stream, other replicas of this host wait for it. It is held for them once it is here, and for
    other hosts while it comes."""
    sources: list[str] = []
    """Actors that have the version, or are about to, under stream. They are asked for chunks in this order, each until
    it fails, and then the parameter server."""
    more_sources: list[list[str]] = []
    """Further lists, under stream: with n of them beside ``sources``, which is list 0, chunk c is asked for by list
    c mod (n + 1). Chunks are numbered from 0 through all buckets."""


class Publish(Request, frozen=True, kw_only=True):
    """Learner to parameter server: version ``manifest.version`` is there. Answered once it is held for good.

    A version that is there already is acknowledged again. Error ``version_reused`` for an older one.
    """

    reply = Done
    senders = LEARNER
    manifest: Manifest
    gather_s: float = 0.0


class Published(Message, frozen=True, kw_only=True):
    """``held`` False: the parameter server is another one and does not know the version; publish it again."""

    held: bool
    corrupt: bool = False
    """Bytes held are no longer those that were sealed: the weights are to be published anew, under another number."""


class KeepPublished(Request, frozen=True, kw_only=True):
    """Learner to parameter server, parked while version ``version`` is held there."""

    reply = Published
    senders = LEARNER
    idle = True
    version: Count


class Announced(Message, frozen=True, kw_only=True):
    """``decided`` False: not in time, ask again. Else broadcast to ``group``; to nobody if it is None."""

    decided: bool
    group: CollectiveGroup | None = None


class Announce(Request, frozen=True, kw_only=True):
    """Learner to parameter server: ``version`` is being gathered and could be broadcast.

    Parked until every member of the group is paused for it, or it is clear that there will be no broadcast. Said again
    once that broadcast has broken, it asks for another one to those who survived.
    """

    reply = Announced
    senders = LEARNER
    version: Count
    backend: CollectiveBackend
    host: str
    port: int
    """Port at which the learner waits for the members."""
    buckets: list[BucketLayout]
    probe: Probe | None = None
    token: str = ""
    """Token as CollectiveGroup.token."""


class BroadcastEnded(Request, frozen=True, kw_only=True):
    """Learner to parameter server: the broadcast of ``version`` is over; an ``error`` breaks the group."""

    reply = Done
    senders = LEARNER
    version: Count
    epoch: Count
    error: str = ""
    again: bool = False
    """Whether the learner announces it anew next, after an error."""


class Update(Message, frozen=True, kw_only=True):
    """``offer`` is None when nothing newer came in time."""

    offer: Offer | None = None


class NextUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until there is a version above ``serving`` to be had.

    A replica that asks this has nothing staged and nothing paused any more, but for an engine that failed to load.
    """

    reply = Update
    senders = ROLLOUTER
    idle = True
    serving: int
    host: str
    """Host as by host_id (weights/segments.py): replicas of one value can open each other's segments, and those of a
    parameter server of that value."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes of the engine that take part in a broadcast."""
    on_gpu: bool = False
    base: int = -1
    """Version whose bytes are kept here, to apply deltas to; -1 for none."""


class Chunk(Message, frozen=True, kw_only=True):
    """The bytes asked for."""

    data: np.ndarray
    """uint8 [size]."""
    checksum: int
    """xxh3_64 of ``data``."""


class FetchChunk(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: bytes [offset, offset + size) of a bucket, or of its delta against ``base``.

    Also to a rollouter that brings the version to its host; parked there until the chunk has come. Error
    ``version_gone`` when the version is no longer held, ``not_here`` when the chunk has not come so far.
    """

    reply = Chunk
    senders = ROLLOUTER
    version: Count
    bucket: Count
    offset: Count
    size: Annotated[int, Meta(ge=1)]
    base: int = -1


class PauseGranted(Message, frozen=True, kw_only=True):
    """``granted`` False: not in time, ask again."""

    granted: bool


class RequestPause(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until this replica may pause to load ``version``."""

    reply = PauseGranted
    senders = ROLLOUTER
    version: Count
    paths: list[str] = []
    """Bucket.path of all buckets, where other replicas of this host find the version, if it is held for them."""


class BroadcastBegins(Message, frozen=True, kw_only=True):
    """``decided`` False: not in time, ask again. ``begins`` False: called off; ask for the next update."""

    decided: bool
    begins: bool = False


class JoinBroadcast(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: this replica is paused for the broadcast of ``version``.

    Parked until all members are, or it is called off.
    """

    reply = BroadcastBegins
    senders = ROLLOUTER
    version: Count
    epoch: Count


class ReportUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: the update to ``version`` ended here."""

    reply = Done
    senders = ROLLOUTER
    version: Count
    committed: bool
    times: UpdateTimes
    error: str = ""
    corrupt: bool = False
    """The bytes were not what the manifest says, before anything was loaded."""
    broke_off: bool = False
    """Whether it was a broadcast that broke off under this replica; whose fault that was it does not know."""
    epoch: int = -1
    """Epoch of the broadcast, if it was one: a late word on one that broke says nothing on the next of its version."""
