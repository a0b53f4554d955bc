"""The dataloader as its peers meet it: the real actor, in memory."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_settings import SMALL
from serving_dataloader import LEARNER, A, B, ledger, run, running, small_config
from virtual import run_virtual

from asyncrl.config.load import validate_config
from asyncrl.core.death_counts import ALONE_FROM
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.dataloader import actor as actor_module
from asyncrl.dataloader import prompts as prompts_module
from asyncrl.dataloader.prompt_queue import TOO_LONG
from asyncrl.messages import Done
from asyncrl.messages.dataloader import Outcome, Outcomes, OutcomesSeen, Rejected, SamplePrompts
from asyncrl.messages.groups import NewLeases, ReturnLeases

RUN = run
ONE_STEP = {"learner": {"steps": 1}}
FRESH = {"staleness": {"max": 0}}


async def test_leases_contain_everything_that_a_rollouter_needs(tmp_path: Path) -> None:
    evaluation = {"data": {"source": "synthetic", "size": 1}, "n": 3, "temperature": 0.0, "max_tokens": 5}
    config = small_config(rollout={"temperature": 0.7, "max_tokens": 33}, eval={"held": evaluation})
    async with running(tmp_path, config) as it:
        [lease] = (await it.lease()).leases
        assert (lease.uid, lease.purpose, lease.epoch, lease.index) == ("held@0-0", "eval/held", 0, 0)
        assert (lease.samples, lease.temperature, lease.max_tokens) == (3, 0.0, 5)
        assert (await it.status()).evals == {"eval/held@0": 1}
        await it.report("held@0-0", kind="evaluated")
        first, second = (await it.lease(free=2, seen=1)).leases
        assert first.prompt_ids.tolist() == list(first.prompt.encode())
        assert first.prompt == first.row["question"]
        assert (first.uid, first.epoch, first.index, first.number) == ("0-0", 0, 0, 2)
        assert (second.uid, second.number) == ("0-1", 3)
        assert (first.purpose, first.samples, first.temperature, first.max_tokens) == ("train", 2, 0.7, 33)
        assert (first.param_version, first.attempt) == (0, 0)


async def test_the_check_of_the_chat_template_is_kept_for_episodes(tmp_path: Path) -> None:
    config = small_config(episode={"function": "m:f"}, chat={"date": "2026-11-23"})
    async with running(tmp_path, config):
        report = json.loads((tmp_path / "chat.json").read_text())
        assert (report["date"], report["end"]) == ("2026-11-23", "<|end|>")
        assert {case["verdict"] for case in report["cases"]} == {"extend"}


@pytest.mark.parametrize(("size", "count"), [(64, 8), (5, 8), (9, 8)])
async def test_a_sample_of_prompts_is_available_before_the_gate_opens(tmp_path: Path, size: int, count: int) -> None:
    async with running(tmp_path, small_config(data={"size": size}), restore=False) as it:
        everything, sample = [
            [prompt.tolist() for prompt in (await it.call(LEARNER, SamplePrompts(count=of))).prompts]
            for of in (size, count)
        ]
        assert len(everything) == size
        few = min(size, count)
        assert sample == [everything[i * size // few] for i in range(few)]


async def test_a_lease_is_parked_until_a_place_is_free(tmp_path: Path) -> None:
    async with running(tmp_path, small_config(**FRESH)) as it:
        leased = await it.leased(A, 2) + await it.leased(B, 2)
        # One that is given up takes nothing.
        given_up, parked = it.lease(A, 2, seen=2), it.lease(B, 2, seen=2)
        assert await it.is_parked(parked)
        given_up.cancel()
        await it.report(leased[0], kind="filtered")
        assert [lease.number for lease in (await parked).leases] == [3]
        parked = it.lease(A, 2, seen=2)
        assert await it.call(A, ReturnLeases(uids=leased[1:2])) == Done()
        assert [lease.uid for lease in (await parked).leases] == [leased[1]]


@pytest.mark.parametrize("holds", [True, False])
async def test_a_parked_request_of_a_leaving_rollouter_gets_no_lease(tmp_path: Path, holds: bool) -> None:
    """I1: as when its CANCEL was lost; what is free goes to the others."""

    async with running(tmp_path, small_config(**FRESH)) as it:
        leased, rest = await it.leased(A, 2), await it.leased(B, 2)
        parked = it.lease(A, 2, seen=2, holding=" ".join(leased))
        assert await it.is_parked(parked)
        asked = len(it.learner.asked)
        await it.call(A, ReturnLeases(uids=[], leaving=True, holding=leased if holds else []))
        assert await parked == NewLeases()
        if holds:
            # That is leased to no other rollouter, and the learner is not asked about it.
            other = it.lease(B, 2, seen=2, holding=" ".join(rest))
            assert await it.is_parked(other)
            other.cancel()
            assert len(it.learner.asked) == asked
        await it.report(rest[0], kind="filtered")
        if holds:
            await it.call(A, ReturnLeases(uids=leased, leaving=True))
        # Nor is one that was on its way.
        assert await it.leased(A, 2, seen=2) == []
        found = await it.leased(B, 3, seen=2, holding=rest[1])
        assert set(leased) <= set(found) and len(found) == 3


async def test_a_leaving_rollouter_gets_no_lease_when_the_gate_opens_again(tmp_path: Path) -> None:
    async with running(tmp_path, restore=False) as it:
        parked = it.lease(A, 2)
        leaving = it.call(A, ReturnLeases(uids=[], leaving=True))
        await it.restore()
        assert (await parked, await leaving) == (NewLeases(), Done())
        assert len(await it.leased(B, 2)) == 2


def test_a_parked_call_is_answered_with_nothing_before_half_of_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as it:
            status = await it.status()
            assert await it.lease(served_version=-1, wait_s=0.4) == NewLeases(leases=[], closed=False)
            assert await it.status(seen=status.number, wait_s=0.4) == status

    run_virtual(main())


async def test_the_learner_wakes_when_the_supply_changes_and_rollouters_are_dismissed_at_the_end(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, small_config(**ONE_STEP)) as it:
        status = await it.status()
        assert (status.exhausted, status.outstanding) == (False, 0)
        watched = it.status(seen=status.number)
        await it.lease(A, 3)
        assert await it.is_parked(watched)
        leased = await it.leased(A, 9)
        status = await watched
        assert (status.exhausted, status.outstanding) == (True, 4)
        parked, watched = it.lease(A, 9, seen=4), it.status(seen=status.number)
        seen = await it.report(*leased, version=1, trained_at_version=4, finished=True)
        assert seen == OutcomesSeen(number=1, limit=1.0)
        assert (await watched).outstanding == 0
        assert it.actor.param_version == 1
        assert await parked == NewLeases(leases=[], closed=True)
        assert (await it.lease(B)).closed


async def test_the_learner_hears_of_a_rejected_prompt_at_once_without_any_lease(
    tmp_path: Path,
) -> None:
    """Nothing is leased for training before the learner has reported all of the round at the start."""
    config = small_config(eval={"held": {"data": {"source": "synthetic", "size": 1}, "n": 3}})
    async with running(tmp_path, config, restore=False) as it:
        await it.restore(ledger=ledger(attempts={"held@0-0": ALONE_FROM + config.rollout.max_attempts}))
        status = await it.status()
        assert status.rejected == []
        watched = it.status(seen=status.number)
        assert await it.is_parked(watched)
        parked = it.lease()
        assert [rejected.uid for rejected in (await watched).rejected] == ["held@0-0"]
        assert await it.is_parked(parked)
        await it.report("held@0-0", kind="quarantined")
        assert len((await parked).leases) == 4


async def test_prompts_that_are_too_long_are_reported_and_never_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = []
    monkeypatch.setattr(prompts_module, "TOKENIZED_AT_ONCE", 1)
    monkeypatch.setattr(actor_module.Dataloader, "notify", lambda self, *notice: notices.append(notice))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in (3, 30, 4)))
    data = {"source": "jsonl", "path": str(path), "max_prompt_tokens": 10}
    async with running(tmp_path, small_config(data=data)) as it:
        assert await it.leased(A, 3) == ["0-0", "0-2", "1-0"]
        assert (await it.status()).rejected == [Rejected("0-1", TOO_LONG, "left_out")]
        await it.report("0-1", kind="left_out", version=-1)
        assert (await it.status()).rejected == []
    [(key, text)] = notices
    assert key == "too_long/data"
    assert text.startswith("data: 1 of 3 (33 %) prompts have more than data.max_prompt_tokens = 10 tokens")
    assert f"the longest has 30 ({path}:2)" in text


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"data": {"source": "jsonl", "path": "/nowhere.jsonl"}}, DataError, "nowhere.jsonl: no such file"),
        ({"model": {"path": "/nowhere"}}, ConfigError, "model.path: /nowhere is not a folder"),
        ({"eval": {"e": {"data": {"source": "hf", "path": "/nowhere"}}}}, DataError, "/nowhere: no such folder"),
    ],
)
def test_bad_data_ends_the_actor_before_it_is_ready(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    async def main() -> None:
        async with running(tmp_path, small_config(**changes)):
            raise AssertionError("it was ready")

    with pytest.RaisesGroup(pytest.RaisesExc(error, match=match), flatten_subgroups=True, allow_unwrapped=True):
        run(main())
    assert error.exit_code == 78


async def test_groups_of_a_dead_rollouter_are_leased_again_before_its_successor_starts(tmp_path: Path) -> None:
    """I1: the controller's word is enough, once the learner has said which groups it holds."""

    async with running(tmp_path, small_config(**FRESH)) as it:
        held, lost = await it.leased(A, 2)
        assert len(await it.leased(B, 2)) == 2
        it.learner.held.add(held)
        parked = it.lease(B, 2, seen=2)
        assert await it.is_parked(parked)
        it.actor.peer_died(A, 1)
        assert [lease.uid for lease in (await parked).leases] == [lost]
        assert it.learner.asked[-1] == [held, lost]


