"""Placement, by tables and properties."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.load import validate_config
from asyncrl.errors import ConfigError
from asyncrl.launcher.terms.placement import (
    PlacementHost,
    describe,
    place,
    place_replicas,
    with_episode_hosts,
    with_gpus,
)


def config(ranks=1, replicas=1, gpus_per_replica=1, device="auto", threads=0, sim=False, learner_threads=0, **tables):
    return validate_config(
        {
            "model": {"path": "/models/m"},
            "data": {"source": "synthetic"},
            "learner": {
                "ranks": ranks,
                "device": device,
                "backend": "sim" if sim else "fsdp2",
                "threads": learner_threads,
            },
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
    return PlacementHost(name="box", cpus=cpus, gpus=tuple(map(str, range(gpus))))


def by_name(placed):
    return {actor.name: actor for actor in placed}


def test_visible_devices_of_the_user_are_kept_as_they_are_named():
    offered = PlacementHost(name="box", cpus=8, gpus=("3", "GPU-5a", "7"))
    placed = by_name(place(config(ranks=1, replicas=2), [offered]))
    assert placed["learner/0"].env["CUDA_VISIBLE_DEVICES"] == "3"
    assert placed["rollouter/1"].env["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("engine", "given", "gpus", "found"),
    [
        ("vllm", None, (0,), 0),
        ("vllm", None, (2,), 1),
        ("vllm", None, (0, 2), 1),
        ("vllm", 0, (2,), 0),
        ("vllm", 2, (0,), 2),
        ("reference", None, (2,), 0),
        ("sim", None, (2,), 0),
    ],
)
def test_an_engine_takes_a_gpu_where_there_is_one_unless_the_user_says(engine, given, gpus, found):
    tree = config(gpus_per_replica=given).model_dump(mode="json")
    tree["rollout"]["engine"] = engine
    tree["learner"]["backend"] = "sim" if engine == "sim" else "fsdp2"
    hosts = [PlacementHost(name=f"h{i}", cpus=8, gpus=tuple(map(str, range(count)))) for i, count in enumerate(gpus)]
    settled = with_gpus(validate_config(tree), hosts)
    assert settled.rollout.gpus_per_replica == found
    assert with_gpus(settled, hosts) is settled


def test_a_machine_without_gpus_needs_nothing_by_hand():
    placed = by_name(place(with_gpus(config(gpus_per_replica=None), [host()]), [host()]))
    assert placed["rollouter/0"].gpus == placed["learner/0"].gpus == ()
    with pytest.raises(ConfigError, match=r"weights\.transport: nccl reaches engines on GPUs only"):
        with_gpus(config(gpus_per_replica=None, weights={"transport": "nccl"}), [host()])


@pytest.mark.parametrize(
    ("cpus", "ranks", "replicas", "threads", "sim", "learner", "engine"),
    [
        (2, 1, 1, 0, False, "2", "1"),
        (2, 2, 2, 0, False, "1", "1"),
        (16, 2, 2, 0, False, "8", "4"),
        (16, 3, 8, 0, False, "5", "1"),
        (64, 1, 1, 6, False, "64", "6"),
        (64, 1, 4, 0, True, "1", "1"),
    ],
)
def test_computing_processes_share_the_cores(cpus, ranks, replicas, threads, sim, learner, engine):
    placed = by_name(place(config(ranks, replicas, 0, "cpu", threads, sim), [host(cpus=cpus)]))
    assert placed["learner/0"].env["OMP_NUM_THREADS"] == learner
    assert placed["rollouter/0"].env["OMP_NUM_THREADS"] == engine
    assert placed["reward/0"].env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("device", "gpus", "learner"), [("cpu", 0, "3"), ("auto", 0, "3"), ("cuda", 1, "4")])
def test_threads_of_a_rank_on_cpu_may_be_set(device, gpus, learner):
    placed = by_name(place(config(1, 1, 0, device, learner_threads=3), [host(gpus)]))
    assert [placed[name].env["OMP_NUM_THREADS"] for name in ("learner/0", "rollouter/0")] == [learner, "4"]


def hosts_of(*gpus, cpus=8):
    """Hosts a, b, c, ... with so many GPUs and cores; ``cpus`` may be one number for each."""
    cores = [cpus] * len(gpus) if isinstance(cpus, int) else cpus
    return [
        PlacementHost(name=chr(ord("a") + i), cpus=cores[i], gpus=tuple(map(str, range(count))), address=f"10.0.0.{i}")
        for i, count in enumerate(gpus)
    ]


def row(placed, role):
    """Where the actors of a role are, in order, as "a:0,1 b:2": host and GPUs."""
    chosen = [actor for actor in placed if actor.name.startswith(role + "/")]
    return " ".join(actor.host + (":" + ",".join(actor.gpus) if actor.gpus else "") for actor in chosen)


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "each", "device", "learner", "rollouter"),
    [
        ((8,), 2, 2, 1, "auto", "a:0 a:1", "a:2 a:3"),
        ((5,), 1, 2, 2, "cuda", "a:0", "a:1,2 a:3,4"),
        ((2,), 2, 2, 1, "cpu", "a a", "a:0 a:1"),
        ((2,), 2, 2, 0, "auto", "a:0 a:1", "a a"),
        # The learner fills the first hosts; engines go where most is free, numbered by host.
        ((4, 4), 2, 2, 1, "auto", "a:0 a:1", "b:0 b:1"),
        ((4, 4), 2, 5, 1, "auto", "a:0 a:1", "a:2 a:3 b:0 b:1 b:2"),
        ((4, 4), 6, 2, 1, "auto", "a:0 a:1 a:2 a:3 b:0 b:1", "b:2 b:3"),
        ((8, 8, 8), 8, 4, 4, "cuda", "a:0 a:1 a:2 a:3 a:4 a:5 a:6 a:7", "b:0,1,2,3 b:4,5,6,7 c:0,1,2,3 c:4,5,6,7"),
        # A full first host would leave room for one engine only.
        ((3, 3), 2, 2, 2, "auto", "a:0 b:0", "a:1,2 b:1,2"),
        ((3, 3), 2, 1, 2, "auto", "a:0 a:1", "b:0,1"),
        ((1, 4, 4), 3, 2, 3, "auto", "a:0 b:0 c:0", "b:1,2,3 c:1,2,3"),
        # The learner alone, the engines alone.
        ((2, 2), 3, 2, 0, "auto", "a:0 a:1 b:0", "a b"),
        ((2, 2), 2, 2, 2, "cpu", "a b", "a:0,1 b:0,1"),
        ((0, 2), 1, 2, 1, "cpu", "a", "b:0 b:1"),
        # Without GPUs all is spread evenly.
        ((0, 0), 1, 1, 0, "auto", "a", "b"),
        ((0, 0, 0), 1, 2, 0, "auto", "a", "b c"),
        ((0, 0, 0), 4, 5, 0, "auto", "a a b c", "a b b c c"),
    ],
)
def test_several_hosts(gpus, ranks, replicas, each, device, learner, rollouter):
    placed = place(config(ranks, replicas, each, device), hosts_of(*gpus))
    assert row(placed, "learner") == learner
    assert row(placed, "rollouter") == rollouter
    for role in ("controller", "dataloader", "parameter_server"):
        assert row(placed, role) == "a"


def test_cpu_processes_go_where_they_get_most_cores():
    placed = place(config(1, 3, 0, "cpu"), hosts_of(0, 0, cpus=[4, 16]))
    assert row(placed, "rollouter") == "b b b"
    # Rank 0 is on the head all the same.
    assert row(placed, "learner") == "a"


def test_simulated_replicas_are_spread():
    placed = place(config(1, 9, 8, sim=True), hosts_of(0, 0))
    # Needing no GPU.
    assert row(placed, "rollouter") == "a a a a b b b b b"


@pytest.mark.parametrize(
    ("gpus", "cpus", "replicas", "host"),
    [
        ((2,), 8, 1, "a"),
        ((2, 2), 8, 1, "b"),
        ((2, 2), [13, 8], 2, "a"),
        ((2, 2), [10, 8], 2, "b"),
        ((1, 2), [12, 9], 2, "a"),
        ((2, 0, 0), 8, 1, "b"),
    ],
)
def test_the_reward_pool_is_where_most_cores_are_free(gpus, cpus, replicas, host):
    assert row(place(config(1, replicas, 1), hosts_of(*gpus, cpus=cpus)), "reward") == host


@pytest.mark.parametrize(
    ("cpus", "pools", "hosts"),
    [([8, 9, 7], 1, "b"), ([8, 9, 7], 2, "b c"), ([8, 9, 7], 5, "b c a b c"), ([20, 9, 7], 3, "a b c")],
)
def test_reward_pools_are_on_different_hosts_as_far_as_there_are_hosts(cpus, pools, hosts):
    several = config(1, 1, 1, reward={"pools": pools, "workers": 4})
    assert row(place(several, hosts_of(2, 0, 0, cpus=cpus)), "reward") == hosts


def test_an_episode_host_is_beside_each_rollouter():
    playing = config(1, 3, 1, episode={"function": "pkg:play"})
    placed = by_name(place(playing, hosts_of(2, 2, cpus=8)))
    assert [placed[f"episodes/{n}"].host for n in range(3)] == [placed[f"rollouter/{n}"].host for n in range(3)]
    assert {(placed[f"episodes/{n}"].gpus, placed[f"episodes/{n}"].env["OMP_NUM_THREADS"]) for n in range(3)} == {
        ((), "1")
    }
    # It takes a core from the reward pool's host.
    assert placed["reward/0"].host == "b"
    assert row(place(config(1, 3, 1), hosts_of(2, 2, cpus=[9, 7])), "reward") == "b"
    assert row(place(config(1, 3, 1, episode={"function": "p:f"}), hosts_of(2, 2, cpus=[9, 7])), "reward") == "a"


@pytest.mark.parametrize(
    ("gpus", "replicas", "each", "device", "extra", "found"),
    [
        # Neither GPUs nor a part in what computes.
        ((2, 2, 0, 0), 3, 1, "auto", None, "a b b c d"),
        ((2, 2, 0, 0), 3, 1, "auto", 1, "a b b c"),
        ((2, 2, 0, 0), 3, 1, "auto", 0, "a b b"),
        ((2, 2), 3, 1, "auto", None, "a b b"),
        # GPUs that nobody uses are for something else, and slots=0 says that there are none.
        ((2, 2, 2), 1, 1, "auto", None, "b"),
        # The head has the learner.
        ((0, 2, 0), 2, 1, "cpu", None, "b b c"),
        ((0, 0), 1, 0, "cpu", None, "b"),
        ((0, 0, 0), 1, 0, "cpu", None, "b c"),
        ((0,), 1, 0, "cpu", None, "a"),
    ],
)
def test_hosts_with_cpus_alone_play_episodes(gpus, replicas, each, device, extra, found):
    hosts = hosts_of(*gpus)
    playing = config(1, replicas, each, device, episode={"function": "p:f", "extra_hosts": extra})
    settled = with_episode_hosts(playing, hosts)
    assert with_episode_hosts(settled, hosts) == settled
    placed = place(settled, hosts)
    assert row(placed, "episodes") == found
    assert [actor.name for actor in placed] == list(settled.actors)
    for actor in by_name(placed), by_name(place(settled, hosts)):
        names = settled.extra_episode_hosts
        assert all((actor[name].gpus, actor[name].env["OMP_NUM_THREADS"]) == ((), "1") for name in names)
    text = "\n".join(describe(settled, placed))
    assert all(name in text for name in settled.extra_episode_hosts)


def test_an_extra_episode_host_takes_a_core_from_the_reward_pools_host():
    hosts = hosts_of(2, 0, cpus=[11, 6])
    for extra, reward in (0, "b"), (None, "a"):
        asked = config(episode={"function": "p:f", "extra_hosts": extra})
        assert row(place(with_episode_hosts(asked, hosts), hosts), "reward") == reward


def test_more_extra_episode_hosts_than_there_can_be_are_refused():
    for gpus, said in (
        ((2,), "is 2, and 0 of 1 hosts have neither GPUs nor a rollouter nor a rank of the learner; name more"),
        ((2, 0, 3), "is 2, and 1 of 3 hosts have neither GPUs nor a rollouter nor a rank of the learner: b; name more"),
    ):
        with pytest.raises(ConfigError, match=r"episode\.extra_hosts: " + said):
            with_episode_hosts(config(episode={"function": "p:f", "extra_hosts": 2}), hosts_of(*gpus))
    with pytest.raises(ConfigError, match=r"episode\.extra_hosts: is for episodes"):
        config(episode={"extra_hosts": 1})


@given(
    gpus=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    replicas=st.integers(1, 4),
    each=st.integers(0, 1),
    device=st.sampled_from(["auto", "cpu"]),
)
def test_every_host_with_cpus_alone_has_one_episode_host_and_no_other_has_more(gpus, replicas, each, device):
    hosts = hosts_of(*gpus)
    try:
        settled = with_episode_hosts(config(1, replicas, each, device, episode={"function": "p:f"}), hosts)
    except ConfigError:
        return
    placed = place(settled, hosts)
    at = {
        role: [actor.host for actor in placed if actor.name.startswith(role + "/")]
        for role in ("learner", "rollouter", "episodes")
    }
    for host in hosts:
        alone = not host.gpus and host.name not in (*at["learner"], *at["rollouter"])
        assert at["episodes"].count(host.name) == at["rollouter"].count(host.name) + alone


def test_hosts_that_join_have_both():
    names = ["rollouter/4", "rollouter/5", "episodes/4", "episodes/5"]
    placed = by_name(place_replicas(config(episode={"function": "p:f"}), host(gpus=2, cpus=8), names))
    assert sorted(placed) == sorted(names)
    assert [placed[name].gpus for name in names] == [("0",), ("1",), (), ()]
    assert [placed[name].env["OMP_NUM_THREADS"] for name in names] == ["4", "4", "1", "1"]


def test_each_host_shares_its_own_cores():
    placed = by_name(place(config(3, 2, 1), hosts_of(2, 4, cpus=[8, 32])))
    threads = {name: actor.env["OMP_NUM_THREADS"] for name, actor in placed.items()}
    assert (threads["learner/0"], threads["learner/2"], threads["rollouter/0"]) == ("4", "10", "10")
    assert threads["reward/0"] == threads["controller/0"] == "1"


def test_torch_finds_its_ranks_across_hosts():
    placed = by_name(place(config(ranks=5, replicas=1, gpus_per_replica=1), hosts_of(2, 0, 4)))
    keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    assert [tuple(placed[f"learner/{rank}"].env[key] for key in keys) for rank in range(5)] == [
        ("0", "0", "0", "2", "5", "10.0.0.0", "0,1"),
        ("1", "1", "0", "2", "5", "10.0.0.0", "0,1"),
        ("2", "0", "1", "3", "5", "10.0.0.0", "0,1,2"),
        ("3", "1", "1", "3", "5", "10.0.0.0", "0,1,2"),
        ("4", "2", "1", "3", "5", "10.0.0.0", "0,1,2"),
    ]
    assert placed["rollouter/0"].env["CUDA_VISIBLE_DEVICES"] == "3" and "RANK" not in placed["rollouter/0"].env


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "each", "device", "said"),
    [
        (
            (4, 4),
            4,
            3,
            2,
            "auto",
            ["GPUs: learner.ranks = 4 + ", "3 x 2 = 6 makes 10", "there are 8: a 4, b 4", "use the CPU"],
        ),
        (
            (2, 2),
            1,
            1,
            3,
            "auto",
            ["makes 4 and there are 4", "does not span", "no room for 1 of 3 GPUs each beside the"],
        ),
        (
            (3, 3),
            1,
            3,
            2,
            "cpu",
            ["GPUs: rollout.replicas x", "makes 6 and there are 6", "no room for 3 of 2 GPUs each;"],
        ),
        ((0, 8), 2, 2, 1, "auto", ["rank 0 belongs on the first host, and a has no GPU; name a host with GPUs first"]),
        (
            (1,) * 20,
            21,
            1,
            0,
            "cuda",
            ["but there are 20: a 1, ", ", p 1 and 4 hosts more", 'learner.device = "cpu" to use'],
        ),
        ((4,), 2, 3, 2, "cuda", ["makes 8", "a has 4", 'set learner.device = "cpu"']),
        ((0,), 1, 1, 1, "auto", ["1 x 1 = 1 makes 1", "has 0", "rollout.gpus_per_replica = 0"]),
    ],
)
def test_what_no_split_over_hosts_can_hold_is_refused_with_the_sum(gpus, ranks, replicas, each, device, said):
    with pytest.raises(ConfigError) as caught:
        place(config(ranks, replicas, each, device), hosts_of(*gpus))
    (problem,) = caught.value.problems
    assert all(part in problem for part in said), problem


@pytest.mark.parametrize(
    ("rollout", "episode", "told"),
    [
        (
            {"concurrency": "auto"},
            {},
            "trajectories in flight up to 2048 = rollout.concurrency 1024 x rollout.replicas 2",
        ),
        ({"concurrency": 8}, {"function": "p:f"}, "episodes open 64 = rollout.episodes 32 x rollout.replicas 2"),
        ({"concurrency": "auto"}, {"function": "p:f"}, "episodes open up to 8192 = rollout.episodes 4096 x "),
    ],
)
def test_it_is_told_what_is_in_flight(rollout, episode, told):
    rollout = {"engine": "sim", "replicas": 2, "gpus_per_replica": 0} | rollout
    asked = config(rollout=rollout, learner={"backend": "sim"}, episode=episode)
    assert told in " ".join("\n".join(describe(asked, place(asked, [host()]))).split())


def can_hold(gpus, ranks, replicas, each):
    """Whether any split of the ranks leaves room for the engines, rank 0 being on the first host."""
    return any(
        sum(split) == ranks
        and (not ranks or split[0])
        and (not each or sum((g - r) // each for g, r in zip(gpus, split, strict=True)) >= replicas)
        for split in itertools.product(*(range(g + 1) for g in gpus))
    )


@settings(max_examples=300)
@given(
    gpus=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    cpus=st.lists(st.integers(1, 64), min_size=4, max_size=4),
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 6),
    each=st.integers(0, 4),
    device=st.sampled_from(["auto", "cuda", "cpu"]),
)
def test_placement_over_hosts(gpus, cpus, ranks, replicas, each, device):
    asked, hosts = config(ranks, replicas, each, device), hosts_of(*gpus, cpus=cpus)
    on_gpu = device == "cuda" or (device == "auto" and any(gpus))
    if not can_hold(gpus, ranks if on_gpu else 0, replicas, each):
        with pytest.raises(ConfigError, match=r"GPUs: .* makes \d+"):
            place(asked, hosts)
        return
    placed = place(asked, hosts)
    assert placed == place(asked, hosts)
    assert [actor.name for actor in placed] == list(asked.actors) and placed[0].name == "controller/0"
    # Nobody shares a GPU, and each has what it is to have, on its own host.
    given_away = [(actor.host, gpu) for actor in placed for gpu in actor.gpus]
    assert len(given_away) == len(set(given_away))
    offered = {host.name: host for host in hosts}
    for actor in placed:
        wanted = on_gpu if actor.name.startswith("learner/") else each if actor.name.startswith("rollouter/") else 0
        assert len(actor.gpus) == wanted and set(actor.gpus) <= set(offered[actor.host].gpus)
        # Ranks see those of all on their host, as under torchrun, where LOCAL_RANK chooses.
        if not actor.name.startswith("learner/"):
            assert actor.env["CUDA_VISIBLE_DEVICES"] == ",".join(actor.gpus)
    # Ranks of a host follow one another, from the head on; what torch is told agrees with where they are.
    learners = [actor for actor in placed if actor.name.startswith("learner/")]
    assert learners[0].host == "a"
    assert [actor.host for actor in learners] == sorted(actor.host for actor in learners)
    for rank, actor in enumerate(learners):
        there = [other.name for other in learners if other.host == actor.host]
        assert actor.env["RANK"] == str(rank)
        assert actor.env["LOCAL_RANK"] == str(there.index(actor.name))
        assert actor.env["LOCAL_WORLD_SIZE"] == str(len(there))
        assert (
            actor.gpus == tuple(actor.env["CUDA_VISIBLE_DEVICES"].split(",")[there.index(actor.name) :][:1])
            or not on_gpu
        )
    # Neither ranks nor engines outnumber their cores but by having a thread at least, nor both together on GPUs.
    for host in hosts:
        for roles in ("learner/", "rollouter/", *([("learner/", "rollouter/")] if on_gpu else [])):
            computing = [a for a in placed if a.host == host.name and a.name.startswith(roles)]
            threads = [int(a.env["OMP_NUM_THREADS"]) for a in computing]
            assert sum(threads) <= max(host.cpus, len(threads))


@given(count=st.integers(1, 6), ranks=st.integers(1, 12), replicas=st.integers(1, 24))
def test_cpu_runs_are_spread_evenly(count, ranks, replicas):
    placed = place(config(ranks, replicas, 0, "cpu"), hosts_of(*[0] * count))
    roles = ("learner/", "rollouter/")
    loads = [sum(a.host == host.name and a.name.startswith(roles) for a in placed) for host in hosts_of(*[0] * count)]
    assert max(loads) - min(loads) <= 1
