"""A small model, made-up groups, and the learner's ranks as real processes, for the tests of the learner."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.rollout import RolloutConfig, WeightsConfig
from asyncrl.config.training import LearnerConfig, ModelConfig, RewardConfig
from asyncrl.messages.groups import Group, Ticket, Trajectory, VersionSpan

VOCABULARY = 48
RANK_WAIT_S = 120.0


def save_small_model(folder: Path, *, tied: bool = False, seed: int = 0, **settings: Any) -> Path:
    """A Qwen2 whose distributions are far from uniform and whose attention matters."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            **({"intermediate_size": 96} | settings),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(0, 0.15)
            elif parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            else:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_config(model: Path | None = None, *, ranks: int = 1, budget: int = 64, **learner: Any) -> Config:
    truncated = learner.pop("truncated", "score")
    bucket_bytes = learner.pop("bucket_bytes", 1 << 20)
    defaults: dict[str, Any] = {"lr": 1e-3, "device": "cpu", "collective_timeout_s": 30.0}
    return Config(
        model=ModelConfig(path=str(model) if model else None),
        rollout=RolloutConfig(temperature=0.8, max_tokens=32),
        reward=RewardConfig(truncated=truncated),
        weights=WeightsConfig(bucket_bytes=bucket_bytes),
        learner=LearnerConfig(ranks=ranks, tokens_per_microbatch=budget, **(defaults | learner)),
    )


def make_trajectory(
    tokens: list[int], *, reward: float = 0.0, sample: int = 0, version: int = 0, **fields: Any
) -> Trajectory:
    count = len(tokens)
    fields.setdefault("spans", [VersionSpan(version, 0, count)])
    fields.setdefault("logprobs", np.full(count, -1.0, dtype=np.float32))
    fields.setdefault("loss_mask", np.ones(count, dtype=np.uint8))
    fields.setdefault("finish_reason", "stop")
    return Trajectory(sample=sample, tokens=np.array(tokens, dtype=np.int32), reward=reward, text="", **fields)


def make_group(index: int, prompt: list[int], trajectories: list[Trajectory]) -> Group:
    for sample, trajectory in enumerate(trajectories):
        trajectory.sample = sample
    ticket = Ticket(
        uid=f"0-{index}",
        grant=index + 1,
        purpose="train",
        epoch=0,
        index=index,
        param_version=0,
        prompt_ids=np.array(prompt, dtype=np.int32),
        prompt="",
        row={},
        samples=len(trajectories),
        temperature=0.8,
        max_tokens=32,
    )
    return Group(ticket=ticket, trajectories=trajectories)


def random_groups(seed: int, count: int, *, samples: int = 3, longest: int = 24) -> list[Group]:
    """Groups with lengths, masks, rewards and behaviour log-probs of all kinds."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        trajectories = []
        for _ in range(samples):
            length = int(random.integers(1, longest))
            mask = (random.random(length) < 0.9).astype(np.uint8)
            mask[0] = 1
            trajectories.append(
                make_trajectory(
                    random.integers(0, VOCABULARY, length).tolist(),
                    reward=float(random.normal()),
                    logprobs=(-4.0 * random.random(length)).astype(np.float32) * mask,
                    loss_mask=mask,
                )
            )
        groups.append(make_group(index, random.integers(0, VOCABULARY, 5).tolist(), trajectories))
    return groups


RankZero = Callable[..., Any]
"""Run on rank 0 with its backend and the config, after setup; returns what the test asks for."""


class RankPool:
    """Real processes, one a rank, that play one case after another: importing torch once is enough."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._tasks = [context.Queue() for _ in range(world_size)]
        self._addresses, self._results = context.Queue(), context.Queue()
        self._processes = [
            context.Process(target=_rank_process, args=(rank, tasks, self._addresses, self._results))
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, config: Config, main: RankZero, *arguments: Any) -> tuple[Any, list[Any]]:
        """Run ``main(backend, config, *arguments)`` on rank 0, the others following.

        Returns what ``main`` returned and, for each other rank, what ``follow`` raised as text, or None.
        """
        assert config.learner.ranks == len(self._tasks)
        for tasks in self._tasks:
            tasks.put((config, main, arguments))
        found: dict[int, Any] = {}
        until = time.monotonic() + RANK_WAIT_S
        while len(found) < len(self._tasks):
            rank, value = self._results.get(timeout=max(0.0, until - time.monotonic()))
            found[rank] = value
        return _unpack(found)

    def close(self) -> None:
        try:
            for tasks, process in zip(self._tasks, self._processes, strict=True):
                tasks.put(None)
                process.join(RANK_WAIT_S)
                assert process.exitcode == 0
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            for one in (*self._tasks, self._addresses, self._results):
                one.close()
                one.join_thread()


def run_alone(config: Config, main: RankZero, *arguments: Any) -> Any:
    """Run ``main(backend, config, *arguments)`` on a single rank in this process."""
    results: queue.Queue = queue.Queue()
    _play(config, 0, queue.Queue(), results, main, arguments)
    return _unpack(dict([results.get_nowait()]))[0]


def _unpack(found: dict[int, Any]) -> tuple[Any, list[Any]]:
    ok, value = found.pop(0)
    if not ok:
        raise AssertionError(f"rank 0: {value}")
    return value, [found[rank] for rank in sorted(found)]


def _rank_process(rank: int, tasks: Any, addresses: Any, results: Any) -> None:
    while (task := tasks.get(timeout=300.0)) is not None:
        config, main, arguments = task
        _play(config, rank, addresses, results, main, arguments)


def _play(config: Config, rank: int, addresses: Any, results: Any, main: RankZero, arguments: tuple[Any, ...]) -> None:
    import torch

    from asyncrl.learner.backend import create

    torch.set_num_threads(1)
    backend = create(config, rank)
    if rank == 0:
        address = backend.open_store("127.0.0.1")
        for _ in range(config.learner.ranks - 1):
            addresses.put(address)
    else:
        address = addresses.get(timeout=RANK_WAIT_S)
    try:
        backend.setup(*address)
        result: Any = None
        if rank == 0:
            result = True, main(backend, config, *arguments)
        else:
            backend.follow()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result = (False, text) if rank == 0 else text
    finally:
        backend.stop()
    results.put((rank, result))
