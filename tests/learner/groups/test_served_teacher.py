"""A teacher on a server: what it is asked, what is made of its answers and faults, and what reaches the loss."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import structlog
from learner.learner_cases import (
    build_step,
    make_config,
    make_group,
    make_sequence,
    make_trajectory,
    random_groups,
)
from services import services
from teacher_server import logprob_of, scored, served

from asyncrl.config.algorithm import TeacherServerConfig
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ActorFailed, ConfigError
from asyncrl.learner.groups import served_teacher
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.teacher import TeacherClient, TeacherFailed
from asyncrl.learner.groups.training_progress import News
from asyncrl.messages.groups import sampled_positions
from asyncrl.observe.catalogue import Counters


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(served_teacher, "FIRST_PAUSE_S", 0.001)


@asynccontextmanager
async def living(server, counters, news, **settings: Any):
    """A teacher whose requests have ended when the context does."""
    async with asyncio.TaskGroup() as tasks:
        teacher = ServedTeacher(
            server.url,
            TeacherServerConfig(**settings),
            services(counters=counters, log=structlog.get_logger()),
            tasks=tasks,
            news=news,
        )
        try:
            yield teacher
        finally:
            await teacher.close()


async def score(groups, server, *, begin=(), **settings: Any):
    """The scores, and the counters."""
    counters, news = Counters(), News()
    changed = news.listen()
    async with living(server, counters, news, **settings) as teacher:
        try:
            for group in begin:
                teacher.begin(group)
            while begin and not teacher.has_done(begin):
                # As the training waits.
                await changed.wait()
                changed.clear()
            found: Any = await teacher.scores(groups)
        except ActorFailed as error:
            found = error
    if isinstance(found, ActorFailed):
        raise found
    return found, dict(counters)


async def ask_for_model(url, **settings: Any):
    client = TeacherClient(url, TeacherServerConfig(**settings))
    try:
        await client.model()
    finally:
        await client.close()


def run(groups, *script, server: dict[str, Any] | None = None, **settings: Any):
    async def play():
        async with served(*script, **(server or {})) as there:
            return (*await score(groups, there, **settings), there)

    return asyncio.run(asyncio.wait_for(play(), 30))


def expected(group, sequence):
    prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
    ids = [*prompt.tolist(), *sequence.tokens.tolist()]
    return [logprob_of(ids, len(prompt) + int(at)) for at in sampled_positions(sequence)]


def test_each_sampled_token_gets_the_log_prob_of_its_position():
    groups = random_groups(4, 3)
    found, counters, server = run(groups, begin=groups[:1], concurrency=3)
    for group, of_group in zip(groups, found, strict=True):
        for trajectory, of_trajectory in zip(group.trajectories, of_group, strict=True):
            for sequence, values in zip(trajectory.sequences, of_trajectory, strict=True):
                assert values.tolist() == expected(group, sequence)
    sequences = sum(len(t.sequences) for g in groups for t in g.trajectories)
    assert counters == {"teacher/requests": sequences} and len(server.bodies) == sequences
    assert server.most_at_once == 3
    body = server.bodies[0]
    assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("teacher", 0, 1)


def small():
    return make_group(7, [1, 2], [make_trajectory([3, 4]), make_trajectory([5])])


def shorter(ids):
    answer = scored(ids)
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


FAULTS = {
    "500": (500, "answers with status 500"),
    "wrong length": (shorter, "answers with log-probs of 3 tokens where 4 were asked for|of 2 tokens where 3"),
    "NaN": (lambda ids: scored(ids, at_2=None), "answers with None as the log-prob of token 2, id"),
    "no JSON": (lambda ids: "{", "answers with what cannot be read"),
    "late": (5.0, r"has not answered within learner.teacher_server.timeout_s = 1.5 s"),
}
FOR_GOOD = {
    "400": (400, "answers with status 400"),
    "another token": (lambda ids: scored([id + 1 for id in ids]), "answers without the log-prob of token 2, id"),
    "no choice": (lambda ids: {"choices": []}, "answers without prompt_logprobs: it must be a server that scores"),
    "above 0": (lambda ids: scored(ids, at_2=0.5), "answers with 0.5 as the log-prob of token 2"),
}


@pytest.mark.parametrize("name", FAULTS | FOR_GOOD)
def test_a_passing_fault_is_retried_and_a_lasting_one_ends_the_run_with_the_url(name):
    action, reported = (FAULTS | FOR_GOOD)[name]
    group = make_group(7, [1, 2], [make_trajectory([3, 4])])
    settings = {"timeout_s": 1.5} if name == "late" else {}
    if name in FAULTS:
        found, counters, server = run([group], action, scored, **settings)
        assert found[0][0][0].tolist() == expected(group, group.trajectories[0].sequences[0])
        assert counters == {"teacher/requests": 2, "teacher/failed_requests": 1}
        assert len(server.bodies) == 2
    with pytest.raises(ActorFailed) as error:
        run([small()], action, tries=2, **settings)
    assert re.search(rf"learner.teacher: http://127.0.0.1:\d+/v1/completions .*({reported})", str(error.value))
    assert ("(2 times; learner.teacher_server.tries)" in str(error.value)) == (name in FAULTS)


def test_an_unreachable_teacher_server_is_named():
    async def play():
        async with served() as there:
            pass
        await score([small()], there, tries=2)

    with pytest.raises(ActorFailed, match=r"http://127.0.0.1:\d+/v1/models cannot be reached.*2 times"):
        asyncio.run(play())


def test_the_error_of_a_refused_connection_does_not_advise_a_longer_timeout(monkeypatch):
    monkeypatch.setattr("asyncrl.learner.groups.teacher.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as others:
        port = server.getsockname()[1]
        for _ in range(3):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))

        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(TeacherFailed, match=r"/v1/models takes no connection within 0\.2 s") as failed:
            asyncio.run(ask_for_model(url, timeout_s=300))
    assert failed.value.passing


@pytest.mark.parametrize(
    ("models", "name", "reported"),
    [
        (("a", "b"), None, "serves several models"),
        (("a",), "b", "serves no model 'b'; it serves a"),
        ((), None, "serves no model$"),
    ],
)
def test_a_server_with_several_models_needs_a_model_name(models, name, reported):
    async def play():
        async with served(models=models) as there:
            await ask_for_model(there.url, model=name)

    with pytest.raises(TeacherFailed, match=reported):
        asyncio.run(play())


def test_a_failed_score_of_an_unneeded_group_has_no_effect():
    lost = make_group(8, [9], [make_trajectory([3, 4])])

    def only_small(ids):
        return scored(ids) if ids[0] != 9 else {"choices": []}

    found, _, _ = run([small()], only_small, begin=[lost])
    assert len(found) == 1


@pytest.mark.parametrize("done", [True, False], ids=["scored", "hardly begun"])
def test_a_regenerated_group_is_scored_again(done):
    first, second = (make_group(8, [9], [make_trajectory(tokens)]) for tokens in ([3, 4], [5]))

    async def play():
        async with served() as server, living(server, Counters(), News()) as teacher:
            teacher.begin(first)
            if done:
                await teacher.scores([first])
            teacher.keep([])
            return await teacher.scores([second])

    ((of_trajectory,),) = asyncio.run(asyncio.wait_for(play(), 30))
    assert of_trajectory[0].tolist() == pytest.approx(expected(second, second.trajectories[0].sequences[0]))


def test_the_teacher_key_comes_from_the_environment(monkeypatch):
    for key in ("s3cret", "s3cret\n"):
        monkeypatch.setenv("TEACHER_KEY", key)
        _, _, server = run([small()], api_key_env="TEACHER_KEY")
        assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(("key", "netrc"), [("s3\ncret", ""), ("s3cret", "machine 127.0.0.1 login a password b\n")])
def test_a_key_that_cannot_be_sent_is_a_permanent_error(tmp_path, monkeypatch, key, netrc):
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("TEACHER_KEY", key)
    with pytest.raises(ActorFailed, match=r"/v1/models cannot be asked: .*teacher_server\.api_key_env") as error:
        run([small()], api_key_env="TEACHER_KEY")
    assert "times" not in str(error.value)


def test_the_plan_has_the_teacher_s_log_prob_of_each_token_it_trains():
    first = make_sequence([10, 11, 30, 12], roles="sscs", versions=[0, 3, 3, 3])
    group = make_group(0, [1, 2], [make_trajectory(sequences=[first]), make_trajectory([20], reward=1.0)])
    scores = [[[np.array([-1.0, -2.0, -3.0])], [np.array([-4.0])]]]
    config = make_config(budget=64, ranks=3)
    plan = build_step([group], teacher=scores, version=0, config=config, world_size=3, packed=True)
    batches = [batch for rank in plan.updates[0].ranks for batch in rank]
    found = {int(t): float(v) for batch in batches for t, v in zip(batch.targets, batch.teacher, strict=True)}
    assert found == {10: -1.0, 11: -2.0, 12: -3.0, 20: -4.0, 0: 0.0}
    alone = build_step([group], version=0, config=config, world_size=1, packed=True)
    assert alone.updates[0].ranks[0][0].teacher.shape == (0,)


@pytest.mark.parametrize(
    ("tree", "reported"),
    [
        ({"rollout": {"temperature": 0.8}}, "rollout.temperature: is 0.8, but a teacher on a server scores at"),
        ({"learner": {"teacher": "folder", "teacher_server": {"tries": 2}}}, "unless learner.teacher is a URL"),
        ({"learner": {"teacher_server": {"api_key_env": "sk-12 3"}}}, "takes the name of an environment variable"),
    ],
)
def test_keys_that_conflict_with_a_served_teacher_are_refused(tree, reported):
    base = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"gpus_per_replica": 0}}
    learner = {"loss": "distill", "teacher": "http://localhost:8000/v1"} | tree.get("learner", {})
    rollout = base["rollout"] | tree.get("rollout", {})
    with pytest.raises(ConfigError, match=reported):
        validate_config(base | {"learner": learner, "rollout": rollout})
