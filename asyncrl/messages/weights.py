"""Messages of a weight update: from the learner through the parameter server to the rollouters."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncrl.messages import LEARNER, ROLLOUTER, Count, Done, Message, Request
from asyncrl.messages.learner import UpdateTimes


class TensorSpec(Struct, gc=False, frozen=True, array_like=True):
    """A parameter in a bucket, under its Hugging Face checkpoint name."""

    name: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    offset: Count
    """Byte offset in the bucket; aligned to 64."""


class BucketLayout(Struct, gc=False, frozen=True, kw_only=True):
    """A bucket before it is filled; the same in every version."""

    size: Count
    tensors: list[TensorSpec]


class Bucket(Struct, gc=False, frozen=True, kw_only=True):
    """Some of the parameters of a version, in one memory segment."""

    path: str
    """/proc/PID/fd/N of a sealed memfd, readable by processes of the same user on the same host. Empty if the bytes
    have to be fetched."""
    size: Count
    checksum: int
    """xxh3_64 over the whole bucket."""
    tensors: list[TensorSpec]


class Probe(Struct, gc=False, frozen=True, kw_only=True):
    """Log-probs of a few sequences under the learner's weights of a version; an engine with the same weights agrees.

    There are S sequences of T tokens together, and C places in them. Each place has the K likeliest next tokens.
    """

    tokens: np.ndarray
    """int32 [T], one sequence after the other."""
    lengths: np.ndarray
    """int32 [S], sums to T."""
    logprobs: np.ndarray
    """float32 [T - S]: of each token except a sequence's first, given those before it, at temperature 1 (nats)."""
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
    gather_s: float = 0.0
    """Seconds until everything was gathered and sealed."""


CollectiveBackend = Literal["nccl", "gloo"]
Transport = Literal["nccl", "gloo", "shm", "stream"]


class BroadcastGroup(Struct, gc=False, frozen=True, kw_only=True):
    """The process group of a broadcast. Rank 0 is the learner; a replica has as many consecutive ranks as workers."""

    backend: CollectiveBackend
    epoch: Count
    """Number of this set of members. A group is used until a member joins, leaves or fails."""
    world_size: Annotated[int, Meta(ge=2)]
    host: str
    """Host of the learner's store, at which the members meet."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: str = ""
    """Secret prefix of the group's keys in the store."""


class BroadcastPart(Struct, gc=False, frozen=True, kw_only=True):
    """A replica's part in the broadcast of one version: each of its workers receives every bucket, in order."""

    version: Count
    group: BroadcastGroup
    first_rank: Annotated[int, Meta(ge=1)]
    """Rank of the replica's first worker."""
    buckets: list[BucketLayout]
    probe: Probe | None = None
    timeout_s: float
    """Longest time that a member waits for the others, or for the next bucket."""


class Source(Struct, gc=False, frozen=True, array_like=True):
    """A replica earlier in the chain, and its turn there."""

    name: str
    turn: Count


class Offer(Struct, gc=False, frozen=True, kw_only=True):
    """A version for one replica: with a ``manifest`` under shm and stream, else with a ``broadcast``."""

    version: Count
    transport: Transport
    manifest: Manifest | None = None
    broadcast: BroadcastPart | None = None
    share: bool = False
    """Whether this replica fetches the version for its host. Other replicas of the host open it when it is whole. The
    next host of the chain asks for its chunks while they arrive."""
    turn: Count = 0
    """Turn of this replica in the chain, if it shares. Each fetch has a later turn than all before it."""
    sources: list[Source] = []
    """Replicas earlier in the chain, nearest first. Each is asked for chunks until it fails, and at last the parameter
    server is."""


class Publish(Request, frozen=True, kw_only=True):
    """Learner to parameter server: a new version. Answered when the parameter server holds its segments.

    A version that is held already is acknowledged again. Error ``version_reused`` for an older one.
    """

    reply = Done
    senders = LEARNER
    manifest: Manifest


