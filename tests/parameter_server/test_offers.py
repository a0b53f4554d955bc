"""The transport of a version to each replica."""

import pytest
from conductor_play import Play
from probes import make_probe

PROBE = make_probe()


@pytest.mark.parametrize(
    ("configured", "here"),
    [("auto", "shm"), ("shm", "shm"), ("stream", "stream"), ("gloo", "stream"), ("nccl", "stream")],
)
def test_a_replica_on_the_same_host_opens_segments_and_others_fetch(configured, here):
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
def test_members_of_a_broadcast(configured, backend, on_gpu, member):
    play = Play(transport=configured)
    play.serve("r/0", on_gpu=on_gpu)
    assert (play.announce(1, backend=backend, probe=PROBE) is None) is member
    if member:
        offer = play.look("r/0")
        assert offer.transport == offer.broadcast.group.backend == backend
        assert offer.manifest is None and offer.broadcast.probe is PROBE
