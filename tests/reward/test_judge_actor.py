"""A judge in the reward pool's actor: over the wire, and before a run begins."""

import asyncio

import uvloop
from judge_server import judge_server, right, shown, status, told
from test_reward_actor import config_with, serving

from asyncrl.launcher.checks.inputs import Sample
from asyncrl.launcher.checks.user_code import RewardTrial
from asyncrl.messages.reward import Completion, Score
from asyncrl.observe.catalogue import find
from asyncrl.rpc.heartbeat import gather_heartbeat

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


async def test_a_judge_is_tried_before_the_run():
    samples = [Sample("data", f"p.jsonl:{line}", f"p{line}", {"answer": "worth 1"}) for line in (1, 2)]

    async def check(config):
        async with RewardTrial(config) as trial:
            found = await trial.start() or await trial.call(samples)
            return found.result, found.detail

    def equal(body):
        return told([{"id": id, "explanation": "", "score": 0.5} for id in shown(body)])

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
