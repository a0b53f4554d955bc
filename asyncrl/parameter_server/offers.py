"""The transport by which a version goes to a replica, and the manifest that the replica gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.messages.weights import Bucket, CollectiveBackend, Manifest, Transport


def may_broadcast(configured: str, backend: CollectiveBackend, *, on_gpu: bool) -> bool:
    """Whether a replica can be a member when the learner offers to broadcast over ``backend``.

    ``configured`` is weights.transport; under auto only nccl is worth pausing all replicas at once.
    """
    if backend == "nccl" and not on_gpu:
        return False
    return configured == backend or (configured == "auto" and backend == "nccl")


def rolling_transport(configured: str, *, same_host: bool) -> Transport:
    """Transport to a replica that is served by itself."""
    return "shm" if same_host and configured in ("auto", "shm") else "stream"


def manifest_for(manifest: Manifest, transport: Transport, base: int) -> Manifest:
    """Manifest of a held version for a replica that keeps the bytes of version ``base`` (-1 for none).

    Paths lead the replica to the segments under shm alone; a delta helps it only against its base.
    """
    return msgspec.structs.replace(manifest, buckets=[_bucket_for(b, transport, base) for b in manifest.buckets])


def shared_manifest(manifest: Manifest, paths: Sequence[str]) -> Manifest:
    """Manifest for a replica that finds the version on its own host, which is not this one."""
    buckets = [
        msgspec.structs.replace(bucket, path=path, delta=None)
        for bucket, path in zip(manifest.buckets, paths, strict=True)
    ]
    return msgspec.structs.replace(manifest, buckets=buckets)


def _bucket_for(bucket: Bucket, transport: Transport, base: int) -> Bucket:
    delta = bucket.delta
    if delta is not None and delta.base != base:
        delta = None
    if transport == "shm":
        return bucket if delta is bucket.delta else msgspec.structs.replace(bucket, delta=None)
    if delta is not None:
        delta = msgspec.structs.replace(delta, path="")
    return msgspec.structs.replace(bucket, path="", delta=delta)
