"""Engines that die under their requests: no token is lost, the guilty prompt is found, the others are spared."""

import asyncio

import pytest
from harness import until
from managed_engine import Engine, ManagedEngine, simulated
from virtual import LoopClock, run_virtual

from asyncrl.core.errors import EngineDied
from asyncrl.rollouter.engines.sim_model import content
from asyncrl.rollouter.serving.generation import TrajectoryFailed

RUN = run_virtual
SEED = simulated().run.seed
modes = pytest.mark.parametrize("mode", ["abort_resume", "keep", "drain"])


class Mortal(Engine):
    """Dies at a number of tokens of a uid in ``world.poison``, in some loads, and on request in aborts."""

    def __init__(self, world):
        super().__init__(world.config)
        self.world, self.inside = world, {}

    async def die(self, reason):
        await self.close()
        raise EngineDied(self.name, reason)

    async def generate(self, request):
        uid, held, world = request.key.partition("/")[0], request.held, self.world
        self.inside[request.id] = uid
        world.submitted.append((uid, held, set(self.inside.values())))
        world.seeds.append((request.key, request.seed))
        try:
            async for delta in super().generate(request):
                held += len(delta.tokens)
                if delta.tokens:
                    world.steps.append(set(self.inside.values()))
                    if held > world.poison.get(uid, held):
                        await self.die(f"killed by {uid}")
                yield delta
        finally:
            del self.inside[request.id]

    async def abort(self, ids):
        if self.world.dies_of_an_abort:
            await self.die("of an abort")
        await super().abort(ids)

    async def load(self, weights, *, recompute_kv):
        if weights.version in self.world.unloadable:
            await self.die("killed by a load")
        await super().load(weights, recompute_kv=recompute_kv)


class World(ManagedEngine):
    """A manager of such engines; it replaces them and brings them new weights."""

    def __init__(self, *, poison=None, dies_of_an_abort=False, routes=False, **rollout):
        super().__init__(simulated(routes=routes, **rollout), lambda: Mortal(self))
        self.poison, self.unloadable, self.dies_of_an_abort = poison or {}, set(), dies_of_an_abort
        self.submitted, self.steps, self.seeds, self.reasons, self.excused = [], [], [], [], []
        self.version, self.one_at_a_time = 0, asyncio.Lock()

    async def keep_alive(self):
        await self.manager.start()
        while True:
            await self.update(self.version)
            await self.manager.died.wait()
            self.reasons.append(self.manager.reason)
            self.excused.append(self.manager.turns.excused)
            await self.manager.replace()

    async def update(self, version):
        self.version = version
        async with self.one_at_a_time:
            try:
                await self.load(version)
            except EngineDied as error:
                self.manager.declare_dead(str(error))

    async def __aenter__(self):
        self.living = asyncio.create_task(self.keep_alive())
        await until(lambda: self.manager.version >= 0, "the first weights")
        return self

    async def sampled(self, tokens):
        """Wait until engines have handed over this many tokens."""
        await until(lambda: len(self.steps) >= tokens, f"{tokens} tokens")

    async def __aexit__(self, *_exc):
        self.living.cancel()
        await asyncio.wait({self.living})
        await self.manager.close()
        assert self.manager.turns.lone is None and self.manager.running == 0


def versions(trajectory, uid, tokens):
    """The versions of all tokens, which are those that a live engine samples (I3)."""
    [sequence] = trajectory.sequences
    expected = content(SEED, f"{uid}/{trajectory.sample}/1", 0, tokens)
    assert (sequence.tokens.tolist(), sequence.logprobs.tolist()) == (expected[0], pytest.approx(expected[1]))
    return [span.version for span in sequence.spans for _ in range(span.start, span.end)]


async def caught(work):
    try:
        return await work
    except TrajectoryFailed as error:
        return error


@modes
async def test_the_death_of_an_engine_costs_no_delivered_token(mode):
    async with World(on_update=mode) as world:
        running = asyncio.create_task(world.response("0-1", 8))
        await world.sampled(3)
        world.version = 4
        await world.manager.engine.close()
        trajectory = await running
        assert versions(trajectory, "0-1", 8) == [0] * 3 + [4] * 5
        assert [held for _, held, _ in world.submitted] == [0, 3]
        assert trajectory.resumes == 1


@modes
async def test_a_death_costs_the_tokens_whose_routes_were_to_come_at_the_end(mode):
    """An abort of an update brings them; the simulated engine's route of a token is its id."""
    async with World(on_update=mode, routes=True) as world:
        running = asyncio.create_task(world.response("0-1", 12))
        await world.sampled(3)
        if mode == "abort_resume":
            await world.update(4)
            await world.sampled(6)
        world.version = 5
        await world.manager.engine.close()
        trajectory = await running
        kept = 3 if mode == "abort_resume" else 0
        assert versions(trajectory, "0-1", 12) == [0] * kept + [5] * (12 - kept)
        (sequence,) = trajectory.sequences
        routes = sequence.routes.ravel().tolist()
        assert routes[-11:] == sequence.tokens[:-1].tolist() and len(routes) > 11


