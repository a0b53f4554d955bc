"""Placement, by tables and properties."""

import itertools

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE, sharers_of
from asyncrl.launcher.common.placement import (
    PlacementHost,
    describe,
    place,
    place_replicas,
    replicas_of,
    shared_gpus,
    with_episode_hosts,
    with_gpus,
)

PLAYING = {"episode": {"function": "p:f"}}


def config(ranks=1, replicas=1, each=1, device="auto", engine="vllm", threads=0, **tables):
    """``each``: GPUs of a replica."""
    tree = {
        "model": {"path": "/models/m"},
        "data": {"source": "synthetic"},
        "learner": {"ranks": ranks, "device": device, "backend": "sim" if engine == "sim" else "fsdp2"},
        "rollout": {"replicas": replicas, "gpus_per_replica": each, "engine": engine, "vllm": {"threads": threads}},
    }
    return validate_config(tree | {name: tree.get(name, {}) | table for name, table in tables.items()})


def hosts_of(*gpus, cpus=8):
    """Hosts a, b, c, ... with so many GPUs and cores; ``cpus`` may be one number for each."""
    cores = [cpus] * len(gpus) if isinstance(cpus, int) else cpus
    return [
        PlacementHost(name=chr(ord("a") + i), cpus=cores[i], gpus=tuple(map(str, range(count))), address=f"10.0.0.{i}")
        for i, count in enumerate(gpus)
    ]


def by_name(placed):
    return {actor.name: actor for actor in placed}


def row(placed, role):
    """Where the actors of a role are, in order, as "a:0,1 b:2": host and GPUs."""
    chosen = [actor for actor in placed if actor.name.startswith(role + "/")]
    return " ".join(actor.host + (":" + ",".join(actor.gpus) if actor.gpus else "") for actor in chosen)


def threads_of(placed, *names):
    return [by_name(placed)[name].env["OMP_NUM_THREADS"] for name in names]


# --- what each gets ---


@pytest.mark.parametrize(
    ("engine", "given", "gpus", "found"),
    [
        ("vllm", None, (0,), 0),
        ("vllm", None, (0, 2), 1),
        ("vllm", 0, (2,), 0),
        ("vllm", 2, (0,), 2),
        ("reference", None, (2,), 0),
        ("sim", None, (2,), 0),
        ("sim", 1, (2,), 1),
    ],
)
def test_an_engine_takes_a_gpu_if_there_is_one_and_the_user_sets_nothing(engine, given, gpus, found):
    hosts = hosts_of(*gpus)
    settled = with_gpus(config(each=given, engine=engine), hosts)
    assert settled.rollout.gpus_per_replica == found and with_gpus(settled, hosts) is settled


def test_a_machine_without_gpus_needs_nothing_by_hand():
    hosts = hosts_of(0)
    placed = by_name(place(with_gpus(config(each=None), hosts), hosts))
    assert placed["rollouter/0"].gpus == placed["learner/0"].gpus == ()
    with pytest.raises(ConfigError, match=r"weights\.transport: nccl reaches engines on GPUs only"):
        with_gpus(config(each=None, weights={"transport": "nccl"}), hosts)


@pytest.mark.parametrize(
    ("cpus", "asked", "learner", "engine"),
    [
        (2, config(1, 1, 0, "cpu"), "2", "1"),
        (16, config(3, 8, 0, "cpu"), "5", "1"),
        (64, config(1, 1, 0, "cpu", threads=6), "64", "6"),
        (64, config(1, 4, None, "cpu", "sim"), "1", "1"),
        (8, config(1, 1, 0, "cpu", learner={"threads": 3, "device": "cpu"}), "3", "4"),
        (8, config(1, 1, 0, "auto", learner={"threads": 3}), "3", "4"),
    ],
)
def test_computing_processes_share_the_cores_unless_the_user_sets_threads(cpus, asked, learner, engine):
    placed = place(asked, hosts_of(0, cpus=cpus))
    assert threads_of(placed, "learner/0", "rollouter/0", "reward/0") == [learner, engine, "1"]


