"""Whether preempt.grace_s is long enough for a run that is asked to end. Pure.

Such a run finishes the step that it has begun, waits for the last groups, and writes a checkpoint. The wait takes
LAST_GROUPS_SHARE of the time at most, and the step has the rest.
"""

from __future__ import annotations

import math

from asyncrl.config import Config

LAST_GROUPS_SHARE = 0.3
"""Share of preempt.grace_s: longest wait for the last groups of the rollouters."""


def too_short(config: Config, step_s: float) -> tuple[str, str]:
    """The problem with preempt.grace_s if a step takes ``step_s`` (s, publication included), and what to do.

    Both are empty if there is no problem.
    """
    grace_s = config.preempt.grace_s
    left_s = (1.0 - LAST_GROUPS_SHARE) * grace_s
    if step_s <= left_s:
        return "", ""
    least = math.ceil(step_s / (1.0 - LAST_GROUPS_SHARE)) + 1
    problem = (
        f"a step takes {step_s:.3g} s, and preempt.grace_s = {grace_s:g} leaves {left_s:.3g} s for it: a run that is "
        "asked to end may not reach a checkpoint"
    )
    return problem, f"set preempt.grace_s to {least} or more"
