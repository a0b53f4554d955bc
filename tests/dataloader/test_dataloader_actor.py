"""The dataloader as its peers meet it: the real actor, in memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from serving_dataloader import LEARNER, A, B, Learner, restored, run, running, small_config, uids

from asyncrl.dataloader import actor as actor_module
from asyncrl.dataloader.actor import Dataloader
from asyncrl.dataloader.prompt_queue import TOO_LONG
from asyncrl.errors import ConfigError, DataError, RemoteError
from asyncrl.messages import Done
from asyncrl.messages.dataloader import Leased, OutcomesSeen, Rejected, ReturnTickets, SamplePrompts


def test_leases_carry_all_that_a_rollouter_needs(tmp_path: Path) -> None:
    async def main() -> None:
        config = small_config(data={"shuffle": False}, rollout={"temperature": 0.7, "max_tokens": 33})
        async with running(config, tmp_path) as it:
            first, second = (await it.lease(free=2)).tickets
            assert first.prompt_ids.tolist() == list(first.prompt.encode())
            assert first.prompt == first.row["question"]
            assert (first.uid, first.epoch, first.index, first.grant) == ("0-0", 0, 0, 1)
            assert (second.uid, second.grant) == ("0-1", 2)
            assert (first.purpose, first.samples, first.temperature, first.max_tokens) == ("train", 2, 0.7, 33)
            assert (first.param_version, first.attempt) == (0, 0)

    run(main())


def test_what_the_check_of_the_chat_template_found_is_kept_where_there_are_episodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_config(), tmp_path):
            assert not (tmp_path / "chat.json").exists()
        async with running(small_config(episode={"function": "m:f"}, chat={"date": "2026-11-23"}), tmp_path):
            report = json.loads((tmp_path / "chat.json").read_text())
            assert (report["date"], report["end"]) == ("2026-11-23", "<|end|>")
            assert {case["verdict"] for case in report["cases"]} == {"extend"}

    run(main())


def test_eval_tickets_have_their_own_sampling(tmp_path: Path) -> None:
    async def main() -> None:
        evaluation = {"data": {"source": "synthetic", "size": 1}, "n": 3, "temperature": 0.0, "max_tokens": 5}
        async with running(small_config(eval={"held": evaluation}), tmp_path) as it:
            (ticket,) = (await it.lease()).tickets
            assert (ticket.uid, ticket.purpose, ticket.epoch, ticket.index) == ("held@0-0", "eval/held", 0, 0)
            assert (ticket.samples, ticket.temperature, ticket.max_tokens) == (3, 0.0, 5)
            assert (await it.supply()).evals == {"eval/held@0": 1}

    run(main())


@pytest.mark.parametrize(("size", "count"), [(64, 8), (64, 1), (5, 8), (9, 8)])
def test_a_few_prompts_from_all_over_the_data_are_told_before_the_gate_opens(
    tmp_path: Path, size: int, count: int
) -> None:
    async def main() -> None:
        config = small_config(data={"size": size})
        async with running(config, tmp_path, restore=False) as it:
            sample = await it.call(LEARNER, SamplePrompts(count=count))
            known = [it.actor._prompts.prompt(index)[0].tolist() for index in range(size)]
            found = [known.index(prompt.tolist()) for prompt in sample.prompts]
            assert len(found) == min(size, count) and found == sorted(set(found))
            assert found == [i * size // len(found) for i in range(len(found))]
            again = await it.call(LEARNER, SamplePrompts(count=count))
            assert [prompt.tolist() for prompt in again.prompts] == [prompt.tolist() for prompt in sample.prompts]

    run(main())


def test_a_lease_is_parked_until_a_place_is_free(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_config(staleness={"max": 0}), tmp_path) as it:
            granted = uids(await it.lease(A, 2)) + uids(await it.lease(B, 2))
            parked = it.lease(B, 2, seen=2)
            await asyncio.sleep(0.05)
            assert not parked.done()
            await it.report(granted[0], kind="filtered")
            assert len((await parked).tickets) == 1
            parked = it.lease(A, 2, seen=2)
            assert await it.call(A, ReturnTickets(uids=granted[1:2])) == Done()
            assert uids(await parked) == [granted[1]]

    run(main())


@pytest.mark.parametrize("holds", [True, False])
def test_a_call_of_who_leaves_that_is_still_parked_is_granted_nothing(tmp_path: Path, holds: bool) -> None:
    """I1: as when its CANCEL was lost; what is free goes to the others."""

    async def main() -> None:
        async with running(small_config(staleness={"max": 0}), tmp_path) as it:
            granted, rest = uids(await it.lease(A, 2)), uids(await it.lease(B, 2))
            parked = it.lease(A, 2, seen=2, holding=granted)
            await asyncio.sleep(0.05)
            assert not parked.done()
            await it.call(A, ReturnTickets(uids=[], leaving=True, holding=granted if holds else []))
            assert await parked == Leased()
            # Nor is one that was on its way.
            assert await it.lease(A, 2, seen=2, holding=granted) == Leased()
            await it.report(rest[0], kind="filtered")
            if holds:
                await it.call(A, ReturnTickets(uids=granted, leaving=True))
            assert await it.lease(A, 2, seen=2) == Leased()
            found = uids(await it.lease(B, 3, seen=2, holding=rest[1:]))
            assert set(granted) <= set(found) and len(found) == 3

    run(main())


def test_a_call_of_who_leaves_is_granted_nothing_by_a_gate_that_opens_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_config(), tmp_path, restore=False) as it:
            parked = it.lease(A, 2)
            leaving = it.call(A, ReturnTickets(uids=[], leaving=True))
            await it.restore(restored())
            assert (await parked, await leaving) == (Leased(), Done())
            assert len(uids(await it.lease(B, 2))) == 2

    run(main())


def test_a_parked_call_is_answered_with_nothing_before_half_of_its_deadline(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with running(small_config(), tmp_path) as it:
            it.timeout_s = 0.4
            supply = await it.supply()
            assert await it.lease(served_version=-1) == Leased(tickets=[], closed=False)
            assert await it.supply(seen=supply.number) == supply

    run(main())


def test_a_call_that_is_given_up_takes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_config(staleness={"max": 0}), tmp_path) as it:
            granted = uids(await it.lease(A, 4))
            parked = it.lease(A, 4, seen=4)
            await asyncio.sleep(0.05)
            parked.cancel()
            await asyncio.sleep(0.05)
            await it.report(granted[0], kind="quarantined")
            assert [ticket.grant for ticket in (await it.lease(A, 4, seen=4)).tickets] == [5]

    run(main())


def test_the_orphans_of_a_dead_rollouter_are_granted_again_once_the_learner_has_spoken(tmp_path: Path) -> None:
    async def main() -> None:
        learner = Learner()
        config = small_config(staleness={"max": 0})
        async with running(config, tmp_path, learner) as it:
            granted = uids(await it.lease(A, 4))
            learner.held = set(granted[:1])
            again = await it.lease(A, 4, incarnation=2)
            assert uids(again) == granted[1:]
            assert learner.asked[-1] == granted
            assert it.actor.counters["tickets/orphaned"] == 4

    run(main())


def test_the_learner_is_woken_when_the_supply_changes(tmp_path: Path) -> None:
    async def main() -> None:
        config = small_config(learner={"steps": 1})
        async with running(config, tmp_path) as it:
            supply = await it.supply()
            assert (supply.exhausted, supply.outstanding) == (False, 0)
            watched = it.supply(seen=supply.number)
            await it.lease(A, 3)
            await asyncio.sleep(0.05)
            assert not watched.done()
            granted = uids(await it.lease(A, 9))
            supply = await watched
            assert (supply.exhausted, supply.outstanding) == (True, 4)
            watched = it.supply(seen=supply.number)
            await it.report(*granted, version=1, trained_at_version=4)
            assert (await watched).outstanding == 0
            assert it.actor.param_version == 1

    run(main())


def test_rollouters_are_sent_away_when_the_run_is_finished(tmp_path: Path) -> None:
    async def main() -> None:
        config = small_config(learner={"steps": 1})
        async with running(config, tmp_path) as it:
            granted = uids(await it.lease(A, 9))
            parked = it.lease(A, 9, seen=4)
            seen = await it.report(*granted, version=1, trained_at_version=4, finished=True)
            assert seen == OutcomesSeen(number=1, limit=1.0)
            assert await parked == Leased(tickets=[], closed=True)
            assert (await it.lease(B)).closed

    run(main())


def test_an_outcome_of_what_is_no_prompt_is_the_learners_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_config(), tmp_path) as it:
            with pytest.raises(RemoteError, match="0-700") as caught:
                await it.report("0-700")
            assert caught.value.code == "ProtocolError"

    run(main())


def test_prompts_that_are_too_long_are_reported_and_never_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "TOKENIZED_AT_ONCE", 1)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in (3, 30, 4)))

    async def main() -> None:
        data = {"source": "jsonl", "path": str(path), "max_prompt_tokens": 10, "shuffle": False}
        async with running(small_config(data=data), tmp_path) as it:
            assert uids(await it.lease(A, 3)) == ["0-0", "0-2", "1-0"]
            assert (await it.supply()).rejected == [Rejected("0-1", TOO_LONG)]
            await it.report("0-1", kind="quarantined", version=-1)
            assert (await it.supply()).rejected == []
            (notice,) = it.actor._notices.take()
            assert notice.key == "too_long/data"
            assert notice.text.startswith("data: 1 of 3 prompts have more than data.max_prompt_tokens = 10 tokens")
            assert f"the longest has 30 ({path}:2)" in notice.text

    run(main())


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"data": {"source": "jsonl", "path": "/nowhere.jsonl"}}, DataError, "nowhere.jsonl: no such file"),
        ({"data": {"max_prompt_tokens": 1}}, DataError, "every prompt is over"),
        ({"model": {"path": "/nowhere"}}, ConfigError, "model.path: /nowhere is not a folder"),
        (
            {"eval": {"e": {"data": {"source": "hf", "path": "/nowhere"}}}},
            DataError,
            "/nowhere: no such folder",
        ),
    ],
)
def test_bad_data_ends_the_actor_before_it_is_ready(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    async def main() -> None:
        async with running(small_config(**changes), tmp_path):
            raise AssertionError("it was ready")

    with pytest.RaisesGroup(pytest.RaisesExc(error, match=match), flatten_subgroups=True, allow_unwrapped=True):
        run(main())
    assert error.exit_code == 78

    assert Dataloader.role == "dataloader"


def test_groups_of_the_dead_are_granted_again_before_a_successor_is_there(tmp_path: Path) -> None:
    """I1: the controller's word is enough, once the learner has said which groups it holds."""

    async def main() -> None:
        async with running(small_config(staleness={"max": 0}), tmp_path) as it:
            held, lost = uids(await it.lease(A, 2))
            assert len(uids(await it.lease(B, 2))) == 2
            it.learner.held.add(held)
            parked = it.lease(B, 2, seen=2)
            await asyncio.sleep(0.05)
            assert not parked.done()
            it.actor.peer_died(A, 1)
            assert uids(await parked) == [lost]
            assert it.learner.asked[-1] == [held, lost]

    run(main())
