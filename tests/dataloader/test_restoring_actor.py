"""The dataloader that hears where the run stands: at the start, after its own restart, after the learner's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from serving_dataloader import (
    LEARNER,
    A,
    B,
    Learner,
    Rollouter,
    Running,
    ledger,
    restored,
    run,
    running,
    small_config,
    uids,
)

from asyncrl.errors import RemoteError
from asyncrl.messages import Done
from asyncrl.messages.dataloader import EvalRound, Leased, OpenGrants, Outcomes, ReturnTickets
from asyncrl.messages.groups import LedgerState
from asyncrl.messages.rollouter import HeldTicket

RUN = run
IN_ORDER: dict[str, Any] = {"data": {"shuffle": False}}
EVAL: dict[str, Any] = {"held": {"data": {"source": "synthetic", "size": 2}, "every_versions": 2}}


async def needs_restore(it: Running) -> None:
    for request in (it.supply(), it.report("0-0")):
        with pytest.raises(RemoteError) as caught:
            await request
        assert (caught.value.code, caught.value.retryable) == ("restore_needed", True)


# --- the gate ---


async def test_nothing_is_granted_before_the_learner_has_said_where_the_run_stands(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER), tmp_path, restore=False) as it:
        parked = it.lease(free=2)
        await needs_restore(it)
        assert not parked.done()
        resumed = await it.restore(restored())
        assert (resumed.fingerprint, resumed.seed) == (it.actor._prompts.fingerprint, 0)
        assert (resumed.limit, resumed.first_epoch) == (1.0, 0)
        assert uids(await parked) == ["0-0", "0-1"]


async def test_what_the_ledger_knows_and_the_learner_or_a_rollouter_has_is_not_granted(tmp_path: Path) -> None:
    """I1: the state of a dataloader follows from ledger, claims and what is held."""

    rollouters = {A: Rollouter(HeldTicket("0-3", 7, 0), HeldTicket("0-5", 9, 1), seen=9, served_version=3)}
    learner = Learner("0-4")
    config = small_config(**IN_ORDER)
    async with running(config, tmp_path, learner, rollouters=rollouters, restore=False) as it:
        where = restored(
            version=3,
            trained_at_version=2,
            groups_left=12,
            outcomes_number=5,
            ledger=ledger(0, 1),
            claims=["0-2"],
        )
        await it.restore(where)
        assert rollouters[A].learners == [1]
        supply = await it.supply()
        # 0-4 was delivered after the learner had spoken and before the rollouter did.
        assert (supply.outstanding, supply.attempts) == (4, {"0-5": 1})
        assert await it.lease(seen=9, served_version=2, holding=["0-3", "0-5"], wait_s=0.2) == Leased()
        leased = await it.lease(seen=9, served_version=3, free=9, holding=["0-3", "0-5"])
        # T(3) + 2 G admits ten; two are trained and four are out.
        assert uids(leased) == ["0-6", "0-7", "0-8", "0-9"]
        assert [ticket.grant for ticket in leased.tickets] == [10, 11, 12, 13]
        await it.report("0-2", "0-3", "0-4", "0-5", version=4, trained_at_version=6)
        assert (await it.supply()).attempts == {}


async def test_what_is_out_is_told_to_a_learner_that_waits_and_lower_attempts_are_nobodys(tmp_path: Path) -> None:
    rollouters = {A: Rollouter(HeldTicket("0-3", 7, 0, 1, 2), HeldTicket("0-5", 9, 0, 0, 2), seen=9, served_version=3)}
    async with running(small_config(**IN_ORDER), tmp_path, rollouters=rollouters, restore=False) as it:
        known = LedgerState(requeues={"0-3": 1, "0-5": 2})
        await it.restore(restored(version=3, ledger=known, claims=["0-2"]))
        # The learner takes nothing that comes of a ticket with fewer requeues than it knows of.
        assert (await it.supply()).outstanding == 2
        leased = await it.lease(seen=9, served_version=3, free=3, holding=["0-3"])
        assert [(ticket.uid, ticket.served_version) for ticket in leased.tickets] == [
            ("0-0", 3),
            ("0-1", 3),
            ("0-4", 3),
        ]
        told = await it.call("learner/0", OpenGrants())
        assert told.supply_number == (await it.supply()).number
        found = {grant.uid: (grant.served_version, grant.rollouter) for grant in told.grants}
        assert found == {
            "0-2": (-1, ""),
            "0-3": (2, A),
            "0-0": (3, A),
            "0-1": (3, A),
            "0-4": (3, A),
        }
        ages = {grant.uid: grant.age_s for grant in told.grants}
        assert ages["0-3"] is None and ages["0-0"] >= 0
        assert uids(leased) == ["0-0", "0-1", "0-4"]
        (again,) = (await it.lease("rollouter/1", served_version=3, free=1)).tickets
        assert (again.uid, again.requeues) == ("0-5", 2)


# --- who does not answer ---


async def test_a_rollouter_that_does_not_answer_holds_nothing_and_its_prompts_go_to_others(tmp_path: Path) -> None:
    silent, learner = Rollouter(), Learner()
    config = small_config(**IN_ORDER, rollout={"replicas": 2}, network={"call_timeout_s": 0.6})
    async with running(config, tmp_path, learner, rollouters={A: silent, B: Rollouter()}) as it:
        granted = uids(await it.lease(A, 2))
        silent.may_answer.clear()
        learner.held = {granted[1]}
        await it.restore(restored(outcomes_number=1))
        assert granted[0] in learner.asked[-1]
        assert uids(await it.lease(B, 2)) == [granted[0], "0-2"]
        # It finishes all the same: of what is reported then, nothing is refused.
        await it.report(*granted)
        assert (await it.supply()).outstanding == 1


async def test_a_rollouter_that_is_not_there_delays_the_gate_and_no_more(tmp_path: Path) -> None:
    config = small_config(**IN_ORDER, rollout={"replicas": 2}, network={"call_timeout_s": 0.6})
    async with running(config, tmp_path, rollouters={B: Rollouter()}) as it:
        assert uids(await it.lease(A, 1)) == ["0-0"]


async def test_a_rollouter_that_dies_after_its_answer_leaves_orphans(tmp_path: Path) -> None:
    slow = Rollouter()
    rollouters = {A: Rollouter(HeldTicket("0-0", 1, 0), seen=1), B: slow}
    config = small_config(**IN_ORDER, rollout={"replicas": 2})
    async with running(config, tmp_path, rollouters=rollouters, restore=False) as it:
        slow.may_answer.clear()
        restoring = it.restore(restored())
        while not slow.learners:
            await asyncio.sleep(0.001)
        await it.hello(A, 1)
        await it.hello(A, 2)
        slow.may_answer.set()
        await restoring
        leased = await it.lease(B, 1)
        assert [(ticket.uid, ticket.attempt) for ticket in leased.tickets] == [("0-0", 1)]


async def test_without_the_learners_word_on_what_it_holds_the_run_goes_on(tmp_path: Path) -> None:
    config = small_config(**IN_ORDER, network={"call_timeout_s": 0.6})
    learner = Learner()
    async with running(config, tmp_path, learner, restore=False) as it:
        learner.may_answer.clear()
        await it.restore(restored())
        assert uids(await it.lease(free=1)) == ["0-0"]


# --- the same word again, another learner, another dataloader ---


async def test_the_same_word_again_changes_nothing(tmp_path: Path) -> None:
    rollouters = {A: Rollouter()}
    async with running(small_config(**IN_ORDER), tmp_path, rollouters=rollouters, restore=False) as it:
        both = await asyncio.gather(it.restore(restored()), it.restore(restored()))
        assert both[0] == both[1]
        granted = uids(await it.lease(free=3))
        await it.report(*granted)
        assert await it.call(LEARNER, restored()) == both[0]
        assert len(rollouters[A].learners) == 1
        assert (await it.supply()).outstanding == 0
        assert uids(await it.lease(seen=3, free=1)) == ["0-3"]


async def test_i1_a_learner_that_went_back_gets_again_what_it_had_reported(tmp_path: Path) -> None:
    rollouter = Rollouter()
    async with running(small_config(**IN_ORDER), tmp_path, rollouters={A: rollouter}) as it:
        granted = uids(await it.lease(free=4))
        rollouter.tickets = Rollouter(HeldTicket("0-3", 4, 0), seen=4).tickets
        await it.report(*granted[:3], version=1, trained_at_version=3)
        with pytest.raises(RemoteError) as caught:
            await it.call(LEARNER, Outcomes(number=1, version=2, trained_at_version=0), 2)
        assert caught.value.code == "restore_needed"
        await it.restore(restored(version=2, trained_at_version=1, ledger=ledger(0)), 2)
        assert rollouter.learners == [1, 2]
        assert await it.lease(seen=4, served_version=1, wait_s=0.2) == Leased()
        leased = await it.lease(seen=4, served_version=2, free=3, holding=["0-3"])
        assert uids(leased) == ["0-1", "0-2", "0-4"]
        await it.report("0-1", version=2, trained_at_version=1)
        assert it.actor.param_version == 2


async def test_what_a_checkpoint_holds_is_no_ticket_that_is_out(tmp_path: Path) -> None:
    """Its outcome was not reported in time, and nobody reports it any more."""

    rollouter = Rollouter()
    async with running(small_config(**IN_ORDER), tmp_path, rollouters={A: rollouter}) as it:
        await it.lease(free=3)
        assert it.actor.counters["tickets/granted"] == 3
        assert it.actor.figures()["tickets/oldest_s"] > 0
        rollouter.tickets = Rollouter(seen=3).tickets
        await it.restore(restored(ledger=ledger(0, 1, 2), groups_left=21), 2)
        assert it.actor.counters["tickets/outstanding"] == 0
        assert it.actor.figures()["tickets/oldest_s"] == 0
        assert uids(await it.lease(seen=3, free=2)) == ["0-3", "0-4"]
        assert it.actor.counters["tickets/granted"] == 5, "counters only grow"


async def test_a_learner_that_has_a_successor_is_not_believed(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER), tmp_path, restore=False) as it:
        await it.restore(restored(ledger=ledger(0, 1)))
        # Its HELLO would have been refused; this is one that had said HELLO before.
        it.actor._learner = 3
        with pytest.raises(RemoteError, match="a newer learner/0") as caught:
            await it.restore(restored())
        assert caught.value.code == "invalid"


async def test_a_restarted_dataloader_stands_where_the_lost_one_stood(tmp_path: Path) -> None:
    rollouter, learner = Rollouter(), Learner()
    config = small_config(**IN_ORDER)
    async with running(config, tmp_path, learner, rollouters={A: rollouter}) as first:
        granted = uids(await first.lease(free=4))
        await first.report(granted[0])
        seen = (await first.supply()).number
        first.actor.begin_drain()
        held = (HeldTicket(uid, grant, 0) for grant, uid in enumerate(granted[1:3], 2))
        rollouter.tickets = Rollouter(*held, seen=4).tickets
        async with running(config, tmp_path, restore=False, incarnation=2, net=first.net) as second:
            await needs_restore(second)
            await second.restore(restored(outcomes_number=2, ledger=ledger(0), claims=[granted[3]], groups_left=23))
            # What the learner has seen of the lost one does not keep news from it.
            assert (await second.supply(seen=seen)).outstanding == 3
            assert uids(await second.lease(seen=4, free=1, holding=granted[1:3])) == ["0-4"]
            await second.report(*granted[1:])


async def test_tickets_that_are_returned_while_the_gate_is_shut_are_granted_again(tmp_path: Path) -> None:
    rollouters = {A: Rollouter(HeldTicket("0-0", 1, 0), seen=1)}
    async with running(small_config(**IN_ORDER), tmp_path, rollouters=rollouters, restore=False) as it:
        returned = it.call(A, ReturnTickets(uids=["0-0"]))
        await it.restore(restored())
        assert await returned == Done()
        assert uids(await it.lease(seen=1, free=2)) == ["0-0", "0-1"]


async def test_the_working_limit_survives_the_learner(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER), tmp_path) as it:
        granted = uids(await it.lease(free=9))
        assert await it.lease(seen=8, wait_s=0.2) == Leased()
        seen = await it.report(*granted, step_began=True, waited=True)
        assert seen.limit == 1.5
        assert (await it.restore(restored(version=1), 2)).limit == 1.5


async def test_a_run_that_makes_way_grants_nothing_more(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER), tmp_path) as it:
        supply = await it.supply()
        granted = uids(await it.lease(free=2))
        watched = it.supply(seen=supply.number)
        it.actor.preempted()
        assert ((await watched).exhausted, (await watched).outstanding) == (True, 2)
        assert await it.lease(seen=2, wait_s=0.2) == Leased()
        await it.call(A, ReturnTickets(uids=granted))
        assert (await it.supply()).outstanding == 0
        await it.restore(restored(outcomes_number=1))
        assert (await it.supply()).exhausted


# --- other prompts, another order ---


async def test_other_prompts_are_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER), tmp_path) as it:
        assert it.actor._tickets is not None
        with pytest.raises(
            RemoteError, match=r"the prompts differ: was the fingerprint other .*--allow-changed-data"
        ) as caught:
            await it.restore(restored(fingerprint="other", outcomes_number=9))
        assert caught.value.code == "changed"
        with pytest.raises(RemoteError, match=r"run\.seed differs: was 4.*is 0 now.*--allow-changed-seed") as caught:
            await it.restore(restored(seed=4, outcomes_number=9))
        assert caught.value.code == "changed"
        # A refusal leaves everything as it was.
        assert uids(await it.lease(free=1)) == ["0-0"]


async def test_other_prompts_begin_with_an_epoch_of_their_own(tmp_path: Path) -> None:
    config = small_config(**IN_ORDER, resume={"allow": ["data", "seed"]})
    rollouter = Rollouter()
    async with running(config, tmp_path, rollouters={A: rollouter}, restore=False) as it:
        where = restored(
            fingerprint="other", seed=4, ledger=ledger(0, 1, attempts={"0-2": 2}), claims=["1-5"], groups_left=9
        )
        assert (await it.restore(where)).first_epoch == 2
        assert uids(await it.lease(free=2)) == ["2-0", "2-1"]
        await it.report("1-5", "2-1")
        rollouter.tickets = Rollouter(HeldTicket("2-0", 1, 0), seen=2).tickets
        # The learner keeps the first epoch with the ledger, and the fingerprint fits from then on.
        fingerprint = it.actor._prompts.fingerprint
        known = ledger(0, 1, first_epoch=2)
        again = restored(fingerprint=fingerprint, seed=0, ledger=known, outcomes_number=2)
        assert (await it.restore(again)).first_epoch == 2
        assert uids(await it.lease(seen=2, free=1, holding=["2-0"])) == ["2-1"]


# --- evaluation ---


async def test_rounds_go_on_where_the_learner_says(tmp_path: Path) -> None:
    rollouters = {A: Rollouter(HeldTicket("held@4-1", 3, 0), HeldTicket("held@2-0", 2, 0), seen=3)}
    config = small_config(**IN_ORDER, eval=EVAL)
    async with running(config, tmp_path, rollouters=rollouters, restore=False) as it:
        where = restored(
            version=5,
            trained_at_version=1,
            ledger=ledger(0),
            rounds_closed=["held@0"],
            rounds_open=[EvalRound(name="held@4", held=["held@4-0"])],
        )
        await it.restore(where)
        assert (await it.supply()).evals == {"eval/held@4": 2}
        assert uids(await it.lease(seen=3, served_version=5, free=1)) == ["0-1"]
        await it.report("held@4-0", "held@4-1", kind="evaluated", version=5, trained_at_version=1)
        assert (await it.supply()).evals == {}


async def test_the_round_at_the_start_is_held_once(tmp_path: Path) -> None:
    async with running(small_config(**IN_ORDER, eval=EVAL), tmp_path) as it:
        assert uids(await it.lease(free=3)) == ["held@0-0", "held@0-1"]
        await it.report("held@0-0", "held@0-1", kind="evaluated")
        await it.restore(restored(version=1, rounds_closed=["held@0"]), 2)
        assert (await it.supply()).evals == {}
        assert uids(await it.lease(seen=2, served_version=1, free=1)) == ["0-0"]


# --- suspects ---
