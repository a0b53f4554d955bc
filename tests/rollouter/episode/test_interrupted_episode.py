"""I8 for conversations: on the reference engine, loading the weights again in every turn does not change a bit."""

import asyncio

import pytest
from session_cases import World, echoed, user
from tiny_models import Publisher

from asyncrl.messages.episodes import EpisodeDone
from asyncrl.rollouter.engines import make_engine
from tools.learn.chat_model import make_model, make_tokenizer, save
from tools.learn.recipe import Settings

TURNS = 4
MAX_TOKENS = 40
UPDATE_EVERY = 10
"""Tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("chat") / "model", make_tokenizer()
    made = make_model(Settings(layers=2, width=64, heads=2, intermediate=128), len(tokenizer))
    save(made, tokenizer, folder)
    return folder, made


async def play(world, key):
    """Some turns; the last is asked twice at the same time."""
    messages = [user("go")]
    for turn in range(TURNS - 1):
        reply = await world.chat(key, messages)
        messages += [echoed(reply), user(f"turn {turn}")]
    await asyncio.gather(*(world.chat(key, messages) for _ in range(2)))
    return EpisodeDone(reward=1.0)


def played(folder, model, on_update, *, updates):
    """Its trajectory, and for each turn the versions that sampled it."""
    path, weights = model

    async def go():
        publisher = Publisher()
        world = World(
            folder,
            agent=play,
            model=path,
            engine=lambda config: make_engine(config, "rollouter/0"),
            publish=lambda version: publisher.publish_model(version, weights),
            rollout={"engine": "reference", "max_tokens": MAX_TOKENS, "stream_interval": 2, "on_update": on_update},
            data={"max_prompt_tokens": 400},
        )
        async with world:
            playing = asyncio.create_task(world.player.play(world.lease, world.events))
            updating = asyncio.create_task(world.update_every(UPDATE_EVERY)) if updates else playing
            trajectory = await playing
            updating.cancel()
            await asyncio.wait({updating})
        publisher.close()
        return trajectory

    return asyncio.run(go())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    return played(tmp_path_factory.mktemp("whole"), model, "keep", updates=False)


def but_versions(trajectory):
    """Everything except the versions and the times."""
    return [
        (
            [] if each.prompt_ids is None else each.prompt_ids.tolist(),
            each.tokens.tolist(),
            each.logprobs.tobytes(),
            [span.role for span in each.spans for _ in range(span.start, span.end)],
            each.turns,
        )
        for each in trajectory.sequences
    ], (trajectory.messages, trajectory.text, trajectory.reward, trajectory.finish_reason)


@pytest.mark.parametrize("on_update", ["abort_resume", "keep"])
def test_i8_interrupted_turns_equal_uninterrupted_ones(tmp_path, model, whole, on_update):
    interrupted = played(tmp_path, model, on_update, updates=True)
    assert but_versions(interrupted) == but_versions(whole)
    assert len(whole.sequences) == 2
    assert {span.version for each in whole.sequences for span in each.spans if span.role == "sampled"} == {0}
    met = [
        len({span.version for span in each.spans if turn.start <= span.start < turn.end}) > 1
        for each in interrupted.sequences
        for turn in each.turns
    ]
    assert met == [True] * (TURNS + 1), "updates met every turn"
