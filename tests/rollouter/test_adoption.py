"""The accepted peers after OpenLeases: I1, no lease is lost and none is released by a learner that is gone.

The answer says which leases are held. It must stay true from then on, with any messages in flight.
"""

import asyncio
from contextlib import asynccontextmanager
from unittest import mock

import pytest
from cuts import path_to
from harness import Net, repeat_after, replace
from rollouter_cases import Dataloader, Learner, ScriptedRollouter, living

from asyncrl.core.errors import EngineDied, RemoteError
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.dataloader import OpenLeases
from asyncrl.rpc.heartbeat import gather_heartbeat


@asynccontextmanager
async def between(learner, dataloader, folder, *, memory=True, learner_at=1, dataloader_at=1):
    """A rollouter that stays alive while its peers have these incarnations."""
    async with Net(memory=memory) as net:
        net.serve(learner, "learner/0", learner_at)
        net.serve(dataloader, "dataloader/0", dataloader_at)
        async with living(net, folder) as life:
            yield life


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    repeat_after(monkeypatch, 0.2)


@pytest.mark.parametrize(("arrived", "memory"), [(True, True), (True, False), (False, True)])
async def test_i1_an_acknowledgement_of_a_replaced_learner_releases_nothing(arrived, memory, tmp_path):
    """Even if it has arrived, and the coroutine that waits for it has not run when OpenLeases is answered."""
    old, new, dataloader = Learner(open=False), Learner(), Dataloader()
    async with between(old, dataloader, tmp_path, memory=memory) as life:
        dataloader.lease("0-1")
        await old.came.wait()
        if arrived:
            answers = life.within_the_next_reply("learner/0", lambda: life.open_leases(learner=2))
            old.open.set()
            await life.until(lambda: answers)
            await life.until(lambda: life.rollouter.counters["rollout/delivered_again"])
        else:
            answers = [life.open_leases(learner=2)]
            old.open.set()
            await life.until(lambda: old.answered)
        assert list(answers[0].attempts) == ["0-1"]
        assert life.held.keys() == {"0-1"}
        life.net.serve(new, "learner/0", 2)
        await life.until(lambda: not life.held)
        assert (old.uids, new.uids) == (["0-1"], ["0-1"])
        counters = life.rollouter.counters
        assert (counters["rollout/adoptions"], counters["rollout/delivered_again"]) == (1, int(arrived))


@pytest.mark.parametrize("adopted", [1, 2])
async def test_an_acknowledgement_of_the_adopted_learner_always_counts(tmp_path, adopted):
    """At first it does not accept groups, and is asked again."""
    learner, dataloader = Learner(open=False, refusals=1), Dataloader()
    async with between(learner, dataloader, tmp_path, learner_at=2) as life:
        dataloader.lease("0-1")
        await learner.came.wait()
        answers = life.within_the_next_reply("learner/0", lambda: life.open_leases(learner=adopted))
        learner.open.set()
        await life.until(lambda: answers and not life.held)
        assert learner.uids == ["0-1"]
        assert life.rollouter.counters["rollout/delivered_again"] == 0


async def test_the_answer_lists_every_unacknowledged_lease_with_its_deaths(tmp_path):
    learner, dataloader = Learner(open=False), Dataloader()
    async with between(learner, dataloader, tmp_path, dataloader_at=7) as life:
        life.gates["0-2"] = asyncio.Event()
        dataloader.lease("0-1", "0-2")
        await life.until(lambda: learner.uids == ["0-1"])
        dataloader.lease("0-3", attempt=1)
        await life.until(lambda: learner.uids == ["0-1", "0-3"])
        held = life.rollouter._leases.held
        life.rollouter._manager.turns.died([held["0-2"], held["0-3"]], "killed")
        asker = life.net.client("rollouter/0", "dataloader/0", 7)
        life.net.register(ActorRecord(name="rollouter/0", incarnation=life.incarnation, address=life.rollouter.address))
        answer = await asker.call(OpenLeases(learner=1))
        assert answer.attempts == {"0-1": 0, "0-2": 1, "0-3": 2}
        assert (answer.seen, answer.served_version) == (3, -1)
        stranger = life.net.client("rollouter/0", "reward/0", 1)
        with pytest.raises(RemoteError, match="reward/0 may not send OpenLeases: dataloader may"):
            await stranger.call(OpenLeases(learner=9))
        learner.open.set()
        life.gates["0-2"].set()
        await life.until(lambda: not life.held)


