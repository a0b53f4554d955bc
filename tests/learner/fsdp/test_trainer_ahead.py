"""A step whose micro-batches went ahead of it is the step that it would be without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from learner.learner_cases import make_config, plan_of
from learner.rank_pool import RANK_WAIT_S
from segment_reading import weights_of

from asyncrl.learner.exchange.sent_ahead import Sending

STEPS = 3
Trained = tuple[list[dict[str, float]], dict[str, bytes]]


def _bytes(backend: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights_of(backend.publish(1).result()).items()}


def _at_begin(backend: Any, config: Any) -> Trained:
    return [backend.train(plan_of(backend, config, step)) for step in range(STEPS)], _bytes(backend)


def _slow_steps(backend: Any, config: Any) -> tuple[Trained, list[str]]:
    """Each step is held on rank 0, and with it on the other rank, until the next one is there."""
    plans = [plan_of(backend, config, step) for step in range(STEPS)]
    events: list[str] = []
    threads: list[threading.Thread] = []
    step = backend._updates.step

    def send(number: int) -> None:
        backend.send(plans[number], Sending(number, number - 1))
        events.append(f"{number} is held")

    def slow(*arguments: Any, **named: Any) -> Any:
        number = backend.steps + 1
        events.append(f"step {number} begins")
        if number < STEPS:
            threads.append(threading.Thread(target=send, args=(number,)))
            threads[-1].start()
            threads[-1].join(RANK_WAIT_S)
        found = step(*arguments, **named)
        events.append(f"step {number} ends")
        return found

    with mock.patch.object(backend._updates, "step", slow):
        metrics = [backend.train(plan, number) for number, plan in enumerate(plans)]
    return (metrics, _bytes(backend)), events


def test_the_next_step_is_held_by_all_ranks_before_the_present_one_ends(folder: Path, run: Callable) -> None:
    config = make_config(folder, ranks=2, budget=50, updates_per_batch=2)
    (ahead, events), followers = run(config, _slow_steps)
    assert followers == [None]
    held = [[f"step {n} begins", f"{n} is held", f"step {n} ends"] for n in (1, 2)]
    assert events == [*held[0], *held[1], "step 3 begins", "step 3 ends"]
    at_begin, followers = run(config, _at_begin)
    assert followers == [None]
    # In every bit: metrics, and weights by their bytes.
    assert ahead == at_begin
