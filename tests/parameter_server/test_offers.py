"""Which way a version goes to which replica."""

import pytest
from conductor_play import Play
from probes import make_probe

from asyncrl.messages.weights import Bucket, Delta, Manifest
from asyncrl.parameter_server.offers import manifest_for

PROBE = make_probe()


@pytest.mark.parametrize(
    ("configured", "here"),
    [("auto", "shm"), ("shm", "shm"), ("stream", "stream"), ("gloo", "stream"), ("nccl", "stream")],
)
def test_the_rolling_way(configured, here):
    play = Play(transport=configured)
    play.publish(0)
    assert play.next("r/0", -1, same_host=True).transport == here
    assert play.next("r/1", -1, same_host=False).transport == "stream"


@pytest.mark.parametrize(
    ("configured", "backend", "on_gpu", "member"),
    [
        ("auto", "nccl", True, True),
        ("auto", "nccl", False, False),
        ("auto", "gloo", True, False),
        ("nccl", "nccl", True, True),
        ("nccl", "nccl", False, False),
        ("nccl", "gloo", True, False),
        ("gloo", "gloo", False, True),
        ("gloo", "nccl", True, False),
        ("shm", "nccl", True, False),
    ],
)
def test_who_can_be_a_member(configured, backend, on_gpu, member):
    play = Play(transport=configured)
    play.serve("r/0", on_gpu=on_gpu)
    assert (play.announce(1, backend=backend, probe=PROBE) is None) is member
    if member:
        offer = play.look("r/0")
        assert offer.transport == offer.collective.group.backend == backend
        assert offer.manifest is None and offer.collective.probe is PROBE


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("base", [-1, 1, 2])
def test_a_manifest_tells_all_that_the_replica_can_use(transport, base):
    delta = Delta(base=1, path="/proc/1/fd/2", size=7)
    buckets = [
        Bucket(path="/proc/1/fd/3", size=64, checksum=5, tensors=[], delta=delta),
        Bucket(path="/proc/1/fd/4", size=64, checksum=6, tensors=[]),
    ]
    manifest = Manifest(version=2, buckets=buckets, probe=PROBE)
    told = manifest_for(manifest, transport, base)
    assert (told.version, told.probe) == (2, PROBE)
    assert [(b.size, b.checksum) for b in told.buckets] == [(64, 5), (64, 6)]
    assert [b.path for b in told.buckets] == (["/proc/1/fd/3", "/proc/1/fd/4"] if transport == "shm" else ["", ""])
    useful = Delta(base=1, path=delta.path if transport == "shm" else "", size=7) if base == 1 else None
    assert [b.delta for b in told.buckets] == [useful, None]
    assert manifest.buckets[0].path and manifest.buckets[0].delta is delta