def test_each_host_shares_its_own_cores_and_a_rank_on_a_gpu_takes_those_of_its_share():
    placed = place(config(3, 2, 1, learner={"ranks": 3, "threads": 3}), hosts_of(2, 4, cpus=[8, 32]))
    names = ("learner/0", "learner/2", "rollouter/0", "reward/0", "controller/0")
    assert threads_of(placed, *names) == ["4", "10", "10", "1", "1"]


def test_devices_have_the_names_of_their_host_and_torch_connects_ranks_across_hosts():
    offered = PlacementHost(name="box", cpus=8, gpus=("3", "GPU-5a", "7"))
    placed = by_name(place(config(1, 2), [offered]))
    assert [placed[name].env["CUDA_VISIBLE_DEVICES"] for name in ("learner/0", "rollouter/1")] == ["3", "7"]
    placed = by_name(place(config(5, 1), hosts_of(2, 0, 4)))
    keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    assert [tuple(placed[f"learner/{rank}"].env[key] for key in keys) for rank in (1, 2, 4)] == [
        ("1", "1", "0", "2", "5", "10.0.0.0", "0,1"),
        ("2", "0", "1", "3", "5", "10.0.0.0", "0,1,2"),
        ("4", "2", "1", "3", "5", "10.0.0.0", "0,1,2"),
    ]
    assert placed["rollouter/0"].env["CUDA_VISIBLE_DEVICES"] == "3" and "RANK" not in placed["rollouter/0"].env


def test_collectives_go_over_the_interface_that_holds_the_address():
    hosts = [PlacementHost(name=n, cpus=2, address=f"10.0.0.{n}", interface=f"ib{n}") for n in "12"]
    for actor in place(config(2, 2, 0, engine="sim"), hosts):
        if actor.name.startswith(("learner", "rollouter")):
            assert actor.env["GLOO_SOCKET_IFNAME"] == actor.env["NCCL_SOCKET_IFNAME"] == f"ib{actor.host}"


# --- where each is ---


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "each", "device", "learner", "rollouter"),
    [
        ((5,), 1, 2, 2, "cuda", "a:0", "a:1,2 a:3,4"),
        ((2,), 2, 2, 1, "cpu", "a a", "a:0 a:1"),
        ((2,), 2, 2, 0, "auto", "a:0 a:1", "a a"),
        # The learner fills the first hosts; engines go where most is free, numbered by host.
        ((4, 4), 2, 2, 1, "auto", "a:0 a:1", "b:0 b:1"),
        ((4, 4), 2, 5, 1, "auto", "a:0 a:1", "a:2 a:3 b:0 b:1 b:2"),
        ((4, 4), 6, 2, 1, "auto", "a:0 a:1 a:2 a:3 b:0 b:1", "b:2 b:3"),
        # A full first host would leave room for one engine only.
        ((3, 3), 2, 2, 2, "auto", "a:0 b:0", "a:1,2 b:1,2"),
        ((3, 3), 2, 1, 2, "auto", "a:0 a:1", "b:0,1"),
        ((1, 4, 4), 3, 2, 3, "auto", "a:0 b:0 c:0", "b:1,2,3 c:1,2,3"),
        # The learner alone, the engines alone.
        ((2, 2), 3, 2, 0, "auto", "a:0 a:1 b:0", "a b"),
        ((2, 2), 2, 2, 2, "cpu", "a b", "a:0,1 b:0,1"),
        ((0, 2), 1, 2, 1, "cpu", "a", "b:0 b:1"),
        # Without GPUs all is spread evenly.
        ((0, 0, 0), 4, 5, 0, "auto", "a a b c", "a b b c c"),
    ],
)
def test_several_hosts(gpus, ranks, replicas, each, device, learner, rollouter):
    placed = place(config(ranks, replicas, each, device), hosts_of(*gpus))
    assert (row(placed, "learner"), row(placed, "rollouter")) == (learner, rollouter)
    for role in ("controller", "dataloader", "parameter_server"):
        assert row(placed, role) == "a"