async def test_leases_of_a_dead_dataloader_are_dropped_with_their_numbers(tmp_path):
    """Otherwise the next one would number other prompts alike, and assume that they were seen."""
    learner, old, new = Learner(open=False), Dataloader(), Dataloader()
    async with between(learner, old, tmp_path) as life:
        old.lease("0-1")
        await life.until(lambda: life.held.keys() == {"0-1"} and len(old.asked) > 1)
        answers = life.within_the_next_reply("dataloader/0", lambda: life.open_leases(1, dataloader=2))
        old.lease("0-2")
        await life.until(lambda: answers)
        assert answers[0].seen == 1
        life.net.serve(new, "dataloader/0", 2)
        # It lives on and leases, like one that is cut off from the controller.
        old.lease("0-9")
        await life.until(lambda: new.asked)
        assert (new.asked[0].seen, new.asked[0].holding) == (1, ["0-1"])
        assert life.held.keys() == {"0-1"}
        new.lease("0-3")
        await life.until(lambda: life.held.keys() == {"0-1", "0-3"})
        assert life.held["0-3"] == 2
        # The numbers of the calls only grow, across dataloaders too.
        numbers = [call.number for call in (*old.asked, *new.asked)]
        assert numbers[0] == 1 and numbers == sorted(numbers) and numbers[-1] > 1
        learner.open.set()
        await life.until(lambda: not life.held)


async def test_a_preempted_rollouter_delivers_generated_groups_and_returns_the_others(tmp_path):
    learner, dataloader = Learner(open=False), Dataloader()
    async with between(learner, dataloader, tmp_path) as life:
        life.gates["0-2"] = asyncio.Event()
        dataloader.lease("0-1", "0-2")
        await learner.came.wait()
        life.rollouter.preempted()
        asked = len(dataloader.asked)
        dataloader.lease("0-3")
        # At once, since the learner waits for every outstanding group; and it names those that it may still deliver.
        await life.until(lambda: life.held.keys() == {"0-1"})
        assert (dataloader.returned, dataloader.partings) == (["0-2"], [["0-1"]])
        assert list(life.open_leases(1).attempts) == ["0-1"]
        learner.open.set()
        await life.until(lambda: not life.held)
        await life.drain()
        assert len(dataloader.asked) == asked
        assert dataloader.returned == ["0-2"]
        assert learner.uids == ["0-1"]


async def test_a_preempted_rollouter_in_time_slices_frees_the_gpu(tmp_path):
    """Also while it has a group to deliver: the learner needs the GPU for its checkpoint."""
    learner, dataloader = Learner(open=False), Dataloader()
    async with between(learner, dataloader, tmp_path) as life:
        dataloader.lease("0-1")
        await learner.came.wait()
        manager, given = life.rollouter._manager, []
        manager.slices = mock.Mock(give=lambda: given.append(True))
        engine = manager.engine
        life.rollouter.preempted()
        await life.until(lambda: given)
        with pytest.raises(EngineDied):
            await engine.resume()
        assert life.held.keys() == {"0-1"}
        learner.open.set()
        await life.until(lambda: not life.held)
        life.rollouter.metrics()
        await life.drain()
        assert learner.uids == ["0-1"]


async def test_a_rollouter_that_is_preempted_before_its_run_starts_no_engine(tmp_path, monkeypatch):
    """As one that starts again while the run ends."""
    setup = ScriptedRollouter.setup

    async def preempted_at_once(self):
        await setup(self)
        self._manager.slices = mock.Mock()
        self.preempted()

    monkeypatch.setattr(ScriptedRollouter, "setup", preempted_at_once)
    async with between(Learner(), Dataloader(), tmp_path) as life:
        manager = life.rollouter._manager
        await life.until(lambda: manager.slices.give.called)
        assert life.rollouter._following is None
        with pytest.raises(AssertionError):
            _ = manager.engine
        await life.drain()


