"""Noise of a response: its own, whatever happens to its requests, or left to the engine."""

import asyncio

import pytest
from test_engine_deaths import World
from virtual import run_virtual

RUN = run_virtual


@pytest.mark.parametrize("own", [True, False])
async def test_the_requests_of_a_response_have_its_seed_or_none(own):
    async with World(request_seeds=own) as world:
        async with asyncio.TaskGroup() as tasks:
            for sample in range(2):
                tasks.create_task(world.response("0-1", 8, sample))
            await asyncio.sleep(3.5)
            world.engines[-1].die("killed")
        seeds = [seed for _, seed in sorted(world.seeds)]
        assert len(seeds) == 4, "each was submitted twice"
        if own:
            assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
        else:
            assert seeds == [None] * 4