async def test_a_curriculum_that_fails_ends_the_dataloader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("samplers")
    exec("def broken(*, results): return results[0]", module.__dict__)
    monkeypatch.setitem(sys.modules, "samplers", module)
    config = small_config(data={"curriculum": {"function": "samplers:broken"}})

    async def lease() -> None:
        async with running(tmp_path, config) as it:
            it.lease()
            await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup) as caught:
        await lease()
    text = "".join(traceback.format_exception(caught.value))
    assert "ConfigError: data.curriculum.function: samplers:broken failed: IndexError" in text


async def test_prompts_of_sources_have_their_names_and_rest_in_an_epoch(tmp_path: Path) -> None:
    sources = [{"name": name, "source": "synthetic", "weight": weight} for name, weight in (("a", 3.0), ("b", 1.0))]
    data = {"source": [each | {"size": 4} for each in sources], "curriculum": {"rest": 1}}
    config = validate_config(SMALL | {"data": data, "staleness": {"max": 9}})
    async with running(tmp_path, config) as it:
        leases = (await it.lease(free=4)).leases
        assert [lease.source for lease in leases] == ["a", "a", "b", "a"]
        assert [lease.uid.partition("-")[0] for lease in leases] == ["0", "0", "1", "0"]
        flat = [Outcome(lease.uid, "filtered", 1.0, 0.0) for lease in leases]
        it.reports += 1
        await it.call(LEARNER, Outcomes(number=it.reports, version=0, trained_at_version=0, outcomes=flat))
        again = (await it.lease(free=4, seen=4)).leases
        assert [lease.source for lease in again] == ["a", "a", "b", "a"]
        status = await it.status()
        assert {(rejected.uid, rejected.kind) for rejected in status.rejected} <= {
            (lease.uid.replace("0-", "2-"), "rested") for lease in leases
        }
        assert not {lease.uid for lease in again} & {rejected.uid for rejected in status.rejected}
