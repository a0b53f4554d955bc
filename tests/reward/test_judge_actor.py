"""A judge in the reward pool's actor: over the wire, for a rollouter's group, and before a run begins."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import uvloop
from judge_server import as_json, judge_server, right, scores, shown, status
from made_group import make_group
from services import services
from test_reward_actor import config_with, serving
from virtual import LoopClock

from asyncrl.launcher.checks.inputs import Sample
from asyncrl.launcher.checks.user_code import RewardTrial
from asyncrl.messages.reward import Completion, Score
from asyncrl.observe.catalogue import find
from asyncrl.rollouter.groups import GroupRunner
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.heartbeat import gather_heartbeat

SAMPLES = 4
RUN = uvloop.run


def judged_by(server, **options):
    return config_with(function="relative_judge", per="group", options={"url": server.url, "model": "m", **options})


def request(*values, uid="0-1"):
    completions = [Completion(text=f"worth {value}", finish_reason="stop", tokens=3) for value in values]
    return Score(uid=uid, prompt="p", row={}, completions=completions)


async def test_a_judge_serves_rollouters_and_reports_its_metrics(tmp_path):
    async with judge_server(right) as server, serving(judged_by(server, tries=1), tmp_path) as served:
        calls = [served.rollouter.call(request(0.0, 1.0, uid=f"0-{at}")) for at in range(20)]
        assert [found.rewards for found in await asyncio.gather(*calls)] == [[0.0, 1.0]] * 20
        server.script = [status(500, "overloaded")]
        error = await served.failing("worth 1", "0-77")
        assert (error.code, error.retryable) == ("reward_failed", True)
        assert "relative_judge: unjudged: http" in str(error)
        [(key, (text, more))] = served.notices.items()
        assert (key, more["count"]) == ("reward: unjudged (status 500)", 1)
        assert "overloaded (prompt 0-77)" in text and "A group is tried" in more["meanwhile"]
        said = gather_heartbeat(served.actor, 1)
        counts = {"judge/requests": 21, "judge/unjudged": 1, "judge/prompt_tokens": 2000, "reward/scored": 20}
        assert counts.items() <= said.counters.items()
        assert all(find(name) is not None for name in served.actor.metrics())
        assert sum(said.histograms["judge/request_s"].counts) == 21
        assert len(list((tmp_path / "judge_cache").iterdir())) == 20


async def test_an_unjudged_group_is_tried_again_and_then_quarantined_with_the_reason(tmp_path):
    def short(body):
        return as_json(scores(body)[1:])

    async def play(lease, events):
        sample = events.sample
        trajectory = make_group(samples=SAMPLES).trajectories[sample]
        trajectory.reward, trajectory.text = None, f"worth {sample / 4}"
        return trajectory

    async with judge_server(short) as server, serving(judged_by(server), tmp_path) as served:
        config = config_with(function="relative_judge", per="group").model_copy(deep=True)
        object.__setattr__(config.rollout, "retry_backoff_s", 0.01)
        pools = SimpleNamespace(score=lambda request, _: served.rollouter.call(request))
        leases = SimpleNamespace(generated=lambda _: None, taken_at=defaultdict(float))
        runner = GroupRunner(config, services(clock=LoopClock()), SimpleNamespace(play=play), pools, leases)

        async def group():
            lease = make_group(samples=SAMPLES).lease
            return await runner.run(lease, GroupEvents(lease, LoopClock().now, LoopClock().wall))

        found = await group()
        attempts = config.rollout.max_attempts
        assert found.trajectories == [] and f"scoring failed {attempts} times" in found.failure
        assert "unjudged: its answer cannot be used, nor the repaired one: id " in found.failure
        assert len(server.bodies) == 2 * attempts
        # Judged at the second attempt, it is as any other.
        server.script = [short, short, right]
        found = await group()
        assert (found.failure, [t.reward for t in found.trajectories]) == (None, [0.0, 0.25, 0.5, 0.75])


async def test_a_judge_is_tried_before_the_run():
    samples = [Sample("data", f"p.jsonl:{line}", f"p{line}", {"answer": "worth 1"}) for line in (1, 2)]

    async def check(config):
        async with RewardTrial(config) as trial:
            found = await trial.start() or await trial.call(samples)
            return found.result, found.detail

    def equal(body):
        return as_json([{"id": id, "explanation": "", "score": 0.5} for id in shown(body)])

    async with judge_server(equal) as server:
        result, detail = await check(judged_by(server))
        assert result == "ok" and "gives on samples: 0.5" in detail
        server.script = [status(401, "no such key")]
        result, detail = await check(judged_by(server))
        assert result == "fail" and "status 401: no such key, on p.jsonl:1" in detail
        result, detail = await check(judged_by(server, votes=0))
        assert result == "fail" and "reward.options.votes: Expected `int` >= 1" in detail
    result, detail = await check(judged_by(server))
    assert result == "fail" and "cannot be reached" in detail
