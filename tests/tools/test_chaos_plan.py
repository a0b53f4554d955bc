"""Plans of faults: each has the effect it would have alone, even if hosts, links and clocks fail at the same time."""

import os
import socket
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.chaos.hosts import Conditions, conditions, directions, queue
from tools.chaos.plan import (
    BROADCAST_PHASES,
    ENDS,
    KINDS,
    MOST_AHEAD_S,
    ON_HOSTS,
    ON_PROCESSES,
    ROLLING_PHASES,
    TURNS,
    UPDATED,
    Link,
    draw,
    steps_of_run,
    victims,
)
from tools.chaos.turns import phase_of

SILENCE_S = 3.0
HOSTS = ("head", "a", "b")
seeds = st.integers(0, 2**32 - 1)


def test_every_role_is_a_victim():
    assert victims(2, 2, cores=True) == [
        *("controller/0", "dataloader/0", "parameter_server/0", "reward/0", "reward_worker"),
        *("learner/0", "learner/1", "rollouter/0", "rollouter/1", "engine_core/0", "engine_core/1"),
    ]
    assert not any(name.startswith("engine_core") for name in victims(2, 2, cores=False))
    plain = victims(2, 2, cores=False)
    assert victims(2, 2, cores=False, episodes="function") == [*plain, "episodes/0", "episodes/1", "episode_worker"]
    assert victims(2, 2, cores=False, episodes="command") == [*plain, "episodes/0", "episodes/1", "agent"]


@given(seeds)
def test_in_time_slices_faults_of_ranks_and_engines_meet_every_phase(seed):
    struck = victims(2, 2, cores=False)
    plan = draw(seed, 60, struck, ON_PROCESSES, silence_s=SILENCE_S, in_turns=True)
    waiting = Counter(fault.during for fault in plan if fault.victim.startswith(("learner/", "rollouter/")))
    assert set(waiting) == set(TURNS)
    assert max(waiting.values()) - min(waiting.values()) <= 1
    assert not any(fault.during in TURNS for fault in plan if fault.victim.startswith(("controller", "parameter")))
    without = draw(seed, 60, struck, ON_PROCESSES, silence_s=SILENCE_S)
    assert [(one.kind, one.victim, one.after_step) for one in without] == [
        (one.kind, one.victim, one.after_step) for one in plan
    ]


@pytest.mark.parametrize(
    ("bound", "phase"),
    [
        (["rank", "memory"], "generating"),
        (["rank", "asked", "memory"], "taking"),
        (["rank", "asked"], "taking"),
        (["rank"], "waking"),
        ([], ""),
    ],
)
def test_the_phase_of_time_slices_is_read_from_the_bound_sockets(bound, phase):
    lines = [
        f"0: 00000002 00000000 00010000 0001 01 {70 + i} @asyncrl-0-9-19-gpu-cpu0-{name}"
        for i, name in enumerate(bound)
    ]
    # A look of the engine, another process, and the same pair of another GPU.
    lines += [
        "0: 00000002 00000000 00000000 0001 02     0 @asyncrl-0-9-19-gpu-cpu0-memory",
        "0: 0 0 0 1 01 5 /run/x.sock",
    ]
    # In another run on this host the rank has asked, and an engine has the memory.
    lines += [
        f"0: 00000002 00000000 00010000 0001 01 {90 + i} @asyncrl-0-9-77-gpu-cpu0-{name}"
        for i, name in enumerate(("rank", "asked", "memory"))
    ]
    assert phase_of("\n".join(lines), "19", "rollouter/0", ranks=[]) == phase


def test_the_rank_trains_if_it_has_the_memory():
    name = f"\0asyncrl-0-9-{os.getpid()}-gpu-cpu7-memory"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as memory:
        memory.bind(name)
        table, agent = Path("/proc/self/net/unix").read_text(), str(os.getpid())
        assert phase_of(table, agent, "learner/7", ranks=[os.getpid()]) == "training"
        assert phase_of(table, agent, "learner/7", ranks=[]) == "generating"


@given(seeds, st.integers(0, 120), st.integers(0, 6))
def test_a_plan_is_a_function_of_its_seed_and_in_order(seed, count, everything):
    struck = victims(2, 1, cores=False)
    faults = draw(seed, count, struck, KINDS, hosts=HOSTS, everything=everything, silence_s=SILENCE_S)
    assert faults == draw(seed, count, struck, KINDS, hosts=HOSTS, everything=everything, silence_s=SILENCE_S)
    assert len(faults) == count + everything
    ends = [fault.kind for fault in faults if fault.kind in ENDS]
    assert len(ends) == everything
    assert abs(ends.count("everything") - ends.count("preempt")) <= 1
    steps = [fault.after_step for fault in faults]
    assert steps == sorted(steps)
    assert all(0 < step < steps_of_run(faults) for step in steps)
    for fault in faults:
        assert bool(fault.victim) == (fault.kind in (*ON_PROCESSES, *ON_HOSTS))
        assert (fault.link is None) == (fault.kind != "slow")
        assert abs(fault.ahead_s) <= (MOST_AHEAD_S if fault.kind == "clock" else 0.0)
        assert (fault.lasts_s is None) == (fault.kind in ("kill", "freeze", "reset", *ENDS))
        assert fault.kind not in ENDS or fault.during in ("", "checkpoint")
        assert fault.kind in (*ON_PROCESSES, *ENDS) or not fault.during
        if fault.kind == "delay":
            assert fault.lasts_s < SILENCE_S, "supervision does not act on a moment"


