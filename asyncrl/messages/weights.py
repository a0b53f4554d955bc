"""Messages of a weight update: from the learner through the parameter server to the rollouters.

By shm and stream each replica opens segments or fetches chunks by itself. By nccl and gloo the learner broadcasts to
all members at once. In parameter_server/, conductor.py explains staging and the chain of hosts with its turns, and
broadcast_control.py members and epochs.
"""

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
    """Log-probs of a few sequences by the learner's weights of a version; an engine with the same weights agrees.

    There are S sequences of T tokens in all. A place is a position in a sequence. For each of C places there are also
    the K likeliest next tokens, at the run's temperature: there the engine samples one token.
    """

    tokens: np.ndarray
    """int32 [T], one sequence after the other."""
    lengths: np.ndarray
    """int32 [S], sums to T."""
    logprobs: np.ndarray
    """float32 [T - S]: of each token except a sequence's first, given those before it, at temperature 1 (nats)."""
    places: np.ndarray
    """int32 [C, 2]: the index of a sequence, and the number of its tokens before the place."""
    likeliest: np.ndarray
    """int32 [C, K]: the likeliest tokens at each place."""
    likeliest_logprobs: np.ndarray
    """float32 [C, K]: their log-probs at the run's temperature (nats)."""


class DeviceCopy(Struct, gc=False, frozen=True, kw_only=True):
    """A copy of a version in the memory of a GPU, for the engines there. The next version overwrites it."""

    gpu: str
    """UUID of the GPU."""
    handle: Annotated[bytes, Meta(max_length=64)]
    """Bytes by which another process opens the memory (weights/tensors.py)."""
    size: Count
    """Bytes of the memory."""
    offsets: list[list[Count]]
    """For each bucket, the byte offset of each of its tensors; empty if the copy lacks the bucket."""
    sums: list[int]
    """For each bucket, the sum of its 64-bit words (weights/tensors.py)."""


class Manifest(Struct, gc=False, frozen=True, kw_only=True):
    """A complete set of weights: every parameter of the model exactly once."""

    version: Count
    buckets: list[Bucket]
    device: DeviceCopy | None = None
    """A copy of the same weights on the learner's GPU, if an engine shares that GPU."""
    probe: Probe | None = None
    gather_s: float = 0.0
    """Seconds until everything was gathered and sealed."""

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)


CollectiveBackend = Literal["nccl", "gloo"]
Transport = Literal["nccl", "gloo", "shm", "stream"]


class BroadcastGroup(Struct, gc=False, frozen=True, kw_only=True):
    """The process group of a broadcast. Rank 0 is the learner; a replica has consecutive ranks, one for each worker."""

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

    manifest: Manifest
    """The version. Its paths are those of the learner's host, which members do not open."""
    group: BroadcastGroup
    first_rank: Annotated[int, Meta(ge=1)]
    """Rank of the replica's first worker."""
    timeout_s: float
    """Seconds that a member waits for the others, or for the next bucket, before it fails."""

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version


class Source(Struct, gc=False, frozen=True, array_like=True):
    """A replica earlier in the chain, and the turn of its fetch (parameter_server/conductor.py)."""

    name: str
    turn: Count


class WeightUpdate(Struct, gc=False, frozen=True, kw_only=True):
    """A version for one replica to take: with a ``manifest`` by shm and stream, else with a ``broadcast``."""

    version: Count
    transport: Transport
    manifest: Manifest | None = None
    broadcast: BroadcastPart | None = None
    turn: Count = 0
    """Above 0 if this replica fetches the version for its host: its turn in the chain, later than all before it. Other
    replicas of the host open the version once it is whole. The next host requests its chunks while they arrive."""
    sources: list[Source] = []
    """Replicas earlier in the chain, nearest first. Chunks come from the first until it fails, then from the next, and
    at last from the parameter server."""


class Publish(Request, frozen=True, kw_only=True):
    """Learner to parameter server: a new version. Answered when the parameter server holds its segments.

    A repeat for the newest version is acknowledged again. Error ``version_reused`` for an older version.
    """

    reply = Done
    senders = LEARNER
    manifest: Manifest


class Published(Message, frozen=True, kw_only=True):
    """State of a published version.

    If ``held``, ask again. If not, a restarted parameter server lacks the version: publish it again.
    """

    held: bool
    corrupt: bool = False
    """Whether the bytes have changed since they were sealed. Then publish the weights with another number."""


