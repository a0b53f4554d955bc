"""The loss and the advantage, found as the learner finds them and tried on a few made-up tokens, in a process of their
own, so that the user's code can cost that process and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.preflight.findings import Finding, fail, listed, ok, warn
from asyncrl.runtime.supervision import describe_exit

ARGV = (sys.executable, "-m", "asyncrl.learner.algorithm.trial")
TRIAL_S = 60.0
"""Longest time for the trial (s); importing torch takes most."""
KEYS = ("loss", "loss_options", "correction", "kl", "entropy_bonus", "teacher", "advantage", "advantage_options")


def is_default(config: LearnerConfig) -> bool:
    """Whether there is nothing to be tried: the loss and the advantage are those of a configuration without keys."""
    default = LearnerConfig()
    return config.backend == "sim" or all(getattr(config, key) == getattr(default, key) for key in KEYS)


async def check_algorithm(config: Config, *, limit_s: float = TRIAL_S) -> Finding | None:
    """Whether loss and advantage can be called; None where there is nothing to be tried."""
    learner = config.learner
    if is_default(learner):
        return None
    trial = await asyncio.create_subprocess_exec(
        *ARGV,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        process_group=0,
    )
    try:
        async with asyncio.timeout(limit_s):
            answer, said = await trial.communicate(learner.model_dump_json().encode())
    except TimeoutError:
        told = f"{learner.loss} and {learner.advantage} were not tried within {limit_s:g} s"
        return warn("algorithm", told, "see what their modules do when they are imported", key="learner.loss")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(trial.pid, 9)
        await trial.wait()
    try:
        problems = json.loads(answer)
    except ValueError:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        told = f"the process that tries them ended: {describe_exit(trial.returncode or 0)}"
        return fail(
            "algorithm", ": ".join([told, *last]), "mend what their modules do when imported", key="learner.loss"
        )
    if problems:
        fix = "correct these keys; modules of your own have to be installed or lie where you launch"
        return fail("algorithm", listed(problems), fix)
    return ok("algorithm", f"{learner.loss} with {learner.advantage} can be called", key="learner.loss")
