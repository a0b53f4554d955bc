"""The receiving sides of the benchmark of weights: each brings one version's bytes here and verifies what it would."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import numpy as np

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, BucketLayout, Manifest, Offer, Transport
from asyncrl.rollouter.updating.fetch import fetch

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


async def by_fetch(manifest: Manifest, transport: Transport, call: Any, weights: WeightsConfig) -> float:
    """Seconds until every sealed segment is open and verified, or every chunk has come, was verified and sealed."""
    began = time.perf_counter()
    offer = Offer(version=manifest.version, transport=transport, manifest=manifest)
    fetched = await fetch(offer, call=lambda name, request, timeout: call(request, timeout), weights=weights)
    seconds = time.perf_counter() - began
    fetched.close()
    return seconds


def by_gloo(receiver: Any, version: int, group: BroadcastGroup, layouts: list[BucketLayout]) -> float:
    """Seconds until every bucket was received and verified."""
    began = time.perf_counter()
    part = BroadcastPart(version=version, group=group, first_rank=1, buckets=layouts, timeout_s=TIMEOUT_S)
    for _ in receiver.receive(part, worker=0):
        pass
    return time.perf_counter() - began


def by_memcpy(source: np.ndarray, target: np.ndarray) -> float:
    """Seconds of one copy between two arrays that both exist already."""
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def by_tcp(port: int, target: np.ndarray) -> float:
    """Seconds of a bare loopback connection, into memory that exists already."""
    began = time.perf_counter()
    view = target.data
    with socket.create_connection((HOST, port)) as connection:
        done = 0
        while done < len(view):
            count = connection.recv_into(view[done:])
            if not count:
                raise ConnectionError(f"sender left after {done} of {len(view)} bytes")
            done += count
    return time.perf_counter() - began


def by_bare_gloo(group: Any, targets: list[Any]) -> float:
    """Seconds of one bare broadcast a bucket, into memory that exists already."""
    began = time.perf_counter()
    for target in targets:
        broadcast(group, target)
    return time.perf_counter() - began


def bare_store() -> Any:
    """The store of the bare group; its ``port`` is told to the other side."""
    dist = _distributed()

    return dist.TCPStore(HOST, 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)


def bare_group(port: int, rank: int, store: Any = None) -> Any:
    """Two ranks over gloo and nothing else."""
    dist = _distributed()

    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST, lazy_init=False)]
    if store is None:
        store = dist.TCPStore(HOST, port, None, False, timedelta(seconds=TIMEOUT_S))
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, options)


def broadcast(group: Any, tensor: Any) -> None:
    """Broadcast from rank 0."""
    dist = _distributed()

    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def _distributed() -> Any:
    # Brings torch along; it does not say itself what of its classes is public.
    import torch.distributed

    return torch.distributed
