"""Placement, by tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import validate_config
from asyncrl.errors import ConfigError
from asyncrl.launcher.placement import Host, describe, place


def config(ranks=1, replicas=1, gpus_per_replica=1, device="auto", threads=0, sim=False, **tables):
    return validate_config(
        {
            "model": {"path": "/models/m"},
            "data": {"source": "synthetic"},
            "learner": {"ranks": ranks, "device": device, "backend": "sim" if sim else "fsdp2"},
            "rollout": {
                "replicas": replicas,
                "gpus_per_replica": gpus_per_replica,
                "engine": "sim" if sim else "vllm",
                "vllm": {"threads": threads},
            },
        }
        | tables
    )


def host(gpus=0, cpus=8):
    return Host(name="box", cpus=cpus, gpus=tuple(map(str, range(gpus))))


def by_name(placed):
    return {actor.name: actor for actor in placed}


def test_every_actor_is_placed_and_the_controller_comes_first():
    names = [actor.name for actor in place(config(ranks=2, replicas=3), [host(gpus=5)])]
    assert names == [
        "controller/0",
        "dataloader/0",
        "reward/0",
        "parameter_server/0",
        "learner/0",
        "learner/1",
        "rollouter/0",
        "rollouter/1",
        "rollouter/2",
    ]


@pytest.mark.parametrize(
    ("ranks", "replicas", "each", "device", "gpus", "learner", "engines"),
    [
        (2, 2, 1, "auto", 4, ["0", "1"], [["2"], ["3"]]),
        (2, 2, 1, "auto", 8, ["0", "1"], [["2"], ["3"]]),
        (1, 2, 2, "cuda", 5, ["0"], [["1", "2"], ["3", "4"]]),
        (2, 2, 1, "cpu", 2, [], [["0"], ["1"]]),
        (2, 2, 0, "auto", 2, ["0", "1"], [[], []]),
        (2, 2, 0, "auto", 0, [], [[], []]),
        (1, 1, 0, "cpu", 4, [], [[]]),
    ],
)
def test_learner_ranks_get_gpus_first_then_engines(ranks, replicas, each, device, gpus, learner, engines):
    placed = by_name(place(config(ranks, replicas, each, device), [host(gpus)]))
    for rank in range(ranks):
        actor = placed[f"learner/{rank}"]
        assert actor.gpus == tuple(learner[rank : rank + 1])
        # As under torchrun: all see all, LOCAL_RANK chooses.
        assert actor.env["CUDA_VISIBLE_DEVICES"] == ",".join(learner)
    for replica in range(replicas):
        actor = placed[f"rollouter/{replica}"]
        assert list(actor.gpus) == engines[replica]
        assert actor.env["CUDA_VISIBLE_DEVICES"] == ",".join(engines[replica])
    for name in ("controller/0", "dataloader/0", "reward/0", "parameter_server/0"):
        assert placed[name].gpus == ()
        assert placed[name].env["CUDA_VISIBLE_DEVICES"] == ""


def test_visible_devices_of_the_user_are_kept_as_they_are_named():
    offered = Host(name="box", cpus=8, gpus=("3", "GPU-5a", "7"))
    placed = by_name(place(config(ranks=1, replicas=2), [offered]))
    assert placed["learner/0"].env["CUDA_VISIBLE_DEVICES"] == "3"
    assert placed["rollouter/1"].env["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("ranks", "replicas", "each", "device", "gpus", "said"),
    [
        (2, 3, 2, "cuda", 4, ["learner.ranks = 2", "3 x 2 = 6", "makes 8", "box has 4", 'learner.device = "cpu"']),
        (1, 1, 1, "auto", 0, ["1 x 1 = 1", "makes 1", "has 0", "rollout.gpus_per_replica = 0"]),
        (1, 1, 1, "auto", 1, ["learner.ranks = 1", "makes 2", "has 1"]),
        (4, 1, 0, "cuda", 2, ["learner.ranks = 4", "makes 4", "has 2"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(ranks, replicas, each, device, gpus, said):
    with pytest.raises(ConfigError) as caught:
        place(config(ranks, replicas, each, device), [host(gpus)])
    (problem,) = caught.value.problems
    assert all(part in problem for part in said), problem


def test_what_is_simulated_needs_no_gpu():
    placed = place(config(ranks=1, replicas=64, gpus_per_replica=8, sim=True), [host()])
    assert all(actor.gpus == () for actor in placed)


@pytest.mark.parametrize(
    ("cpus", "ranks", "replicas", "threads", "sim", "learner", "engine"),
    [
        (2, 1, 1, 0, False, "1", "1"),
        (2, 2, 2, 0, False, "1", "1"),
        (16, 2, 2, 0, False, "4", "4"),
        (64, 1, 1, 6, False, "32", "6"),
        (64, 1, 4, 0, True, "1", "1"),
    ],
)
def test_computing_processes_share_the_cores(cpus, ranks, replicas, threads, sim, learner, engine):
    placed = by_name(place(config(ranks, replicas, 0, "cpu", threads, sim), [host(cpus=cpus)]))
    assert placed["learner/0"].env["OMP_NUM_THREADS"] == learner
    assert placed["rollouter/0"].env["OMP_NUM_THREADS"] == engine
    assert placed["reward/0"].env["OMP_NUM_THREADS"] == "1"


def test_torch_finds_its_ranks():
    placed = by_name(place(config(ranks=2, replicas=1, gpus_per_replica=0), [host()]))
    env = placed["learner/1"].env
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "1", "2", "2")
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert "RANK" not in placed["rollouter/0"].env


@given(ranks=st.integers(1, 8), replicas=st.integers(1, 8), each=st.integers(0, 4), gpus=st.integers(0, 40))
def test_no_gpu_is_given_twice(ranks, replicas, each, gpus):
    offered = host(gpus)
    try:
        placed = place(config(ranks, replicas, each), [offered])
    except ConfigError:
        assert (ranks if gpus else 0) + replicas * each > gpus
        return
    given_away = [gpu for actor in placed for gpu in actor.gpus]
    assert len(given_away) == len(set(given_away))
    assert set(given_away) <= set(offered.gpus)


def test_it_can_be_read():
    settings = config(ranks=1, replicas=2)
    text = "\n".join(describe(settings, place(settings, [host(gpus=3)])))
    assert "rollouter/1" in text
    assert "GPU 2" in text
    assert "gate capacity, groups        16 = (staleness.max 1 + 1) x G" in text
