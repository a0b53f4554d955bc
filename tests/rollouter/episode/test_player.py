"""Episodes from a lease to a trajectory: their ends, their deadlines, their rewards, their hosts."""

import asyncio
import json

import pytest
from harness import replace
from made_group import make_group
from run_settings import sim_config
from session_cases import HOST, World, echoed, played, user

from asyncrl.core.errors import EpisodeHostFull, EpisodeOver, PeerRestarted, RemoteError
from asyncrl.data.rows import RawRow
from asyncrl.dataloader.prompts import check_row
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.messages.groups import sampled_tokens
from asyncrl.rollouter.episode.player import first_messages, task_seed, total_reward
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.chat.template import PromptEncoder
from asyncrl.text.tokenizer import load_tokenizer

WAIT_S, OTHER = 20.0, "episodes/1"


def test_an_episode_becomes_a_trajectory(tmp_path):
    async def agent(world, key):
        conversation = world.sessions.find(key, HOST).conversation
        first = await world.chat(key, [user("hi")])
        conversation.reward(None, 1.0)
        await world.chat(key, [user("hi"), echoed(first), user("left")])
        await world.chat(key, [user("hi"), echoed(first), user("more")])
        conversation.reward(None, 2.0)
        await world.chat(key, [user("a title?")], untrained=True)
        return EpisodeDone(reward=0.5, components={"found": 1.0})

    trajectory, world = played(tmp_path, agent)
    assert (trajectory.reward, trajectory.components, trajectory.finish_reason) == (3.5, {"found": 1.0}, "stop")
    assert [m["content"] for m in trajectory.messages] == ["hi", "Hello.", "more", "Hello."]
    assert [[m["content"] for m in branch] for branch in trajectory.branches] == [["hi", "Hello.", "left", "Hello."]]
    assert trajectory.text == "Hello."
    assert sampled_tokens(trajectory) == world.spoken * 3 // 4
    request = world.ran[0]
    assert (request.uid, request.sample, request.attempt) == ("0-1", 0, 0)
    assert request.seed == task_seed(world.config.run.seed, "0-1") != task_seed(world.config.run.seed, "0-2")


@pytest.mark.parametrize(("value", "turns", "total"), [(None, [], None), (0.0, [], 0.0), (None, [1.0, 2.0], 3.0)])
def test_the_return_of_an_episode_is_its_value_or_the_sum_of_its_turn_rewards(value, turns, total):
    assert total_reward(value, turns) == total


@pytest.mark.parametrize("closes", [True, False])
def test_a_time_limit_is_an_outcome_and_an_episode_that_does_not_close_is_ended(tmp_path, closes):
    reasons = []

    async def agent(world, key):
        messages = [user("hi")]
        try:
            while True:
                messages += [echoed(await world.chat(key, messages)), user("more")]
                await asyncio.sleep(0.05)
        except EpisodeOver as over:
            reasons.append(str(over))
        if not closes:
            await asyncio.Event().wait()
        return EpisodeDone(error="raised EpisodeOver")

    limits = {"timeout_s": 0.2, "close_timeout_s": 9.0 if closes else 0.1}
    trajectory, _ = played(tmp_path, agent, episode=limits)
    assert (trajectory.finish_reason, trajectory.reward) == ("time", None)
    assert "episode.timeout_s" in reasons[0] and len(trajectory.messages) >= 2


def test_a_cut_last_answer_truncates_the_trajectory_and_a_missing_reward_fails_it(tmp_path):
    async def agent(world, key):
        reply = await world.chat(key, [user("hi")])
        try:
            await world.chat(key, [user("hi"), echoed(reply), user("more")])
        except EpisodeOver:
            return EpisodeDone()
        return EpisodeDone(reward=0.0)

    long = {"say": lambda prompt: "words " * 99, "rollout": {"max_tokens": 4}}
    assert played(tmp_path, agent, **long)[0].finish_reason == "length"
    with pytest.raises(TrajectoryFailed, match=r"ended by a limit \(turns\).*no reward"):
        played(tmp_path, agent, reward={"function": "episode"}, episode={"max_turns": 1})