@pytest.mark.parametrize(
    ("device", "each", "learner", "rollouter"),
    [("auto", None, "a", "a"), ("auto", 1, "a", "a:0"), ("cuda", None, "a:0", "a"), ("cuda", 1, "a:0", "a:0")],
)
def test_simulated_actors_reserve_gpus_if_the_user_asks(device, each, learner, rollouter):
    hosts = hosts_of(1)
    placed = place(with_gpus(config(device=device, each=each, engine="sim"), hosts), hosts)
    assert (row(placed, "learner"), row(placed, "rollouter")) == (learner, rollouter)


def test_cpu_processes_go_to_hosts_with_most_cores_and_simulated_ones_need_no_gpu():
    placed = place(config(1, 3, 0, "cpu"), hosts_of(0, 0, cpus=[4, 16]))
    # Rank 0 is on the head all the same.
    assert (row(placed, "rollouter"), row(placed, "learner")) == ("b b b", "a")
    assert row(place(config(1, 9, None, engine="sim"), hosts_of(0, 0)), "rollouter") == "a a a a b b b b b"


@pytest.mark.parametrize(
    ("gpus", "cpus", "asked", "hosts"),
    [
        ((2, 2), 8, config(), "b"),
        ((2, 2), [13, 8], config(1, 2), "a"),
        ((2, 2), [10, 8], config(1, 2), "b"),
        ((1, 2), [12, 9], config(1, 2), "a"),
        # Episode hosts take a core each.
        ((2, 2, 2), [5, 8, 7], config(1, 4), "b"),
        ((2, 2, 2), [5, 8, 7], config(1, 4, **PLAYING), "c"),
        # Several pools are on different hosts while there are hosts left.
        ((2, 0, 0), [8, 9, 7], config(reward={"pools": 5, "workers": 4}), "b c a b c"),
        ((2, 0, 0), [20, 9, 7], config(reward={"pools": 3, "workers": 4}), "a b c"),
    ],
)
def test_reward_pools_go_to_hosts_with_most_free_cores(gpus, cpus, asked, hosts):
    assert row(place(asked, hosts_of(*gpus, cpus=cpus)), "reward") == hosts


# --- hosts of episodes ---


@pytest.mark.parametrize(
    ("gpus", "replicas", "each", "device", "extra", "found"),
    [
        # Neither GPUs nor a part in what computes.
        ((2, 2, 0, 0), 3, 1, "auto", None, "a b b c d"),
        ((2, 2, 0, 0), 3, 1, "auto", 1, "a b b c"),
        ((2, 2, 0, 0), 3, 1, "auto", 0, "a b b"),
        # GPUs may stay unused, and slots=0 means no GPU.
        ((2, 2, 2), 1, 1, "auto", None, "b"),
        # The head has the learner.
        ((0, 2, 0), 2, 1, "cpu", None, "b b c"),
        ((0, 0, 0), 1, 0, "cpu", None, "b c"),
        ((0,), 1, 0, "cpu", None, "a"),
    ],
)
def test_episodes_run_on_the_host_of_each_rollouter_and_on_hosts_with_only_cpus(
    gpus, replicas, each, device, extra, found
):
    hosts = hosts_of(*gpus)
    playing = config(1, replicas, each, device, episode={"function": "p:f", "extra_hosts": extra})
    settled = with_episode_hosts(playing, hosts)
    assert with_episode_hosts(settled, hosts) == settled
    placed = place(settled, hosts)
    assert row(placed, "episodes") == found and [actor.name for actor in placed] == list(settled.actors)
    assert row(placed, "episodes").split()[:replicas] == [
        each.partition(":")[0] for each in row(placed, "rollouter").split()
    ]
    names = [actor.name for actor in placed if actor.name.startswith("episodes")]
    assert {*threads_of(placed, *names)} == {"1"}
    text = "\n".join(describe(settled, placed))
    assert all(name in text for name in settled.extra_episode_hosts)


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
def test_every_host_with_only_cpus_has_one_episode_host_and_no_other_has_more(gpus, replicas, each, device):
    hosts = hosts_of(*gpus)
    try:
        settled = with_episode_hosts(config(1, replicas, each, device, **PLAYING), hosts)
    except ConfigError:
        return
    placed = place(settled, hosts)
    at = {role: [a.host for a in placed if a.name.startswith(role)] for role in ("learner", "rollouter", "episodes")}
    for host in hosts:
        alone = not host.gpus and host.name not in (*at["learner"], *at["rollouter"])
        assert at["episodes"].count(host.name) == at["rollouter"].count(host.name) + alone