class WatchPublished(Request, frozen=True, kw_only=True):
    """Learner to parameter server, parked as long as ``version``, or a newer one, is held and its bytes are intact."""

    reply = Published
    senders = LEARNER
    idle = True
    version: Count


class BroadcastState(Message, frozen=True, kw_only=True):
    """State of the learner's broadcast. ``decided`` False: ask again."""

    decided: bool = False
    """False at the end of the parking time, or if the learner has asked another question since."""
    group: BroadcastGroup | None = None
    """The group to which the learner must now broadcast; None if there is no broadcast."""
    error: str = ""
    """Reason that the broadcast broke; empty if all members have committed."""


class AnnounceBroadcast(Request, frozen=True, kw_only=True):
    """Learner to parameter server: a version can be broadcast. Sent before its Publish.

    Parked until every member of the group is paused for it, or the broadcast is declined or called off.
    """

    reply = BroadcastState
    senders = LEARNER
    manifest: Manifest
    backend: CollectiveBackend
    host: str
    port: int
    """Port of the learner's store."""
    token: str = ""
    """As BroadcastGroup.token."""


class WatchBroadcast(Request, frozen=True, kw_only=True):
    """Learner to parameter server, while it sends: parked until the broadcast is over, so that it can stop early."""

    reply = BroadcastState
    senders = LEARNER
    idle = True
    version: Count
    epoch: Count
    error: str = ""
    """Reason that the learner cannot continue to send, which breaks the group; empty while it sends."""


class UpdateAnswer(Message, frozen=True, kw_only=True):
    """A version to take. Without an ``update`` there was no newer one in time: ask again."""

    update: WeightUpdate | None = None


class NextUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until there is a version above ``serving`` for this replica.

    It also says that the replica has nothing staged, and that it is not paused, unless its engine failed to load.
    """

    reply = UpdateAnswer
    senders = ROLLOUTER
    idle = True
    serving: int
    host: str
    """host_id of the replica (rpc/linux.py): it can open the segments of all processes with the same value."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes of the engine that take part in a broadcast."""
    joins_nccl: bool = False
    """Whether it can be in one NCCL group with the learner: on GPUs, not in time slices, and on no GPU of rank 0."""


class Chunk(Message, frozen=True, kw_only=True):
    """Bytes of a bucket."""

    data: np.ndarray
    """uint8 [size]."""
    checksum: int
    """xxh3_64 of ``data``."""


class FetchChunk(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: send bytes [offset, offset + size) of a bucket.

    Also sent to a rollouter that fetches the version for its host, and parked there until the chunk has arrived. Errors
    are ``version_gone`` if the version is not held there (with this turn), and ``not_here`` if the chunk has not
    arrived in time.
    """

    reply = Chunk
    senders = ROLLOUTER
    version: Count
    bucket: Count
    offset: Count
    size: Annotated[int, Meta(ge=1)]
    turn: Count = 0
    """Turn of the fetch that is asked; 0 for the parameter server. If the rollouter has begun another fetch, it has a
    later turn and refuses: it may itself wait for chunks of the caller."""


class LoadAnswer(Message, frozen=True, kw_only=True):
    """``decided`` False: ask again. ``may_load`` False: the broadcast is called off; no other request is refused."""

    decided: bool = False
    may_load: bool = False


class RequestLoad(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server, parked until this replica may load ``version``.

    With shm or stream it pauses after the answer. For a broadcast it is paused already, and waits for other members.
    """

    reply = LoadAnswer
    senders = ROLLOUTER
    version: Count
    epoch: Count | None = None
    """Epoch of the broadcast; None with shm and stream."""
    paths: list[str] = []
    """Bucket.path of each bucket, by which other replicas of this host can open the version; empty if not shared."""


class ReportUpdate(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: the update to ``version`` has ended; if ``committed``, the replica serves it."""

    reply = Done
    senders = ROLLOUTER
    version: Count
    committed: bool
    times: UpdateTimes
    error: str = ""
    corrupt: bool = False
    """Whether the bytes differed from the manifest; nothing was loaded then."""


class ReportSleep(Request, frozen=True, kw_only=True):
    """Rollouter to parameter server: the learner asks for the GPU of its engine.

    The update under way and the open question end, and the update counts as no failure.
    """

    reply = Done
    senders = ROLLOUTER
