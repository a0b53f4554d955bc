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
from asyncrl.learner.fsdp.updates import Updates

STEPS = 3


def _bytes(backend: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights_of(backend.publish(1).result()).items()}


def _ahead_and_at_begin(backend: Any, config: Any, start: Path) -> tuple[list[str], list[Any]]:
    """Metrics and weights of the same steps, twice: first each is held on rank 0, and with it on the other rank, until
    the next one is there."""
    plans = [plan_of(backend, config, step) for step in range(STEPS)]
    events: list[str] = []
    step = Updates.step

    def send(number: int) -> None:
        backend.send(plans[number], Sending(number, number - 1))
        events.append(f"{number} is held")

    def slow(updates: Updates, *arguments: Any, **named: Any) -> Any:
        number = backend.steps + 1
        events.append(f"step {number} begins")
        if number < STEPS:
            sending = threading.Thread(target=send, args=(number,))
            sending.start()
            sending.join(RANK_WAIT_S)
        found = step(updates, *arguments, **named)
        events.append(f"step {number} ends")
        return found

    backend.save(start).result(60)
    with mock.patch.object(Updates, "step", slow):
        ahead = [backend.train(plan, number) for number, plan in enumerate(plans)], _bytes(backend)
    backend.load(start)
    return events, [ahead, ([backend.train(plan) for plan in plans], _bytes(backend))]


def test_the_next_step_is_held_by_all_ranks_before_the_present_one_ends(folder, tmp_path, run_well: Callable) -> None:
    config = make_config(folder, ranks=2, budget=50, updates_per_batch=2)
    events, (ahead, at_begin) = run_well(config, _ahead_and_at_begin, tmp_path / "start")
    held = [[f"step {n} begins", f"{n} is held", f"step {n} ends"] for n in (1, 2)]
    assert events == [*held[0], *held[1], "step 3 begins", "step 3 ends"]
    # In every bit: metrics, and weights by their bytes.
    assert ahead == at_begin
