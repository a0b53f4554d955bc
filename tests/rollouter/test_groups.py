"""Groups: trajectories fail, retry and are scored one by one; an error is never a reward."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from harness import Net
from made_group import make_group
from rollouter_cases import Dataloader, Learner, living
from run_settings import sim_config
from services import services
from virtual import LoopClock, run_virtual

from asyncrl.core.errors import DeadlineExceeded, PeerRestarted, Refused, RemoteError
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.rollouter.episode.player import EpisodeFailed
from asyncrl.rollouter.groups import GroupRunner
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.heartbeat import gather_heartbeat

SAMPLES = 4


def lease():
    return make_group(samples=SAMPLES).lease


class Scripted:
    """Episodes and scores that fail a given number of times, by sample; ``trouble`` is that of the pool itself."""

    def __init__(self, *, losses=(), refusals=(), final=(), components=None, hopeless=None, trouble=()):
        self.losses, self.refusals, self.final = dict(losses), dict(refusals), set(final)
        self.components, self.hopeless, self.trouble = components or {}, hopeless, list(trouble)
        self.generated, self.scored = [], []
        """(sample, time) of each episode and each call for a score."""
        self.reported = self.tries = 0
        self.has_worked = []
        """Each score's word on the function."""
        self.leases = SimpleNamespace(generated=self.finished, taken_at=defaultdict(float))

    def finished(self, lease):
        self.reported += 1

    async def play(self, lease, events):
        sample = events.sample
        await asyncio.sleep(sample + 1)
        if sample == self.hopeless:
            self.tries += 1
            raise TrajectoryFailed("the engine died of it")
        if self.losses.get(sample, 0) > 0:
            self.losses[sample] -= 1
            raise EpisodeFailed("its tool did not answer", "user")
        self.generated.append((sample, asyncio.get_running_loop().time()))
        trajectory = make_group(samples=SAMPLES).trajectories[sample]
        trajectory.reward, trajectory.text = None, str(sample)
        return trajectory

    async def score(self, request, away):
        if self.trouble:
            raise self.trouble.pop()
        sample = int(request.completions[0].text)
        self.scored.append((sample, asyncio.get_running_loop().time()))
        self.has_worked.append(request.has_worked)
        await asyncio.sleep(0.5)
        if sample in self.final:
            raise RemoteError("reward/0", "reward_failed", "nonsense", retryable=False)
        if self.refusals.get(sample, 0) > 0:
            self.refusals[sample] -= 1
            raise RemoteError("reward/0", "reward_failed", "timeout", retryable=True)
        return Scores(
            rewards=[float(c.text) for c in request.completions],
            components=[self.components for _ in request.completions],
            judgements=[f"words about {c.text}" for c in request.completions],
            run_s=0.5,
        )


def run(script, **tables):
    async def main():
        clock = LoopClock()
        runner = GroupRunner(sim_config(**tables), services(clock=clock), script, script, script.leases)
        return await runner.run(lease(), GroupEvents(lease(), clock.now, clock.wall))

    return run_virtual(main())


@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_each_trajectory_is_scored_when_it_finishes_or_the_group_when_all_have(per):
    script = Scripted()
    group = run(script, reward={"per": per})
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [t.judgement for t in group.trajectories] == [f"words about {number}" for number in range(4)]
    assert script.generated == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert script.scored == (script.generated if per == "trajectory" else [(0, 4)])
    assert (group.trajectories[3].generate_s, group.trajectories[3].score_s) == (4, 0.5)


@pytest.mark.parametrize(("components", "notified"), [({}, True), ({"timed_out": -1.0}, False)])
def test_the_reward_pool_is_notified_once_its_function_has_worked(components, notified):
    script = Scripted(refusals={0: 1}, components=components)
    run(script, rollout={"retry_backoff_s": 0.1})
    # The first two and a second attempt were requested before there was a reward.
    assert script.has_worked == [False, False, False, notified, notified]


def test_only_failed_trajectories_are_tried_again_with_growing_pauses():
    script = Scripted(losses={1: 2}, refusals={3: 1})
    group = run(script, rollout={"max_attempts": 3, "retry_backoff_s": 1.0})
    assert group.failure is None
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
    # Sample 1 takes 2 s an attempt, with pauses of 1 s and 2 s between.
    assert sorted(script.generated) == [(0, 1), (1, 9), (2, 3), (3, 4)]
    assert script.reported == SAMPLES


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Scripted(losses={2: 99}), "its tool did not answer"),
        (Scripted(refusals={2: 99}), "timeout"),
        (Scripted(final={2}), "nonsense"),
        (Scripted(hopeless=2), "the engine died of it"),
    ],
    ids=["episode", "score", "final", "hopeless"],
)
def test_a_permanent_failure_may_quarantine_the_group_with_its_reason(script, reason):
    group = run(script, rollout={"on_failed_trajectory": "quarantine_group"})
    assert group.trajectories == []
    assert reason in group.failure
    assert script.reported == SAMPLES
    assert script.tries <= 1, "a permanent failure is not tried again"


