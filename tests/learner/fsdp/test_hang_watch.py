"""A rank that hangs is named with the wait and the ranks that it waited on, whether torch ends the wait or not."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from learner.rank_pool import PROCESSES, find_store

from asyncrl.learner.fsdp.ranks.hang_watch import MOST_NAMED, SILENT_S, Others, Position, in_words

WAIT_S = 120.0
TIMEOUT_S = 4.0
STEP = "step 3"


def _others(rank: int, **positions: Position) -> Others:
    others = Others(rank, 1 + len(positions))
    others.note({int(name[1:]): position for name, position in positions.items()}, 0.0)
    return others


@pytest.mark.parametrize(
    ("position", "blamed"),
    [
        (Position(9, 7, STEP), []),
        (Position(9, 8, "the sums of step 3"), []),
        (Position(9, 7, ""), ["learner/1 (outside of any wait)"]),
        (Position(9, 6, "the batch of step 3"), ["learner/1 (in the batch of step 3)"]),
    ],
)
def test_a_rank_that_is_behind_is_blamed(position: Position, blamed: list[str]) -> None:
    assert _others(0, r1=position).blame(7, STEP, 1.0) == blamed


def test_a_rank_that_reports_nothing_new_is_blamed() -> None:
    others = _others(0, r1=Position(1, 7, STEP), r2=Position(1, 7, STEP))
    others.note({1: Position(2, 7, STEP), 2: Position(1, 7, STEP)}, SILENT_S)
    assert others.blame(7, STEP, SILENT_S) == []
    assert others.blame(7, STEP, SILENT_S + 1.0) == [f"learner/2 (silent for {SILENT_S + 1:.0f} s, last in {STEP})"]


def test_a_store_that_does_not_answer_counts_as_silence_of_rank_0() -> None:
    others = _others(1, r0=Position(1, 7, STEP))
    others.note({0: Position(2, 7, STEP)}, 10.0)
    others.ask(10.0)
    others.ask(12.0)
    assert others.blame(7, STEP, 10.0 + SILENT_S) == []
    assert others.blame(7, STEP, 11.0 + SILENT_S) == [
        f"learner/0 (its store has not answered for {SILENT_S + 1:.0f} s)"
    ]
    others.note({0: Position(3, 7, STEP)}, 11.0 + SILENT_S)
    assert others.blame(7, STEP, 12.0 + SILENT_S) == []


def test_no_rank_is_blamed_before_the_first_report() -> None:
    assert Others(0, 4).blame(1, STEP, 1e9) == []
    assert in_words([]) == "the other ranks of the learner"
    assert in_words([str(rank) for rank in range(MOST_NAMED + 3)]).endswith("and 3 more")


def _rank(rank: int, stopped: int, timeout_s: float, addresses: Any, log: str) -> None:
    """Two ranks meet, the one that is ``stopped`` stops, and the other waits in a collective."""
    import torch
    import torch.distributed as dist

    from asyncrl.core.errors import DeadlineExceeded
    from asyncrl.learner.fsdp.ranks import hang_watch
    from asyncrl.learner.fsdp.ranks.ranks import Ranks

    hang_watch.BEAT_S = 0.2
    hang_watch.AFTER_S = hang_watch.SILENT_S = 0.5
    begin = dist.init_process_group
    # As long as NCCL would spin.
    dist.init_process_group = lambda *a, **named: begin(*a, **(named | {"timeout": timedelta(seconds=timeout_s)}))
    store, port = find_store(rank, addresses)
    ranks = Ranks(rank, 2, "127.0.0.1", port, device=torch.device("cpu"), timeout_s=TIMEOUT_S, store=store)
    ranks.all_gather([1.0], "a first word")
    own = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if rank == stopped:
        # Once it has been heard of, and the other has left the first collective.
        own.wait([f"position/{rank}", "the first word is over"], timedelta(seconds=WAIT_S))
        os.kill(os.getpid(), signal.SIGSTOP)
    own.set("the first word is over", "")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    try:
        with ranks.waiting(STEP):
            ranks.all_gather([1.0], f"the sums of {STEP}")
    except DeadlineExceeded as error:
        os.write(2, f"raised {error}".encode())
        os._exit(3)


@pytest.mark.parametrize(
    ("stopped", "timeout_s", "exit_code", "on_whom"),
    [
        (1, TIMEOUT_S, 3, "learner/1 (silent for "),
        (0, WAIT_S, 1, "learner/0 (its store has not answered for "),
    ],
    ids=["torch ends the wait", "torch does not, and rank 0 has stopped"],
)
def test_a_rank_that_has_stopped_is_named(
    stopped: int, timeout_s: float, exit_code: int, on_whom: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    addresses = PROCESSES.Queue()
    processes = [
        PROCESSES.Process(target=_rank, args=(rank, stopped, timeout_s, addresses, str(log))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        waiting = processes[1 - stopped]
        waiting.join(WAIT_S)
        said = log.read_text().splitlines()[-1]
        assert waiting.exitcode == exit_code, said
    finally:
        for process in processes:
            process.kill()
            process.join()
        addresses.close()
        addresses.join_thread()
    who = f"learner/{1 - stopped}"
    assert said.removeprefix("raised ").removeprefix(f"{who}: ").startswith(f"{who} waited ")
    assert f" on {on_whom}" in said
    assert f" for the sums of {STEP}: see their logs; the limit is learner.collective_timeout_s" in said
