"""The drift alarm over the real vLLM on CPU in bfloat16; in float32 test_vllm_engine.py has it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from drifting import Followed, Learner, Replica, config_for, random_prompts, texts_of
from rollouter.engines.changing import LEAVES_CONTEXTS
from tiny_models import save_model, sharp_model

from asyncrl.config import Config
from asyncrl.errors import ActorFailed
from asyncrl.learner.exchange.probe_sequences import ProbeSequence
from asyncrl.messages.weights import Offer
from asyncrl.rollouter.engines.vllm import adapter

pytestmark = [
    *LEAVES_CONTEXTS,
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        reason="without AVX-512 vLLM's matrices in bfloat16 are those of a fallback, with another rounding",
    ),
]


class Pair:
    """A learner and a replica that follows it."""

    def __init__(self, runner: asyncio.Runner, replica: Replica, learner: Learner) -> None:
        self._run = runner.run
        self._replica, self.learner = replica, learner
        self._version = 0

    def offer(self, noise: float = 0.0) -> Offer:
        self._version += 1
        self.learner.step(self._version)
        return self.learner.publish(self._version, noise)

    def follow(self, *offers: Offer) -> Followed:
        return self._run(self._replica.follow(offers))

    def failure(self, *offers: Offer) -> ActorFailed:
        with pytest.raises(ExceptionGroup) as failed:
            self.follow(*offers)
        problem: Any = failed.value
        while isinstance(problem, ExceptionGroup):
            (problem,) = problem.exceptions
        assert isinstance(problem, ActorFailed)
        assert not problem.restartable
        return problem


@contextmanager
def paired(config: Config, sequences: list[ProbeSequence]) -> Iterator[Pair]:
    with asyncio.Runner() as runner:
        replica, learner = Replica(config), Learner(config, sequences)
        try:
            runner.run(replica.start())
            yield Pair(runner, replica, learner)
        finally:
            runner.run(replica.host.close())
            learner.close()
            gc.collect()


LIMITS = {"warn": 0.03, "stop": 0.05}
"""The default ones are those of models that are deeper."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), sharp_model(0))
    with paired(config_for(folder, "bfloat16", drift=LIMITS), random_prompts(0)) as pair:
        yield pair


def check_silent(followed: Followed, updates: int) -> None:
    assert followed.told == []
    assert len(followed.updated) == updates
    assert all(times.drift is not None for times in followed.updated)


def test_updates_stay_silent(pair):
    check_silent(pair.follow(*(pair.offer() for _ in range(3))), 3)


def test_a_hundred_updates_stay_silent(pair):
    for _ in range(20):
        check_silent(pair.follow(*(pair.offer() for _ in range(5))), 5)


def test_a_hundredth_of_noise_on_the_weights_of_an_engine_ends_the_run(pair):
    failure = pair.failure(pair.offer(), pair.offer(noise=0.01))
    for words in ("rollouter/0", f"version {pair._version}", "nats", "drift.stop", "weights of another version"):
        assert words in str(failure)


def cool(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling: Callable[..., Any] = adapter.sampling

    def cooler(request: Any, *arguments: Any) -> Any:
        return sampling(replace_fields(request, temperature=0.9 * request.temperature), *arguments)

    monkeypatch.setattr(adapter, "sampling", cooler)


def test_another_temperature_in_an_engine_ends_the_run(pair, monkeypatch):
    check_silent(pair.follow(pair.offer()), 1)
    cool(monkeypatch)
    failure = pair.failure(pair.offer())
    for words in ("rollouter/0", "another temperature than rollout.temperature", "drift.stop"):
        assert words in str(failure)


@pytest.mark.timeout(800)
@pytest.mark.skipif(
    "ASYNCRL_CHAT_MODEL" not in os.environ,
    reason="ASYNCRL_CHAT_MODEL does not name the folder of SmolLM2-135M-Instruct (make chat-model)",
)
def test_a_real_model_in_bfloat16_and_the_default_limits(monkeypatch):
    folder = str(Path(os.environ["ASYNCRL_CHAT_MODEL"]).absolute())
    with paired(config_for(folder, "bfloat16"), texts_of(folder)) as pair:
        followed = pair.follow(*(pair.offer() for _ in range(5)))
        check_silent(followed, 5)
        print("clean", sorted(times.drift or 0.0 for times in followed.updated))
        print(pair.failure(pair.offer(noise=0.01)))
        cool(monkeypatch)
        print(pair.failure(pair.offer()))