async def test_i3_an_engine_death_under_keep_loses_only_tokens_after_a_load():
    """It is unknown which version sampled them."""
    async with World(on_update="keep") as world:
        running = asyncio.create_task(world.response("0-1", 10))
        await world.sampled(3)
        await world.update(1)
        await world.sampled(6)
        await world.manager.engine.close()
        assert versions(await running, "0-1", 10) == [0] * 3 + [1] * 7
        assert [held for _, held, _ in world.submitted] == [0, 3], "three of six were kept"


async def test_the_states_show_the_update_and_the_death_of_the_engine_in_it():
    async with World(on_update="keep") as world:
        world.entered.clear()
        running = asyncio.create_task(world.response("0-1", 8))
        await world.sampled(2)
        updating = asyncio.create_task(world.update(4))
        await until(lambda: world.entered[-1][1] == "loading", "a load")
        killed = LoopClock().now()
        await world.manager.engine.close()
        await running
        await updating
        states = [state for _, state in world.entered]
        assert states[:6] == ["generating", "pausing", "paused", "loading", "restarting", "waiting"]
        assert world.entered[4][0] == pytest.approx(killed)


@modes
async def test_only_the_prompt_that_kills_engines_fails(mode):
    async with World(poison={"0-3": 2}, max_attempts=3, on_update=mode) as world:
        async with asyncio.TaskGroup() as tasks:
            fine = [tasks.create_task(world.response(f"0-{n}", 6 + n)) for n in range(3)]
            bad = [tasks.create_task(caught(world.response("0-3", 8, sample))) for sample in range(2)]
            for version in range(1, 30):
                await asyncio.sleep(2.3)
                world.version = version
                if world.manager.serves:
                    await world.update(version)
        assert all(versions(task.result(), f"0-{n}", 6 + n) for n, task in enumerate(fine))
        for task in bad:
            assert isinstance(task.result(), TrajectoryFailed)
            assert "died 3 times while this prompt alone was generated (rollout.max_attempts)" in str(task.result())
            assert "killed by 0-3" in str(task.result())
        alone = [inside for uid, _, inside in world.submitted if uid == "0-3"][4:]
        assert alone and all(inside == {"0-3"} for inside in alone)
        assert world.excused == [False] * 2 + [True] * 3, "the engine is not blamed for one prompt"
        assert (world.manager.turns.deaths_alone, world.manager.turns.failed) == (3, 1)


@modes
async def test_updates_and_requests_that_run_alone_do_not_wait_for_each_other(mode):
    async with World(on_update=mode) as world:
        async with asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(world.response(f"0-{n}", 5 + n % 4, attempt=0 if n % 3 else 2)) for n in range(12)
            ]
            for version in range(1, 10):
                await asyncio.sleep(1.7)
                await world.update(version)
        assert all(versions(task.result(), f"0-{n}", 5 + n % 4) for n, task in enumerate(work))
        assert all(len(inside) == 1 for inside in world.steps if inside & {f"0-{n}" for n in range(0, 12, 3)})


async def test_a_death_in_a_load_is_not_blamed_on_frozen_requests():
    async with World(on_update="keep", max_attempts=1) as world:
        running = asyncio.create_task(world.response("0-1", 8, attempt=2))
        await world.sampled(2)
        world.unloadable = {1}
        await world.update(1)
        world.unloadable = set()
        assert versions(await running, "0-1", 8)
        assert "load" in world.reasons[0]
        assert (world.manager.turns.deaths_alone, any(world.excused)) == (0, False)


async def test_an_engine_that_dies_of_one_prompt_after_another_is_not_excused():
    """Restarts of a broken engine are used up before its prompts are given up."""
    async with World(poison={"0-1": 0, "0-2": 0, "0-3": 0}, max_attempts=2) as world:
        results = await asyncio.gather(*[caught(world.response(f"0-{n}")) for n in (1, 2, 3)])
        assert all(isinstance(result, TrajectoryFailed) for result in results)
        deaths = [False] * 2 + [True, False, False] * 2
        await until(lambda: len(world.excused) >= len(deaths), "the last engine's replacement")
        assert world.excused == deaths


async def test_an_engine_that_dies_of_an_abort_is_replaced():
    """The stop string was found, and the delivered tokens stay."""
    tokens, _ = content(SEED, "0-1/0/1", 0, 4)
    async with World(stop=[chr(0x100 + tokens[3])], dies_of_an_abort=True) as world:
        trajectory = await world.response("0-1", 8)
        assert (trajectory.sequences[0].tokens.tolist(), trajectory.finish_reason) == (tokens, "stop")
        await until(lambda: world.reasons, "a death")
        assert "abort" in world.reasons[0]


@pytest.mark.parametrize("own", [True, False])
async def test_the_requests_of_a_response_have_its_seed_or_none(own):
    async with World(request_seeds=own) as world:
        async with asyncio.TaskGroup() as tasks:
            for sample in range(2):
                tasks.create_task(world.response("0-1", 8, sample))
            await world.sampled(6)
            await world.manager.engine.close()
        first, again, other, other_again = (seed for _, seed in sorted(world.seeds))
        assert (first, other) == (again, other_again)
        assert first != other if own else first is other is None