async def test_i1_a_leaving_rollouter_reports_at_once_which_groups_it_may_still_deliver(tmp_path):
    """It takes no lease afterwards."""
    learner, dataloader = Learner(), Dataloader()
    async with between(learner, dataloader, tmp_path) as life:
        life.gates["0-2"] = asyncio.Event()
        dataloader.lease("0-1", "0-2")
        await life.until(lambda: life.held.keys() == {"0-2"})
        life.rollouter.asked_to_leave(10.0)
        dataloader.lease("0-3")
        await life.until(lambda: dataloader.partings)
        assert dataloader.partings == [["0-2"]]
        assert life.open_leases(1).leaving
        assert life.held.keys() == {"0-2"}
        life.gates["0-2"].set()
        await life.task
        assert (dataloader.partings, dataloader.returned) == ([["0-2"], []], [])
        assert learner.uids == ["0-1", "0-2"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_i1_a_stopping_rollouter_returns_its_leases_and_a_leaving_one_only_ungenerated_ones(tmp_path, leaves):
    """In a run that continues, the learner is asked about generated groups: it may be accepting them."""
    learner, dataloader = Learner(open=False), Dataloader()
    async with between(learner, dataloader, tmp_path) as life:
        life.gates["0-2"] = asyncio.Event()
        dataloader.lease("0-1", "0-2")
        await life.until(lambda: learner.uids == ["0-1"] and life.held.keys() == {"0-1", "0-2"})
        if leaves:
            life.rollouter.asked_to_leave(0.1)
            await life.task
        else:
            await life.drain()
        assert dataloader.returned == (["0-2"] if leaves else ["0-1", "0-2"])
        assert dataloader.partings == ([["0-1", "0-2"], []] if leaves else [])


async def test_a_rollouter_without_the_learner_takes_no_leases_and_names_the_learner(tmp_path):
    def unreached():
        return {record.whom: record.seconds for record in gather_heartbeat(life.rollouter, 1).unreached}

    async with Net() as net:
        learner, dataloader = Learner(), Dataloader()
        net.serve(learner, "learner/0")
        net.serve(dataloader, "dataloader/0")
        async with path_to(net.records["learner/0"].address) as path:
            net.register(replace(net.records["learner/0"], address=path.address))
            path.cut()
            dataloader.lease("0-1")
            async with living(net, tmp_path) as life:
                await life.until(lambda: unreached().get("learner/0", 0.0) > 0.5)
                assert set(unreached()) == {"learner/0"}
                assert (dataloader.asked, life.held) == ([], {})
                await path.open()
                await life.until(lambda: learner.uids == ["0-1"] and not life.held)
                assert unreached() == {}
                # Once it was reached, the rollouter is kept busy: its learner may only be restarting.
                path.cut()
                dataloader.lease("0-2")
                await life.until(lambda: life.held.keys() == {"0-2"} and unreached().get("learner/0", 0.0) > 0.1)
                await path.open()
                await life.until(lambda: not life.held)


async def test_a_too_large_group_is_delivered_as_failed_and_the_rollouter_continues(tmp_path):
    learner, dataloader = Learner(), Dataloader()
    async with Net(memory=True) as net:
        net.serve(learner, "learner/0", max_message_bytes=4000)
        net.serve(dataloader, "dataloader/0")
        async with living(net, tmp_path) as life:
            dataloader.lease("0-1", samples=100)
            await life.until(lambda: learner.uids and not life.held)
            dataloader.lease("0-2")
            await life.until(lambda: len(learner.uids) == 2 and not life.held)
    assert learner.uids == ["0-1", "0-2"]
    reported, none = learner.failures
    assert none is None
    assert "it cannot be brought to the learner" in reported and "raise network.max_message_bytes" in reported


async def test_late_news_of_a_dead_host_restarts_no_episode_of_its_successor(tmp_path, monkeypatch):
    async with between(Learner(), Dataloader(), tmp_path) as life:
        life.net.serve(object(), "episodes/0", 2)
        host = life.rollouter.peer("episodes/0")
        host.connect()
        await life.until(lambda: host.ready)
        with monkeypatch.context() as playing:
            sessions = mock.Mock()
            playing.setattr(life.rollouter, "_sessions", sessions, raising=False)
            life.rollouter.peer_died("episodes/0", 1)
            sessions.host_died.assert_not_called()
            life.rollouter.peer_died("episodes/0", 2)
            sessions.host_died.assert_called_once_with("episodes/0")