class Published(Message, frozen=True, kw_only=True):
    """``held`` False: this is another parameter server, which lacks the version; publish it again."""

    held: bool
    corrupt: bool = False
    """The bytes have changed since they were sealed: publish the weights again, under another number."""


class KeepPublished(Request, frozen=True, kw_only=True):
    """Learner to parameter server, parked while version ``version`` is held."""

    reply = Published
    senders = LEARNER
    idle = True
    version: Count


class BroadcastState(Message, frozen=True, kw_only=True):
    """State of the learner's broadcast. ``decided`` False: ask again."""

    decided: bool = False
    group: BroadcastGroup | None = None
    """The group that the learner now broadcasts to; None where there is no broadcast."""
    error: str = ""
    """Reason that the broadcast broke; empty if all members have committed."""


class AnnounceBroadcast(Request, frozen=True, kw_only=True):
    """Learner to parameter server: ``version`` is being gathered and can be broadcast.

    Parked until every member of the group is paused for it, or it is clear that there is no broadcast.
    """

    reply = BroadcastState
    senders = LEARNER
    version: Count
    backend: CollectiveBackend
    host: str
    port: int
    """Port of the learner's store."""
    token: str = ""
    """As BroadcastGroup.token."""
    buckets: list[BucketLayout]
    probe: Probe | None = None


class WatchBroadcast(Request, frozen=True, kw_only=True):
    """Learner to parameter server while it sends, parked until the broadcast is over, so that it stops at a failure."""

    reply = BroadcastState
    senders = LEARNER
    idle = True
    version: Count
    epoch: Count


class FailBroadcast(Request, frozen=True, kw_only=True):
    """Learner to parameter server: it cannot send on because of ``error``, which breaks the group."""

    reply = BroadcastState
    senders = LEARNER
    version: Count
    epoch: Count
    error: str


class Update(Message, frozen=True, kw_only=True):
    """Without an ``offer`` nothing newer came in time."""

    offer: Offer | None = None


class NextUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until there is a version above ``serving`` for this replica.

    A replica that asks this has nothing staged and nothing paused, except an engine that failed to load.
    """

    reply = Update
    senders = ROLLOUTER
    idle = True
    serving: int
    host: str
    """Host by host_id (weights/segments.py). A process can open the segments of all processes with the same value."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes of the engine that take part in a broadcast."""
    on_gpu: bool = False


class Chunk(Message, frozen=True, kw_only=True):
    """Bytes of a bucket."""

    data: np.ndarray
    """uint8 [size]."""
    checksum: int
    """xxh3_64 of ``data``."""


class FetchChunk(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: bytes [offset, offset + size) of a bucket.

    Also to a rollouter that fetches the version for its host; parked there until the chunk has arrived. Error
    ``version_gone`` if the version is not held by this turn, ``not_here`` if the chunk has not arrived in time.
    """

    reply = Chunk
    senders = ROLLOUTER
    version: Count
    bucket: Count
    offset: Count
    size: Annotated[int, Meta(ge=1)]
    turn: Count = 0
    """Turn of the rollouter that is asked; 0 for the parameter server. A rollouter that has begun again has a later
    turn, and may wait for the chunks of the caller itself."""


class LoadGranted(Message, frozen=True, kw_only=True):
    """``decided`` False: ask again. ``granted`` False: the broadcast is called off; ask for the next update."""

    decided: bool = False
    granted: bool = False


class RequestLoad(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until this replica may load ``version``.

    By shm or stream it pauses then. For a broadcast it is paused already, and waits for the other members.
    """

    reply = LoadGranted
    senders = ROLLOUTER
    version: Count
    epoch: Count | None = None
    """Epoch of the broadcast; None by shm and stream."""
    paths: list[str] = []
    """Bucket.path of all buckets at which other replicas of this host find the version, if it is held for them."""


class ReportUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: the update to ``version`` ended here."""

    reply = Done
    senders = ROLLOUTER
    version: Count
    committed: bool
    times: UpdateTimes
    error: str = ""
    corrupt: bool = False
    """The bytes were not those of the manifest, before anything was loaded."""
