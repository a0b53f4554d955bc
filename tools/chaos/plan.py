"""Faults drawn from a seed: what is broken, and when. Pure.

Invariant: the same seed, count and machine give the same faults. They come from a deck that holds every kind for every
victim. The deck is shuffled again when it is empty, so a long round meets each combination about equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal[
    "kill", "freeze", "stall", "delay", "disk", "cut", "reset", "partition", "slow", "clock", "everything", "preempt"
]
ON_PROCESSES: tuple[Kind, ...] = ("kill", "freeze", "stall", "delay")
"""SIGKILL; SIGSTOP for good; SIGSTOP for about as long as supervision takes to notice; SIGSTOP for a moment."""
ON_MACHINE: tuple[Kind, ...] = ("disk", "cut", "reset")
"""No room in the run's folder for a while; no loopback network for a while; every connection reset at once."""
ON_HOSTS: tuple[Kind, ...] = ("partition", "slow", "clock")
"""For a while: a cut between two hosts in both directions or in one, a slow link of a host, a wrong wall clock of a
host.
"""
KINDS: tuple[Kind, ...] = (*ON_PROCESSES, *ON_MACHINE, *ON_HOSTS)
ENDS: tuple[Kind, ...] = ("everything", "preempt")
"""Ends of the whole run, after which it is resumed: SIGKILL to all processes at once; SIGTERM to the launcher."""
Episodes = Literal["function", "command"] | None
"""The kind of episodes of a run. None: a prompt has one response."""
MACHINE_CARDS = 3
"""Cards of each kind that strikes the machine, for one of each kind and victim."""
HOST_CARDS = 2
"""Cards of each kind that strikes a host, for each host."""
BOTH, ONE_WAY = "-", ">"
"""Signs between the names of two hosts: neither hears the other; the second does not hear the first."""
MOST_AHEAD_S = 10.0
"""Most by which a clock differs, either way."""
STEPS_PER_FAULT = 6
"""Steps between two faults, so that the run also trains undisturbed."""
REST_IN_PHASES = 40
"""Steps after the last of the faults that wait for phases. Some wait for many steps, and a replica needs some to serve
again."""
CHECKPOINT = "checkpoint"
BROADCAST_PHASES, ROLLING_PHASES = ("announced", "paused", "receiving"), ("staging", "waiting", "loading")
"""Phases of a weight update by broadcast, and by the other transports."""
UPDATED = ("rollouter/", "engine_core/", "learner/", "parameter_server/")
"""Victims that take part in weight updates. Half of their faults wait for a phase of one."""
GENERATING, TAKING, TRAINING, WAKING = TURNS = ("generating", "taking", "training", "waking")
"""Phases of the time slices of a GPU: the engine has the memory; the rank has asked for it; the rank has it; the rank
has given it back, and the engine has not taken it yet."""
TAKES_TURNS = ("rollouter/", "engine_core/", "learner/")
"""Victims that have a GPU in turn. In time slices their faults wait for a phase, each phase about equally often."""
TOGETHER = 0.2
"""Share of faults that come while the run still handles the fault before."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a host to all others, in either direction."""

    delay_ms: float
    rate_mbit: float
    loss: float
    """Share of the packets."""

    def __str__(self) -> str:
        return f"{self.delay_ms:.0f} ms, {self.rate_mbit:.1f} Mbit/s, loss {self.loss:.1%}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    victim: str
    """An actor, an engine core (engine_core/N), a worker of the reward pool (reward_worker) or of an episode host
    (episode_worker), a program that plays an episode (agent), a host, two hosts (a-b, or a>b where only what a sends
    to b is lost), or empty: the machine, or the only host."""
    after_step: int
    """Steps that are trained before it comes."""
    after_s: float
    """Seconds that go by after these before it comes."""
    lasts_s: float | None = None
    """Seconds that it lasts; None where it is over at once, or never ends by itself."""
    during: str = ""
    """What it waits for: a checkpoint that is being written; a phase of a weight update of the victim, or of any
    rollouter if the victim is none; or a phase of the victim's time slices. Empty: nothing."""
    link: Link | None = None
    """Link of the host, where the kind is slow."""
    ahead_s: float = 0.0
    """Seconds that the host's clock is ahead, where the kind is clock; behind, where negative."""

    def __str__(self) -> str:
        how = f" ({self.link})" if self.link else f" {self.ahead_s:+.1f} s" if self.ahead_s else ""
        lasts = "" if self.lasts_s is None else f" for {self.lasts_s:.1f} s"
        return f"{self.kind} {self.victim}".rstrip() + how + lasts


def victims(replicas: int, ranks: int, *, cores: bool, episodes: Episodes = None) -> list[str]:
    """Return every process of a run that a fault can strike alone.

    ``cores``: engines have processes of their own. ``episodes``: how the run plays episodes.
    """
    played_by = {None: [], "function": ["episode_worker"], "command": ["agent"]}[episodes]
    return [
        "controller/0",
        "dataloader/0",
        "parameter_server/0",
        "reward/0",
        "reward_worker",
        *(f"learner/{rank}" for rank in range(ranks)),
        *(f"rollouter/{index}" for index in range(replicas)),
        *(f"engine_core/{index}" for index in range(replicas if cores else 0)),
        *(f"episodes/{index}" for index in range(replicas if episodes else 0)),
        *played_by,
    ]


