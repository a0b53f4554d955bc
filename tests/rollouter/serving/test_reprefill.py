"""Tokens that updates make engines compute again: counted when computed, once, without what the prefix cache has."""

import asyncio

import pytest
from hosting import Hosted
from hypothesis import given
from hypothesis import strategies as st
from inprocess import sim_config
from virtual import run_virtual

from asyncrl.rollouter.engines.sim import SimEngine
from asyncrl.rollouter.serving.reprefill import Reprefill

PROMPT = list(range(40))
"""Two whole blocks of the simulated prefix cache, and half of one."""
SIBLINGS, TOKENS = 4, 64


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 3, st.integers(0, 3)), max_size=6))
def test_it_counts_once_with_the_first_token_and_with_a_load_all_that_is_held(requests):
    """(prompt, tokens of it that were computed under older weights, those in the cache, deltas of two tokens)"""
    reprefill, expected = Reprefill(), 0
    for number, (more, lost, cached, deltas) in enumerate(requests):
        reprefill.submitted(str(number), lost + more + 1, lost)
        for _ in range(deltas):
            reprefill.sampled(str(number), 2, cached)
        expected += max(0, lost - cached) if deltas else 0
    assert reprefill.tokens == expected
    reprefill.dropped()
    # One that has sampled nothing may not even be begun.
    expected += sum(lost + more + 1 + 2 * deltas for more, lost, _, deltas in requests if deltas)
    for number in range(len(requests)):
        reprefill.ended(str(number))
    reprefill.dropped()
    assert reprefill.tokens == expected


class Engine(SimEngine):
    """Notes what each submission makes it compute, and takes weights without bytes."""

    def __init__(self, config, computed):
        super().__init__(config, "rollouter/0")
        self.computed = computed

    async def generate(self, request):
        first = True
        async for delta in super().generate(request):
            if first and delta.tokens:
                first = False
                self.computed.append((request.held, len(request.prompt_ids), delta.cached_tokens))
            yield delta

    async def load(self, weights, *, recompute_kv):
        self._batch.load(weights.version, recompute_kv=recompute_kv)


def played(meanwhile, **rollout):
    """Siblings of one prompt in a simulated engine, on a virtual clock: prefill takes no time, a token a second.

    ``meanwhile`` is given the world while they run. Returns the host, and of each submission that came to sample
    something (held, prompt with them, cached).
    """
    sim = {"prefill_tokens_per_s": 1e9, "decode_step_s": 1.0, "length": "constant", "length_median": TOKENS}
    config, computed = sim_config(rollout={"stream_interval": 1, "sim": sim, **rollout}), []

    async def main():
        world = Hosted(config, lambda: Engine(config, computed))
        await world.host.start()
        await world.load(0)
        async with asyncio.TaskGroup() as tasks:
            for sample in range(SIBLINGS):
                tasks.create_task(world.response("0-1", TOKENS, sample, PROMPT))
            await asyncio.sleep(10.5)
            await meanwhile(world)
        await world.host.close()
        return world.host

    return run_virtual(main()), computed


def test_aborted_requests_count_what_their_resumes_compute():
    async def twice(world):
        await world.load(1)
        await asyncio.sleep(10.0)
        # On its heels another: nothing is sampled in between.
        await world.load(2)
        await world.load(3)
        await asyncio.sleep(10.0)

    host, computed = played(twice)
    resumed = [each for each in computed if each[0]]
    assert len(resumed) == 2 * SIBLINGS
    # All of the first one's, and of its siblings' not the blocks of the prompt that it has brought into the cache.
    assert sorted(cached for _, _, cached in resumed) == [0, 0, *[32] * 2 * (SIBLINGS - 1)]
    assert host.reprefill.tokens == sum(prompt - cached for _, prompt, cached in resumed) > 0


@pytest.mark.parametrize(("keep_kv", "counts"), [("recompute", True), ("stale", False)])
def test_kept_requests_count_what_they_held_at_the_load(keep_kv, counts):
    held = []

    async def once(world):
        held.append(SIBLINGS * len(PROMPT) + world.host.sampled_tokens)
        await world.load(1)

    host, _ = played(once, on_update="keep", keep_kv=keep_kv)
    assert host.reprefill.tokens == (held[0] if counts else 0)


def test_what_the_death_of_an_engine_costs_is_not_that_of_the_update_after_it():
    async def dies(world):
        await world.host.engine.close()
        await world.host.died.wait()
        await world.host.replace()
        await world.load(1)

    host, computed = played(dies)
    assert [held for held, _, _ in computed if held] == [10] * SIBLINGS
    assert host.reprefill.tokens == 0
