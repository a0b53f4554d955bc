"""Engines that die under their requests: no token is lost, the guilty prompt is found, the innocent are left alone."""

import asyncio
from contextlib import suppress

import pytest
from hosting import Hosted
from inprocess import sim_config
from virtual import LoopClock, run_virtual

from asyncrl.errors import EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines.base import TokenDelta
from asyncrl.rollouter.serving.generation import TrajectoryFailed

RUN = run_virtual
modes = pytest.mark.parametrize("mode", ["abort_resume", "keep", "drain"])


class Engine:
    """One token a second and request; token n of a response is n, its log-prob the negative of the version.

    It dies when a response of a uid in ``world.poison`` has so many tokens. Under ``keep`` it goes on over loads.
    """

    name, workers = "rollouter/0", 1

    def __init__(self, world):
        self.world, self.version, self.dead = world, -1, ""
        self.running, self.going = {}, asyncio.Event()

    async def start(self):
        pass

    async def close(self):
        self.die("it was closed")

    def die(self, reason):
        self.dead = self.dead or reason
        for request in self.running.values():
            request.set()

    def require_alive(self):
        if self.dead:
            raise EngineDied(self.name, self.dead)

    def uids(self):
        return {id.partition("/")[0] for id in self.running}

    async def generate(self, request):
        self.require_alive()
        uid = request.key.partition("/")[0]
        aborted = self.running[request.id] = asyncio.Event()
        self.world.submitted.append((uid, request.held, self.uids()))
        self.world.seeds.append((request.key, request.seed))
        spans = []
        try:
            for held in range(request.held, request.held + request.max_tokens):
                waits = True
                while waits:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await aborted.wait()
                    self.require_alive()
                    if aborted.is_set():
                        yield TokenDelta(tokens=[], logprobs=[], finish_reason="abort", spans=spans)
                        return
                    waits = not self.going.is_set()
                if held == self.world.poison.get(uid):
                    self.die(f"killed by {uid}")
                    self.require_alive()
                self.world.steps.append(self.uids())
                n = held - request.held
                start = spans.pop().start if spans and spans[-1].version == self.version else n
                spans.append(VersionSpan(self.version, start, n + 1))
                end = {"finish_reason": "length", "spans": spans} if n + 1 == request.max_tokens else {}
                yield TokenDelta(tokens=[held], logprobs=[-float(self.version)], **end)
        finally:
            del self.running[request.id]

    async def abort(self, ids):
        if ids and self.world.dies_of_an_abort:
            self.die("of an abort")
        self.require_alive()
        for id in ids:
            if id in self.running:
                self.running[id].set()

    async def pause(self, mode):
        self.require_alive()
        if mode == "abort":
            await self.abort(list(self.running))
        self.going.clear()

    async def load(self, weights, *, recompute_kv):
        await asyncio.sleep(0.1)
        if weights.version in self.world.unloadable:
            self.die("killed by a load")
        self.require_alive()
        self.version = weights.version

    async def resume(self):
        self.require_alive()
        self.going.set()


class World(Hosted):
    """A host with such engines, and somebody who replaces them and brings them new weights."""

    def __init__(self, *, poison=None, dies_of_an_abort=False, **rollout):
        super().__init__(sim_config(rollout=rollout), self.make)
        self.poison, self.unloadable, self.dies_of_an_abort = poison or {}, set(), dies_of_an_abort
        self.submitted, self.steps, self.engines, self.seeds = [], [], [], []
        self.reasons, self.excused = [], []
        self.version = 0

    def make(self):
        self.engines.append(Engine(self))
        return self.engines[-1]

    async def keep_alive(self):
        await self.host.start()
        while True:
            await self.update(self.version)
            await self.host.died.wait()
            self.reasons.append(self.host.reason)
            self.excused.append(self.host.excused)
            await self.host.replace()

    async def update(self, version):
        self.version = version
        try:
            await self.load(version)
        except EngineDied as error:
            self.host.lost(str(error))

    async def __aenter__(self):
        self.living = asyncio.create_task(self.keep_alive())
        while self.host.version < 0:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_exc):
        self.living.cancel()
        await asyncio.wait({self.living})
        await self.host.close()
        assert self.host.turns.lone is None and self.host.running == 0


def versions(trajectory, tokens):
    """Of a response that is whole, and whose log-probs are those of its versions (I3)."""
    [sequence] = trajectory.sequences
    assert sequence.tokens.tolist() == list(range(tokens))
    found = [span.version for span in sequence.spans for _ in range(span.start, span.end)]
    assert found == [-int(logprob) for logprob in sequence.logprobs]
    return found


async def caught(work):
    try:
        return await work
    except TrajectoryFailed as error:
        return error


@modes
async def test_the_death_of_an_engine_costs_no_token_that_was_handed_over(mode):
    async with World(on_update=mode) as world:
        running = asyncio.create_task(world.response("0-1", 8))
        await asyncio.sleep(3.5)
        world.version = 4
        world.engines[-1].die("killed")
        trajectory = await running
        assert versions(trajectory, 8) == [0] * 3 + [4] * 5
        assert [held for _, held, _ in world.submitted] == [0, 3]
        assert trajectory.resumes == 1