# --- hosts that join ---


@pytest.mark.parametrize(
    ("gpus", "asked", "count"),
    [
        (0, config(each=2), 0),
        (1, config(each=2), 0),
        (5, config(each=2), 2),
        (0, config(each=0), 1),
        (0, config(each=None, engine="sim"), 1),
        (3, config(each=1, engine="sim"), 3),
    ],
)
def test_a_new_host_has_the_engines_that_fit_its_gpus_or_one_without_gpus(gpus, asked, count):
    assert replicas_of(asked, hosts_of(gpus)[0]) == count


def test_a_host_that_joins_has_engines_and_hosts_of_episodes():
    names = ["rollouter/4", "rollouter/5", "episodes/4", "episodes/5"]
    host = PlacementHost(name="c", cpus=8, gpus=tuple("01234"), address="10.0.0.3", interface="eth0")
    placed = by_name(place_replicas(config(each=2, **PLAYING), host, names))
    assert sorted(placed) == sorted(names)
    assert [placed[name].gpus for name in names] == [("0", "1"), ("2", "3"), (), ()]
    assert threads_of(placed.values(), *names) == ["4", "4", "1", "1"]
    env = placed["rollouter/5"].env
    assert (env["CUDA_VISIBLE_DEVICES"], env["GLOO_SOCKET_IFNAME"]) == ("2,3", "eth0")


# --- descriptions ---


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
        ((2, 2), 1, 1, 3, "auto", ["makes 4 and there are 4", "does not span", "no room for 1 of 3 GPUs each beside"]),
        ((3, 3), 1, 3, 2, "cpu", ["GPUs: rollout.replicas x", "makes 6 and there are 6", "no room for 3 of 2 GPUs"]),
        ((0, 8), 2, 2, 1, "auto", ["rank 0 belongs on the first host, and a has no GPU; name a host with GPUs first"]),
        (
            (1,) * 20,
            21,
            1,
            0,
            "cuda",
            ["there are 20: a 1, ", ", p 1 and 4 hosts more", 'learner.device = "cpu" to use'],
        ),
        ((0,), 1, 1, 1, "auto", ["1 x 1 = 1 makes 1", "has 0", "rollout.gpus_per_replica = 0"]),
    ],
)
def test_a_run_that_fits_on_no_split_of_hosts_is_refused_with_the_sum(gpus, ranks, replicas, each, device, said):
    with pytest.raises(ConfigError) as caught:
        place(config(ranks, replicas, each, device, placement={"share": "never"}), hosts_of(*gpus))
    (problem,) = caught.value.problems
    assert all(part in problem for part in said), problem


