"""The host, the GPUs and the environment of each actor: a pure function of the configuration and the hosts.

The first host is the head. It has the controller, the dataloader, the learner's rank 0, the parameter server, and every
role without another place.

* Learner ranks with a GPU fill the first hosts, as long as the engines fit on the rest.
* An engine is the process of a rollouter. It never spans hosts and goes where most GPUs are free. Its episode host, the
  process that plays its episodes, is on the same host.
* Ranks and engines on CPUs go where they get most cores.
* With episodes, a host without GPUs, rank and engine gets an episode host too, up to ``episode.extra_hosts`` of them.
* Actors with the place "free cores", such as reward pools, go to all hosts in turn, that with most free cores first.

Between equal hosts the earlier one is chosen. Ranks and replicas are numbered in the order of the hosts.

The GPUs of a host go to the learner's ranks first, then to the engines. A rank sees all GPUs of the learner on its host
and takes one, as under torchrun. An engine sees its own GPUs, and every other actor sees none.

``placement.share`` says whether an engine may take the GPU of a rank: with "auto" only if there are too few GPUs
without a rank. Two ranks never share a GPU, because NCCL refuses it, and two engines never do, because each would get
half of a KV cache. If a run does not fit, the error shows how many GPUs it needs.

Ranks with a GPU, and all engines, get an even share of their host's threads. Ranks that train on the CPU share all
cores, because engines are mostly idle while a slow learner trains. So the last bits of a learner's results depend on
the cores and ranks of its host, or on learner.threads, but not on the number of engines. Other actors get one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrl.config import Config
from asyncrl.config.load import with_values
from asyncrl.core.errors import ConfigError
from asyncrl.core.roles import ROLES, is_optional, role_of
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE, sharers_of

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
MOST_HOSTS_NAMED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementHost:
    """A host and what it offers to a run."""

    name: str
    cpus: int
    gpus: tuple[str, ...] = ()
    address: str = ""
    """Address at which other hosts reach it. Empty in a run on one host, which uses the key network.host."""
    interface: str = ""
    """The network interface that has the address; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One actor with its host, its GPUs and the environment variables that it gets."""

    name: str
    host: str
    gpus: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def place(config: Config, hosts: Sequence[PlacementHost]) -> list[Placed]:
    """Place every actor of a run, and return them in the order of ``config.actors``, the controller first.

    ``hosts`` have different names; the first is the head. ``config`` has passed through ``with_gpus``, if its GPUs
    were left open, and then ``with_episode_hosts``. Raises ConfigError if the run does not fit.
    """
    assert hosts
    assert len({host.name for host in hosts}) == len(hosts)
    layout = _layout(config, hosts)
    ranks, replicas = layout.ranks, layout.replicas
    on_gpu, gpus_each = _learner_on_gpu(config, hosts), _gpus_per_replica(config)
    threads = [_threads(config, *counts, on_gpu) for counts in zip(hosts, ranks, replicas, strict=True)]
    placed = {}
    # Ranks and replicas on the hosts before this one.
    earlier_ranks = earlier_replicas = 0
    for index, host in enumerate(hosts):
        learner_gpus = host.gpus[: ranks[index]] if on_gpu else ()
        for local in range(ranks[index]):
            env = _environment(threads[index].get("learner", 1), learner_gpus)
            env |= _torch_environment(config, hosts[0], ranks, index, local) | _interface_environment(host)
            name = f"learner/{earlier_ranks + local}"
            placed[name] = Placed(name=name, host=host.name, gpus=learner_gpus[local : local + 1], env=env)
        for local in range(replicas[index]):
            gpus = layout.gpus_of_engines(host.gpus, len(learner_gpus))[local * gpus_each :][:gpus_each]
            env = _environment(threads[index].get("rollouter", 1), gpus) | _interface_environment(host)
            name = f"rollouter/{earlier_replicas + local}"
            placed[name] = Placed(name=name, host=host.name, gpus=gpus, env=env)
            # The result leaves this actor out if ``config.actors`` has no episode hosts.
            episodes = f"episodes/{earlier_replicas + local}"
            placed[episodes] = Placed(name=episodes, host=host.name, env=_environment(1, ()))
        earlier_ranks, earlier_replicas = earlier_ranks + ranks[index], earlier_replicas + replicas[index]
    simulated = config.placement.share == "time_slice" and not on_gpu and not gpus_each
    for host in hosts:
        _set_sharers(placed, host.name, simulated=simulated)
    extra = _episode_hosts(hosts, ranks, replicas)[: len(config.extra_episode_hosts)]
    for name, host in zip(config.extra_episode_hosts, extra, strict=True):
        placed[name] = Placed(name=name, host=host.name, env=_environment(1, ()))
    freest = itertools.cycle(_freest_hosts(config, hosts, ranks, replicas))
    for name in config.actors:
        if name not in placed:
            host = next(freest) if ROLES[role_of(name)].place == "free cores" else hosts[0]
            placed[name] = Placed(name=name, host=host.name, env=_environment(1, ()))
    return [placed[name] for name in config.actors]


def with_gpus(config: Config, hosts: Sequence[PlacementHost]) -> Config:
    """Return the config with rollout.gpus_per_replica set.

    If the user leaves it out, it is 1 if the engines use GPUs and a host has some, else 0. Raises ConfigError.
    """
    if config.rollout.gpus_per_replica is not None:
        return config
    on_gpu = config.rollout.traits.gpus and any(host.gpus for host in hosts)
    return with_values(config, {"rollout.gpus_per_replica": 1 if on_gpu else 0})


def with_episode_hosts(config: Config, hosts: Sequence[PlacementHost]) -> Config:
    """Return the config with episode.extra_hosts set: by default one on every host without GPUs, ranks and engines.

    ``config`` has passed through ``with_gpus``. Returns it unchanged if the user has set a number, if episodes are
    single responses, or if there is no such host. Raises ConfigError if the user asks for more than there are,
    or if the run does not fit.
    """
    wanted = config.episode.extra_hosts
    if config.episode.kind == "single" or wanted == 0:
        return config
    layout = _layout(config, hosts)
    candidates = _episode_hosts(hosts, layout.ranks, layout.replicas)
    if wanted is None and not candidates:
        return config
    if wanted is None:
        return with_values(config, {"episode.extra_hosts": len(candidates)})
    if wanted > len(candidates):
        named = f": {', '.join(host.name for host in candidates[:MOST_HOSTS_NAMED])}" if candidates else ""
        text = (
            f"episode.extra_hosts: is {wanted}, and {len(candidates)} of {len(hosts)} hosts have neither GPUs nor a "
            f"rollouter nor a rank of the learner{named}; name more of them (slots=0 in the hostfile keeps GPUs out "
            "of a run), or leave it out to take those that there are"
        )
        raise ConfigError([text])
    return config


def replicas_of(config: Config, host: PlacementHost) -> int:
    """Return how many engines fit on a host that gets nothing else of the run; 1 if engines compute on CPUs."""
    gpus_each = _gpus_per_replica(config)
    return len(host.gpus) // gpus_each if gpus_each else 1


def place_replicas(config: Config, host: PlacementHost, names: Sequence[str]) -> list[Placed]:
    """Place these rollouters and episode hosts on a host that has nothing else of the run, as one that joins."""
    gpus_each = _gpus_per_replica(config)
    rollouters = [name for name in names if role_of(name) == "rollouter"]
    threads = _threads(config, host, 0, len(rollouters), on_gpu=False).get("rollouter", 1)
    placed = [
        Placed(name=name, host=host.name, env=_environment(1, ())) for name in names if role_of(name) == "episodes"
    ]
    for local, name in enumerate(rollouters):
        gpus = host.gpus[local * gpus_each :][:gpus_each]
        env = _environment(threads, gpus) | _interface_environment(host)
        placed.append(Placed(name=name, host=host.name, gpus=gpus, env=env))
    return placed


def _learner_on_gpu(config: Config, hosts: Sequence[PlacementHost]) -> bool:
    learner = config.learner
    return learner.device == "cuda" or (learner.may_use_gpus and any(host.gpus for host in hosts))


def _gpus_per_replica(config: Config) -> int:
    """Return the GPUs of each engine; 0 for engines on CPUs. A number that was left open is set (``with_gpus``)."""
    gpus = config.rollout.gpus_per_replica
    assert gpus is not None or not config.rollout.traits.gpus
    return gpus or 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """The numbers of learner ranks and of engines of each host, and which GPUs the engines may use."""

    ranks: list[int]
    replicas: list[int]
    engines_take: Literal["free", "free first", "ranks first"] = "free"
    """"free": only GPUs without a rank. "free first": GPUs of ranks too, after those. "ranks first": before those."""

    def gpus_of_engines(self, gpus: tuple[str, ...], rank_count: int) -> tuple[str, ...]:
        """Return the GPUs that the engines of a host with these ``gpus`` use, in order; ranks have the first ones."""
        of_ranks, free = gpus[:rank_count], gpus[rank_count:]
        if self.engines_take == "free":
            return free
        return free + of_ranks if self.engines_take == "free first" else gpus


def _layout(config: Config, hosts: Sequence[PlacementHost]) -> _Layout:
    """Divide ranks and engines over the hosts, on shared GPUs if placement.share wants or allows it.

    Raises ConfigError if they do not fit.
    """
    share = config.placement.share
    if not (_learner_on_gpu(config, hosts) and _gpus_per_replica(config)):
        # Only one side uses GPUs.
        share = "never"
    if share in ("auto", "never"):
        try:
            return _Layout(*_unshared_counts(config, hosts))
        except ConfigError:
            if share == "never" or (shared := _shared_counts(config, hosts)) is None:
                raise
            return _Layout(*shared, engines_take="free first")
    shared = _shared_counts(config, hosts)
    if shared is None:
        raise _refusal(config, hosts, config.learner.ranks, _gpus_per_replica(config))
    return _Layout(*shared, engines_take="ranks first")


def _shared_counts(config: Config, hosts: Sequence[PlacementHost]) -> tuple[list[int], list[int]] | None:
    """Return the numbers of ranks and of engines of each host, where an engine may also use GPUs of ranks.

    Ranks fill the first hosts. Each engine goes to a host that has enough GPUs without an engine. With
    placement.share = "auto" it prefers a host where it needs no GPU of a rank. With any other value it prefers a host
    where a rank's GPU has no engine yet. Among equal hosts it takes the one with most GPUs without an engine. Returns
    None if engines use no GPUs, if the first host has no GPU, or if ranks alone or engines alone do not fit.
    """
    gpus_each, gpus = _gpus_per_replica(config), [len(host.gpus) for host in hosts]
    if not gpus_each:
        return None
    ranks, left = list[int](), config.learner.ranks
    for count in gpus:
        ranks.append(min(left, count))
        left -= ranks[-1]
    if left or not ranks[0] or sum(count // gpus_each for count in gpus) < config.rollout.replicas:
        return None
    replicas = [0] * len(hosts)

    def preference(i: int) -> tuple[bool, int, int]:
        taken = replicas[i] * gpus_each
        if config.placement.share != "auto":
            return taken < ranks[i], gpus[i] - taken, -i
        return gpus[i] - taken - ranks[i] >= gpus_each, gpus[i] - taken, -i

    for _ in range(config.rollout.replicas):
        able = [i for i in range(len(hosts)) if gpus[i] >= (replicas[i] + 1) * gpus_each]
        replicas[max(able, key=preference)] += 1
    return ranks, replicas


def shared_gpus(placed: Iterable[Placed], host: str) -> dict[str, list[str]]:
    """Return the GPUs of a host that a rank and an engine share, each with the names of both."""
    users: dict[str, list[str]] = {}
    for actor in placed:
        for gpu in actor.gpus if actor.host == host else ():
            users.setdefault(gpu, []).append(actor.name)
    return {gpu: names for gpu, names in users.items() if len(names) > 1}


def _set_sharers(placed: dict[str, Placed], host: str, *, simulated: bool) -> None:
    """Replace the actors in ``placed`` that share a GPU on a host by copies with SHARED_GPU_VARIABLE.

    ``simulated``: placement.share is "time_slice", and neither ranks nor engines use GPUs. To take turns as on GPUs,
    each pair of a rank and an engine on the host shares a made-up GPU: "cpu0", "cpu1" and so on.
    """
    shared = shared_gpus(placed.values(), host)
    if simulated:
        here = [name for name, actor in placed.items() if actor.host == host]
        pairs_here = zip(*([n for n in here if role_of(n) == role] for role in ("learner", "rollouter")), strict=False)
        shared = {f"cpu{number}": list(names) for number, names in enumerate(pairs_here)}
    others: dict[str, list[str]] = {}
    for gpu, names in shared.items():
        for name, other in itertools.permutations(names, 2):
            others.setdefault(name, []).append(f"{gpu}:{other}")
    for name, pairs in others.items():
        placed[name] = replace(placed[name], env={**placed[name].env, SHARED_GPU_VARIABLE: ",".join(pairs)})


def _unshared_counts(config: Config, hosts: Sequence[PlacementHost]) -> tuple[list[int], list[int]]:
    """Return the numbers of ranks and of engines of each host, where no GPU is shared. Raises ConfigError."""
    on_gpu, gpus_each = _learner_on_gpu(config, hosts), _gpus_per_replica(config)
    gpus = [len(host.gpus) for host in hosts]
    if on_gpu:
        ranks = _split_ranks(config, hosts, gpus_each)
        free = [count - taken for count, taken in zip(gpus, ranks, strict=True)]
    else:
        # Rank 0 is always on the head.
        ranks = [1] + [0] * (len(hosts) - 1)
        _spread(ranks, config.learner.ranks - 1, hosts, ranks)
        free = gpus
    replicas = [0] * len(hosts)
    if not gpus_each:
        _spread(replicas, config.rollout.replicas, hosts, list(ranks))
        return ranks, replicas
    if sum(count // gpus_each for count in free) < config.rollout.replicas:
        raise _refusal(config, hosts, config.learner.ranks if on_gpu else 0, gpus_each)
    for _ in range(config.rollout.replicas):
        chosen = max(range(len(hosts)), key=lambda i: (free[i] - replicas[i] * gpus_each, -i))
        replicas[chosen] += 1
    return ranks, replicas


def _spread(counts: list[int], more: int, hosts: Sequence[PlacementHost], computing: list[int]) -> None:
    """Add ``more`` processes to ``counts``, each where it gets most cores; ``computing``: all processes, by host."""
    for _ in range(more):
        chosen = max(range(len(hosts)), key=lambda i: (hosts[i].cpus / (computing[i] + 1), -i))
        counts[chosen] += 1
        # For ranks, ``counts`` and ``computing`` are one list, in which each rank counts once.
        if counts is not computing:
            computing[chosen] += 1


def _split_ranks(config: Config, hosts: Sequence[PlacementHost], gpus_each: int) -> list[int]:
    """Return the number of learner ranks on each host, one GPU for each. An engine takes ``gpus_each`` GPUs.

    The hosts are filled in order, but all engines must still fit: each host gets the most ranks with which the rest
    fits. Raises ConfigError if there is no such split.
    """
    # If engines take no GPUs, their number does not matter.
    each, replicas = (gpus_each, config.rollout.replicas) if gpus_each else (1, 0)
    gpus = [len(host.gpus) for host in hosts]
    later_gpus, later_engines = sum(gpus), sum(count // each for count in gpus)
    split: list[int] = []
    ranks_left, engines = config.learner.ranks, 0
    for count in gpus:
        later_gpus, later_engines = later_gpus - count, later_engines - count // each
        # Rank 0 must be on the head.
        fewest = 0 if split else 1
        for taken in range(min(ranks_left, count), fewest - 1, -1):
            later_ranks, engines_here = ranks_left - taken, (count - taken) // each
            # Ranks on the later hosts first take the GPUs that are too few for an engine.
            most_engines = engines + engines_here + min(later_engines, (later_gpus - later_ranks) // each)
            if later_ranks <= later_gpus and most_engines >= replicas:
                split.append(taken)
                ranks_left, engines = later_ranks, engines + engines_here
                break
        else:
            raise _refusal(config, hosts, config.learner.ranks, gpus_each)
    return split


def _refusal(config: Config, hosts: Sequence[PlacementHost], ranks: int, each: int) -> ConfigError:
    """Return the error that explains why ``ranks`` learner ranks and all engines, of ``each`` GPUs, do not fit."""
    replicas = config.rollout.replicas
    needed, available = ranks + replicas * each, sum(len(host.gpus) for host in hosts)
    parts = [f"learner.ranks = {ranks}"] * bool(ranks)
    parts += [f"rollout.replicas x rollout.gpus_per_replica = {replicas} x {each} = {replicas * each}"] * bool(each)
    advice = ['set learner.device = "cpu"'] * bool(ranks) + ["set rollout.gpus_per_replica = 0"] * bool(each)
    named = ", ".join(f"{host.name} {len(host.gpus)}" for host in hosts[:MOST_HOSTS_NAMED])
    named += f" and {len(hosts) - MOST_HOSTS_NAMED} hosts more" if len(hosts) > MOST_HOSTS_NAMED else ""
    has = f"{hosts[0].name} has {available}" if len(hosts) == 1 else f"there are {available}: {named}"
    text, sharing = f"GPUs: {' + '.join(parts)} makes {needed}", ""
    if ranks and each and config.placement.share != "never":
        needed = max(ranks, replicas * each)
        text = f"GPUs: {' and '.join(parts)} need {needed} if they share GPUs"
    elif ranks and _shared_counts(config, hosts) is not None:
        sharing = ', or set placement.share = "auto", so that ranks and engines share GPUs'
    if needed > available:
        text += f", but {has}; ask for fewer, or {' and '.join(advice)} to use the CPU"
        text += sharing
    elif ranks and not hosts[0].gpus:
        text += f" and {has}, but the learner's rank 0 belongs on the first host, and {hosts[0].name} has no GPU"
        text += "; name a host with GPUs first"
    else:
        text += (
            f" and {has}, but an engine does not span hosts, and there is no room for {replicas} of {each} GPUs each"
        )
        text += " beside the learner" if ranks else ""
        text += f"; ask for fewer, or smaller ones{sharing}"
    return ConfigError([text])


def _episode_hosts(
    hosts: Sequence[PlacementHost], ranks: Sequence[int], replicas: Sequence[int]
) -> list[PlacementHost]:
    """Return the hosts that can play episodes for rollouters elsewhere: those without GPUs, ranks and engines."""
    return [
        host for host, *computing in zip(hosts, ranks, replicas, strict=True) if not host.gpus and not any(computing)
    ]


def _freest_hosts(
    config: Config, hosts: Sequence[PlacementHost], ranks: Sequence[int], replicas: Sequence[int]
) -> list[PlacementHost]:
    """Sort the hosts by free cores, most first. Each actor counts as one core, even a rank or an engine."""
    # Optional actors on the head do not count: the run continues without them, so they have a low priority.
    on_head = sum(ROLES[role_of(name)].place == "head" and not is_optional(name) for name in config.actors)
    actors_each = 1 if config.episode.kind == "single" else 2
    extra = _episode_hosts(hosts, ranks, replicas)[: len(config.extra_episode_hosts)]
    free = [
        host.cpus - ranks[i] - actors_each * replicas[i] - (host in extra) - (on_head if i == 0 else 0)
        for i, host in enumerate(hosts)
    ]
    # The sort keeps the order of equal hosts.
    return [hosts[at] for at in sorted(range(len(hosts)), key=lambda at: -free[at])]


def _threads(config: Config, host: PlacementHost, ranks: int, replicas: int, on_gpu: bool) -> dict[str, int]:
    """Return how many threads each learner and each rollouter on this host gets, by role.

    ``ranks`` and ``replicas`` are the numbers of learners and rollouters there; ``on_gpu``: the learner trains on GPUs.
    Configured numbers win. A simulated role is absent.
    """
    counts = {}
    if config.learner.backend != "sim":
        counts["learner"] = ranks
    threads_key = config.rollout.traits.threads_key
    if threads_key:
        counts["rollouter"] = replicas
    share = max(1, host.cpus // max(1, sum(counts.values())))
    threads = dict.fromkeys(counts, share)
    if "learner" in counts and not on_gpu:
        threads["learner"] = config.learner.threads or max(1, host.cpus // max(1, ranks))
    if "rollouter" in counts and (asked := config.rollout.value_of(threads_key)):
        threads["rollouter"] = asked
    return threads


def _environment(threads: int, visible: Sequence[str]) -> dict[str, str]:
    """Return the variables for an actor's threads and for the GPUs that it sees."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"CUDA_VISIBLE_DEVICES": ",".join(visible)}