def draw(
    seed: int,
    count: int,
    struck: Sequence[str],
    kinds: Sequence[Kind],
    *,
    hosts: Sequence[str] = ("",),
    everything: int = 0,
    silence_s: float,
    transport: str = "shm",
    in_updates: bool = False,
    in_turns: bool = False,
) -> list[Fault]:
    """Draw ``count`` faults of these ``kinds`` in the order of their start.

    Faults of processes strike ``struck``, faults of hosts strike ``hosts``. ``everything`` more end the whole run, by
    each of ENDS in turn.

    ``silence_s`` and ``transport`` are the run's supervision.silence_s and weights.transport. ``in_updates``: every
    fault of a process strikes a part of weight updates and waits for a phase of one. ``in_turns``: faults of a rank or
    an engine wait for a phase of their time slices.
    """
    randomness = random.Random(seed)
    turns = _deck(random.Random(f"turns {seed}"), TURNS)
    if in_updates:
        struck = [name for name in struck if name.startswith(UPDATED)]
    cards = _deck(randomness, [(kind, victim) for kind in kinds for victim in _struck_by(kind, struck, hosts)])
    dealt: list[tuple[Kind, str]] = [next(cards) for _ in range(count)]
    for number in range(everything):
        # Spread them over the round.
        at = randomness.randint(len(dealt) * number // everything, len(dealt) * (number + 1) // everything)
        dealt.insert(at, (ENDS[number % len(ENDS)], ""))
    found = []
    step = 0
    for number, (kind, victim) in enumerate(dealt):
        alone = kind in ENDS or not number or dealt[number - 1][0] in ENDS
        if alone or randomness.random() >= TOGETHER:
            step += STEPS_PER_FAULT
        fault = Fault(
            kind=kind,
            victim=victim,
            after_step=step,
            after_s=randomness.uniform(0.0, 1.0),
            lasts_s=_duration(randomness, kind, silence_s),
            during=_during(randomness, kind, victim, transport, 1.0 if in_updates else 0.5),
            link=_link(randomness) if kind == "slow" else None,
            ahead_s=randomness.uniform(-MOST_AHEAD_S, MOST_AHEAD_S) if kind == "clock" else 0.0,
        )
        takes_turns = kind in ON_PROCESSES and victim.startswith(TAKES_TURNS)
        found.append(replace(fault, during=next(turns)) if in_turns and takes_turns else fault)
    return found


def steps_of_run(faults: Sequence[Fault], *, in_phases: bool = False) -> int:
    """Return the number of steps that hold all faults and a rest for the recovery.

    ``in_phases``: most faults wait for a phase of an update or of a turn.
    """
    rest = REST_IN_PHASES if in_phases else 5 * STEPS_PER_FAULT
    return max((fault.after_step for fault in faults), default=0) + rest


def between(hosts: Sequence[str]) -> list[str]:
    """Return every partition of two of these hosts."""
    pairs = list(combinations(hosts, 2))
    return [way for a, b in pairs for way in (f"{a}{BOTH}{b}", f"{a}{ONE_WAY}{b}", f"{b}{ONE_WAY}{a}")]


def _struck_by(kind: Kind, processes: Sequence[str], hosts: Sequence[str]) -> Sequence[str]:
    if kind in ON_PROCESSES:
        return processes
    if kind in ON_MACHINE:
        return ("",) * MACHINE_CARDS
    return between(hosts) if kind == "partition" else [*hosts] * HOST_CARDS


def _deck(randomness: random.Random, cards: Sequence[T]) -> Iterator[T]:
    while True:
        yield from randomness.sample(cards, len(cards))


def _duration(randomness: random.Random, kind: Kind, silence_s: float) -> float | None:
    if kind == "delay":
        return randomness.uniform(0.05, 0.25 * silence_s)
    if kind in ("stall", "cut"):
        return randomness.uniform(0.5 * silence_s, 1.5 * silence_s)
    if kind == "disk":
        return randomness.uniform(0.25 * silence_s, 2.0 * silence_s)
    if kind == "partition":
        # The longer ones last longer than the connection, and some longer than supervision.unreachable_s.
        return randomness.uniform(0.5 * silence_s, 10.0 * silence_s)
    if kind in ("slow", "clock"):
        return randomness.uniform(0.5 * silence_s, 2.5 * silence_s)
    return None


def _during(randomness: random.Random, kind: Kind, victim: str, transport: str, share: float) -> str:
    if randomness.random() >= share:
        return ""
    if kind in ENDS:
        return CHECKPOINT
    phases = BROADCAST_PHASES if transport == "gloo" else ROLLING_PHASES
    return randomness.choice(phases) if kind in ON_PROCESSES and victim.startswith(UPDATED) else ""


def _link(randomness: random.Random) -> Link:
    return Link(
        delay_ms=randomness.uniform(5.0, 200.0),
        rate_mbit=10.0 ** randomness.uniform(0.3, 1.7),
        loss=randomness.uniform(0.0, 0.05),
    )
