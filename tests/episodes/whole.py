"""Episodes from end to end: user code in an episode host, its calls answered by a rollouter's sessions and an engine.

Real processes, sockets and, where the world has one, a real engine with weights that change; the leases are given by
hand, and no learner trains.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from episodes.hosted import Hosted, hosting
from session_cases import World
from tiny_models import Publisher, logprobs_of

from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply, EpisodeBegan, TurnReward, TurnRewarded
from asyncrl.messages.groups import Trajectory
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.calls.peer import Peer


class Seat:
    """The calls that a rollouter answers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.host: Peer | None = None

    @handler
    async def chat(self, request: Chat, caller: Caller) -> ChatReply:
        reply: ChatReply = await self.world.sessions.chat(request, caller.name)
        return reply

    @handler
    def turn_reward(self, request: TurnReward, caller: Caller) -> TurnRewarded:
        session = self.world.sessions.find(request.session, caller.name)
        return TurnRewarded(node=session.conversation.reward(request.node, request.value))

    @handler
    def episode_began(self, request: EpisodeBegan, caller: Caller) -> None:
        self.world.sessions.began(request.session, caller.name)

    def send(self, host: str, delta: ChatDelta) -> None:
        assert self.host is not None
        self.host.cast(delta)


@asynccontextmanager
async def whole(world: World, run_dir: Path) -> AsyncIterator[Hosted]:
    """The world's player plays at a real host."""
    seat = Seat(world)
    async with world, hosting(world.config, run_dir, seat) as hosted:
        world.send = seat.send
        world.run = lambda host, request, timeout: hosted.peer.call(request, timeout=timeout)
        yield hosted


def played_by(
    engine: str,
    folder: Path,
    model: Path,
    made: Sequence[Any],
    prompts: Sequence[str],
    *,
    tokens: int,
    max_tokens: int,
    **more: Any,
) -> tuple[World, list[Trajectory], int]:
    """Episodes that agent:play plays at the same time, the engine (rollout.engine) speaks, and the weights are those of
    ``made`` in turn, new ones every ``tokens``. Returns the world, a trajectory for each prompt, and the last version.
    """
    vllm = {"cpu_kv_cache_bytes": 256 << 20, "threads": 1, "max_num_seqs": 32}
    rollout = {"engine": engine, "gpus_per_replica": 0, "concurrency": 16, "stream_interval": 4, "vllm": vllm}

    async def main() -> tuple[World, list[Trajectory], int]:
        publisher = Publisher()
        world = World(
            folder,
            model=model,
            engine=lambda config: make_engine(config, "rollouter/0"),
            publish=lambda version: publisher.publish_model(version, made[version % len(made)]),
            rollout=rollout | {"max_tokens": max_tokens},
            episode={"function": "agent:play", "workers": 1},
            **more,
        )
        async with whole(world, folder):
            updating = asyncio.ensure_future(world.update_every(tokens))
            played = await asyncio.gather(*(play(world, prompt, at) for at, prompt in enumerate(prompts)))
            updating.cancel()
            await asyncio.wait({updating})
            version = world.manager.version
        publisher.close()
        return world, played, version

    found = asyncio.run(main())
    gc.collect()
    return found


def play(world: World, prompt: str, sample: int = 0, **lease: Any) -> asyncio.Task[Trajectory]:
    """One attempt at a trajectory."""
    given = msgspec.structs.replace(world.lease, prompt=prompt, uid=f"0-{sample}", temperature=1.0, **lease)
    events = GroupEvents(given, world.clock.now, world.clock.wall).samples[0]
    return asyncio.ensure_future(world.player.play(given, events))


def worst_error(trajectories: Sequence[Trajectory], model_of: Any) -> tuple[float, int]:
    """Largest difference (nats) of a trained token's log-prob from that of the model of its version over the context
    that it was sampled in; and how many tokens were compared."""
    worst, count = 0.0, 0
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            ids = [*sequence.prompt_ids.tolist(), *sequence.tokens.tolist()]
            offset, scores = len(ids) - len(sequence.tokens) - 1, iter(sequence.logprobs.tolist())
            truth = {}
            for span in sequence.spans:
                if span.role != "sampled":
                    continue
                if span.version not in truth:
                    truth[span.version] = logprobs_of(model_of(span.version), ids)
                expected = np.array(truth[span.version][offset + span.start : offset + span.end])
                found = np.array([next(scores) for _ in expected])
                worst, count = max(worst, float(np.abs(found - expected).max())), count + len(found)
            assert next(scores, None) is None
    return worst, count
