"""Runs a configuration from start to end and carries out the faults of a plan during training.

Training must continue after each fault. If no new step is trained for ``patience_s``, the round ends with NotRecovered,
which names the last fault and shows the last log lines of the actors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tools.chaos.faults import Striker, Struck
from tools.chaos.plan import Fault
from tools.live_run import LiveRun, pid_lives

LOOK_S = 0.03
VICTIM_WAIT_S = 60.0
"""Longest wait for a victim that an earlier fault has ended."""
PROGRESS_STEPS = 2
"""Steps after a fault that prove that training continues; the first may have started before the fault."""


class NotRecovered(Exception):
    """The run makes no progress, or ended too early."""


def torment(
    run: LiveRun,
    striker: Striker,
    faults: Sequence[Fault],
    struck: list[Struck],
    *,
    patience_s: float,
    told: Callable[[Struck], None],
) -> None:
    """Return when the run has ended by itself. Calls ``struck`` with each fault, and ``told`` after its recovery."""
    waiting = list(faults)
    best = 0
    moved_at = time.monotonic()
    due_at: float | None = None
    missing_since: float | None = None
    try:
        while True:
            striker.tick()
            now = time.monotonic()
            if run.step > best:
                best, moved_at = run.step, now
            _note_recovered(run, struck, best, told)
            if run.exit_code is not None:
                _note_recovered(run, struck, best, told, ended=True)
                return
            if now - moved_at > patience_s:
                raise NotRecovered(f"nothing was trained for {patience_s:g} s after step {best}{_since(struck)}")
            if waiting and due_at is None and best >= waiting[0].after_step:
                due_at = now + waiting[0].after_s
            if due_at is not None and now >= due_at:
                found = striker.strike(waiting[0], best)
                missing_since = missing_since or now
                if found is not None:
                    struck.append(found)
                    waiting.pop(0)
                    missing_since = due_at = None
                    if found.fault.kind == "everything":
                        run.resume()
                    # The recovery from the last fault restarts the clock.
                    moved_at = time.monotonic()
                elif now > missing_since + VICTIM_WAIT_S:
                    raise NotRecovered(f"there is no {waiting[0].victim} for {VICTIM_WAIT_S:g} s{_since(struck)}")
            time.sleep(LOOK_S)
    finally:
        striker.lift()


def _note_recovered(
    run: LiveRun, struck: list[Struck], best: int, told: Callable[[Struck], None], *, ended: bool = False
) -> None:
    now = time.monotonic()
    for one in struck:
        if one.recovered_s is not None or now < one.lifts_at:
            continue
        went_on = ended or best >= one.step + PROGRESS_STEPS
        for_good = one.fault.kind in ("kill", "freeze") and one.fault.victim != "reward_worker"
        if went_on and (ended or not for_good or not any(map(pid_lives, one.pids))):
            one.recovered_s = now - one.struck_at
            told(one)


def _since(struck: list[Struck]) -> str:
    open_ones = [str(one.fault) for one in struck if one.recovered_s is None]
    return f"; not recovered from: {', '.join(open_ones)}" if open_ones else ""