def test_time_with_the_policy_does_not_count_for_the_agent(tmp_path):
    async def agent(world, key):
        world.speaks.clear()
        asked = asyncio.create_task(world.chat(key, [user("hi")]))
        # Longer than every deadline of the agent.
        await asyncio.sleep(0.5)
        world.speaks.set()
        await asked
        return EpisodeDone(reward=1.0)

    limits = {"timeout_s": 0.3, "turn_timeout_s": 0.3, "start_timeout_s": 0.3, "close_timeout_s": 0.1}
    trajectory, _ = played(tmp_path, agent, episode=limits)
    assert (trajectory.finish_reason, trajectory.reward) == ("stop", 1.0)


async def test_cancelling_the_player_ends_the_episode(tmp_path):
    async def agent(world, key):
        world.speaks.clear()
        await world.chat(key, [user("hi")])

    async with asyncio.timeout(WAIT_S), World(tmp_path, agent=agent) as world:
        playing = asyncio.create_task(world.player.play(world.lease, world.events))
        await world.until(lambda: world.submitted)
        playing.cancel()
        await world.until(lambda: world.ended)
        assert len(world.sessions) == 0


@pytest.mark.parametrize(
    ("row", "system", "expected"),
    [
        ({"prompt": [user("a"), {"role": "assistant", "content": "b"}, user("c")]}, None, ["a", "b", "c"]),
        ({"prompt": "hi"}, "Be brief.", ["Be brief.", "hi"]),
        ({"prompt": [{"role": "system", "content": "Mine."}, user("hi")]}, "Be brief.", ["Mine.", "hi"]),
        ({}, None, ["1+1="]),
    ],
)
def test_a_conversation_starts_with_the_prompt_of_the_row(row, system, expected):
    said = {"template": "chat", "system": system} if system else {}
    config = sim_config(data={"source": "jsonl", "path": "prompts.jsonl"} | said)
    found, tools = first_messages(config, replace(make_group().lease, row=row))
    assert tools == []
    assert [message["content"] for message in found] == expected
    assert (found[0]["role"] == "system") == (system is not None)


def test_a_conversation_starts_with_the_prompt_whose_tokens_are_counted(family):
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    prompt = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        user("hi") | {"name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "r"},
    ]
    row = {"prompt": prompt, "tools": json.dumps([{"name": "f", "parameters": {"type": "object"}}])}
    data = {"source": "jsonl", "path": "p.jsonl", "template": "chat", "system": "Another."}
    config = sim_config(data=data)
    found, tools = first_messages(config, replace(make_group().lease, row=row))
    tokenizer = load_tokenizer(str(family("tools first")))
    checked = check_row(RawRow("p.jsonl", 1, row), config.data)
    ids, text = PromptEncoder(tokenizer, config.data, config)(checked.prompt, checked.tools)
    assert make_renderer(config, tokenizer).render(found, tools, {}) == ids
    assert "Another." not in text and "Be\nbrief." in text and '{"name": "f", "arguments": {"a": 1}}' in text


@pytest.mark.parametrize("source", [{"source": "synthetic"}, {"source": "reasoning_gym", "task": "chain_sum"}])
def test_a_conversation_starts_with_the_question_of_a_source_that_makes_its_prompts(source):
    config = sim_config(data=source | {"template": "chat", "system": "Be brief."})
    lease = replace(make_group().lease, row={"question": "1+1?"}, prompt="system: Be brief.\nuser: 1+1?\nassistant:")
    assert first_messages(config, lease) == ([{"role": "system", "content": "Be brief."}, user("1+1?")], [])


async def one_turn(world, key):
    await world.chat(key, [user("hi")], host=world.hosts[-1])
    return EpisodeDone(reward=1.0)


