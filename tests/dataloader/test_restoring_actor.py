"""The dataloader that hears where the run stands: at the start, after its own restart, after the learner's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness import until
from serving_dataloader import A, B, Learner, Rollouter, Running, ledger, running, small_config
from virtual import run_virtual

from asyncrl.config import Config
from asyncrl.core.errors import RemoteError
from asyncrl.messages import Done
from asyncrl.messages.dataloader import Outcomes
from asyncrl.messages.groups import ReturnLeases

RUN = run_virtual


def two(call_timeout_s: float = 0.6) -> Config:
    return small_config(rollout={"replicas": 2}, network={"call_timeout_s": call_timeout_s})


async def needs_restore(it: Running) -> None:
    for request in (it.status(), it.report("0-0")):
        with pytest.raises(RemoteError) as caught:
            await request
        assert (caught.value.code, caught.value.retryable) == ("restore_needed", True)


# --- the gate ---


async def test_nothing_is_leased_before_the_learner_reports_the_state_of_the_run(tmp_path: Path) -> None:
    rollouters = {A: Rollouter({"0-1": 0}, seen=1)}
    async with running(tmp_path, rollouters=rollouters, restore=False) as it:
        parked, returned = it.lease(free=2, seen=1), it.call(A, ReturnLeases(uids=["0-1"]))
        await needs_restore(it)
        assert not parked.done()
        both = await asyncio.gather(it.restore(), it.restore())
        assert (both[0].seed, both[0].limit, both[0].first_epoch, both[0].prompts) == (0, 1.0, 0, 64)
        assert await returned == Done()
        leased = [lease.uid for lease in (await parked).leases]
        assert set(leased) <= {"0-0", "0-1", "0-2"} and len(leased) == 2
        # The same word again changes nothing.
        await it.report(*leased)
        assert await it.restore() == both[0] == both[1]
        assert len(rollouters[A].learners) == 1
        assert (await it.status()).outstanding == 0


async def test_known_and_held_prompts_are_not_leased(tmp_path: Path) -> None:
    """I1: the state of a dataloader follows from ledger, claims and what is held."""

    held = {"0-3": 0, "0-5": 1}
    rollouters = {A: Rollouter(held, seen=9, served_version=3)}
    async with running(tmp_path, learner=Learner("0-4"), rollouters=rollouters, restore=False) as it:
        where = {"version": 3, "trained_at_version": 2, "groups_left": 12, "outcomes_number": 5}
        await it.restore(**where, ledger=ledger(0, 1), claims=["0-2"])
        assert rollouters[A].learners == [1]
        status = await it.status()
        # 0-4 was delivered after the learner had spoken and before the rollouter did.
        assert (status.outstanding, status.attempts) == (4, {"0-5": 1})
        assert await it.leased(seen=9, served_version=2, holding="0-3 0-5", wait_s=0.2) == []
        leased = await it.lease(seen=9, served_version=3, free=9, holding="0-3 0-5")
        # T(3) + 2 G admits ten; two are trained and four are out.
        leased = [(lease.uid, lease.number) for lease in leased.leases]
        assert leased == [("0-6", 10), ("0-7", 11), ("0-8", 12), ("0-9", 13)]
        await it.report("0-2", "0-3", "0-4", "0-5", version=4, trained_at_version=6)
        assert (await it.status()).attempts == {}


async def test_supply_numbers_of_a_successor_are_above_those_of_its_predecessor(tmp_path: Path) -> None:
    """The learner takes no status for news whose number is not above what it has seen."""
    numbers = []
    for incarnation in (7, 8):
        async with running(tmp_path, incarnation=incarnation) as it:
            numbers.append((await it.status()).number)
    assert numbers[1] > numbers[0] + (1 << 20)


# --- who does not answer ---


async def test_a_rollouter_that_does_not_answer_holds_nothing_and_its_prompts_go_to_others(tmp_path: Path) -> None:
    silent, learner = Rollouter(), Learner()
    async with running(tmp_path, two(), learner=learner, rollouters={A: silent, B: Rollouter()}) as it:
        leased = await it.leased(A, 2)
        silent.may_answer.clear()
        learner.held = {leased[1]}
        await it.restore(outcomes_number=1)
        assert leased[0] in learner.asked[-1]
        assert await it.leased(B, 2) == [leased[0], "0-2"]
        # It finishes all the same: of what is reported then, nothing is refused.
        await it.report(*leased)
        assert (await it.status()).outstanding == 1


async def test_neither_a_missing_rollouter_nor_a_silent_learner_keeps_the_gate_closed(tmp_path: Path) -> None:
    learner = Learner()
    async with running(tmp_path, two(), learner=learner, rollouters={B: Rollouter()}, restore=False) as it:
        learner.may_answer.clear()
        await it.restore()
        assert await it.leased(A, 1) == ["0-0"]


async def test_leases_of_a_rollouter_that_dies_after_its_answer_are_orphaned(tmp_path: Path) -> None:
    slow = Rollouter()
    rollouters = {A: Rollouter({"0-0": 0}, seen=1), B: slow}
    async with running(tmp_path, two(call_timeout_s=20), rollouters=rollouters, restore=False) as it:
        slow.may_answer.clear()
        restoring = it.restore()
        await until(lambda: slow.learners)
        await it.hello(A, 1)
        await it.hello(A, 2)
        slow.may_answer.set()
        await restoring
        leased = await it.lease(B, 1)
        assert [(lease.uid, lease.attempt) for lease in leased.leases] == [("0-0", 1)]


# --- another learner, another dataloader ---


async def test_i1_a_learner_that_went_back_gets_its_reported_prompts_again(tmp_path: Path) -> None:
    rollouter = Rollouter()
    async with running(tmp_path, rollouters={A: rollouter}) as it:
        leased = await it.leased()
        rollouter.leases = Rollouter({"0-3": 0}, seen=4).leases
        await it.report(*leased[:3], version=1, trained_at_version=3)
        with pytest.raises(RemoteError) as caught:
            await it.call("learner/0", Outcomes(number=1, version=2, trained_at_version=0), 2)
        assert caught.value.code == "restore_needed"
        await it.restore(2, version=2, trained_at_version=1, ledger=ledger(0))
        assert rollouter.learners == [1, 2]
        assert await it.leased(seen=4, served_version=1, wait_s=0.2) == []
        assert await it.leased(free=3, seen=4, served_version=2, holding="0-3") == ["0-1", "0-2", "0-4"]
        await it.report("0-1", version=2, trained_at_version=1)
        assert it.actor.param_version == 2


async def test_prompts_of_a_checkpoint_have_no_open_leases(tmp_path: Path) -> None:
    """Their outcome was not reported in time, and no actor will report it later."""

    rollouter = Rollouter()
    async with running(tmp_path, rollouters={A: rollouter}) as it:
        await it.lease(free=3)
        assert it.actor.counters["tickets/granted"] == 3
        assert it.actor.metrics()["tickets/oldest_s"] > 0
        rollouter.leases = Rollouter(seen=3).leases
        await it.restore(2, ledger=ledger(0, 1, 2), groups_left=21)
        assert (it.actor.counters["tickets/outstanding"], it.actor.metrics()["tickets/oldest_s"]) == (0, 0)
        assert await it.leased(seen=3, free=2) == ["0-3", "0-4"]
        assert it.actor.counters["tickets/granted"] == 5, "counters only grow"


async def test_a_restarted_dataloader_restores_the_state_of_its_predecessor(tmp_path: Path) -> None:
    rollouter, learner = Rollouter(), Learner()
    async with running(tmp_path, learner=learner, rollouters={A: rollouter}) as first:
        leased = await first.leased()
        await first.report(leased[0])
        seen = (await first.status()).number
        first.actor.begin_drain()
        held = dict.fromkeys(leased[1:3], 0)
        rollouter.leases = Rollouter(held, seen=4).leases
        async with running(tmp_path, restore=False, incarnation=2, net=first.net) as second:
            await needs_restore(second)
            await second.restore(outcomes_number=2, ledger=ledger(0), claims=[leased[3]], groups_left=23)
            # The learner gets news, although it has seen higher numbers of the lost one.
            assert (await second.status(seen=seen)).outstanding == 3
            assert await second.leased(seen=4, free=1, holding=" ".join(leased[1:3])) == ["0-4"]
            await second.report(*leased[1:])


async def test_the_working_limit_survives_the_learner(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        leased = await it.leased(free=9)
        assert await it.leased(seen=8, wait_s=0.2) == []
        assert (await it.report(*leased, step_began=True, waited=True)).limit == 1.5
        assert (await it.restore(2, version=1)).limit == 1.5


async def test_a_preempted_run_leases_nothing_more(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        status = await it.status()
        leased = await it.leased(free=2)
        watched = it.status(seen=status.number)
        it.actor.preempted()
        assert ((await watched).exhausted, (await watched).outstanding) == (True, 2)
        assert await it.leased(seen=2, wait_s=0.2) == []
        await it.call(A, ReturnLeases(uids=leased))
        assert (await it.status()).outstanding == 0
        await it.restore(outcomes_number=1)
        assert (await it.status()).exhausted


# --- other prompts, another order ---


async def test_changed_prompts_are_refused_unless_allowed(tmp_path: Path) -> None:
    was: dict[str, Any] = {"outcomes_number": 9}
    async with running(tmp_path) as it:
        for changed, match in (
            ({"fingerprint": "other"}, r"the prompts differ: was the fingerprint other .*--allow-changed-data"),
            ({"seed": 4}, r"run\.seed differs: was 4.*is 0 now.*--allow-changed-seed"),
        ):
            with pytest.raises(RemoteError, match=match) as caught:
                await it.restore(**was, **changed)
            assert caught.value.code == "changed"
        # A refusal leaves everything as it was.
        assert await it.leased(free=1) == ["0-0"]


async def test_changed_prompts_start_a_new_epoch(tmp_path: Path) -> None:
    config = small_config(resume={"allow": ["data", "seed"]})
    rollouter = Rollouter()
    async with running(tmp_path, config, rollouters={A: rollouter}, restore=False) as it:
        before = ledger(0, 1, attempts={"0-2": 2})
        resumed = await it.restore(fingerprint="other", seed=4, ledger=before, claims=["1-5"], groups_left=9)
        assert resumed.first_epoch == 2
        assert await it.leased(free=2) == ["2-0", "2-1"]
        await it.report("1-5", "2-1")
        rollouter.leases = Rollouter({"2-0": 0}, seen=2).leases
        # The learner keeps the first epoch with the ledger, and the fingerprint fits from then on.
        known = ledger(0, 1, first_epoch=2)
        again = await it.restore(fingerprint=resumed.fingerprint, seed=0, ledger=known, outcomes_number=2)
        assert again.first_epoch == 2
        assert await it.leased(seen=2, free=1, holding="2-0") == ["2-1"]
