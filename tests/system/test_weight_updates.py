"""Weight updates on the whole system in one process: joins, deaths and restarts while versions come all the time."""

import asyncio
import itertools
import threading
from collections import Counter

import msgspec
import pytest
from inprocess import System, sim_config
from run_files import assert_spans_cover, groups
from structlog.testing import capture_logs

from asyncrl.learner.loop import Training
from asyncrl.telemetry.metrics_line import read_metrics
from asyncrl.weights.collective.gloo import GlooGroup
from asyncrl.weights.segments import Segment

TRANSPORTS = ["shm", "stream", "gloo"]


def config_of(transport, *, eta=3, **learner):
    """A version every 30 ms or so."""
    return sim_config(
        run={"samples_per_step": 100},
        data={"size": 4096},
        learner={"steps": 30, "sim": {"step_s": 0.03, "publish_bytes": 300_000}, **learner},
        rollout={"sim": {"decode_step_s": 0.002, "load_s": 0.004}},
        staleness={"max": eta},
        weights={"transport": transport, "chunk_bytes": 65_536, "broadcast_timeout_s": 5.0},
    )


def check(system, state):
    """I1, I3 and I4: every group once, spans that cover, and the versions that were published."""
    assert state.phase == "done", state
    uids = []
    for group in groups(system.run_dir):
        uids.append(group["uid"])
        for trajectory in group["trajectories"]:
            assert_spans_cover(trajectory)
    trained = system.lines("train")[-1]["ledger/trained"]
    assert len(uids) == len(set(uids)) == trained == 30 * 4


async def disturb(system, when, what):
    """Run to the end; ``what`` happens as soon as ``when`` is true."""
    running = asyncio.create_task(system.run())
    while not when():
        assert not running.done(), await running
        await asyncio.sleep(0.002)
    await what()
    return await running


async def live_till_all_serve_the_last(system, monkeypatch, when, what):
    """``disturb``, where the run ends only when every rollouter serves the last version."""
    finish = Training.finish

    async def held(training):
        async with asyncio.timeout(20):
            while served(system) != {training.version}:
                await asyncio.sleep(0.01)
        await finish(training)

    monkeypatch.setattr(Training, "finish", held)
    state = await asyncio.wait_for(disturb(system, when, what), 60)
    check(system, state)
    assert served(system) == {30}


def served(system):
    return {actor.param_version for name, actor in system.actors.items() if name.startswith("rollouter")}


def step_reached(system, step):
    learner = system.actors.get("learner/0")
    return learner is not None and learner.step >= step


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_replica_is_updated_by_the_chosen_transport_and_one_that_joins_disturbs_nobody(tmp_path, transport):
    system = System(config_of(transport), tmp_path / "run")
    seen = {}

    async def join():
        seen["published"] = system.actors["learner/0"].param_version
        system._lives["rollouter/2"] = asyncio.create_task(system._live("rollouter/2"))

    state = asyncio.run(asyncio.wait_for(disturb(system, lambda: step_reached(system, 8), join), 60))
    check(system, state)
    updates = system.lines("update")
    first = [line for line in updates if line["weights/version"] == 0]
    assert {line["replica"] for line in first} == {"rollouter/0", "rollouter/1"}
    # Nobody is a member of a broadcast before it serves something.
    ways = sorted(line["weights/transport"] for line in first)
    assert ways == {"shm": ["shm", "shm"], "stream": ["stream", "stream"], "gloo": ["shm", "stream"]}[transport]
    later = [line["weights/transport"] for line in updates if line["weights/version"] > 0]
    assert later.count(transport) >= 20
    # Each is told with the line of the step in which it ended; those after the last step with that step.
    told = read_metrics(system.run_dir / "metrics.jsonl", ("train", "update"))
    steps = [line["step"] for line in told if line["kind"] == "train"]
    for at, line in enumerate(told):
        following = (other["step"] for other in told[at:] if other["kind"] == "train")
        assert line["step"] == next(following, steps[-1])
    own = [line for line in updates if line["replica"] == "rollouter/2"]
    assert own[0]["weights/version"] >= seen["published"]
    assert own[0]["weights/transport"] in ("shm", "stream")
    # A publication a step and one update of a replica a publication: it came without either.
    assert {line["weights/version"] for line in system.lines("train")} == set(range(1, 31))
    for name in ("rollouter/0", "rollouter/1"):
        versions = [line["weights/version"] for line in updates if line["replica"] == name]
        assert versions == sorted(set(versions)), "an update that was repeated would be a pause for nothing"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_dies_in_an_update_or_conducts_it_costs_the_others_nothing(tmp_path, monkeypatch, transport):
    system = System(config_of(transport), tmp_path / "run")

    async def kill():
        # At whatever point of an update that is.
        for victim in ("rollouter/1", "parameter_server/0", "rollouter/1", "parameter_server/0", "rollouter/1"):
            await system.replace(victim)
            await asyncio.sleep(0.12)

    asyncio.run(live_till_all_serve_the_last(system, monkeypatch, lambda: step_reached(system, 5), kill))
    versions = [line["weights/version"] for line in system.lines("train")]
    assert versions == sorted(set(versions)), "a number is never used twice"