async def test_under_keep_only_tokens_after_a_load_are_lost_with_the_engine():
    """I3: of those nobody can say which version sampled them."""
    async with World(on_update="keep") as world:
        running = asyncio.create_task(world.response("0-1", 10))
        await asyncio.sleep(3.5)
        await world.update(1)
        await asyncio.sleep(3.0)
        world.engines[-1].die("killed")
        assert versions(await running, 10) == [0] * 3 + [1] * 7
        assert [held for _, held, _ in world.submitted] == [0, 3], "three of six were kept"


async def test_its_states_tell_of_the_update_and_an_engine_that_dies_under_it_is_down_from_then_on():
    async with World(on_update="keep") as world:
        world.entered.clear()
        running = asyncio.create_task(world.response("0-1", 8))
        await asyncio.sleep(2.5)
        updating = asyncio.create_task(world.update(4))
        await asyncio.sleep(0.05)
        killed = LoopClock().now()
        world.engines[-1].die("killed")
        await running
        await updating
        states = [state for _, state in world.entered]
        assert states[:6] == ["generating", "pausing", "paused", "loading", "restarting", "waiting"]
        assert world.entered[4][0] == pytest.approx(killed)


@modes
async def test_the_prompt_that_kills_engines_is_found_and_no_other_pays_for_it(mode):
    async with World(poison={"0-3": 2}, max_attempts=3, on_update=mode) as world:
        async with asyncio.TaskGroup() as tasks:
            fine = [tasks.create_task(world.response(f"0-{n}", 6 + n)) for n in range(3)]
            bad = [tasks.create_task(caught(world.response("0-3", 8, sample))) for sample in range(2)]
            for version in range(1, 30):
                await asyncio.sleep(2.3)
                world.version = version
                if world.host.serves:
                    await world.update(version)
        assert all(versions(task.result(), 6 + n) for n, task in enumerate(fine))
        for task in bad:
            assert isinstance(task.result(), TrajectoryFailed)
            assert "died 3 times (rollout.max_attempts)" in str(task.result())
            assert "killed by 0-3" in str(task.result())
        alone = [inside for uid, _, inside in world.submitted if uid == "0-3"][4:]
        assert alone and all(inside == {"0-3"} for inside in alone)
        assert world.excused == [False] * 2 + [True] * 3, "what one prompt does is not the engine's fault"
        assert (world.host.suspects.own_deaths, world.host.suspects.failed) == (3, 1)


@modes
async def test_updates_and_those_that_run_alone_do_not_wait_for_one_another(mode):
    async with World(on_update=mode) as world:
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(world.response(f"0-{n}", 5 + n % 4, alone=n % 3 == 0)) for n in range(12)]
            for version in range(1, 10):
                await asyncio.sleep(1.7)
                await world.update(version)
        assert all(versions(task.result(), 5 + n % 4) for n, task in enumerate(work))
        assert all(len(inside) == 1 for inside in world.steps if inside & {f"0-{n}" for n in range(0, 12, 3)})


async def test_what_dies_of_a_load_is_no_fault_of_what_is_frozen_in_it():
    async with World(on_update="keep", max_attempts=1) as world:
        running = asyncio.create_task(world.response("0-1", 8, alone=True))
        await asyncio.sleep(2.5)
        world.unloadable = {1}
        await world.update(1)
        world.unloadable = set()
        assert versions(await running, 8)
        assert "load" in world.reasons[0]
        assert (world.host.suspects.own_deaths, any(world.excused)) == (0, False)


async def test_an_engine_that_dies_of_one_prompt_after_the_other_is_not_excused():
    """Restarts of an engine that is broken are used up before its prompts are given up."""
    async with World(poison={"0-1": 0, "0-2": 0, "0-3": 0}, max_attempts=2) as world:
        results = await asyncio.gather(*[caught(world.response(f"0-{n}")) for n in (1, 2, 3)])
        assert all(isinstance(result, TrajectoryFailed) for result in results)
        await asyncio.sleep(1.0)
        assert world.excused == [False] * 2 + [True, False, False] * 2


async def test_an_engine_that_dies_of_an_abort_is_replaced():
    """The stop string was found; what was handed over stands."""
    async with World(stop=[chr(0x100 + 3)], dies_of_an_abort=True) as world:
        trajectory = await world.response("0-1", 8)
        assert (trajectory.sequences[0].tokens.tolist(), trajectory.finish_reason) == ([0, 1, 2, 3], "stop")
        while not world.reasons:
            await asyncio.sleep(0.01)
        assert "abort" in world.reasons[0]


@pytest.mark.parametrize("own", [True, False])
async def test_the_requests_of_a_response_have_its_seed_or_none(own):
    async with World(request_seeds=own) as world:
        async with asyncio.TaskGroup() as tasks:
            for sample in range(2):
                tasks.create_task(world.response("0-1", 8, sample))
            await asyncio.sleep(3.5)
            world.engines[-1].die("killed")
        first, again, other, other_again = (seed for _, seed in sorted(world.seeds))
        assert (first, other) == (again, other_again)
        assert first != other if own else first is other is None
