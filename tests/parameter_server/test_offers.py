"""Which way a version goes to which replica."""

import pytest
from conductor_play import LEARNER, Play
from probes import make_probe

from asyncrl.messages.weights import Bucket, Delta, Manifest
from asyncrl.parameter_server.offers import manifest_for, may_broadcast, rolling_transport

PROBE = make_probe()


@pytest.mark.parametrize(
    ("configured", "here", "elsewhere"),
    [
        ("auto", "shm", "stream"),
        ("shm", "shm", "stream"),
        ("stream", "stream", "stream"),
        ("gloo", "stream", "stream"),
        ("nccl", "stream", "stream"),
    ],
)
def test_the_rolling_way(configured, here, elsewhere):
    assert rolling_transport(configured, same_host=True) == here
    assert rolling_transport(configured, same_host=False) == elsewhere
    play = Play(transport=configured)
    play.publish(0)
    assert play.next("r/0", -1, same_host=True).transport == here
    assert play.next("r/1", -1, same_host=False).transport == elsewhere


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
        ("gloo", "gloo", True, True),
        ("gloo", "nccl", True, False),
        ("shm", "nccl", True, False),
        ("stream", "gloo", True, False),
    ],
)
def test_who_can_be_a_member(configured, backend, on_gpu, member):
    assert may_broadcast(configured, backend, on_gpu=on_gpu) is member
    play = Play(transport=configured)
    play.serve("r/0", on_gpu=on_gpu)
    answer = play.announce(1, backend=backend)
    assert (answer is None) is member
    assert str(play.replica("r/0").phase) == ("announced" if member else "serving")
    if member:
        offer = play.look("r/0")
        assert offer.transport == offer.collective.group.backend == backend
        assert offer.manifest is None


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("base", [-1, 1, 2])
def test_a_manifest_tells_what_the_replica_can_use(transport, base):
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
    assert told.buckets[1].delta is None
    if base == 1:
        assert told.buckets[0].delta == Delta(base=1, path=delta.path if transport == "shm" else "", size=7)
    else:
        assert told.buckets[0].delta is None
    assert manifest.buckets[0].path and manifest.buckets[0].delta is delta


def test_in_a_broadcast_the_announcement_carries_the_probe():
    play = Play()
    play.serve("r/0", "r/1")
    play.announce(1, probe=PROBE)
    assert all(play.look(name).collective.probe is PROBE for name in ("r/1", "r/0"))
    assert play.look(LEARNER[0]) is None

    play = Play()
    play.serve("r/0")
    play.announce(1)
    assert play.look("r/0").collective.probe is None