def test_who_survives_a_death_in_a_broadcast_has_the_same_version_by_another(tmp_path, monkeypatch):
    config = config_of("gloo", sim={"step_s": 0.03, "publish_bytes": 8_000_000})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replicas": 3})})
    system = System(config, tmp_path / "run")
    send, sending, dead = GlooGroup.send, threading.Event(), threading.Event()
    survivors = {"rollouter/0", "rollouter/2"}
    versions = []

    def send_once_one_is_dead(*arguments):
        sending.set()
        assert dead.wait(20)
        send(*arguments)

    async def kill():
        conductor = system.actors["parameter_server/0"]._conductor
        versions.append(conductor.fleet.replicas["rollouter/1"].target)
        assert {conductor.fleet.replicas[name].phase for name in survivors} == {"receiving"}
        await system.replace("rollouter/1")
        dead.set()

    monkeypatch.setattr(GlooGroup, "send", send_once_one_is_dead)
    asyncio.run(live_till_all_serve_the_last(system, monkeypatch, sending.is_set, kill))
    ways = {
        line["replica"]: line["weights/transport"]
        for line in system.lines("update")
        if line["weights/version"] in versions and line["replica"] in survivors
    }
    assert ways == dict.fromkeys(survivors, "gloo")


HOSTS = ["a", "a", "b", "b", "c", "c"]
"""Hosts of six rollouters, none of them beside the parameter server."""


def on_other_hosts(monkeypatch):
    """Rollouters that live now are on HOSTS; the n-th that is started is where the n-th of these is, over and over."""
    places = itertools.cycle(HOSTS)
    monkeypatch.setattr("asyncrl.rollouter.actor.host_id", lambda: next(places))


def test_each_host_fetches_one_copy_and_hands_it_on(tmp_path, monkeypatch):
    on_other_hosts(monkeypatch)
    config = config_of("auto")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replicas": len(HOSTS)})})
    system = System(config, tmp_path / "run")
    check(system, asyncio.run(system.run()))
    copies = Counter()
    for line in system.lines("update"):
        host = HOSTS[int(line["replica"].partition("/")[2])]
        copies[host, line["weights/version"]] += line["weights/transport"] == "stream"
    assert set(copies) >= {(host, 0) for host in "abc"}
    assert max(copies.values()) == 1
    shared = [line for line in system.lines("update") if line["weights/transport"] == "shm"]
    assert len(shared) >= 20
    # Two hosts ask the parameter server, and the third one of them.
    relayed = sum(system.actors[f"rollouter/{index}"].counters.get("rollout/bytes_relayed", 0) for index in range(6))
    assert relayed >= 300_000


def test_who_dies_while_it_fetches_for_others_costs_them_no_version(tmp_path, monkeypatch):
    on_other_hosts(monkeypatch)
    config = config_of("auto")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replicas": len(HOSTS)})})
    system = System(config, tmp_path / "run")
    died = []

    async def kill():
        # All six in turn, so that each keeps its host; those that fetch just then, where there are any.
        for index in range(6):
            conductor = system.actors["parameter_server/0"]._conductor
            async with asyncio.timeout(10):
                while True:
                    replica = conductor.fleet.replicas.get(f"rollouter/{index}")
                    if replica is not None and replica.phase == "staging":
                        break
                    await asyncio.sleep(0)
            died.append(replica.fetches)
            await system.replace(f"rollouter/{index}")

    asyncio.run(live_till_all_serve_the_last(system, monkeypatch, lambda: step_reached(system, 3), kill))
    assert len(died) == 6


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("eta", [0, 3])
def test_i4_a_version_with_a_flipped_bit_is_named_never_loaded_and_made_anew(tmp_path, monkeypatch, transport, eta):
    config = config_of(transport, eta=eta)
    sealed = []

    class Flipped(Segment):
        def seal(self, tensors):
            bucket = super().seal(tensors)
            sealed.append(bucket)
            # As if a bit of the memory had changed since.
            return msgspec.structs.replace(bucket, checksum=bucket.checksum ^ 1) if len(sealed) == 5 else bucket

    monkeypatch.setattr("asyncrl.learner.backends.sim.Segment", Flipped)
    monkeypatch.setattr("asyncrl.learner.boundaries.OWED_RETRY_S", 0.2)
    system = System(config, tmp_path / "run")
    with capture_logs() as logs:
        state = asyncio.run(asyncio.wait_for(system.run(), 60))
    check(system, state)
    failed = [line for line in logs if line["event"] == "update failed" and "checksum" in line.get("error", "")]
    assert failed
    (condemned,) = [line for line in logs if line["event"] == "version is condemned"]
    assert "bucket 0" in condemned["error"]
    updates = system.lines("update")
    assert condemned["version"] not in {line["weights/version"] for line in updates}
    # The same weights follow under the next number; who serves the very last when the run ends is left open.
    assert max(line["weights/version"] for line in system.lines("train")) >= 30
    assert max(line["weights/version"] for line in updates) > condemned["version"]