@given(seeds)
def test_one_deck_has_each_fault_for_each_victim_and_pair_of_hosts_once(seed):
    struck = victims(2, 2, cores=True)
    deck = len(struck) * len(ON_PROCESSES)
    faults = draw(seed, deck, struck, ON_PROCESSES, silence_s=SILENCE_S)
    assert set(Counter((fault.kind, fault.victim) for fault in faults).values()) == {1}
    kinds = Counter((fault.kind, fault.victim) for fault in draw(seed, 21, [], ON_HOSTS, hosts=HOSTS, silence_s=3.0))
    assert {victim for kind, victim in kinds if kind == "partition"} == {
        *("head-a", "head-b", "a-b"),
        *("head>a", "a>head", "head>b", "b>head", "a>b", "b>a"),
    }
    for kind in ("slow", "clock"):
        assert {victim: times for (of, victim), times in kinds.items() if of == kind} == dict.fromkeys(HOSTS, 2)


@pytest.mark.parametrize(("transport", "phases"), [("gloo", BROADCAST_PHASES), ("shm", ROLLING_PHASES)])
def test_each_phase_of_an_update_is_struck(transport, phases):
    faults = draw(1, 100, victims(2, 1, cores=True), ["kill", "freeze"], silence_s=SILENCE_S, transport=transport)
    assert {fault.during for fault in faults} == {"", *phases}
    assert {fault.victim.partition("/")[0] for fault in faults if fault.during} == {
        *("rollouter", "engine_core", "learner", "parameter_server")
    }


@given(seeds)
def test_a_plan_of_faults_in_updates_has_no_other_faults(seed):
    struck = victims(3, 2, cores=True, episodes="command")
    for fault in draw(seed, 12, struck, ON_PROCESSES, silence_s=SILENCE_S, in_updates=True):
        assert fault.during in ROLLING_PHASES
        assert fault.victim.startswith(UPDATED)


def test_no_fault_shares_a_step_with_the_end_of_the_run():
    for seed in range(50):
        faults = draw(seed, 30, victims(1, 1, cores=False), KINDS, everything=5, silence_s=SILENCE_S)
        for before, after in zip(faults, faults[1:], strict=False):
            if not {before.kind, after.kind}.isdisjoint(ENDS):
                assert after.after_step > before.after_step


@pytest.mark.parametrize("kind", ["stall", "cut", "partition"])
def test_planned_stalls_are_shorter_and_longer_than_the_limit(kind):
    faults = draw(1, 100, victims(1, 1, cores=False), [kind], hosts=HOSTS, silence_s=SILENCE_S)
    assert min(fault.lasts_s for fault in faults) < SILENCE_S < max(fault.lasts_s for fault in faults)
    assert {fault.kind for fault in faults} == {kind}


@given(
    st.builds(
        lambda seed, count: draw(seed, count, [], ON_HOSTS, hosts=HOSTS, silence_s=3.0), seeds, st.integers(0, 30)
    ),
    st.randoms(),
)
def test_each_fault_has_its_full_effect_until_it_ends(faults, randomness):
    ending, going_on = list(faults), list(faults)
    randomness.shuffle(ending)
    for over in ending:
        now = conditions(going_on)
        deaf = [set(directions(fault.victim)) for fault in going_on if fault.kind == "partition"]
        assert now.deaf == set().union(*deaf)
        for host in HOSTS:
            alone = [fault for fault in going_on if fault.victim == host]
            assert now.ahead_s.get(host, 0.0) == pytest.approx(sum(fault.ahead_s for fault in alone))
            links = [fault.link for fault in alone if fault.link is not None]
            assert now.slow.get(host) == (links[-1] if links else None)
        going_on = [fault for fault in going_on if fault is not over]
    assert conditions(going_on) == Conditions()


def test_a_partition_has_one_or_two_directions_and_a_link_is_a_queue_of_the_kernel():
    assert (set(directions("a-b")), directions("a>b")) == ({("a", "b"), ("b", "a")}, [("a", "b")])
    link = Link(delay_ms=40.0, rate_mbit=2.5, loss=0.015)
    assert queue(link, netem=True) == "netem delay 40.0ms loss 1.50% rate 2.500mbit"
    assert queue(link, netem=False) == "tbf rate 2.500mbit burst 256kbit latency 90.0ms"
