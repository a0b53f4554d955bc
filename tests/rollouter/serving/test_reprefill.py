"""Tokens that engines compute again after updates: counted once, when computed, without those in the prefix cache."""

import asyncio

import pytest
from harness import until
from hypothesis import given
from hypothesis import strategies as st
from made_group import make_group
from managed_engine import ManagedEngine, Turns, simulated
from virtual import run_virtual

from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.serving.engine_manager import Reprefill
from asyncrl.rollouter.serving.generation import PolicyRequest, Response
from asyncrl.rollouter.serving.group_events import SampleEvents

PROMPT = list(range(40))
"""Two whole blocks of the simulated prefix cache, of 16 tokens, and half of one."""
SIBLINGS, TOKENS = 4, 64


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 3, st.integers(0, 3)), max_size=6))
def test_prefilled_tokens_count_once_and_all_held_tokens_count_again_at_a_load(requests):
    """(prompt, tokens of it that were computed under older weights, those in the cache, deltas of two tokens)"""
    reprefill, expected = Reprefill(), 0
    for number, (more, lost, cached, deltas) in enumerate(requests):
        reprefill.submitted(str(number), lost + more + 1, lost)
        for _ in range(deltas):
            reprefill.sampled(str(number), 2, cached)
        expected += max(0, lost - cached) if deltas else 0
    assert reprefill.tokens == expected
    reprefill.dropped()
    # One that has sampled nothing may not have started.
    expected += sum(lost + more + 1 + 2 * deltas for more, lost, _, deltas in requests if deltas)
    for number in range(len(requests)):
        reprefill.ended(str(number))
    reprefill.dropped()
    assert reprefill.tokens == expected


def played(meanwhile, slices=None, **rollout):
    """Siblings of one prompt on a virtual clock. ``meanwhile`` is given the world when each has 10 tokens.

    Returns the tokens computed again, and those sampled.
    """

    async def main():
        world = ManagedEngine(simulated(**rollout), slices=slices)
        await world.manager.start()
        await world.load(0)
        async with asyncio.TaskGroup() as tasks:
            for sample in range(SIBLINGS):
                tasks.create_task(world.response("0-1", TOKENS, sample, PROMPT))
            await sampled(world, 10)
            await meanwhile(world)
        await world.manager.close()
        return world.manager.reprefill.tokens, world.manager.sampled_tokens

    return run_virtual(main())


async def sampled(world, tokens):
    """Wait until each sibling has this many."""
    await until(lambda: world.manager.sampled_tokens >= SIBLINGS * tokens, f"{tokens} tokens each")


async def updated(world):
    await world.load(1)


async def updated_thrice(world):
    await world.load(1)
    await sampled(world, 20)
    # Another follows at once: nothing is sampled in between.
    await world.load(2)
    await world.load(3)


async def dies_and_is_updated(world):
    await world.manager.engine.close()
    await world.manager.died.wait()
    await world.manager.replace()
    await world.load(1)


ALL = len(PROMPT) + 10
CACHED = 32 * (SIBLINGS - 1)
"""Blocks of the prompt that the first of the siblings brings into the cache again."""


@pytest.mark.parametrize(
    ("meanwhile", "rollout", "again"),
    [
        (updated_thrice, {}, SIBLINGS * ALL - CACHED + SIBLINGS * (ALL + 10) - CACHED),
        (updated, {"on_update": "keep", "keep_kv": "recompute"}, SIBLINGS * ALL),
        (updated, {"on_update": "keep", "keep_kv": "stale"}, 0),
        # The cost of an engine's death is separate from that of the update after it.
        (dies_and_is_updated, {}, 0),
    ],
)
def test_tokens_that_an_engine_computes_again_after_updates_are_counted(meanwhile, rollout, again):
    assert played(meanwhile, **rollout) == (again, SIBLINGS * TOKENS)


@pytest.mark.parametrize("version", [0, 1])
def test_a_sleep_loses_all_tokens_even_if_the_same_version_follows(version):
    async def sleeps(world):
        await world.manager.sleep()
        await world.load(version)

    again, tokens = played(sleeps, Turns())
    assert (again, tokens) == (SIBLINGS * ALL - CACHED, SIBLINGS * TOKENS)


@pytest.mark.parametrize(("keep_kv", "again"), [("recompute", ALL + ALL), ("stale", ALL)])
def test_i3_a_call_that_is_given_up_during_a_load_continues_after_another(keep_kv, again):
    """Its tokens of unknown version are sampled again, and do not count as computed twice."""

    async def main():
        world, response = ManagedEngine(simulated(on_update="keep", keep_kv=keep_kv)), Response(max_tokens=TOKENS)
        await world.manager.start()
        await world.load(0)
        events = SampleEvents("0-1", 0, asyncio.get_running_loop().time)
        lease, key = world.lease("0-1", TOKENS), "0-1/0/1"
        request = PolicyRequest(lease=lease, events=events.call(), ids=PROMPT, response=response, key=key)
        given_up = asyncio.create_task(world.generate(request))
        await until(lambda: len(response.tokens) == 10, "10 tokens")
        await world.load(1)
        await until(lambda: len(response.tokens) == 20, "10 more")
        given_up.cancel()
        await asyncio.wait([given_up])
        await world.load(2)
        await world.generate(request)
        assert world.manager.running == 0
        await world.manager.close()
        return response.spans, world.manager.reprefill.tokens

    assert run_virtual(main()) == ([VersionSpan(0, 0, 10), VersionSpan(2, 10, TOKENS)], again)


def test_a_refused_submission_leaves_nothing():
    async def main():
        world = ManagedEngine(simulated())
        await world.manager.start()
        await world.load(0)
        request = GenerationRequest(id="0-1/0/1", prompt_ids=PROMPT, max_tokens=1, temperature=1.0, seed=None)
        with pytest.raises(AssertionError):
            await anext(world.manager.stream(request, make_group("0-1").lease, lost=len(PROMPT) + 1))
        assert world.manager.running == 0
        await world.manager.close()

    run_virtual(main())