@pytest.mark.parametrize("fails", ["losses", "refusals"])
def test_failed_trajectories_are_left_out_while_enough_survive(fails):
    """A response on which a verifier hangs costs its siblings nothing: they are scored once, and form the group."""
    drop = {"on_failed_trajectory": "drop", "max_attempts": 3}
    script = Scripted(**{fails: {2: 99}})
    group = run(script, rollout=drop)
    assert (group.failure, group.dropped, group.failed_attempts) == (None, 1, 3)
    assert [(t.sample, t.reward) for t in group.trajectories] == [(0, 0.0), (1, 1.0), (3, 3.0)]
    assert sorted(sample for sample, _ in script.scored) == [0, 1, *[2] * (3 if fails == "refusals" else 0), 3]
    # Two survivors are enough for a baseline.
    assert run(Scripted(**{fails: {0: 99, 1: 99}}), rollout=drop).dropped == 2
    group = run(Scripted(**{fails: {0: 99, 1: 99, 3: 99}}), rollout=drop)
    assert "failed 3 times" in group.failure


@pytest.mark.parametrize(
    "trouble",
    [
        DeadlineExceeded("rollouter/0", "reward/0", "Score", 1.0),
        PeerRestarted("reward/0", "Score"),
        RemoteError("reward/0", "AssertionError", "a bug", retryable=True),
        RemoteError("reward/0", "deadline", "ran past the deadline", retryable=False),
    ],
    ids=lambda error: getattr(error, "code", type(error).__name__),
)
@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_a_failure_of_the_reward_pool_does_not_count_as_an_attempt(trouble, per):
    group = run(Scripted(trouble=[trouble] * 50), rollout={"max_attempts": 1}, reward={"per": per})
    assert group.failure is None
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "bug",
    [
        RemoteError("reward/0", "AssertionError", "a bug", retryable=False),
        # The pool has heard of the loss of the rollouter's host, and the learner may not have.
        Refused("reward/0", "incarnation", ours="1", theirs="above 1, which is dead"),
    ],
    ids=["bug", "refusal"],
)
@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_i1_a_reward_pool_that_will_never_score_quarantines_nothing(bug, per):
    with pytest.raises(BaseExceptionGroup if per == "trajectory" else type(bug)) as caught:
        run(Scripted(trouble=[bug] * 4), reward={"per": per})
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is bug


class Pool:
    """Has a long queue: answers when the test allows it."""

    def __init__(self, count=1):
        self.came, self.answers, self.count = asyncio.Event(), asyncio.Event(), count

    @handler
    async def score(self, request: Score, caller: Caller) -> Scores:
        self.came.set()
        await self.answers.wait()
        return Scores(rewards=[1.0] * self.count, components=[{}] * self.count, run_s=0.0)


@asynccontextmanager
async def scoring(folder, count, patience_s=30.0):
    """A rollouter with ``count`` completions at a reward pool, which answers when the test allows it."""
    pool, completion = Pool(count), Completion(text="x", finish_reason="stop", tokens=1)
    async with asyncio.timeout(30), Net(memory=True) as net:
        for name, served in (("dataloader/0", Dataloader()), ("learner/0", Learner())):
            net.serve(served, name, 1)
        net.serve(pool, "reward/0", 1)
        async with living(net, folder) as life:
            rollouter = life.rollouter
            network = rollouter.config.network.model_copy(update={"call_timeout_s": patience_s})
            reward = rollouter.config.reward.model_copy(update={"timeout_s": 3600.0})
            rollouter._pools._config = rollouter.config.model_copy(update={"network": network, "reward": reward})
            request = Score(uid="0-1", prompt="", row={}, completions=[completion] * count)
            call = asyncio.create_task(life.rollouter._pools.score(request, set()))
            await pool.came.wait()
            yield life, call
            pool.answers.set()


async def test_a_call_waits_for_a_reward_pool_that_confirms_it_and_not_for_a_silent_one(tmp_path):
    """However long its queue: that of a large run may take hours. A group reward is one call for all."""
    async with scoring(tmp_path, SAMPLES, patience_s=1.5) as (life, call):
        rollouter = life.rollouter
        assert rollouter.metrics()["rollout/scoring"] == SAMPLES

        def waited_s():
            return max(on.seconds for on in gather_heartbeat(rollouter, 1).awaits if on.what == "Score")

        # Longer than it waits for a silent one.
        await life.until(lambda: waited_s() > 2.5)
        assert not call.done()
        life.ears.deaf_to.add("reward/0")
        with pytest.raises(DeadlineExceeded, match="on reward/0 for Score"):
            await call
        assert rollouter.metrics()["rollout/scoring"] == 0