# --- shared GPUs ---


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "each", "share", "learner", "rollouter", "sharing"),
    [
        # With one GPU it is the only way.
        ((1,), 1, 1, 1, "auto", "a:0", "a:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((2,), 1, 1, 1, "auto", "a:0", "a:1", {}),
        ((2,), 1, 1, 1, "always", "a:0", "a:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        # GPUs without a rank come first.
        ((2,), 1, 2, 1, "auto", "a:0", "a:1 a:0", {"rollouter/1": "0:learner/0", "learner/0": "0:rollouter/1"}),
        ((2,), 2, 1, 2, "auto", "a:0 a:1", "a:0,1", {"rollouter/0": "0:learner/0,1:learner/1"}),
        ((1, 1), 1, 2, 1, "auto", "a:0", "a:0 b:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((1, 1), 2, 1, 1, "auto", "a:0 b:0", "a:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((1, 1), 1, 1, 1, "always", "a:0", "a:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((2, 1), 1, 2, 1, "always", "a:0", "a:0 a:1", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((2,), 1, 1, 1, "time_slice", "a:0", "a:0", {"rollouter/0": "0:learner/0", "learner/0": "0:rollouter/0"}),
        ((1,), 1, 1, 0, "always", "a:0", "a", {}),
        # On CPUs time slices are simulated by pairs.
        ((0,), 1, 2, 0, "time_slice", "a", "a a", {"rollouter/0": "cpu0:learner/0", "learner/0": "cpu0:rollouter/0"}),
        ((0, 0), 2, 2, 0, "time_slice", "a b", "a b", {"rollouter/1": "cpu0:learner/1"}),
        ((0,), 1, 1, 0, "always", "a", "a", {}),
    ],
)
def test_engines_share_gpus_with_ranks_if_gpus_are_scarce(
    gpus, ranks, replicas, each, share, learner, rollouter, sharing
):
    asked = config(ranks, replicas, each, placement={"share": share})
    placed = place(asked, hosts_of(*gpus))
    assert (row(placed, "learner"), row(placed, "rollouter")) == (learner, rollouter)
    reported = {actor.name: actor.env[SHARED_GPU_VARIABLE] for actor in placed if SHARED_GPU_VARIABLE in actor.env}
    assert {name: value for name, value in reported.items() if name in sharing} == sharing and bool(reported) is bool(
        sharing
    )
    lines = {line.split()[0]: line for line in describe(asked, placed) if "GPU" in line}
    assert all((" with " in line) is (name in reported) for name, line in lines.items())


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "said"),
    [
        ((1,), 2, 1, r"learner.ranks = 2 and .* 1 x 1 = 1 need 2 if they share GPUs, but a has 1"),
        ((1,), 1, 2, r"learner.ranks = 1 and .* 2 x 1 = 2 need 2 if they share GPUs, but a has 1"),
        ((0, 1), 1, 1, r".* rank 0 belongs on the first host, and a has no GPU; name a host with GPUs first"),
    ],
)
def test_two_ranks_or_two_engines_never_share_a_gpu(gpus, ranks, replicas, said):
    for share in ("auto", "always"):
        with pytest.raises(ConfigError, match=rf"GPUs: {said}"):
            place(config(ranks, replicas, 1, placement={"share": share}), hosts_of(*gpus))


def test_a_run_that_needs_shared_gpus_names_the_key_that_forbids_them():
    with pytest.raises(ConfigError, match=r"makes 2, but a has 1; .* set placement\.share = \"auto\", so that ranks"):
        place(config(placement={"share": "never"}), hosts_of(1))
    with pytest.raises(ConfigError) as caught:
        place(config(2, placement={"share": "never"}), hosts_of(1))
    assert "placement.share" not in str(caught.value)


@settings(max_examples=examples(200))
@given(
    gpus=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 6),
    each=st.integers(1, 4),
    share=st.sampled_from(["auto", "always"]),
)
def test_shared_placement_over_hosts(gpus, ranks, replicas, each, share):
    hosts = hosts_of(*gpus)
    apart = can_hold(gpus, ranks, replicas, each) and share == "auto"
    fits = gpus[0] > 0 and sum(gpus) >= ranks and sum(count // each for count in gpus) >= replicas
    asked = config(ranks, replicas, each, "cuda", placement={"share": share})
    if not apart and not fits:
        with pytest.raises(ConfigError, match=r"GPUs: .* need \d+ if they share GPUs"):
            place(asked, hosts)
        return
    placed = place(asked, hosts)
    for role, count in (("learner/", 1), ("rollouter/", each)):
        taken = [(actor.host, gpu) for actor in placed if actor.name.startswith(role) for gpu in actor.gpus]
        assert len(taken) == len(set(taken)) == count * (ranks if role == "learner/" else replicas)
    for host in hosts:
        shared = shared_gpus(placed, host.name)
        assert not (apart and shared)
        for gpu, names in shared.items():
            first, second = names
            assert {name.partition("/")[0] for name in names} == {"learner", "rollouter"}
            assert sharers_of(by_name(placed)[first].env[SHARED_GPU_VARIABLE])[gpu] == second
            assert sharers_of(by_name(placed)[second].env[SHARED_GPU_VARIABLE])[gpu] == first


def test_the_placement_shows_the_trajectories_in_flight():
    for concurrency, episode, reported in (
        ("auto", {}, "trajectories in flight up to 2048 = rollout.concurrency 1024 x rollout.replicas 2"),
        ("auto", {"function": "p:f"}, "episodes open up to 8192 = rollout.episodes 4096 x "),
    ):
        asked = config(1, 2, 0, engine="sim", rollout={"concurrency": concurrency}, episode=episode)
        assert reported in " ".join("\n".join(describe(asked, place(asked, hosts_of(0)))).split())


# --- properties ---


def can_hold(gpus, ranks, replicas, each):
    """Whether any split of the ranks leaves room for the engines, rank 0 being on the first host."""
    return any(
        sum(split) == ranks
        and (not ranks or split[0])
        and (not each or sum((g - r) // each for g, r in zip(gpus, split, strict=True)) >= replicas)
        for split in itertools.product(*(range(g + 1) for g in gpus))
    )


@settings(max_examples=examples(200))
@given(
    gpus=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    cpus=st.lists(st.integers(1, 64), min_size=4, max_size=4),
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 6),
    each=st.integers(0, 4),
    device=st.sampled_from(["auto", "cuda", "cpu"]),
)
def test_placement_over_hosts(gpus, cpus, ranks, replicas, each, device):
    asked, hosts = config(ranks, replicas, each, device, placement={"share": "never"}), hosts_of(*gpus, cpus=cpus)
    on_gpu = device == "cuda" or (device == "auto" and any(gpus))
    if not can_hold(gpus, ranks if on_gpu else 0, replicas, each):
        with pytest.raises(ConfigError, match=r"GPUs: .* makes \d+"):
            place(asked, hosts)
        return
    placed = place(asked, hosts)
    assert placed == place(asked, hosts)
    assert [actor.name for actor in placed] == list(asked.actors) and placed[0].name == "controller/0"
    # No two actors share a GPU, and each has its number of GPUs on its own host.
    given_away = [(actor.host, gpu) for actor in placed for gpu in actor.gpus]
    assert len(given_away) == len(set(given_away))
    offered = {host.name: host for host in hosts}
    for actor in placed:
        wanted = on_gpu if actor.name.startswith("learner/") else each if actor.name.startswith("rollouter/") else 0
        assert len(actor.gpus) == wanted and set(actor.gpus) <= set(offered[actor.host].gpus)
        # Ranks see those of all on their host, as under torchrun, where LOCAL_RANK chooses.
        if not actor.name.startswith("learner/"):
            assert actor.env["CUDA_VISIBLE_DEVICES"] == ",".join(actor.gpus)
    # Ranks of a host follow one another, from the head on; torch's variables agree with where they are.
    learners = [actor for actor in placed if actor.name.startswith("learner/")]
    assert learners[0].host == "a" and [a.host for a in learners] == sorted(a.host for a in learners)
    for rank, actor in enumerate(learners):
        there = [other.name for other in learners if other.host == actor.host]
        at = there.index(actor.name)
        reported = [actor.env[key] for key in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert reported == [str(rank), str(at), str(len(there))]
        assert actor.gpus == tuple(actor.env["CUDA_VISIBLE_DEVICES"].split(",")[at : at + 1]) or not on_gpu
    # Neither ranks nor engines outnumber their cores but by having a thread at least, nor both together on GPUs.
    for host in hosts:
        for roles in ("learner/", "rollouter/", *([("learner/", "rollouter/")] if on_gpu else [])):
            threads = [
                int(a.env["OMP_NUM_THREADS"]) for a in placed if a.host == host.name and a.name.startswith(roles)
            ]
            assert sum(threads) <= max(host.cpus, len(threads))