def _interface_environment(host: PlacementHost) -> dict[str, str]:
    """Return the variables that name the network interface for collectives; none if it is unknown."""
    return dict.fromkeys(INTERFACE_VARIABLES, host.interface) if host.interface else {}


def _torch_environment(
    config: Config, head: PlacementHost, ranks: Sequence[int], index: int, local: int
) -> dict[str, str]:
    """Return the variables that torch.distributed reads, for the rank with number ``local`` on the host at ``index``.

    ``ranks`` has the number of ranks on each host. The ranks themselves agree on the port.
    """
    return {
        "RANK": str(sum(ranks[:index]) + local),
        "LOCAL_RANK": str(local),
        # Index of the host among those that have ranks.
        "GROUP_RANK": str(sum(map(bool, ranks[:index]))),
        "WORLD_SIZE": str(config.learner.ranks),
        "LOCAL_WORLD_SIZE": str(ranks[index]),
        "MASTER_ADDR": head.address or config.network.host,
    }


def describe(config: Config, placed: Sequence[Placed]) -> list[str]:
    """Return lines for people: the placement of each actor, and the numbers derived from the configuration."""
    width = max(len(actor.name) for actor in placed)
    host_width = max(len(actor.host) for actor in placed)
    rows = ["", "placement:"]
    for actor in placed:
        where = f"GPU {','.join(actor.gpus)}" if actor.gpus else "CPU"
        others = dict.fromkeys(sharers_of(actor.env.get(SHARED_GPU_VARIABLE, "")).values())
        where += f" with {', '.join(others)}" if others else ""
        rows.append(
            f"  {actor.name:<{width}}  {actor.host:<{host_width}}  {where}  threads {actor.env[THREAD_VARIABLES[0]]}"
        )
    learner, rollout = config.learner, config.rollout
    _, most = rollout.concurrency_bounds
    upto = "up to " if rollout.concurrency == "auto" else ""
    each, key, what = most, "rollout.concurrency", "trajectories in flight"
    if config.episode.kind != "single":
        each, key, what = config.episodes_open(most), "rollout.episodes", "episodes open"
        upto = "" if rollout.episodes else upto
    return [
        *rows,
        "",
        "derived:",
        f"  G, groups per version        {config.groups_per_version} = learner.groups_per_step "
        f"{learner.groups_per_step} x learner.steps_per_version {learner.steps_per_version}",
        f"  gate capacity, groups        {config.gate_capacity} = (staleness.max {config.staleness.max} + 1) x G",
        f"  trajectories per step        {learner.groups_per_step * rollout.samples_per_prompt}",
        f"  {what:<27}  {upto}{each * rollout.replicas} = {key} {each} x "
        f"rollout.replicas {rollout.replicas}; the gate admits "
        f"{config.gate_capacity * rollout.samples_per_prompt}",
        f"  versions of the run          {learner.steps // learner.steps_per_version}",
    ]