def elsewhere(asked):
    """Chooses the first host of two that is not to be avoided, and records its requests."""

    def choose(*, prefer, avoid):
        asked.append((prefer, sorted(avoid - {""})))
        return prefer or next((host for host in (OTHER, HOST) if host not in avoid), HOST)

    return choose


@pytest.mark.parametrize("how", ["dies", "restarts", "never begins"])
def test_an_episode_whose_host_is_away_starts_at_another(tmp_path, how):
    async def agent(world, key):
        if world.hosts[-1] == HOST:
            return await one_turn(world, key)
        if how == "restarts":
            await world.chat(key, [user("hi")], host=OTHER)
            raise PeerRestarted(OTHER, "RunEpisode")
        if how == "dies":
            asyncio.get_running_loop().call_soon(world.sessions.host_died, OTHER)
        await asyncio.Event().wait()

    asked = []
    options = {"rollout": {"retry_backoff_s": 0.01}, "choose": elsewhere(asked)}
    if how == "never begins":
        options["episode"] = {"timeout_s": 0.2}

    async def run():
        async with asyncio.timeout(WAIT_S), World(tmp_path, agent=agent, **options) as world:
            if how == "never begins":
                world.sessions.began = lambda key, host: None
            return [await world.player.play(world.lease, world.events) for _ in range(2)], world

    trajectories, world = asyncio.run(run())
    assert ([each.reward for each in trajectories], world.events.failed_attempts) == ([1.0, 1.0], 0)
    assert [each.turns for each in trajectories] == [1, 1], "nothing of the earlier attempts is trained"
    # The second attempt avoids the first one's host: it may be frozen, and have missed a deadline.
    assert asked == [("", []), ("", [OTHER]), ("", [HOST]), ("", [HOST, OTHER])]
    assert world.hosts == [OTHER, HOST] * 2
    assert +world.sessions.at == {}
    assert world.counters["rollout/episodes_failed/host"] == 2


def test_an_episode_tries_a_host_again_if_its_own_stays_away(tmp_path):
    async def agent(world, key):
        if world.hosts[-1] == OTHER and len(world.hosts) > 1:
            return await one_turn(world, key)
        raise PeerRestarted(world.hosts[-1], "RunEpisode")

    asked = []
    trajectory, world = played(tmp_path, agent, rollout={"retry_backoff_s": 0.01}, choose=elsewhere(asked))
    assert (trajectory.reward, world.hosts) == (1.0, [OTHER, HOST, HOST, OTHER])
    assert asked == [("", []), ("", [OTHER]), ("", [HOST, OTHER]), ("", [HOST])]


def test_an_episode_suspected_of_a_worker_death_returns_to_its_host_until_it_ran_alone(tmp_path):
    """Only its host knows how often it was in such a death."""

    async def agent(world, key):
        if world.hosts[-1] == HOST:
            return await one_turn(world, key)
        return EpisodeDone(error="the worker was killed", blame="host")

    asked = []
    trajectory, world = played(tmp_path, agent, rollout={"retry_backoff_s": 0.01}, choose=elsewhere(asked))
    assert (trajectory.reward, world.events.failed_attempts) == (1.0, 0)
    assert len({request.session for request in world.ran}) == 4
    assert world.hosts == [OTHER, OTHER, OTHER, HOST]
    assert [prefer for prefer, _ in asked] == ["", OTHER, OTHER, ""]


def test_an_episode_goes_to_another_host_at_once_if_one_is_full(tmp_path):
    async def agent(world, key):
        if world.hosts[-1] == HOST:
            return await one_turn(world, key)
        raise RemoteError(OTHER, EpisodeHostFull.code, "4 episodes are open here", retryable=True)

    # A pause would be longer than the test may take.
    pause = {"retry_backoff_s": 2 * WAIT_S}
    trajectory, world = played(tmp_path, agent, rollout=pause, choose=elsewhere([]))
    assert (trajectory.reward, world.hosts) == (1.0, [OTHER, HOST])
    assert "rollout/episodes_failed/host" not in world.counters
